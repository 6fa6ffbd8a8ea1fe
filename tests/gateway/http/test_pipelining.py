"""Several requests on one connection: each is answered in its turn, and none is taken for another."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.downstream import Downstream, Refusal
from gateway.http.server import Server

from .serving import GET, Echo, served
from .talk import eventually


async def test_keep_alive_serves_one_request_after_another():
    async with served() as (talk, _, _):
        for _ in range(3):
            await talk.say(GET)
            assert (await talk.response())[0::2] == (200, b"GET /a?b=1 ")


async def test_pipelined_requests_are_answered_in_order():
    async with served() as (talk, echo, _):
        await talk.say(
            b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
            + b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(50))
        )
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
        await talk.say(
            b"POST /p HTTP/1.1\r\nHost: x\r\nX: a RTSP/1.1 b\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) + GET
        )
        assert [(await talk.response())[0] for _ in range(2)] == [200, 200]


async def test_a_smuggled_second_request_is_not_run():
    async with served() as (talk, echo, _):
        await talk.say(
            b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        assert (await talk.response())[0] == 400
        assert await talk.rest() == b""
        assert not echo.seen


async def test_a_large_head_is_counted_once_and_without_the_body_before_it():
    head = b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40)) + b"\r\n"
    async with served() as (talk, _, _):
        body = b"z" * 100_000
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + head[:-10])
        assert (await talk.response())[0] == 200
        await talk.say(head[-10:])
        assert (await talk.response())[0] == 200


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
    async with served() as (talk, echo, server):
        body = b"z" * 100_000
        request = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for _ in range(200):
            talk.writer.write(request)
        (connection,) = server.connections
        await eventually(lambda: connection.writing_paused and connection.reading_paused)  # until the client reads
        assert len(echo.seen) < 150
        for _ in range(200):
            assert (await talk.response())[0] == 200


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
        await talk.say(
            first + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" + first + b"GET /version RTSP/1.1\r\nHost: x\r\n\r\n"
        )
        assert [(await talk.response())[0] for _ in range(4)] == [200, 200, 200, 400]


def fed(*reads: bytes) -> Downstream:
    """A connection on which these reads came, and nothing is answered yet."""
    client = Downstream(Server(Echo()).clients)
    client.writing_paused = True
    client.connection_made(type("Transport", (), {"pause_reading": lambda self: None})())
    for read in reads:
        client.data_received(read)
    return client


def understood(client: Downstream) -> list[str | int]:
    """The requests it found, by their methods, and the status of a refusal."""
    return [item.status if isinstance(item, Refusal) else item.method for item in client.waiting]


LINE = b"GET /x HTTP/1.1"
NEXT = LINE + b"\r\nHost: x\r\n\r\n"
FOREIGN = NEXT.replace(b"HTTP/1.1", b"RTSP/1.1")
UPLOAD = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
UPLOADS = (
    UPLOAD + b"f\r\n" + LINE + b"\r\n0\r\n\r\n",
    UPLOAD + b"1;x=\"" + LINE + b"\"\r\nx\r\nf\r\n" + LINE + b"\r\n0\r\n\r\n",
    UPLOAD + b"1\r\nx\r\n0\r\nX: " + LINE + b"\r\nY: z\r\n\r\n",
    UPLOAD + b"0;x=\"" + LINE + b"\"\r\nX: " + LINE + b"\r\n\r\n",
    UPLOAD + b"0\r\n\r\n",
    b"POST /p HTTP/1.1\r\nHost: x\r\nX: " + LINE + b"\r\nContent-Length: 19\r\n\r\n" + LINE + b"\r\n\r\n",
)  # fmt: skip


@pytest.mark.parametrize("first", UPLOADS, ids=["chunk", "extension", "trailer", "last extension", "empty", "length"])
@pytest.mark.parametrize(("behind", "found"), [(NEXT, ["POST", "GET"]), (FOREIGN, ["POST", 400])], ids=["http", "rtsp"])
def test_a_request_line_is_what_follows_the_request_before_it_wherever_reads_end(first, behind, found):
    """Not what an upload that began in an earlier read has in its text."""
    said = first + behind
    for cut in range(1, len(said)):
        assert understood(fed(said[:cut], said[cut:])) == found, cut
        assert understood(fed(said[: cut - 1], said[cut - 1 : cut], said[cut:])) == found, cut


@given(
    st.lists(st.sampled_from((*UPLOADS, NEXT)), min_size=1, max_size=1),
    st.lists(st.sampled_from((*UPLOADS, b"\r\n" + NEXT)), max_size=1),
    st.sets(st.integers(1, 500)),
)
def test_another_protocols_request_line_is_found_behind_any_requests(first, second, cuts):
    said = b"".join((*first, *second, FOREIGN))
    ends = [0, *sorted(cut for cut in cuts if cut < len(said)), len(said)]
    client = fed(*(said[begin:end] for begin, end in itertools.pairwise(ends)))
    assert understood(client)[-1] == 400 and len(client.waiting) == len(first) + len(second) + 1
