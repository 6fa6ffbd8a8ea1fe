"""Something else than Redis at its address: lengths that cannot be, and replies of another kind than the command's."""

import asyncio
import logging
from itertools import pairwise
from types import SimpleNamespace

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.exceptions import InvalidResponse

from cachemap.cluster.connect import FAILURES, RedisClients, RedisConnection, describe, parse
from cachemap.cluster.replies import MOST_AHEAD, Parser
from gateway.ops.gateway_checks import redis
from gateway.proxy.placement.shared import HEARTBEAT
from tests.gateway.proxy.test_shared import Gateway as LedgerGateway
from tests.gateway.proxy.test_shared import prompt as tokens_of
from tests.gateway.tenants.test_shared import gateways as limit_gateways
from tests.redis_server import Proxy

from ..publisher import publishing
from .gateways import event, gateways, prompt, until

NONE, NUMBER, LIST = b"$-1\r\n", b":7\r\n", b"*3\r\n:1\r\n$-1\r\n*1\r\n$1\r\nx\r\n"
ODD = {"none": NONE, "a number": NUMBER, "a list": LIST, "a text": b"$5\r\nhello\r\n", "nothing": b"*0\r\n"}
NO_NEWS = "none", "nothing"  # Redis answers so to a read without news
IMPOSSIBLE = [
    b"*1000000000\r\n", b"*2\r\n*1000000000\r\n", b"*2\r\n$3\r\nabc\r\n*1000000000\r\n", b"%1000000000\r\n",
    b"~1000000000\r\n", b">1000000000\r\n", b"|1000000000\r\n", b"$1000000000\r\n", b"*1\r\n=1000000000\r\n",
    b"*3\r\n$1\r\naXX*1000000000\r\n", b"*9999\r\n" * 1000, b"*9\r\n*99999\r\n*99999\r\n",
]  # fmt: skip


class Reads:
    """A connection's stream that gives these reads, one after the other."""

    def __init__(self, reads):
        self._reads = iter(reads)

    async def read(self, most):
        return next(self._reads, b"")

    def at_eof(self):
        return False


def reading(reads):
    parser = Parser(1 << 16)
    encoder = SimpleNamespace(decode_responses=False)
    parser.on_connect(SimpleNamespace(_reader=Reads(reads), encoder=encoder))
    return parser


async def replies(reads, count):
    parser = reading(reads)
    return [await parser.read_response() for _ in range(count)]


def cut(data, at):
    """The bytes in pieces that end at these places."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:end] for start, end in pairwise(places)]


def encoded(value):
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


@pytest.mark.parametrize("data", IMPOSSIBLE, ids=lambda data: repr(data[:24]))
@pytest.mark.parametrize("size", [1, 3, 1 << 16])
async def test_a_length_that_cannot_be_is_refused_before_it_is_allocated(data, size, monkeypatch):
    reads = [b"+OK\r\n", *(data[at : at + size] for at in range(0, len(data), size))]
    parser, fed = reading(reads), []
    monkeypatch.setattr(parser, "_reader", SimpleNamespace(
        feed=lambda data, at=0, length=None, reader=parser._reader: (
            fed.append(data if length is None else data[at : at + length]),
            reader.feed(fed[-1]),
        ),
        gets=parser._reader.gets, has_data=parser._reader.has_data,
    ))  # fmt: skip
    assert await parser.read_response() == b"OK"
    with pytest.raises(InvalidResponse, match="a length that cannot be"):
        await parser.read_response()
    assert b"00000000\r\n" not in b"".join(fed) and b"".join(fed).count(b"9999\r\n") <= MOST_AHEAD // 9999 + 1


TEXTS = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"\r\n*1000000000\r\n", b"*123456\r\n" * 9, b"$9999999999\r\n", b"x\r\n*"])
)
VALUES = st.recursive(
    st.none() | st.integers(-5, 1 << 40) | TEXTS, lambda value: st.lists(value, max_size=14), max_leaves=40
)


@given(st.lists(VALUES, min_size=1, max_size=5), st.lists(st.integers(0, 1 << 12), max_size=9))
@example([b"*123456\r\n" * 100, [b"\r\n*1000000000\r\n"] * 12], range(0, 1 << 12, 7))
@example([[b"x"] * 20_000], [40, 50_000])
def test_what_redis_sends_is_read_as_it_is_however_it_is_cut(values, at):
    assert asyncio.run(replies(cut(b"".join(map(encoded, values)), at), len(values))) == values


async def test_the_largest_replies_are_read():
    slots = [[slot, slot, [b"10.0.0.1", 6379, b"n" * 40, []]] for slot in range(16384)]
    streams = [[b"stream %d" % number, [[b"1-0", [b"d", b"x"]]] * 20] for number in range(5000)]
    for value in (slots, streams, [[b"x" * 48] * 10_000, 0, 0], [1, [b"x" * (1 << 20)] * 30]):
        data = encoded(value)
        assert await replies([data[at : at + 1000] for at in range(0, len(data), 1000)], 1) == [value]


async def test_a_push_message_is_refused():
    with pytest.raises(InvalidResponse, match="a push message"):
        await replies([b">1\r\n+message\r\n" * 3000], 1)


class Other(Proxy):
    """A way to Redis on which some commands get another answer; `answer` gives it, or None for Redis' own."""

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


