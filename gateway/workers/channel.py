"""Channel: messages between the control process and a worker, with file descriptors beside them.

A pair of sockets that keep messages apart (SEQPACKET). Nobody waits: what does not fit into the socket stays here until
it does. A message is JSON; a long one travels in anonymous memory (memfd). A client's connection is no message but one
byte with a descriptor. When either end dies, the other one reads the end of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from cachemap.memory import segment

log = logging.getLogger("hitherto.workers")

LONG = 1 << 16  # bytes; the kernel takes about 200 KiB of one message
MOST_DESCRIPTORS = 64
CONNECTION, MESSAGE, LONG_MESSAGE = b"c", b"j", b"m"
AT_ONCE = 64  # messages read before the loop turns

OnMessage = Callable[[dict[str, Any], list[int]], None]


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. `on_message(message, descriptors)` and `on_connection(descriptor)` own the descriptors; None: it was too
    many for this process. `on_end` is called once, unless this end was closed."""

    def __init__(self, end: socket.socket, on_message: OnMessage, on_end: Callable[[], None], on_connection: Callable[[int | None], None] = lambda _: None):
        self._end, self._on_message, self._on_end, self._on_connection = end, on_message, on_end, on_connection
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        end.setblocking(False)
        self._loop.add_reader(end, self._readable)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Descriptors are the caller's to close, and are closed no sooner than this returns."""
        if self.closed:
            return
        data, mine = MESSAGE + orjson.dumps(message), [os.dup(one) for one in descriptors]
        if len(data) > LONG:
            mine.append(_in_memory(data[1:]))
            data = LONG_MESSAGE
        self._waiting.append((data, mine))
        self._flush()

    def give(self, connection: socket.socket) -> bool:
        """Hand over a client; False if that is not possible now."""
        if self.closed or self._waiting:
            return False
        try:
            socket.send_fds(self._end, [CONNECTION], [connection.fileno()])
        except OSError:
            return False
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
            while self._waiting:
                _close_all(self._waiting.popleft()[1])

    def _flush(self) -> None:
        try:
            while self._waiting:
                data, descriptors = self._waiting[0]
                socket.send_fds(self._end, [data], descriptors)
                self._waiting.popleft()
                _close_all(descriptors)
        except BlockingIOError:
            self._loop.add_writer(self._end, self._flush)
            return
        except OSError:
            self._ended()
            return
        self._loop.remove_writer(self._end)

    def _readable(self) -> None:
        for _ in range(AT_ONCE):
            if self.closed:
                return
            try:
                data, descriptors, _, _ = socket.recv_fds(self._end, LONG + 16, MOST_DESCRIPTORS)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self._ended()
                return
            try:
                self._take(data, descriptors)
            except Exception:
                log.exception("a message between processes made the gateway stumble")

    def _take(self, data: bytes, descriptors: list[int]) -> None:
        kind = data[:1]
        if kind == CONNECTION:
            if not descriptors:
                log.error("a client is lost: this process can open no more files")
            self._on_connection(descriptors[0] if descriptors else None)
            return
        text = data[1:]
        if kind == LONG_MESSAGE:
            with open(descriptors.pop(), "rb") as memory:
                text = memory.read()
        self._on_message(orjson.loads(text), descriptors)

    def _ended(self) -> None:
        if not self.closed:
            self.close()
            self._on_end()


def _in_memory(data: bytes) -> int:
    descriptor = segment(0)
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _close_all(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        with contextlib.suppress(OSError):
            os.close(one)
