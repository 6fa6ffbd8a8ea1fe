"""What the gateway promises to clients at the level of HTTP/1.1 bytes."""

import asyncio
import itertools
import os
import sys
import time
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.downstream import Downstream
from gateway.wire.http import HOP_BY_HOP, Limits
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
    def held_up(self, now): ...

    def refuse(self, status, message, target):
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


@pytest.mark.parametrize(("target", "seen"), [(b"http://x/abs", b"/abs"), (b"http://x", b"/"), (b"http://x?q=1", b"/?q=1"), (b"http://x/a?u=http://y/z", b"/a?u=http://y/z"), (b"/a?u=http://y/z", b"/a?u=http://y/z")])
async def test_absolute_form_targets_are_accepted(target, seen):
    async with served() as (talk, _, _):
        await talk.say(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
        assert (await talk.response())[2] == b"GET %b " % seen


async def test_an_offer_to_upgrade_is_served_as_the_plain_request_it_is():
    async with served() as (talk, _, _):
        await talk.say(b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n")
        assert (await talk.response())[0::2] == (200, b"GET /up ")
        await talk.say(GET)
        assert (await talk.response())[0] == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"])
@pytest.mark.parametrize("piece", [1, 1000])
async def test_a_body_behind_an_offer_to_upgrade_is_not_lost(framing, piece):
    """Java's client offers h2c with every request."""
    async with served() as (talk, echo, _):
        raw = b"POST /p HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n" + framing + GET
        for at in range(0, len(raw), piece):
            await talk.say(raw[at : at + piece])
        assert [(await talk.response())[2] for _ in range(2)] == [b"POST /p abc", b"GET /a?b=1 "]
        assert echo.seen[0].header(b"upgrade") is None


UPGRADE = b"Upgrade: h2c\r\nHTTP2-Settings: AAA\r\n"


@pytest.mark.parametrize("named", [b"Upgrade, HTTP2-Settings, Content-Length", b"Upgrade,content-length", b"Content-Length", b"close, Transfer-Encoding", b"Host"])
@pytest.mark.parametrize("upgrade", [UPGRADE, b""])
async def test_a_connection_header_that_names_framing_smuggles_nothing(named, upgrade):
    """Whoever removed what it names would take the body for the next request."""
    async with served() as (talk, echo, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (named, upgrade, len(GET), GET))
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""
        assert not echo.seen


@pytest.mark.parametrize("named", [b"close, Upgrade", b"Upgrade, close, HTTP2-Settings"])
async def test_an_offer_to_upgrade_leaves_what_else_connection_says(named):
    async with served() as (talk, echo, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nX-Kept: y\r\nConnection: %b, X-Named\r\nX-Named: y\r\n%bContent-Length: 3\r\n\r\nabc" % (named, UPGRADE))
        _, headers, body = await talk.response()
        assert headers["connection"] == "close" and body == b"POST /p abc"
        assert await talk.rest() == b""
        passed_on = echo.seen[0].end_to_end(HOP_BY_HOP)
        assert b"x-kept: y" in passed_on and b"x-named" not in passed_on and b"upgrade" not in passed_on


@pytest.mark.parametrize("line", [b"GET /x RTSP/1.1", b"POST /x RTSP/1.0", b"SOURCE /x ICE/1.0", b"GET /x RTSP/1.1\r\nX: GET /x HTTP/1.1", b"POST /x RTSP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c"])
@pytest.mark.parametrize("before", [b"", b"\r\n"])
@pytest.mark.parametrize("piece", [1, 1000])
async def test_other_protocols_request_lines_are_refused(line, before, piece):
    async with served() as (talk, echo, _):
        raw = before + line + b"\r\nHost: x\r\n\r\n"
        for at in range(0, len(raw), piece):
            await talk.say(raw[at : at + piece])
        assert (await talk.response())[0] == 400
        assert not echo.seen


async def test_another_protocols_request_line_behind_a_request_is_refused():
    async with served() as (talk, echo, _):
        await talk.say(GET + b"GET /x RTSP/1.1\r\nHost: x\r\n\r\n")
        assert [(await talk.response())[0] for _ in range(2)] == [200, 400]


async def test_another_protocols_request_line_is_not_taken_for_the_one_before_it():
    async with served() as (talk, echo, _):
        await talk.say(GET + GET.replace(b"HTTP/1.1", b"RTSP/1.1"))
        assert [(await talk.response())[0] for _ in range(2)] == [200, 400]
        assert len(echo.seen) == 1


async def test_words_of_other_protocols_in_a_request_are_words():
    async with served() as (talk, echo, _):
        body = b"GET /x RTSP/1.1"
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nX: a RTSP/1.1 b\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) + GET)
        assert [(await talk.response())[0] for _ in range(2)] == [200, 200]


async def test_no_proxying_to_elsewhere():
    async with served() as (talk, echo, _):
        await talk.say(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
        assert (await talk.response())[0] == 405
        assert not echo.seen


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /a HTTP/0.9\r\nHost: x\r\n\r\n", 505),
        (b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    ],
)
async def test_versions_and_codings_that_are_not_spoken_are_refused(raw, status):
    async with served() as (talk, echo, _):
        await talk.say(raw)
        assert (await talk.response())[0] == status
        assert not echo.seen


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %b3\r\n\r\nabc" % (b"0" * 5000),
        b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
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


CHUNKED = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (CHUNKED + b"0\r\nX: ", b"y"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"y"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
        (CHUNKED + b"1;", b"y"),
        (CHUNKED + b"1\r\na\r\n2;x=", b"y"),
        (CHUNKED, b"1;%b\r\na\r\n" % (b"y" * 1000)),
        (CHUNKED, b"0" * 100),
        (b"", b"\r\n"),
        (GET, b"\r\n"),
    ],
    ids=["trailer", "trailer name", "trailers", "extension", "later extension", "extensions", "size", "blank lines", "blank lines behind"],
)
async def test_nothing_that_comes_between_a_request_and_its_end_is_without_a_limit(begin, endless):
    """Neither a line that never ends nor lines without end."""
    async with served(Limits(head_bytes=20_000)) as (talk, echo, server):
        await talk.say(begin)
        if begin == GET:
            await talk.response()
        for _ in range(40):
            await talk.say(endless * (4000 // len(endless)))
            await asyncio.sleep(0)
        assert (await talk.response())[0] in (400, 431)
        assert not echo.seen[1:] and not [one for one in echo.seen if one.method == "POST"]


async def test_extensions_and_trailers_within_reason_are_dropped():
    async with served(Limits(head_bytes=2000)) as (talk, echo, _):
        framed = b"".join(b"0000001;x\r\n%c\r\n" % byte for byte in b"a" * 1000)
        await talk.say(CHUNKED + framed + b"0;last\r\nX-Sum: " + b"y" * 1000 + b"\r\n\r\n")
        assert (await talk.response())[2] == b"POST /p " + b"a" * 1000


async def test_a_large_head_is_counted_once_and_without_the_body_before_it():
    head = b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40)) + b"\r\n"
    async with served() as (talk, _, _):
        body = b"z" * 100_000
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + head[:-10])
        assert (await talk.response())[0] == 200
        await talk.say(head[-10:])
        assert (await talk.response())[0] == 200