async def test_every_client_gets_that_something_else_answers(redis_server):
    async with Other(redis_server.port) as other:
        other.answer = lambda command: b"*1000000000\r\n" if command[0] in (b"PING", b"EVALSHA") else None
        ways = RedisClients(parse(other.url))
        line = RedisConnection(ways, "key")
        for ask in ((await ways.to("key")).ping, lambda: line.ask([("PING",)])):
            with pytest.raises(FAILURES) as failed:
                await ask()
            assert describe(failed.value) == (
                "something else than Redis answers there (a length that cannot be: *1000000000)"
            )
        other.answer = lambda command: None
        assert await (await ways.to("key")).ping() and await line.ask([("PING",)]) == [b"PONG"]
        await ways.aclose()


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:{}/main", "redis+cluster://127.0.0.1:{}"])
@pytest.mark.parametrize(
    "odd", [*ODD.values(), b"*1\r\n*2\r\n:1\r\n:2\r\n", b"*1\r\n*3\r\n:0\r\n:1\r\n:2\r\n", IMPOSSIBLE[0]]
)
async def test_no_cluster_and_no_sentinel_either(redis_server, url, odd):
    async with Other(redis_server.port) as other:
        other.answer = lambda command: odd if command[0] in (b"SENTINEL", b"CLUSTER") else None
        ways = RedisClients(parse(url.format(other.port)))
        with pytest.raises(FAILURES) as failed:
            await (await ways.to("key")).ping()
        await ways.aclose()
        if odd == IMPOSSIBLE[0] and "sentinel" in url:  # the nodes of a Cluster are asked one after the other
            assert "a length that cannot be" in str(failed.value)


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
            gateway.follow("r:1", publisher)
        await until(lambda: {one.role("r:1"), two.role("r:1")} == {"leader", "follower"})
        other.answer = only(what, odd)
        await until(lambda: one.shared.trouble or two.shared.trouble)
        await publisher.publish(event(1, 0, 6))
        if b"EVALSHA" in what:
            await until(lambda: all(gateway.held("r:1", prompt(1, 6)[1]) == 6 for gateway in (one, two)))
        other.answer = only((), odd)
        await until(lambda: {one.role("r:1"), two.role("r:1")} == {"leader", "follower"})
        await until(lambda: one.shared.usable and two.shared.usable)
        await publisher.publish(event(2, 0, 6))
        await until(lambda: all(gateway.held("r:1", prompt(2, 6)[1]) == 6 for gateway in (one, two)))
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
