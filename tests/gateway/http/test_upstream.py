"""What a replica may send, seen from a client: nothing of it passes as something else, and nothing of it is without a
limit."""

import asyncio
import socket
import struct

import pytest
import uvloop

from gateway.http import upstream
from gateway.http.messages import end_to_end
from gateway.http.upstream import Pool, Upstream

from ..proxy.replies import ANSWER, EVENT, SSE_HEAD, answers, chunk, post, reply, says
from ..proxy.stack import stack
from .talk import eventually, read_request

CHUNKED = b"Transfer-Encoding: chunked\r\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\n"
EVIL = b"Content-Length: 4\r\n\r\nevil"


def as_stream(framing: bytes) -> bytes:
    return SSE_HEAD.replace(CHUNKED, framing) + chunk(EVENT) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (SWITCH + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n", b"101"),
        (SWITCH + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n\0\0\0\4", b"101"),
        (SWITCH + b"\r\n", b"101"),
        (SWITCH + b"\r\nHTTP/1.1 200 OK\r\n" + EVIL, b"101"),
        *((b"%b 200 OK\r\n%b" % (one, EVIL), b"HTTP/1.1") for one in (b"HTTP/2.0", b"RTSP/1.0", b"HTTP/0.9")),
        *((b"HTTP/1.1 %b X\r\n%b" % (one, EVIL), b"status is " + one) for one in (b"000", b"099", b"600", b"999")),
        # codings for which nobody asks, so that no client could read them
        (as_stream(b"Transfer-Encoding: gzip, chunked\r\n"), b""),
        (as_stream(CHUNKED + b"Transfer-Encoding: gzip, chunked\r\n"), b""),
        (as_stream(b"Transfer-Encoding: gzip\r\n" + CHUNKED), b""),
        (as_stream(b"Transfer-Encoding: xchunked\r\n"), b""),
        (as_stream(b"Transfer-Encoding: chunked,\r\n"), b""),
        (as_stream(b"Transfer-Encoding: identity\r\n"), b""),
        (as_stream(b"Content-Length: 20\r\n" + CHUNKED), b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, b""),
    ],
)
async def test_what_is_no_answer_of_http_1_is_a_502_at_once(said, why, caplog):
    async with stack(says(said), request_timeout=60, retries=0) as s:
        status, _, body = await s.ask(post())
        assert status == 502 and why in body and b"evil" not in body and b"data:" not in body
        assert s.faults == ["protocol"] and "exception" not in caplog.text.lower()


