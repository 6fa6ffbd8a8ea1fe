"""Inboxes: as many as there are replicas, and none of them left over."""

import asyncio
import gc
import resource
import weakref
from contextlib import ExitStack, asynccontextmanager

import pytest
import uvloop
import zmq

from cachemap.events import sockets
from cachemap.events.zmtp import Inbox, connected

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")


@pytest.fixture
def many_files():
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 8192:
        pytest.skip(f"only {most} files may be open at once here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as the gateway does
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


async def test_more_than_a_thousand_replicas_can_be_followed_at_once(many_files, unused_tcp_port):
    # others of this process use ZMQ as well, and did so before
    with zmq.Context.instance().socket(zmq.PUB), ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(connected("SUB", f"tcp://127.0.0.1:{unused_tcp_port}"))
        stack.enter_context(connected("DEALER", f"tcp://127.0.0.1:{unused_tcp_port}"))


@pytest.mark.parametrize("endpoint", ["tcp://no port", "tcp://:1", "tcp://a:65536", "inproc://a", "ipc://", ""])
async def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(ValueError, match="no address of a ZMQ socket"), connected("SUB", endpoint):
        pass


@asynccontextmanager
async def peer(socket_type: bytes, then: bytes = b""):
    """What shakes hands as such a socket and says more -> its port, and the connections that the other side has
    ended."""
    ended = asyncio.Semaphore(0)

    async def shake_hands(reader, writer):
        ready = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
        writer.write(GREETING + bytes((4, len(ready))) + ready + then)
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        writer.close()
        ended.release()

    server = await asyncio.start_server(shake_hands, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], ended


async def is_linked(inbox: Inbox) -> None:
    while not inbox.linked:
        await inbox.changed(1)


@pytest.mark.parametrize(("ours", "theirs"), [("SUB", b"ROUTER"), ("SUB", b"SUB"), ("DEALER", b"PUB")])
async def test_a_socket_of_another_kind_is_never_linked_so_that_swapped_ports_show(ours, theirs):
    async with peer(theirs) as (port, ended):
        with connected(ours, f"tcp://127.0.0.1:{port}") as inbox:
            was_linked = asyncio.ensure_future(is_linked(inbox))
            for _ in range(2):
                await ended.acquire()
            assert not was_linked.done()
            was_linked.cancel()


@pytest.mark.parametrize("command", [b"\x04PING\0\1", b"\x05READY", b"\x03ABC"])
async def test_a_peer_that_sends_commands_without_end_is_left_and_counted(command):
    async with peer(b"PUB", (bytes((4, len(command))) + command) * 1000) as (port, ended):
        with connected("SUB", f"tcp://127.0.0.1:{port}") as inbox:
            for _ in range(2):
                await ended.acquire()
            assert inbox.faults >= 2


@pytest.mark.parametrize(
    ("theirs", "then", "wanted"),
    [
        (b"ROUTER", b"", [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        (b"PUB", (bytes((4, 3)) + b"\x03AB") * 1000, [0.1] * 6),
    ],
    ids=["of another kind", "linked for a moment"],
)
async def test_the_pause_before_a_connection_grows_until_one_is_linked(monkeypatch, theirs, then, wanted):
    pauses, sleep = [], asyncio.sleep

    def record(seconds):
        pauses.append(seconds)
        return sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    async with peer(theirs, then) as (port, ended):
        with connected("SUB", f"tcp://127.0.0.1:{port}"):
            for _ in range(7):
                await ended.acquire()
    assert pauses[:6] == wanted


async def test_a_closed_inbox_is_not_kept():
    async with peer(b"PUB") as (port, ended):
        with connected("SUB", f"tcp://127.0.0.1:{port}") as inbox:
            await is_linked(inbox)
        await ended.acquire()
        kept = weakref.ref(inbox)
        del inbox
        await asyncio.sleep(0)
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_publisher_on_this_machine_is_followed_by_its_path(run, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"

    async def linked():
        with connected("SUB", endpoint) as inbox:
            await is_linked(inbox)

    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind(endpoint)
        run(linked())


async def test_who_leaves_a_hole_in_each_answer_is_not_asked_for_ever(monkeypatch):
    asked = []

    async def answer(endpoint, start):
        asked.append(start)
        assert len(asked) <= 1000
        yield [[number.to_bytes(8, "big"), b""] for number in (start, start + 2)]

    monkeypatch.setattr(sockets, "_answer", answer)
    with pytest.raises(TimeoutError, match="that lack batches"):
        async for _ in sockets.replay("tcp://127.0.0.1:1", 0):
            pass
    assert asked == list(range(len(asked)))
