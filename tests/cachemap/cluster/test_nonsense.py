"""Something else than Redis at its address: replies of another kind than the command's."""

import asyncio
import logging
from types import SimpleNamespace

import hiredis
import pytest

from cachemap.cluster.connect import FAILURES, RedisClients, parse
from gateway.ops.gateway_checks import redis
from gateway.proxy.placement.shared import HEARTBEAT
from tests.gateway.proxy.test_shared import Gateway as LedgerGateway
from tests.gateway.proxy.test_shared import prompt as tokens_of
from tests.gateway.tenants.test_shared import gateways as limit_gateways
from tests.redis_server import Proxy

from ..publisher import publishing
from .gateways import event, gateways, hold, is_shared, report, until

NONE, NUMBER, LIST = b"$-1\r\n", b":7\r\n", b"*3\r\n:1\r\n$-1\r\n*1\r\n$1\r\nx\r\n"
ODD = {"none": NONE, "a number": NUMBER, "a list": LIST, "a text": b"$5\r\nhello\r\n", "nothing": b"*0\r\n"}
HERE, ONE = b"$9\r\n127.0.0.1\r\n", b":1\r\n"
ODD_NODES = (NONE, HERE, ONE), (b":0\r\n", ONE, ONE), (b":0\r\n", HERE, NONE)  # first slot, host, port
NO_NEWS = "none", "nothing"  # Redis answers so to a read without news


class Other(Proxy):
    """A proxy to Redis that answers some commands itself: `answer` returns the reply, or None for Redis's own."""

    answer = staticmethod(lambda command: None)

    async def _serve(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        own = hiredis.Reader()
        self._writers |= {writer, back}
        pump = None
        try:
            while data := await reader.read(1 << 16):
                own.feed(data)
                while command := own.gets():
                    odd = self.answer(command)
                    if odd is None:
                        back.write(hiredis.pack_command(tuple(command)))
                        if pump is None:
                            pump = asyncio.create_task(self._pump(there, writer))
                    else:
                        writer.write(odd)
        except OSError:
            pass
        finally:
            for one in (writer, back):
                one.transport.abort()
            if pump is not None:
                await asyncio.gather(pump, return_exceptions=True)


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:{}/main", "redis+cluster://127.0.0.1:{}"])
@pytest.mark.parametrize(
    "odd",
    [*ODD.values(), b"*1\r\n*2\r\n:1\r\n:2\r\n", b"*1\r\n*3\r\n:0\r\n:1\r\n:2\r\n"]
    + [b"*1\r\n*3\r\n%b:16383\r\n*2\r\n%b%b" % one for one in ODD_NODES],
)
async def test_a_cluster_or_sentinel_that_answers_otherwise_counts_as_away(redis_server, url, odd):
    async with Other(redis_server.port) as other:
        other.answer = only((b"SENTINEL", b"CLUSTER"), odd)
        ways = RedisClients(parse(url.format(other.port)))
        with pytest.raises(FAILURES):
            await (await ways.to("key")).ping()
        await ways.aclose()


def only(what, odd):
    """Return an `answer` that gives this to the commands of these names."""
    return lambda command: odd if command[0] in what else None


def quiet(caplog, *parts):
    """Check that no failure was logged or counted; return the log lines that say that something else answers."""
    for background in parts:
        assert not any(background.counts.values()), background.failures
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info]
    return [one.getMessage() for one in caplog.records if "something else than Redis answers there" in one.getMessage()]


@pytest.mark.parametrize(
    ("what", "odd"),
    [((b"EVALSHA", b"XREAD"), odd) for odd in ODD.values()]
    + [((b"XREAD",), odd) for name, odd in ODD.items() if name not in NO_NEWS],
)
async def test_a_map_goes_on_by_itself_and_is_whole_again(start_redis, redis_binary, caplog, what, odd):
    server = start_redis(binary=redis_binary)
    async with Other(server.port) as other, publishing() as publisher, gateways(other.url, 2) as (one, two):
        for gateway in (one, two):
            gateway.follow("r", publisher)
        await until(lambda: is_shared(one, two))
        other.answer = only(what, odd)
        await until(lambda: one.shared.trouble or two.shared.trouble)
        await publisher.publish(event(1, 0, 6))
        if b"EVALSHA" in what:
            await hold(1, 6, one, two)
        other.answer = only((), odd)
        await until(lambda: is_shared(one, two) and one.shared.usable and two.shared.usable)
        await report(publisher, 2, one, two)
        told = quiet(caplog, one.shared.background, two.shared.background)
        assert 1 <= len(told) <= 2  # once for each gateway


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_a_ledger_goes_on_by_itself_and_is_joined_again(redis_server, caplog, odd):
    async with Other(redis_server.port) as other:
        gateway = LedgerGateway(other.url).start()
        await until(lambda: gateway.shared.joined)
        other.answer = only((b"EVALSHA",), odd)
        await gateway.route(tokens_of(1))
        await until(lambda: not gateway.shared.joined)
        assert gateway.outcomes["shared"] == 0
        other.answer = only((), odd)
        await until(lambda: gateway.shared.joined)
        await gateway.route(tokens_of(2))
        assert gateway.outcomes["shared"] == 1
        await gateway.stop()
        assert len(quiet(caplog, gateway.shared._background)) == 1
        assert HEARTBEAT in gateway.shared._background.counts


@pytest.mark.parametrize("odd", [*ODD.values(), b"*2\r\n:10000000000\r\n:10000000000\r\n"])
async def test_limits_are_counted_here_alone_and_then_together_again(redis_server, caplog, odd):
    async with Other(redis_server.port) as other, limit_gateways(other.url, 1) as (gateway,):
        other.answer = only((b"EVALSHA",), odd)
        await until(lambda: not gateway.shared.joined)
        other.answer = only((), odd)
        await until(lambda: gateway.shared.joined)
        assert len(quiet(caplog, gateway.shared._background)) == 1


@pytest.mark.parametrize("odd", [*ODD.values(), b"$19\r\nredis_version:a.b\r\n\r\n"])
async def test_the_doctor_says_that_something_else_answers(redis_server, odd):
    async with Other(redis_server.port) as other:
        other.answer = only((b"INFO",), odd)
        config = SimpleNamespace(settings=SimpleNamespace(redis_url=other.url, deployment="prod"))
        first, *_ = [one async for one in redis(config)]
        assert first.level == "fail"