@pytest.mark.parametrize(
    "said",
    [
        CHUNKED + CHUNKED.lower(),
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: Chunked ,chunked\r\n" + CHUNKED,
    ],
    ids=["two lines", "one line", "both"],
)
async def test_a_coding_that_is_said_twice_is_passed_on_once(said):
    """Engines behind servers that copy another's headers say it; h11 refuses it, and so OpenAI's client would."""
    head = SSE_HEAD.replace(CHUNKED, said).replace(b"\r\n\r\n", b"\r\nX-Own: y\r\n\r\n")
    assert said in head

    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(head + chunk(EVENT) + b"0\r\n\r\n")

    async with stack(script) as s:
        talk = await s.say(post())
        got = (await talk.until(b"\r\n\r\n")).lower()
        assert got.count(b"chunked") == 1 and b"\r\ntransfer-encoding: chunked\r\n" in got
        assert b"\r\nx-own: y\r\n" in got
        assert await talk.until(b"0\r\n\r\n") == chunk(EVENT) + b"0\r\n\r\n"
        await talk.say(post())  # the connection is kept
        assert (await talk.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("between", [b"", b"\r\n"])
async def test_interim_answers_stay_between_the_replica_and_the_gateway(between):
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + between
    async with stack(says(interim * 3 + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as s:
        status, headers, body = await s.ask(post())
        assert (status, body) == (200, b"ok") and "link" not in headers


@pytest.mark.parametrize("begin", [b"0\r\nX: ", b"0\r\n", b"5;x="], ids=["trailer", "trailer name", "extension"])
async def test_a_line_behind_the_head_that_never_ends_breaks_the_answer(begin, monkeypatch):
    monkeypatch.setattr(upstream, "SEARCH_BYTES", 100_000)
    monkeypatch.setattr(upstream, "LINE_BYTES", 1_000_000)
    left = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(b"data: {}\n\n") * 50_000 + begin)  # a long answer before it is none of its bytes
        try:
            for _ in range(600):
                writer.write(b"y" * 50_000)
                await writer.drain()
        except ConnectionError:
            left.set()

    async with stack(script) as s:
        talk = await s.say(post())
        assert len(await talk.rest(10)) < 4_500_000
        await asyncio.wait_for(left.wait(), 5)
        assert s.faults == ["protocol"]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3000000\r\n\r\n", b"Connection: close\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
async def test_long_answers_without_lines_go_through(framing, monkeypatch):
    monkeypatch.setattr(upstream, "SEARCH_BYTES", 100_000)
    monkeypatch.setattr(upstream, "LINE_BYTES", 1_000_000)
    pieces = [b"y" * 500_000] * 6
    if framing.startswith(b"Transfer"):
        pieces = [chunk(piece) for piece in pieces] + [b"0\r\n\r\n"]

    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    async with stack(script) as s:
        talk = await s.say(post())
        await talk.until(b"\r\n\r\n")
        whole = b"".join(pieces)
        assert await asyncio.wait_for(talk.reader.readexactly(len(whole)), 10) == whole
        assert "protocol" not in s.faults


async def test_a_body_behind_an_answer_to_head_is_no_answer_to_the_next():
    """HEAD must not have one: where it comes with the head, that connection is not used again."""

    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    async with stack(script) as s:
        talk = await s.say(b"HEAD /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await talk.until(b"\r\n\r\n")
        await eventually(s.idle)
        assert not any(backend.pool.idle for backend in s.proxy.backends.values())


async def test_bytes_that_come_later_end_a_kept_connection():
    say = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await say.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    async with stack(script) as s:
        talk = await s.talk()
        (backend,) = s.proxy.backends.values()
        assert (await talk.ask(post()))[2] == b"ok"
        await eventually(lambda: backend.pool.idle)
        say.set()
        await eventually(lambda: not backend.pool.idle)


def test_a_response_keeps_its_framing_whatever_connection_names():
    headers = [(b"connection", b"close, content-length, x"), (b"content-length", b"2"), (b"x", b"y"), (b"z", b"y")]
    assert end_to_end(headers) == b"content-length: 2\r\nz: y\r\n"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])  # uvloop no longer names the socket then
@pytest.mark.parametrize("reset", [True, False])
def test_a_new_connection_that_is_closed_before_the_request_is_sent_is_a_refused_one(reset, run, monkeypatch, caplog):
    async def script(reader, writer):
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def late(seconds, work):
        transport, made = await work
        if made.pool.port == closing:
            await eventually(lambda: made.closed)
        return transport, made

    monkeypatch.setattr(upstream, "within", late)

    async def scenario():
        nonlocal closing
        async with stack(script, answers(), request_timeout=60) as s:
            closing = next(iter(s.proxy.backends.values())).pool.port
            talk = await s.talk()
            for _ in range(2):
                assert (await talk.ask(post()))[0::2] == (200, ANSWER)
            assert s.faults and set(s.faults) == {"connect"}

    closing = 0
    run(scenario())
    assert "opening a connection" not in caplog.text


async def test_a_bug_that_shows_when_the_connection_is_there_ends_the_request_with_an_answer(monkeypatch, caplog):
    def broken(*_):
        raise LookupError("a bug")

    monkeypatch.setattr(upstream.Upstream, "send", broken)
    async with stack(answers(), request_timeout=60) as s:
        assert (await s.ask(post()))[0] == 500 and "a bug" in caplog.text


class Told:
    """A connection to a replica whose reads the test chooses, and what was told of the answer."""

    def __init__(self):
        self.length, self.ended, self.error = 0, False, None
        self.upstream = Upstream(self)
        self.upstream.connection_made(self)
        self.upstream.send(self, b"GET / HTTP/1.1\r\n\r\n", b"", False)

    def head(self, status, head, body):
        self.length += len(body)

    def data(self, data):
        self.length += len(data)

    def end(self):
        self.ended = True

    def lost(self, error):
        self.error = error

    def write(self, data): ...

    def abort(self): ...

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0

    def release(self, upstream): ...


def test_an_answer_whose_lines_end_in_reads_of_their_own_goes_through_however_long(monkeypatch):
    """No read that is looked into has the end of a line in it; each line is short all the same."""
    monkeypatch.setattr(upstream, "SEARCH_BYTES", 100_000)
    monkeypatch.setattr(upstream, "LINE_BYTES", 1_000_000)
    told = Told()
    told.upstream.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(60):
        for read in (b"10000\r\n", b"x" * 65536, b"\r\n"):
            told.upstream.data_received(read)
    told.upstream.data_received(b"0\r\n\r\n")
    assert told.ended and told.error is None and told.length > 60 * 65536


def test_a_head_that_is_too_large_is_refused_also_when_one_read_has_all_of_it():
    told = Told()
    told.upstream.data_received(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\nContent-Length: 2\r\n\r\nok")
    assert not told.ended and "head larger than 65536 bytes" in str(told.error)


class Opening:
    """Who waits for a connection, and what each call told."""

    def __init__(self):
        self.told = []

    def connected(self, upstream):
        self.told.append(upstream)

    def lost(self, error):
        self.told.append(error.kind)


@pytest.mark.parametrize("iterations", range(12))
async def test_whenever_a_replica_is_removed_who_waits_for_a_connection_is_told_and_none_stays_open(iterations):
    """From before the task begins that opens it, to after it has ended."""
    accepted, left = 0, []

    async def serve(reader, writer):
        nonlocal accepted
        accepted += 1
        left.append(await reader.read())
        writer.close()

    async def check():
        return None

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool, opening = Pool("127.0.0.1", server.sockets[0].getsockname()[1], None, ""), Opening()
        pool.connect(opening, check)
        for _ in range(iterations):
            await asyncio.sleep(0)
        pool.close()
        await eventually(lambda: opening.told)
        for one in opening.told:
            if one != "removed":
                one.drop()
        await eventually(lambda: len(left) == accepted)
        assert len(opening.told) == 1 and not pool._connecting


KEEPALIVE = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT


async def test_the_kernel_asks_whether_a_silent_replicas_machine_is_there():
    """One that vanishes closes nothing, and an engine that ends may be silent for long."""
    wait = asyncio.Event()

    async def slow(reader, writer):
        await read_request(reader)
        await wait.wait()
        writer.write(reply())

    async with stack(slow) as s:
        talk = await s.say(post())
        await eventually(lambda: any(one.attempt is not None and one.attempt.upstream for one in s.proxy.exchanges))
        (exchange,) = s.proxy.exchanges
        connection = exchange.attempt.upstream.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        asked = [connection.getsockopt(socket.IPPROTO_TCP, one) for one in KEEPALIVE]
        assert asked[0] + asked[1] * asked[2] == 25
        wait.set()
        assert (await talk.response())[0] == 200
