"""A new connection that is closed before the replica can have read the request: asked once more where nobody else is
left, and not where it may have read all of it."""

import asyncio
import socket
import ssl
import struct
import threading
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from gateway.http import upstream
from gateway.http.upstream import Pool, Upstream
from gateway.tls import Certificate
from tests.replicas.certificates import authority, issue

from ..http.talk import eventually, read_request, scripted
from .replies import answers, post, reply
from .resume.test_resumer import BODY as GREEDY_BODY
from .resume.test_resumer import continued, engine, told
from .stack import stack
from .test_replaced import Broken


def listening(port: int = 0) -> socket.socket:
    one = socket.create_server(("127.0.0.1", port), backlog=8)
    one.setblocking(False)
    return one


async def test_a_process_that_ends_before_it_takes_the_connection_has_not_had_the_request():
    """Its kernel resets what waits to be accepted; another process listens at the address."""
    seen, ends = [], listening()
    port = ends.getsockname()[1]
    async with stack(ports=[port]) as s:
        talk = await s.say(post())
        await s.exchange()
        ends.close()

        async with scripted(answers(seen=seen), listening(port)):
            assert (await talk.response())[0] == 200
        assert len(seen) == 1 and not s.faults and s.metrics.retries.values == {("reconnect",): 1}


def closes(accepted: list, *, first: int = 99, then=answers()):
    """Takes connections and closes the `first` of them without a look."""

    async def script(reader, writer):
        accepted.append(reader)
        if len(accepted) > first:
            await then(reader, writer)

    return script


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "another replica is asked first"])
async def test_what_closes_the_first_connection_at_once_is_asked_once_more_where_nobody_else_is_left(others):
    accepted = []
    async with stack(closes(accepted, first=1), *[answers()] * others) as s:
        assert (await s.ask(post()))[0] == 200
        assert len(accepted) == 2 - others and len(s.faults) == others


@pytest.mark.parametrize(("retries", "asked"), [(2, 2), (1, 2), (0, 1)])
async def test_what_closes_every_connection_is_asked_twice_within_the_retries(retries, asked):
    accepted = []
    async with stack(closes(accepted), retries=retries) as s:
        assert (await s.ask(post()))[0] == 503
        assert len(accepted) == asked and len(s.faults) == 1


def reads(size: int, asked: list, says: bytes = b""):
    """Reads a part of the request, says something, and resets the connection with the rest unread."""

    async def script(reader, writer):
        asked.append(await reader.readexactly(size))
        writer.write(says)
        await writer.drain()
        writer.transport.abort()

    return script


async def test_replicas_that_read_a_part_of_it_are_not_said_to_go_down_with_it():
    """Its client may ask again, and is told so. Who has begun to answer is not asked again."""
    asked, large = [], post(b"x" * 1_000_000, path=b"/v1/audio/transcriptions")
    async with stack(*[reads(100, asked)] * 2) as s:
        status, headers, body = await s.ask(large, 20)
        assert status == 503 and b"replicas_lost" not in body and b"no replica answered" in body
        assert "x-should-retry" not in headers and len(asked) == 3
    async with stack(reads(10, asked, b"HTTP/1.1 200")) as s:
        assert (await s.ask(large))[0] == 502 and len(asked) == 4


async def test_a_connection_that_is_closed_before_the_request_is_sent_is_opened_once_more(monkeypatch):
    accepted, opened = [], []

    def made(pool):
        opened.append(Upstream(pool))
        return opened[-1]

    async def prove(replica: str) -> bool:
        if len(opened) == 1:
            await eventually(lambda: opened[0].closed)
        return True

    monkeypatch.setattr(upstream, "Upstream", made)
    async with stack(closes(accepted, first=1)) as s:
        (backend,) = s.proxy.backends.values()
        backend.prove, backend.replica.proof = prove, Broken()
        assert (await s.ask(post()))[0] == 200
        assert len(opened) == 2 and not s.faults and s.metrics.retries.values == {("reconnect",): 1}


async def test_the_only_replica_that_can_go_on_with_a_stream_is_asked_once_more_too():
    accepted = []
    async with continued(engine("1", b"", 2), closes(accepted, first=1, then=engine("2"))) as s:
        assert told((await s.ask(post(GREEDY_BODY)))[2]) == ("abcdef", {"1"})
        assert len(accepted) == 2 and s.faults == ["closed"], "the first one's"


