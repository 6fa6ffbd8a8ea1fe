"""What all clients together make the gateway hold: bounded in bytes, in rate and in time, and given back."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from gateway.http.downstream import REQUEST_BYTES, Downstream
from gateway.http.messages import Limits
from gateway.http.server import Server

from ..proxy.replies import EVENT, SSE_HEAD, answers, chunk, post
from ..proxy.stack import stack
from .serving import GET, Echo
from .talk import Talker, eventually, read_request

MIB = 1 << 20


def upload(length: int, sent: int, extra: bytes = b"") -> bytes:
    return b"POST /slow HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (extra, length) + b"x" * sent


class Clock:
    """The server's, which goes on only when a test says so; the server looks at its connections without a pause."""

    def __init__(self, monkeypatch):
        self.now, self.looks = 1.0, 0
        for room in ("server", "downstream"):
            monkeypatch.setattr(f"gateway.http.{room}.monotonic", lambda: self.now)
        monkeypatch.setattr("gateway.http.server.SWEEP_SECONDS", 0.001)
        check = Downstream.check

        def counted(connection, now):
            self.looks += 1
            check(connection, now)

        monkeypatch.setattr(Downstream, "check", counted)

    async def goes_on(self, seconds: float, server: Server, received: int) -> None:
        """Once the server has so many bytes of bodies; returns when it has looked at all connections."""
        await eventually(lambda: sum(one.body_bytes for one in server.connections) >= received)
        self.now += seconds
        looks = self.looks + 2 * len(server.connections)
        await eventually(lambda: self.looks >= looks or not server.connections)


@asynccontextmanager
async def served(**limits):
    echo = Echo()
    server = Server(echo, Limits(**limits))
    port = await server.start("127.0.0.1", 0)
    talkers = []

    async def talk() -> Talker:
        talkers.append(await Talker.to(port))
        return talkers[-1]

    try:
        yield talk, echo, server
    finally:
        for one in talkers:
            await one.close()
        await eventually(lambda: not server.connections)
        assert server.held == 0
        await server.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_many_held_uploads_stay_within_the_budget_and_leave_room_for_others(chunked):
    async with served(requests_bytes=16 * MIB, body_bytes=6 * MIB) as (talk, echo, server):
        holders = [await talk() for _ in range(20)]
        for one in holders:
            if chunked:
                one.writer.write(
                    b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * MIB) * 5
                )
            else:
                one.writer.write(upload(6 * MIB, 5 * MIB))
        refused = [asyncio.ensure_future(one.response(30)) for one in holders]
        await eventually(lambda: sum(one.done() for one in refused) >= 15)
        assert 5 * MIB < server.held < 16 * MIB
        assert {one.result()[0] for one in refused if one.done()} == {503}
        honest = await talk()
        for _ in range(3):
            assert (await honest.ask(post(b"y" * 100_000)))[0] == 200
        for one in refused:
            one.cancel()


async def test_whoever_asks_for_too_much_is_told_before_it_is_sent():
    async with served(requests_bytes=4 * MIB) as (talk, echo, server):
        first, second = await talk(), await talk()
        await first.say(upload(MIB, MIB))
        await eventually(lambda: echo.held)
        assert (await second.ask(upload(2 * MIB, 0, b"Expect: 100-continue\r\n")))[0] == 503
        third = await talk()
        await third.say(upload(MIB, 0, b"Expect: 100-continue\r\n"))
        assert await third.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("too_long", [False, True])
async def test_a_body_that_trickles_is_refused_and_one_that_flows_is_not_unless_it_takes_too_long(
    too_long, monkeypatch
):
    clock = Clock(monkeypatch)
    seconds = 1.0 if too_long else 300.0
    async with served(body_gap_seconds=0.3, body_rate=1000, body_seconds=seconds) as (talk, echo, server):
        trickling, flowing = await talk(), await talk()
        await trickling.say(upload(MIB, 500_000))  # what came at once earns no time
        await flowing.say(upload(10 + 40 * 1000, 10))
        answer = asyncio.ensure_future(trickling.response())
        for step in range(1, 40):
            await flowing.say(b"x" * 1000)
            if not answer.done():
                trickling.writer.write(b"x")
            await clock.goes_on(0.05, server, 10 + 1000 * step if step < 18 or not too_long else 0)
        assert (await answer)[0] == 408
        if too_long:
            assert (await flowing.response())[0] == 408
            return
        await flowing.say(b"x" * 1000)
        await eventually(lambda: echo.held)
        assert server.held == 10 + 40 * 1000 + REQUEST_BYTES