async def test_slow_headers_time_out():
    async with served(Limits(head_seconds=0.1)) as (talk, _, _):
        await talk.say(b"GET /a HTTP/1.1\r\nHo")
        assert (await talk.response())[0] == 408
        assert await talk.rest() == b""


async def test_a_body_that_stops_coming_times_out():
    async with served(Limits(body_gap_seconds=0.1)) as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        assert (await talk.response())[0] == 408


async def test_a_client_that_waits_for_us_is_not_timed_out():
    async with served(Limits(body_gap_seconds=0.1, head_seconds=0.1)) as (talk, echo, _):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nPOST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        await eventually(lambda: echo.held)
        (client,) = echo.held
        await eventually(lambda: client.expects)
        client.check(time.monotonic() + 60)
        echo.release()
        assert (await talk.response())[2] == b"slow"
        assert await talk.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await talk.say(b"abc")
        assert (await talk.response())[2] == b"POST /p abc"


async def test_an_answer_nobody_takes_is_cut_in_the_end():
    async with served(Limits(keep_alive_seconds=0.2, flush_seconds=0.2)) as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        echo.held.pop().reply(200, b"x" * 30_000_000, [])
        await eventually(lambda: not server.connections)


async def test_a_slow_uploader_still_gets_its_413():
    async with served(Limits(body_bytes=1000, linger_seconds=0.3)) as (talk, _, _):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(8):
            await talk.say(b"a" * 1000)
            await asyncio.sleep(0.1)
        assert (await talk.response())[0] == 413


async def test_tiny_chunks_do_not_take_many_times_their_size():
    async with served() as (talk, _, server):
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await talk.say(b"2\r\nab\r\n" * 100_000)
        (connection,) = server.connections
        await eventually(lambda: connection.body_bytes == 200_000)
        assert sum(map(sys.getsizeof, [connection.body, *connection.body])) < 500_000
        await talk.say(b"0\r\n\r\n")
        assert (await talk.response())[2] == b"POST /p " + b"ab" * 100_000


