"""Where a request begins and ends, and what is refused because that is not clear or too long."""

import asyncio
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.downstream import Downstream
from gateway.http.messages import HOP_BY_HOP, Limits
from gateway.http.server import Server

from .serving import GET, Echo, served
from .talk import eventually


async def test_a_request_may_come_byte_by_byte():
    async with served() as (talk, _, _):
        for byte in b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc":
            await talk.say(bytes([byte]))
        assert (await talk.response())[2] == b"POST /p abc"


async def test_chunked_bodies_are_collected_and_trailers_dropped():
    async with served() as (talk, echo, _):
        await talk.say(
            b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trail: 1\r\n\r\n"
        )
        assert (await talk.response())[2] == b"POST /p abcde"
        assert echo.seen[0].header(b"x-trail") is None


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


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        (b"http://x/abs", b"/abs"),
        (b"http://x", b"/"),
        (b"http://x?q=1", b"/?q=1"),
        (b"http://x/a?u=http://y/z", b"/a?u=http://y/z"),
        (b"/a?u=http://y/z", b"/a?u=http://y/z"),
    ],
)
async def test_absolute_form_targets_are_accepted(target, seen):
    async with served() as (talk, _, _):
        await talk.say(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
        assert (await talk.response())[2] == b"GET %b " % seen


async def test_an_offer_to_upgrade_is_served_as_the_plain_request_it_is():
    async with served() as (talk, _, _):
        await talk.say(
            b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n\r\n"
        )
        assert (await talk.response())[0::2] == (200, b"GET /up ")
        await talk.say(GET)
        assert (await talk.response())[0] == 200


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("piece", [1, 1000])
async def test_a_body_behind_an_offer_to_upgrade_is_not_lost(framing, piece):
    """Java's client offers h2c with every request."""
    async with served() as (talk, echo, _):
        raw = (
            b"POST /p HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
            + framing
            + GET
        )
        for at in range(0, len(raw), piece):
            await talk.say(raw[at : at + piece])
        assert [(await talk.response())[2] for _ in range(2)] == [b"POST /p abc", b"GET /a?b=1 "]
        assert echo.seen[0].header(b"upgrade") is None


UPGRADE = b"Upgrade: h2c\r\nHTTP2-Settings: AAA\r\n"


@pytest.mark.parametrize(
    "named",
    [
        b"Upgrade, HTTP2-Settings, Content-Length",
        b"Upgrade,content-length",
        b"Content-Length",
        b"close, Transfer-Encoding",
        b"Host",
    ],
)
@pytest.mark.parametrize("upgrade", [UPGRADE, b""])
async def test_a_connection_header_that_names_framing_smuggles_nothing(named, upgrade):
    """Whoever removed what it names would take the body for the next request."""
    async with served() as (talk, echo, _):
        await talk.say(
            b"POST /p HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n%bContent-Length: %d\r\n\r\n%b"
            % (named, upgrade, len(GET), GET)
        )
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""
        assert not echo.seen


@pytest.mark.parametrize("named", [b"close, Upgrade", b"Upgrade, close, HTTP2-Settings"])
async def test_an_offer_to_upgrade_leaves_what_else_connection_says(named):
    async with served() as (talk, echo, _):
        await talk.say(
            b"POST /p HTTP/1.1\r\nHost: x\r\nX-Kept: y\r\nConnection: %b, X-Named\r\nX-Named: y\r\n%bContent-Length: 3\r\n\r\nabc"
            % (named, UPGRADE)
        )
        _, headers, body = await talk.response()
        assert headers["connection"] == "close" and body == b"POST /p abc"
        assert await talk.rest() == b""
        passed_on = echo.seen[0].end_to_end(HOP_BY_HOP)
        assert b"x-kept: y" in passed_on and b"x-named" not in passed_on and b"upgrade" not in passed_on


@pytest.mark.parametrize(
    "line",
    [
        b"GET /x RTSP/1.1",
        b"POST /x RTSP/1.0",
        b"SOURCE /x ICE/1.0",
        b"GET /x RTSP/1.1\r\nX: GET /x HTTP/1.1",
        b"POST /x RTSP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c",
    ],
)
@pytest.mark.parametrize("before", [b"", b"\r\n"])
@pytest.mark.parametrize("piece", [1, 1000])
async def test_other_protocols_request_lines_are_refused(line, before, piece):
    async with served() as (talk, echo, _):
        raw = before + line + b"\r\nHost: x\r\n\r\n"
        for at in range(0, len(raw), piece):
            await talk.say(raw[at : at + piece])
        assert (await talk.response())[0] == 400
        assert not echo.seen


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
    ids=[
        "trailer",
        "trailer name",
        "trailers",
        "extension",
        "later extension",
        "extensions",
        "size",
        "blank lines",
        "blank lines behind",
    ],
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
    framed = b"".join(
        b"%x\r\n%b\r\n" % (size, body[begin : begin + size]) for begin, size in zip(begins, chunks, strict=False)
    )
    said = b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    echo = Echo()
    client = Downstream(Server(echo).clients)
    for start in range(0, len(said), read):
        client.data_received(said[start : start + read])
    assert [request.body for request in echo.seen] == [body[: sum(chunks)]]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nF4240\r\n"]
)
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
