"""ZMQ sockets as the event intake needs them: drained without awaiting each message.

A socket's file descriptor only says that something changed, so it is read until it has no
more; a future for each message, as zmq.asyncio makes them, costs more than decoding it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

# What a socket tells of its connection: it stands once both sides have shaken hands.
_LINK_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
REPLAY_SECONDS = 2.0  # without a word from the replay socket: nobody is there
WAKE_SECONDS = 1.0  # a wake-up that got lost costs at most this
# a turn's worth; then others get the loop. A block is 50 to 90 bytes and 1.5 us of work,
# so 128 KiB take about 3 ms; a batch alone 60 us
TURN_MESSAGES, TURN_BYTES = 64, 1 << 17
# Bytes of one frame, and of what lies in a socket. A prompt of a million tokens in blocks of 16 is told in 7.5 MB; who
# sends a larger frame is disconnected. A socket counts messages, so the largest that came says how many may wait.
MOST_FRAME, MOST_QUEUED, USUAL_FRAME, LEAST_MESSAGES = 1 << 23, 1 << 26, 1 << 12, 16
SNAPSHOT = b"snapshot"
SNAPSHOT_SECONDS = 10.0  # it is one message, of as many blocks as the engine holds, in frames of MOST_FRAME
END = b"\xff" * 8  # the sequence number that ends a replay


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """Where the sockets of all intakes live. ZMQ's default of 1,023 sockets is enough for 341 replicas, and the limit
    can only be set before the first socket is made: so this is not the context that others share."""

    _instance = None

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.set(zmq.MAX_SOCKETS, self.get(zmq.SOCKET_LIMIT))


class Inbox:
    """A connected socket and the event that says it may have messages. `linked`: somebody at its other end speaks ZMQ;
    `refused`: since then or ever it tries to connect again; `ended_at`: when its connection was seen to have ended, if
    it has not tried to connect since."""

    def __init__(self, kind: int, endpoint: str):
        self.linked = self.refused = False
        self.ended_at: float | None = None
        self._changed = asyncio.Event()
        # costs two further sockets: only for a connection that is to last
        self._monitor: zmq.Socket[bytes] | None = None
        self._largest = USUAL_FRAME
        self._kind, self._endpoint = kind, endpoint
        self._connect()

    def _connect(self) -> None:
        self._socket = _Context.instance().socket(self._kind)
        try:
            self._open(self._kind, self._endpoint)
        except BaseException:
            self.close()
            raise

    def connect_again(self) -> None:
        """Open a new connection: ZMQ makes none itself after a frame above MOST_FRAME or outside its protocol."""
        self.close()
        self._monitor, self._largest, self.ended_at = None, USUAL_FRAME, None
        self._connect()

    def _open(self, kind: int, endpoint: str) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)  # beside IPv4: an engine may have an address of either kind
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME)
        # the default of 1,000 drops half of a replay of 10,000 batches without a word
        self._socket.setsockopt(zmq.RCVHWM, MOST_QUEUED // USUAL_FRAME)
        if kind == zmq.SUB:
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._monitor = self._socket.get_monitor_socket(_LINK_EVENTS)
        self._socket.connect(endpoint)
        for socket in self._sockets():
            asyncio.get_running_loop().add_reader(socket.FD, self._changed.set)

    def _sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket] if self._monitor is None else [self._socket, self._monitor]

    def close(self) -> None:
        for socket in self._sockets():
            asyncio.get_running_loop().remove_reader(socket.FD)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()

    def look(self) -> None:
        """Bring `linked`, `refused` and `ended_at` up to date. Only of a subscription."""
        assert self._monitor is not None
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self.linked = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = event == zmq.EVENT_CONNECT_RETRIED or (self.refused and not self.linked)
            self.ended_at = asyncio.get_running_loop().time() if event == zmq.EVENT_DISCONNECTED else None

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def take(self) -> list[list[bytes]]:
        """The messages that are there, up to a turn's worth, each a list of frames."""
        messages: list[list[bytes]] = []
        size = 0
        try:
            while len(messages) < TURN_MESSAGES and size < TURN_BYTES:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
                size += (latest := sum(map(len, messages[-1])))
                if latest > self._largest:
                    self._largest = latest
                    self._socket.setsockopt(zmq.RCVHWM, max(LEAST_MESSAGES, MOST_QUEUED // latest))
        except zmq.Again:
            pass
        return messages

    async def changed(self, seconds: float) -> None:
        """Return when messages may have come or `wake` was called, at the latest in time."""
        # not wait_for: in Python 3.11 it can swallow a cancellation
        alarm = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()
        self._changed.clear()

    def wake(self) -> None:
        self._changed.set()


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[Inbox]:
    inbox = Inbox(kind, endpoint)
    try:
        yield inbox
    finally:
        inbox.close()


async def replay(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """What the engine still has of its batches from number `start` on, a turn's worth at a
    time, each as [..., sequence, payload]. Raises TimeoutError if it stops answering.

    vLLM's socket drops without a word what is more than 1,000 messages ahead of the network, the end as well (its
    high-water mark is ZMQ's default). So where numbers do not follow on, or the end does not come, it is asked for the
    rest."""
    wanted = None
    while True:
        heard = False
        try:
            async with aclosing(_answer(endpoint, start if wanted is None else wanted)) as answer:
                async for batches in answer:
                    follow = _following_on(batches, wanted)
                    if follow:
                        heard, wanted = True, _number(follow[-1]) + 1
                        yield follow
                    if len(follow) < len(batches):
                        break
                else:
                    return
        except TimeoutError:
            if not heard:
                raise
        if not heard:
            raise TimeoutError(f"{endpoint} no longer has batch {wanted}")


def _following_on(batches: list[list[bytes]], number: int | None) -> list[list[bytes]]:
    """Those before the first hole. The first of them has this number, or None: any."""
    for at, frames in enumerate(batches):
        if number is not None and _number(frames) != number:
            return batches[:at]
        number = _number(frames) + 1
    return batches


def _number(frames: list[bytes]) -> int:
    return int.from_bytes(frames[-2][:8], "big")


def publisher_of(frames: list[bytes]) -> bytes:
    """The id of the process that sent a batch, behind its sequence number; b"" of engines that do not tell it."""
    return frames[-2][8:] if len(frames) > 1 else b""


class Snapshot(NamedTuple):
    """All that an engine holds, as batches of events that end with number `sequence` of this publisher."""

    sequence: int
    publisher: bytes
    payloads: list[bytes]


async def snapshot(endpoint: str) -> Snapshot | None:
    """Ask for all that the engine holds; None if it has no answer to that now. Raises TimeoutError.

    As vLLM's proposal has it: one frame `snapshot`, answered by one message of the number (signed, negative where there
    is none), the publisher's id and the batches."""
    loop = asyncio.get_running_loop()
    with connected(zmq.DEALER, endpoint) as inbox:
        inbox.send([SNAPSHOT])
        until = loop.time() + SNAPSHOT_SECONDS
        while loop.time() < until:
            for message in inbox.take():
                frames = message[1:] if message[:1] == [b""] else message
                if len(frames) < 2:  # nothing that the proposal knows
                    continue
                sequence, publisher, *payloads = frames
                number = int.from_bytes(sequence, "big", signed=True)
                return Snapshot(number, publisher, payloads) if number >= 0 else None
            await inbox.changed(min(WAKE_SECONDS, max(0.0, until - loop.time())))
    raise TimeoutError(f"no snapshot from {endpoint}")


async def _answer(endpoint: str, start: int) -> AsyncGenerator[list[list[bytes]], None]:
    """One answer to a request for a replay."""
    loop = asyncio.get_running_loop()
    with connected(zmq.DEALER, endpoint) as inbox:
        inbox.send([b"", start.to_bytes(8, "big")])
        until = loop.time() + REPLAY_SECONDS
        while True:
            messages = [frames for frames in inbox.take() if len(frames) > 1]  # one frame is no batch, and no end
            if messages:
                until = loop.time() + REPLAY_SECONDS
                batches = [frames for frames in messages if frames[-2][:8] != END]
                if batches:
                    yield batches
                if len(batches) < len(messages):
                    return
                await asyncio.sleep(0)
            elif loop.time() >= until:
                raise TimeoutError(f"no answer from {endpoint}")
            else:
                await inbox.changed(min(WAKE_SECONDS, until - loop.time()))