async def test_what_is_held_is_given_back_whatever_a_connection_does():
    """Whole and broken requests in pieces, pipelines, clients that leave; the same through the head that is known."""
    dice = random.Random(5)
    said = [
        GET, upload(1000, 1000), upload(1000, 1000).replace(b"/slow", b"/p"), upload(300_000, 300_000).replace(b"/slow", b"/p"),
        upload(1000, 500), upload(10**9, 10),
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n", b"NONSENSE\r\n\r\n", b"GET /x HTTP/1.0\r\n\r\n",
    ]  # fmt: skip
    async with served(requests_bytes=MIB) as (talk, echo, server):
        for _ in range(60):
            one = await talk()
            for _ in range(dice.randrange(1, 6)):
                one.writer.write(dice.choice(said[:4] if dice.random() < 0.7 else said))
                await asyncio.sleep(0)
            for _ in range(dice.randrange(20)):
                await asyncio.sleep(0)
            while echo.held and dice.random() < 0.5:
                client = echo.held.pop(0)
                if client.exchange is echo:
                    client.reply(200, b"slow", [])
            await one.close()


async def test_a_body_is_dropped_once_its_answer_has_begun():
    ended = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(EVENT))
        await ended.wait()
        writer.write(b"0\r\n\r\n")

    async with stack(script, tokenize_once=False) as s:
        talk = await s.talk()
        await talk.say(post(b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 500_000)))
        await talk.until(EVENT)
        assert 0 < s.server.held <= REQUEST_BYTES
        assert all(exchange.request.body == b"" for exchange in s.proxy.exchanges)
        ended.set()
        await talk.until(b"0\r\n\r\n")
        await eventually(lambda: s.server.held == 0)


async def test_a_body_is_kept_as_long_as_it_may_have_to_go_elsewhere():
    seen = []

    async def fails(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD)
        await writer.drain()

    async with stack(fails, answers(seen=seen)) as s:
        body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 50_000)
        for _ in range(2):
            assert (await s.ask(post(body)))[0] == 200
        assert [received for _, received in seen] == [body, body]


async def test_a_gateway_that_is_full_says_so_and_when_to_come_again():
    async with stack(answers(), limits=Limits(requests_bytes=10_000)) as s:
        status, headers, body = await s.ask(post(b"x" * 9000))
        assert status == 503 and headers["retry-after"] == "1" and b"gateway_full" in body and b"request_budget" in body
        assert s.metrics.rejections.values["503",] == 1


BOMB = b"GET /slow HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 195 + b"\r\n"


async def test_what_is_pipelined_behind_a_request_waits_as_bytes():
    async with served() as (talk, echo, server):
        one = await talk()
        await one.say(BOMB)
        await eventually(lambda: echo.held)
        assert server.held > 195 * 256, "headers take more than their bytes"
        one.writer.write(BOMB * 400)
        await eventually(lambda: next(iter(server.connections)).reading_paused)
        (connection,) = server.connections
        assert len(connection.waiting) < 10
        assert server.held < 10 * 60_000 + 256 * 1024
        for _ in range(401):
            await eventually(lambda: echo.held)
            echo.release()
            assert (await one.response())[0] == 200
        assert server.held == 0


@pytest.mark.parametrize("extra", [b"", b"Connection: upgrade\r\nUpgrade: h\r\n"], ids=["plain", "upgrade"])
async def test_thousands_of_requests_in_a_read_let_others_have_their_turn(extra):
    async with served() as (talk, echo, server):
        one, other = await talk(), await talk()
        one.writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n%b\r\n" % extra * 3000)
        other.writer.write(GET)
        assert (await other.response())[0] == 200
        assert len(echo.seen) < 2500
        one.writer.write(b"NONSENSE\r\n\r\n" + GET)
        for _ in range(3000):
            assert (await one.response())[0::2] == (200, b"GET /x ")
        assert (await one.response())[0] == 400 and await one.rest() == b""


async def test_a_client_that_leaves_is_noticed_though_requests_wait():
    async with served() as (talk, echo, server):
        one = await talk()
        await one.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        await eventually(lambda: any(connection.reading_paused for connection in server.connections))
        one.writer.close()
        await eventually(lambda: echo.left == 1 and not server.connections)


async def test_what_waits_as_bytes_is_within_the_budget():
    async with served(requests_bytes=600_000) as (talk, echo, server):
        one = await talk()
        await one.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 4000)
        await eventually(lambda: next(iter(server.connections)).refused)
        assert server.held < 300_000
        echo.release()
        while (status := (await one.response())[0]) == 200:
            pass
        assert status == 503
