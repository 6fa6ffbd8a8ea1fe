"""ZMTP 3.0, the protocol of ZMQ sockets (rfc.zeromq.org/spec/23), on asyncio, for sockets of type SUB and DEALER.

libzmq limits the bytes of a frame and the number of messages, but not the frames of an unfinished message: a publisher
could make this process keep any amount of data. Here all data that waits to be read has a limit in bytes.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as _now
from typing import cast

WAKE_SECONDS = 1.0  # the longest wait for a change: a lost wake-up delays events by at most this time
# The most messages, bytes and frames that are taken in one event-loop iteration. The event of a block is 50 to 90 bytes
# and takes 1.5 us of work, so 128 KiB take about 3 ms; a batch alone takes 60 us.
TURN_MESSAGES, TURN_BYTES, TURN_FRAMES = 64, 1 << 17, 1024
# The most bytes of one frame (MOST_FRAME), and of all frames that wait to be read or for the end of their message
# (MOST_QUEUED), where a frame counts as at least LEAST_FRAME bytes. The events of a prompt of a million tokens in
# blocks of 16 take 7.5 MB.
MOST_FRAME, MOST_QUEUED, LEAST_FRAME = 1 << 23, 1 << 26, 1 << 10
# The most bytes of a ZMTP command, and the most commands within a second. A peer sends one on connecting and one for
# each heartbeat.
MOST_COMMAND, MOST_COMMANDS = 1 << 12, 64
# The first and the longest pause before a connection is made again; it doubles until a connection has been linked.
RECONNECT_SECONDS = (0.1, 1.0)
HANDSHAKE_SECONDS = 30.0  # the longest time that ZMTP's handshake may take

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_GREETING_BYTES = 64
_NULL = b"NULL".ljust(20, b"\0")  # the only security mechanism supported: neither keys nor passwords
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)
_READY, _PING, _PONG, _ERROR = b"\x05READY", b"\x04PING", b"\x04PONG", b"\x05ERROR"
_SUBSCRIBE_ALL = b"\x01"
# The types of sockets that may answer each type of ours. A publisher's endpoint and its replay endpoint are easily
# swapped, and libzmq too closes such a connection after each handshake.
_PEERS = {"SUB": (b"PUB", b"XPUB"), "DEALER": (b"ROUTER", b"DEALER", b"REP")}


class Inbox(asyncio.Protocol):
    """A ZMTP connection to one endpoint, made again whenever it breaks, and the messages that came over it.

    `kind`: the type of our socket, "SUB" or "DEALER". `endpoint`: tcp://HOST:PORT or ipc://PATH.
    `linked`: there is a connection and its handshake is done.
    `refused`: the last attempt to connect failed.
    `faults`: how many linked connections were closed here because the peer broke the protocol or a limit.
    Raises ValueError for a malformed endpoint.
    """

    def __init__(self, kind: str, endpoint: str):
        self.linked = self.refused = False
        self.faults = 0
        self._kind = kind
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # messages to send once the connection is linked
        self._messages: deque[tuple[int, list[bytes]]] = deque()  # received messages, each with its size
        self._queued = 0  # bytes of `_messages`, where a frame counts as at least LEAST_FRAME bytes
        self._pause = RECONNECT_SECONDS[0]  # before the connection is made again
        self._begin()
        self._connecting = asyncio.ensure_future(self._connect(*_address(endpoint)))

    def close(self) -> None:
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self, host: str, port: int | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ended.clear()
            try:
                if port is None:
                    await loop.create_unix_connection(lambda: self, host)
                else:
                    await loop.create_connection(lambda: self, host, port)
            except (OSError, UnicodeError):  # UnicodeError: the host is not a valid name
                self.refused = True
                self._changed.set()
            else:
                self.refused = False
                alarm = loop.call_later(HANDSHAKE_SECONDS, self._expect_link)
                try:
                    await self._ended.wait()
                finally:
                    alarm.cancel()  # it would keep a closed inbox and its messages alive
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, RECONNECT_SECONDS[1])

    def _expect_link(self) -> None:
        if not self.linked and self._transport is not None:
            self._transport.abort()

    def _begin(self) -> None:
        """Reset the state of the connection, with its unfinished message and frame, for a new connection."""
        self._greeted = self._halted = False  # halted: no more data is taken for now
        self._frames: list[bytes] = []  # the frames of an unfinished message
        self._unfinished = 0  # bytes of `_frames`, where a frame counts as at least LEAST_FRAME bytes
        self._commands, self._second_ends = 0, 0.0  # commands in the current second, and when that second ends
        # The bytes received of an unfinished frame, and how many bytes it needs.
        self._rest, self._wanted = bytearray(), _GREETING_BYTES

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it
        self._begin()
        self._transport.write(_GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        self.linked = False
        self._begin()
        self._transport = None
        self._ended.set()
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if self._halted or len(self._rest) < self._wanted:
                return
            data, self._rest = bytes(self._rest), bytearray()
        assert self._transport is not None
        taken = self._take_frames(data, self._transport)
        if taken is None:
            self.faults += self.linked
            self._transport.abort()
        else:
            self._rest += memoryview(data)[taken:]

    # ---

    def _take_frames(self, data: bytes, transport: asyncio.Transport) -> int | None:
        """Take whole frames from `data`, as many as one event-loop iteration should, and queue complete messages.

        Returns how many bytes of `data` were used, or None if the peer breaks the protocol or exceeds a limit. If data
        is left, reading from `transport` pauses until the next iteration, or until waiting messages have been read.
        """
        at, end, turn = 0, len(data), TURN_FRAMES
        if not self._greeted:
            if data[:1] != _GREETING[:1]:
                return None
            if end < _GREETING_BYTES:
                return at
            if data[10] < 3 or data[12:32] != _NULL:
                return None
            self._greeted, at = True, _GREETING_BYTES
            kind = self._kind.encode()
            transport.write(_framed(_READY + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, _COMMAND))
        while turn > 0:
            if end - at < 9 and (end - at < 2 or data[at] & _LONG):
                self._wanted = 9 if end - at > 1 else 2
                return at
            flags, size, begin = data[at], data[at + 1], at + 2
            if flags & _LONG:
                size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            is_command = flags & _COMMAND
            if flags > 6 or size > (MOST_COMMAND if is_command else MOST_FRAME) or not (self.linked or is_command):
                return None
            if begin + size > end:
                self._wanted = begin + size - at
                return at
            at = begin + size
            if is_command:
                if not self._obey(data[begin:at], transport):
                    return None
                continue
            turn -= 1
            self._frames.append(data[begin:at])
            self._unfinished += size if size > LEAST_FRAME else LEAST_FRAME
            if self._unfinished > MOST_QUEUED:
                return None
            if not flags & _MORE:
                self._messages.append((self._unfinished, self._frames))
                self._queued += self._unfinished
                self._frames, self._unfinished = [], 0
                self._changed.set()
                if self._queued > MOST_QUEUED:
                    break
        self._halted = True
        transport.pause_reading()
        if self._queued <= MOST_QUEUED:
            asyncio.get_running_loop().call_soon(self._go_on, transport)
        return at

    def _go_on(self, transport: asyncio.Transport) -> None:
        """Take the frames that `_take_frames` left, and read from the connection again.

        Frames are left for another event-loop iteration, or because too many bytes wait to be read.
        """
        if transport is not self._transport or transport.is_closing():
            return
        self._halted = False
        if self._rest:
            self._wanted = 0
            self.data_received(b"")
        if not self._halted:
            transport.resume_reading()

    def _obey(self, command: bytes, transport: asyncio.Transport) -> bool:
        """Carry out a ZMTP command of the peer; return False if the connection must end."""
        if (now := _now()) > self._second_ends:
            self._second_ends, self._commands = now + 1, 0
        self._commands += 1
        if self._commands > MOST_COMMANDS:
            return False
        if command.startswith(_READY) and not self.linked:
            if (kind := _socket_type(command[6:])) and kind not in _PEERS[self._kind]:
                return False
            self.linked, self._pause = True, RECONNECT_SECONDS[0]
            transport.write(_framed(_SUBSCRIBE_ALL) if self._kind == "SUB" else b"".join(self._outgoing))
            self._outgoing.clear()
            self._changed.set()
        elif command.startswith(_PING) and self.linked:
            transport.write(_framed(_PONG + command[7:23], _COMMAND))
            return transport.get_write_buffer_size() <= MOST_COMMAND  # with more unsent, the peer does not read
        return not command.startswith(_ERROR)

    def send(self, frames: list[bytes]) -> None:
        """Send a message (a list of frames), now or once the connection's handshake is done."""
        message = b"".join([_framed(one, _MORE) for one in frames[:-1]] + [_framed(frames[-1])])
        if self.linked and self._transport is not None:
            self._transport.write(message)
        else:
            self._outgoing.append(message)

    def take(self) -> list[list[bytes]]:
        """Take waiting messages out of the queue, as many as one event-loop iteration should handle, and return them.

        A message is a list of frames.
        """
        messages: list[list[bytes]] = []
        taken = 0
        while self._messages and len(messages) < TURN_MESSAGES and taken < TURN_BYTES:
            size, frames = self._messages.popleft()
            messages.append(frames)
            self._queued -= size
            taken += sum(map(len, frames))
        if self._halted and messages and self._queued <= MOST_QUEUED // 2 and self._transport is not None:
            self._go_on(self._transport)
        return messages

    async def changed(self, seconds: float) -> None:
        """Wait until messages may have come, the connection changed or `wake` was called, for at most `seconds`."""
        # not wait_for: in Python 3.11 it can swallow a cancellation
        alarm = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()
        self._changed.clear()

    def wake(self) -> None:
        """Make `changed` return."""
        self._changed.set()


@contextmanager
def connected(kind: str, endpoint: str) -> Iterator[Inbox]:
    """Return a context manager that keeps a ZMTP connection (`Inbox`) to an endpoint open, and closes it at the end.

    `kind`: the type of our socket, "SUB" or "DEALER".
    """
    inbox = Inbox(kind, endpoint)
    try:
        yield inbox
    finally:
        inbox.close()


def _framed(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def _socket_type(metadata: bytes) -> bytes:
    """Return the type of the peer's socket from the metadata of its READY command, b"" if there is none."""
    at = 0
    while at < len(metadata):
        name = metadata[at + 1 : (at := at + 1 + metadata[at])]
        value = metadata[at + 4 : (at := at + 4 + int.from_bytes(metadata[at : at + 4], "big"))]
        if name.lower() == b"socket-type":
            return value
    return b""


def _address(endpoint: str) -> tuple[str, int | None]:
    """Return the host and port of a tcp:// endpoint, or the path and None of an ipc:// one. Raises ValueError."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return rest, None
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{endpoint[:120]!r} is no address of a ZMQ socket; write tcp://HOST:PORT")
    return host.strip("[]"), int(port)
