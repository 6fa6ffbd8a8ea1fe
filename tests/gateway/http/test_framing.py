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

from .serving import GET, Echo, cut, served, told
from .talk import eventually

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Upgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\n" + UPGRADE  # Java's client makes it with every request
SMALL = Limits(body_bytes=10_000, head_bytes=20_000)


@pytest.mark.parametrize("piece", [1, 100_000])
@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (POST + b"Content-Length: 3\r\n\r\nabc", [(b"/p", b"abc")]),
        (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trail: 1\r\n\r\n", [(b"/p", b"abcde")]),
        (b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET, [(b"/old", b""), (b"/a?b=1", b"")]),
        (b"\r\n" + GET, [(b"/a?b=1", b"")]),
        (b"GET http://x/abs HTTP/1.1\r\nHost: x\r\n\r\n", [(b"/abs", b"")]),
        (b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n", [(b"/", b"")]),
        (b"GET http://x?q=1 HTTP/1.1\r\nHost: x\r\n\r\n", [(b"/?q=1", b"")]),
        (b"GET http://x/a?u=http://y/z HTTP/1.1\r\nHost: x\r\n\r\n", [(b"/a?u=http://y/z", b"")]),
        (b"GET /a?u=http://y/z HTTP/1.1\r\nHost: x\r\n\r\n", [(b"/a?u=http://y/z", b"")]),
        (GET[:-2] + OFFER + b"\r\n" + GET, [(b"/a?b=1", b"")] * 2),
        (POST + OFFER + b"Content-Length: 3\r\n\r\nabc" + GET, [(b"/p", b"abc"), (b"/a?b=1", b"")]),
        (CHUNKED[:-2] + OFFER + b"\r\n3\r\nabc\r\n0\r\n\r\n" + GET, [(b"/p", b"abc"), (b"/a?b=1", b"")]),
        (
            CHUNKED + b"".join(b"0000001;x\r\n%c\r\n" % byte for byte in b"a" * 1000) + b"0;last\r\nX: y\r\n\r\n",
            [(b"/p", b"a" * 1000)],
        ),
    ],
)
def test_what_is_understood(raw, found, piece):
    seen, transport = told(cut(raw, piece), Limits(head_bytes=2000))
    assert [(one.target, one.body) for one in seen] == found
    assert transport.written.count(b"HTTP/1.1 200") == len(found)
    assert not any(one.named.keys() & {b"upgrade", b"http2-settings", b"x-trail"} for one in seen)


NAMED = (b"Upgrade, HTTP2-Settings, Content-Length", b"Upgrade,content-length", b"close, Transfer-Encoding", b"Host")