@given(st.lists(st.sampled_from((1, 2, 4095, 4096, 4097, 70_000)), min_size=1, max_size=8), st.integers(1000, 100_000))
def test_a_body_arrives_whole_however_it_is_cut(chunks, read):
    body = bytes(range(256)) * (sum(chunks) // 256 + 1)
    begins = [0, *itertools.accumulate(chunks)]
    framed = b"".join(b"%x\r\n%b\r\n" % (size, body[begin : begin + size]) for begin, size in zip(begins, chunks, strict=False))
    said = b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    echo = Echo()
    client = Downstream(Server(echo))
    for start in range(0, len(said), read):
        client.data_received(said[start : start + read])
    assert [request.body for request in echo.seen] == [body[: sum(chunks)]]


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


async def test_a_bug_of_ours_is_answered_also_with_a_refusal_behind_it():
    async with served() as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n")
        await eventually(lambda: echo.held)
        (client,) = echo.held
        await eventually(lambda: client.refused)
        client.failed(echo, ZeroDivisionError("a bug"))
        assert (await talk.response())[0] == 500
        assert await talk.rest() == b""


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


async def test_drain_waits_for_what_is_answered_but_not_sent():
    async with served() as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        echo.held.pop().reply(200, b"x" * 20_000_000, [])
        drained = asyncio.ensure_future(server.drain(10))
        assert len((await talk.response(10))[2]) == 20_000_000
        assert await drained == 0


async def test_a_connection_that_comes_while_closing_is_cut():
    async with served() as (_, _, server):
        await server.close()
        aborted = []
        late = Downstream(server)
        late.connection_made(type("Transport", (), {"abort": lambda self: aborted.append(1)})())
        assert aborted and not server.connections


async def test_of_many_connections_a_sweep_sees_a_part_and_none_is_forgotten():
    async with served(Limits(keep_alive_seconds=0.05)) as (_, echo, server):
        port = server._listener.sockets[0].getsockname()[1]
        ending = []
        echo.sweep = lambda now: ending.append(sum(connection.closing for connection in server.connections))
        talkers = await asyncio.gather(*(Talker.to(port) for _ in range(200)))
        await eventually(lambda: not server.connections, 20)
        assert max(ending) <= 64
        for talker in talkers:
            await talker.close()


async def test_a_failing_sweep_does_not_end_the_sweeping():
    async with served(Limits(head_seconds=0.1)) as (talk, echo, server):
        talk2 = await Talker.to(server._listener.sockets[0].getsockname()[1])
        await eventually(lambda: len(server.connections) == 2)
        for connection in list(server.connections)[:1]:
            connection.read_begun = None  # a bug somewhere
            connection.reading = True
        def fails(now):
            raise ZeroDivisionError
        echo.sweep = fails
        await asyncio.sleep(0.6)
        echo.sweep = lambda now: None
        await talk.say(b"GET /a HTTP/1.1\r\nHo")
        await talk2.say(b"GET /a HTTP/1.1\r\nHo")
        assert (await talk.response())[0] == (await talk2.response())[0] == 408
        await talk2.close()


async def test_drain_cuts_what_is_still_running_at_the_deadline():
    async with served() as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        assert await server.drain(0.05) == 1
        assert await talk.rest() == b""
        assert echo.left == 1


def test_a_client_is_not_late_because_the_event_loop_was():
    async def scenario():
        async with served(Limits(head_seconds=0.4)) as (talk, echo, server):
            await talk.say(GET[:10])
            answer = echo.handle

            def hold_up(client, request):
                echo.handle = answer
                os.write(talk.writer.get_extra_info("socket").fileno(), GET[10:])
                time.sleep(1.0)
                answer(client, request)

            echo.handle = hold_up
            other = await Talker.to(talk.writer.get_extra_info("peername")[1])
            await other.say(GET)
            assert (await talk.response())[0] == 200
            await other.close()

    uvloop.run(scenario())  # the gateway's loop, which runs its timers before it reads on


TEXT = b"GET /version HTTP/1.1"
LONG_HEAD = b"POST /p HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 50


@pytest.mark.parametrize(
    "first",
    [
        LONG_HEAD + b"Content-Length: %d\r\n\r\n" % len(TEXT) + TEXT,
        LONG_HEAD + b"X: " + TEXT + b"\r\nContent-Length: %d\r\n\r\n" % len(TEXT) + TEXT,
        LONG_HEAD + b"Transfer-Encoding: chunked\r\n\r\n15\r\n" + TEXT + b"\r\n0\r\n\r\n",
        LONG_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\nx\r\n15\r\n" + TEXT + b"\r\n0\r\n\r\n",
        LONG_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: " + TEXT + b"\r\n\r\n",
    ],
    ids=["body", "header and body", "chunk", "second chunk", "trailer"],
)
async def test_text_of_one_request_is_not_the_request_line_of_the_next(first):
    async with served() as (talk, _, _):
        await talk.say(first + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" + first + b"GET /version RTSP/1.1\r\nHost: x\r\n\r\n")
        assert [(await talk.response())[0] for _ in range(4)] == [200, 200, 200, 400]


def test_request_lines_are_found_wherever_reads_end():
    said = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\nx\r\n15\r\n" + TEXT + b"\r\n0\r\nX: y\r\n\r\n" + GET + GET
    for at in range(1, len(said)):
        client = Downstream(Server(Echo()))
        client.writing_paused = True
        client.connection_made(type("Transport", (), {"pause_reading": lambda self: None})())
        client.data_received(said[:at])
        client.data_received(said[at:])
        assert not client.refused and len(client.waiting) == 3
