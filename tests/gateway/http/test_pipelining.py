"""Several requests on one connection: each is answered in its turn, and none is taken for another."""

import pytest

from gateway.http.downstream import Downstream, Refusal
from gateway.http.server import Server

from .serving import GET, Echo, Transport, served
from .talk import eventually

SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_requests_are_answered_in_order_pipelined_or_not():
    async with served() as (talk, echo, _):
        for _ in range(3):
            assert (await talk.ask(GET))[0::2] == (200, b"GET /a?b=1 ")
        await talk.say(SLOW + b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(50)))
        await eventually(lambda: echo.held)
        assert len(echo.seen) == 4
        echo.release()
        bodies = [(await talk.response())[2] for _ in range(51)]
        assert bodies == [b"slow"] + [b"GET /%d " % i for i in range(50)]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_malformed_request_behind_a_good_one_waits_its_turn(fails):
    """Where the good one meets a bug of ours, its answer is the last."""
    async with served() as (talk, echo, _):
        await talk.say(SLOW + b"NONSENSE\r\n\r\n")
        await eventually(lambda: echo.held and echo.held[0].refused)
        if fails:
            echo.held[0].failed(echo, ZeroDivisionError("a bug"))
        else:
            echo.release()
        statuses = [500] if fails else [200, 400]
        assert [(await talk.response())[0] for _ in statuses] == statuses
        assert await talk.rest() == b""


async def test_a_large_head_is_counted_once_and_without_the_body_before_it():
    head = b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40)) + b"\r\n"
    async with served() as (talk, _, _):
        body = b"z" * 100_000
        assert (
            await talk.ask(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + head[:-10])
        )[0] == 200
        assert (await talk.ask(head[-10:]))[0] == 200


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


def understood(*reads: bytes) -> list[str | int]:
    """Return what a connection finds in these reads: requests, by their methods, and the status of a refusal."""
    client = Downstream(Server(Echo()).clients)
    client.writing_paused = True
    client.connection_made(Transport())
    for read in reads:
        client.data_received(read)
    return [item.status if isinstance(item, Refusal) else item.method for item in client.waiting]


LINE = b"GET /x HTTP/1.1"
NEXT = LINE + b"\r\nHost: x\r\n\r\n"
FOREIGN = NEXT.replace(b"HTTP/1.1", b"RTSP/1.1")
UPLOAD = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
UPLOADS = {
    "chunk": UPLOAD + b"f\r\n" + LINE + b"\r\n0\r\n\r\n",
    "extension": UPLOAD + b'1;x="' + LINE + b'"\r\nx\r\nf\r\n' + LINE + b"\r\n0\r\n\r\n",
    "trailer": UPLOAD + b"1\r\nx\r\n0\r\nX: " + LINE + b"\r\nY: z\r\n\r\n",
    "last extension": UPLOAD + b'0;x="' + LINE + b'"\r\nX: ' + LINE + b"\r\n\r\n",
    "empty": UPLOAD + b"0\r\n\r\n",
    "length": b"POST /p HTTP/1.1\r\nHost: x\r\nX: " + LINE + b"\r\nContent-Length: 19\r\n\r\n" + LINE + b"\r\n\r\n",
}


@pytest.mark.parametrize("first", UPLOADS.values(), ids=UPLOADS)
@pytest.mark.parametrize(("behind", "found"), [(NEXT, "GET"), (FOREIGN, 400), (b"NONSENSE\r\n\r\n", 400)])
def test_a_request_line_is_what_follows_the_request_before_it_wherever_reads_end(first, behind, found):
    """Not what an upload that began in an earlier read has in its text."""
    said = first + behind
    for at in range(1, len(said)):
        assert understood(said[:at], said[at:]) == ["POST", found], at
        assert understood(said[: at - 1], said[at - 1 : at], said[at:]) == ["POST", found], at


def test_another_protocols_request_line_is_not_taken_for_the_one_before_it():
    for at in range(1, len(said := NEXT + FOREIGN)):
        assert understood(said[:at], said[at:]) == ["GET", 400], at


def test_words_of_other_protocols_in_a_request_are_words():
    head = b"POST /p HTTP/1.1\r\nHost: x\r\nX: POST /p RTSP/1.1\r\nContent-Length: 15\r\n\r\n"
    for at in range(1, len(said := head + b"GET /y RTSP/1.1" + NEXT)):
        assert understood(said[:at], said[at:]) == ["POST", "GET"], at