@pytest.mark.parametrize("piece", [1000, 100_000])
@pytest.mark.parametrize(
    ("status", "raw"),
    [
        # a length that is not clear, or lines that are no HTTP
        (400, POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET),
        (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
        (400, POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        (400, POST + b"Content-Length: +3\r\n\r\nabc"),
        (400, POST + b"Content-Length: %b3\r\n\r\nabc" % (b"0" * 5000)),
        (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
        (400, POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
        (400, CHUNKED + b"zz\r\n"),
        (400, b"GET /a HTTP/1.1\r\n\r\n"),
        (400, b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"),
        (400, b"GET /a HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n"),
        (400, b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n"),
        (400, b"GET /a HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n"),
        *(
            (400, before + line + b"\r\nHost: x\r\n\r\n")
            for before in (b"", b"\r\n")
            for line in (
                b"GET /x RTSP/1.1",
                b"POST /x  RTSP/1.0",
                b"SOURCE /x ICE/1.0",
                b"GET /x RTSP/1.1\r\nX: GET /x HTTP/1.1",
                b"POST /x RTSP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c",
            )
        ),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),  # a TLS hello on the plain port
        # Whoever removed what `Connection` names would take the body for the next request.
        *(
            (400, b"%bConnection: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (POST, named, offer, len(GET), GET))
            for named in NAMED
            for offer in (UPGRADE, b"")
        ),
        # what is not spoken here
        (405, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"),
        (417, POST + b"Content-Length: 1\r\nExpect: a-pony\r\n\r\n"),
        (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
        (505, b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n"),
        (505, b"GET /a HTTP/0.9\r\nHost: x\r\n\r\n"),
        # what is too long, also where it never ends
        (413, POST + b"Content-Length: 10001\r\nExpect: 100-continue\r\n\r\n"),
        (413, CHUNKED + b"F4240\r\n" + b"a" * 10_001),
        (431, b"GET /" + b"a" * 30_000),
        (431, b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n"),
        (431, b"GET /a HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 30_000),
        (431, b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"Y" * 30_000),
        (431, b"\r\n" * 15_000),
        (400, CHUNKED + b"0\r\nX: " + b"y" * 30_000),
        (400, CHUNKED + b"1\r\na\r\n0\r\n" + b"y" * 30_000),
        (400, CHUNKED + b"1;" + b"y" * 30_000),
        (400, CHUNKED + b"1\r\na\r\n2;x=" + b"y" * 30_000),
        (400, CHUNKED + b"1;%b\r\na\r\n" % (b"y" * 1000) * 40),
        (400, CHUNKED + b"0" * 30_000),
    ],
)
def test_what_is_refused(raw, status, piece):
    seen, transport = told(cut(raw, piece), SMALL)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status) and transport.closed
    assert not seen and transport.written.count(b"x-refused") == 1


@pytest.mark.parametrize("raw", [GET + b"\r\n" * 15_000, CHUNKED + b"0\r\n" + b"X: y\r\n" * 10_000])
def test_lines_without_end_behind_a_request_have_a_limit_too(raw):
    seen, transport = told(cut(raw, 1000), SMALL)
    assert [one.method for one in seen] == ["GET"] * raw.startswith(GET)
    assert transport.closed and transport.written.count(b"x-refused") == 1


async def test_head_gets_the_length_but_no_body():
    async with served() as (talk, _, _):
        await talk.say(b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"content-length: 8\r\n" in await talk.until(b"\r\n\r\n")
        assert (await talk.ask(GET))[2] == b"GET /a?b=1 "


async def test_expect_continue_is_answered_before_the_body():
    async with served() as (talk, _, _):
        await talk.say(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await talk.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await talk.ask(b"abc"))[2] == b"POST /p abc"


@pytest.mark.parametrize("named", [b"close, Upgrade", b"Upgrade, close, HTTP2-Settings"])
def test_an_offer_to_upgrade_leaves_what_else_connection_says(named):
    more = b"X-Kept: y\r\nConnection: %b, X-Named\r\nX-Named: y\r\n%bContent-Length: 3\r\n\r\nabc" % (named, UPGRADE)
    (request,), transport = told([POST + more])
    assert request.body == b"abc" and b"connection: close" in transport.written and transport.closed
    passed_on = request.forwarded(b"", HOP_BY_HOP, 3)
    assert b"x-kept: y" in passed_on and b"x-named" not in passed_on and b"upgrade" not in passed_on


async def test_tiny_chunks_do_not_take_many_times_their_size():
    async with served() as (talk, _, server):
        await talk.say(CHUNKED)
        await talk.say(b"2\r\nab\r\n" * 100_000)
        (connection,) = server.connections
        await eventually(lambda: connection.body_bytes == 200_000)
        assert sum(map(sys.getsizeof, [connection.body, *connection.body])) < 500_000
        assert (await talk.ask(b"0\r\n\r\n"))[2] == b"POST /p " + b"ab" * 100_000


@given(st.lists(st.sampled_from((1, 2, 4095, 4096, 4097, 70_000)), min_size=1, max_size=8), st.integers(1000, 100_000))
def test_a_body_arrives_whole_however_it_is_cut(chunks, read):
    body = bytes(range(256)) * (sum(chunks) // 256 + 1)
    begins = [0, *itertools.accumulate(chunks)]
    framed = [b"%x\r\n%b\r\n" % (size, body[at : at + size]) for at, size in zip(begins, chunks, strict=False)]
    echo = Echo()
    client = Downstream(Server(echo).clients)
    for one in cut(CHUNKED.replace(b"/p", b"/slow") + b"".join(framed) + b"0\r\n\r\n", read):
        client.data_received(one)
    assert [request.body for request in echo.seen] == [body[: sum(chunks)]]


async def test_a_client_that_still_sends_can_read_its_refusal():
    """Closing at once would reset the answer away."""
    async with served(Limits(body_bytes=1000)) as (talk, echo, _):
        await talk.say(POST + b"Content-Length: 1000000\r\n\r\n")
        assert (await talk.ask(b"a" * 1_000_000))[0] == 413
        assert not echo.seen


async def test_a_request_of_http_1_0_is_answered_and_closed():
    async with served() as (talk, _, _):
        assert (await talk.ask(b"GET /old HTTP/1.0\r\n\r\n"))[1]["connection"] == "close"
        assert await asyncio.wait_for(talk.rest(), 5) == b""
