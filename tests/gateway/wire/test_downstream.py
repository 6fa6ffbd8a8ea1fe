"""What the gateway promises to clients at the level of HTTP/1.1 bytes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.wire.http import Limits
from gateway.wire.server import Server

from .talk import Talker, eventually


class Echo:
    """Answers each request with its method, path and body; /slow waits until released."""

    def __init__(self):
        self.seen, self.held, self.left = [], [], 0

    def handle(self, client, request):
        self.seen.append(request)
        if request.path == "/slow":
            client.exchange = self
            self.held.append(client)
        else:
            client.reply(200, b"%s %s %s" % (request.method.encode(), request.target, request.body), [(b"content-type", b"text/plain")])

    def release(self):
        self.held.pop(0).reply(200, b"slow", [])

    def client_gone(self):
        self.left += 1

    def pause(self): ...
    def resume(self): ...
    def sweep(self, now): ...

    def refuse(self, status, message):
        return [(b"x-refused", b"yes")], message.encode()


@asynccontextmanager
async def served(limits=Limits()):
    echo = Echo()
    server = Server(echo, limits)
    port = await server.start("127.0.0.1", 0)
    talker = await Talker.to(port)
    try:
        yield talker, echo, server
    finally:
        await talker.close()
        await server.close()


GET = b"GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_keep_alive_serves_one_request_after_another():
    async with served() as (talk, _, _):
        for _ in range(3):
            await talk.say(GET)
            assert (await talk.response())[0::2] == (200, b"GET /a?b=1 ")


async def test_a_request_may_come_byte_by_byte():
    async with served() as (talk, _, _):
        for byte in b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc":
            await talk.say(bytes([byte]))
        assert (await talk.response())[2] == b"POST /p abc"


async def test_chunked_bodies_are_collected_and_trailers_dropped():
    async with served() as (talk, echo, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trail: 1\r\n\r\n")
        assert (await talk.response())[2] == b"POST /p abcde"
        assert echo.seen[0].header(b"x-trail") is None


async def test_pipelined_requests_are_answered_in_order():
    async with served() as (talk, echo, _):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(50)))
        await eventually(lambda: echo.held)
        assert len(echo.seen) == 1
        echo.release()
        bodies = [(await talk.response())[2] for _ in range(51)]
        assert bodies == [b"slow"] + [b"GET /%d " % i for i in range(50)]


async def test_a_malformed_request_behind_a_good_one_waits_its_turn():
    async with served() as (talk, echo, _):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n")
        await eventually(lambda: echo.held)
        echo.release()
        assert (await talk.response())[0] == 200
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""


async def test_head_gets_the_length_but_no_body():
    async with served() as (talk, _, _):
        await talk.say(b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await talk.until(b"\r\n\r\n")
        assert b"content-length: 8\r\n" in head
        await talk.say(GET)
        assert (await talk.response())[2] == b"GET /a?b=1 "


async def test_expect_continue_is_answered_before_the_body():
    async with served() as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await talk.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await talk.say(b"abc")
        assert (await talk.response())[2] == b"POST /p abc"


async def test_expect_continue_is_not_given_to_a_body_that_is_too_large():
    async with served(Limits(body_bytes=10)) as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\n")
        assert (await talk.response())[0] == 413


async def test_http10_is_answered_and_closed():
    async with served() as (talk, _, _):
        await talk.say(b"GET /old HTTP/1.0\r\n\r\n")
        assert (await talk.response())[1]["connection"] == "close"
        assert await talk.rest() == b""


async def test_absolute_form_targets_are_accepted():
    async with served() as (talk, _, _):
        await talk.say(b"GET http://x/abs HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await talk.response())[2] == b"GET /abs "


async def test_an_offer_to_upgrade_is_served_as_the_plain_request_it_is():
    async with served() as (talk, _, _):
        await talk.say(b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n")
        status, headers, body = await talk.response()
        assert (status, body) == (200, b"GET /up ")
        assert headers["connection"] == "close"


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET /a HTTP/9.9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello on the plain port
    ],
)
async def test_ambiguous_or_broken_framing_is_refused_and_closed(raw):
    async with served() as (talk, echo, _):
        await talk.say(raw)
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""
        assert not echo.seen


async def test_a_smuggled_second_request_is_not_run():
    async with served() as (talk, echo, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""
        assert not echo.seen


async def test_a_header_flood_is_refused():
    async with served() as (talk, echo, _):
        await talk.say(b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n")
        assert (await talk.response())[0] == 431
        assert not echo.seen


@pytest.mark.parametrize("endless", [b"X-Long: " + b"y" * 70_000, b"Y" * 70_000], ids=["value", "name"])
async def test_an_endless_header_is_refused_while_it_comes(endless):
    async with served() as (talk, echo, _):
        await talk.say(b"GET /a HTTP/1.1\r\nHost: x\r\n" + endless)
        assert (await talk.response())[0] == 431
        assert not echo.seen


async def test_an_endless_target_is_refused():
    async with served() as (talk, echo, _):
        await talk.say(b"GET /" + b"a" * 100_000)
        assert (await talk.response())[0] == 431


async def test_slow_headers_time_out():
    async with served(Limits(head_seconds=0.1)) as (talk, _, _):
        await talk.say(b"GET /a HTTP/1.1\r\nHo")
        assert (await talk.response())[0] == 408
        assert await talk.rest() == b""


async def test_a_body_that_stops_coming_times_out():
    async with served(Limits(body_gap_seconds=0.1)) as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        assert (await talk.response())[0] == 408


async def test_an_idle_connection_is_closed():
    async with served(Limits(keep_alive_seconds=0.1)) as (talk, _, _):
        await talk.say(GET)
        await talk.response()
        assert await talk.rest() == b""


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nF4240\r\n"])
async def test_a_body_over_the_limit_gets_413_and_the_client_can_read_it(framing):
    async with served(Limits(body_bytes=1000)) as (talk, echo, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\n" + framing)
        await talk.say(b"a" * 1_000_000)  # still sending when the answer comes: it must not be reset away
        assert (await talk.response())[0] == 413
        assert not echo.seen


async def test_unknown_expectations_are_refused():
    async with served() as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: a-pony\r\n\r\n")
        assert (await talk.response())[0] == 417


async def test_a_client_that_leaves_is_told_to_the_exchange():
    async with served() as (talk, echo, _):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        await talk.close()
        await eventually(lambda: echo.left == 1)


async def test_a_bug_of_ours_is_a_500_and_is_not_blamed_on_the_client(caplog):
    async with served() as (talk, echo, _):
        def fails(client, request):
            client.exchange = echo
            raise ZeroDivisionError("a bug")

        echo.handle = fails
        await talk.say(GET)
        assert (await talk.response())[0] == 500
        assert await talk.rest() == b""
        assert echo.left == 1 and "ZeroDivisionError: a bug" in caplog.text


async def test_a_client_that_does_not_read_is_not_read_from():
    """Pipelined requests whose answers nobody takes must not pile up in the gateway."""
    async with served() as (talk, echo, _):
        body = b"z" * 100_000
        request = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for _ in range(200):
            talk.writer.write(request)
        async def settled():
            before = -1
            while before != len(echo.seen):
                before = len(echo.seen)
                await asyncio.sleep(0.2)
        await asyncio.wait_for(settled(), 10)
        assert len(echo.seen) < 150
        for _ in range(200):
            assert (await talk.response())[0] == 200


async def test_drain_finishes_what_runs_and_answers_who_still_asks():
    async with served() as (talk, echo, server):
        idle = await Talker.to(server._listener.sockets[0].getsockname()[1])
        await idle.say(GET)
        await idle.response()
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        drained = asyncio.ensure_future(server.drain(5))
        await eventually(lambda: server.draining)
        await idle.say(GET)
        assert (await idle.response())[1]["connection"] == "close"
        assert await idle.rest() == b""
        assert not drained.done()
        echo.release()
        assert (await talk.response())[1]["connection"] == "close"
        assert await drained == 0
        await idle.close()


async def test_drain_cuts_what_is_still_running_at_the_deadline():
    async with served() as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        assert await server.drain(0.05) == 1
        assert await talk.rest() == b""
        assert echo.left == 1