LARGE = post(b"x" * 30_000_000, path=b"/v1/audio/transcriptions")


async def resets(writer) -> None:
    """Closes as a load balancer does whose time is over: with a reset, whatever was read."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("later", [False, True], ids=["closes", "resets when it has computed for long"])
async def test_who_has_read_all_of_it_may_have_begun(later):
    asked = []

    async def script(reader, writer):
        asked.append(await read_request(reader))
        if later:
            await asyncio.sleep(0.5)
            await resets(writer)

    async with stack(script) as s:
        assert (await s.ask(post()))[0] == 502
        assert len(asked) == 1 and s.faults == ["closed"] and not s.metrics.retries.total(reason="reconnect")


async def answered_by_the_second(first) -> None:
    """A large request is asked of an engine that does `first` with its first connection, once the head is there, and
    reads and answers what comes on its second."""
    asked = []

    async def script(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if len(asked) == 1:
            return await first(writer)
        await reader.readexactly(30_000_000)
        writer.write(reply(b"{}"))
        await reader.read()

    async with stack(script, request_timeout=60.0) as s:
        assert (await s.ask(LARGE, 20))[0] == 200
        assert len(asked) == 2 and not s.faults


async def test_a_reset_while_a_part_of_the_request_is_under_way_does_however_late(monkeypatch):
    monkeypatch.setattr(upstream, "UNREAD_SECONDS", 0.0, raising=False)

    await answered_by_the_second(resets)


async def test_who_closes_its_side_in_the_middle_of_a_large_request_is_not_waited_for():
    async def closes_its_side(writer):
        writer.transport.pause_reading()
        writer.write_eof()
        await asyncio.sleep(30)

    await answered_by_the_second(closes_its_side)


@pytest.mark.parametrize(
    ("framing", "status", "whole"),
    [(b"Content-Length: 100", 413, False), (b"Transfer-Encoding: chunked", 200, False), (b"X: y", 200, True)],
    ids=["length", "chunked", "until it closes"],
)
async def test_who_closes_its_side_within_the_answer_to_a_large_request_is_not_waited_for(framing, status, whole):
    held = asyncio.Event()

    async def script(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()
        body = b"5\r\nbegun\r\n" if framing.startswith(b"Transfer") else b"begun"
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: text/plain\r\n%b\r\n\r\n%b" % (status, framing, body))
        writer.write_eof()
        await held.wait()

    async with stack(script, request_timeout=60.0, idle_timeout=60.0) as s:
        talk = await s.say(LARGE)
        head = await talk.until(b"\r\n\r\n", 20)
        assert head.startswith(b"HTTP/1.1 %d" % status) and b"begun" in await talk.rest()
        assert s.faults == ([] if whole else ["closed"])
        await eventually(s.idle)
        held.set()


@asynccontextmanager
async def closing_over_tls(folder):
    """An engine that says over TLS, in the middle of a request, that it closes, and neither reads on nor closes.
    Yields its port and the certificate's authority."""
    authority(folder)
    issue(folder, "server", "IP:127.0.0.1")
    context, left = Certificate(folder / "server.pem", folder / "server.key").context, threading.Event()

    def serve(one: socket.socket) -> None:
        try:
            connection, _ = one.accept()
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.settimeout(30)
                secure.recv(1000)
                with suppress(OSError):  # the request goes on
                    secure.unwrap()
                left.wait(30)
        except OSError:  # nobody came
            pass

    with socket.create_server(("127.0.0.1", 0)) as one:
        one.settimeout(30)
        thread = threading.Thread(target=serve, args=(one,))
        thread.start()
        try:
            yield one.getsockname()[1], ssl.create_default_context(cafile=folder / "ca.pem")
        finally:
            left.set()
            await asyncio.to_thread(thread.join)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_who_ends_tls_in_the_middle_of_a_large_request_is_not_waited_for(run, tmp_path):
    async def test():
        async with closing_over_tls(tmp_path) as (port, believes), stack(ports=[port], retries=0) as s:
            (backend,) = s.proxy.backends.values()
            backend.pool = Pool("127.0.0.1", port, believes, "127.0.0.1")
            lost = []

            class Idle(dict):
                def pop(self, one, *default):
                    lost.append(one.unread)
                    return super().pop(one, *default)

            backend.pool.idle = Idle()
            assert (await s.ask(LARGE, 4))[0] == 503
            assert lost == [True] and s.faults == ["closed"]

    run(test())
