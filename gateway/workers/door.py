"""Door: where clients come in, one queue for all workers.

What the kernel does with SO_REUSEPORT is even for thousands of connections and is not for dozens, and what waits in the
queue of a worker that dies is lost. Here it waits in one queue that outlives any worker, and each connection is handed
over whole before anything is read of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("hitherto.workers")

AT_ONCE = 64  # accepted before the loop turns
RETRY_SECONDS = 0.02  # until what could not be handed over, or accepted, is tried again


class Door:
    """`place(connection)` hands it to a worker, or says that none can take it now."""

    def __init__(self, place: Callable[[socket.socket], bool]):
        self._place = place
        self._listeners: list[socket.socket] = []
        self._waiting: list[socket.socket] = []
        self._wanted = self._reading = False

    async def listen(self, host: str, port: int) -> int:
        """On every address the host's name stands for, as asyncio's own servers do; returns the port. OSError if it
        is taken. Nobody is let in yet."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(found):
            listener = socket.create_server((address[0], port), family=family, backlog=4096)
            self._listeners.append(listener)
            listener.setblocking(False)
            port = listener.getsockname()[1]
        return port

    def let_in(self, wanted: bool) -> None:
        """Without a worker clients wait in the kernel's queue."""
        self._wanted = wanted
        self._read(wanted)

    def close(self) -> None:
        self.let_in(False)
        for one in [*self._listeners, *self._waiting]:
            one.close()
        self._listeners, self._waiting = [], []

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            loop = asyncio.get_running_loop()
            for listener in self._listeners:
                if wanted:
                    loop.add_reader(listener, self._accept, listener)
                else:
                    loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left, or no memory
                log.error("a client cannot be accepted: %s", error)
                self._read(False)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, lambda: self._read(self._wanted))
                return
            self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        if self._place(connection):
            connection.close()  # ours of the two
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)
        self._waiting.append(connection)

    def _try_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            self._hand_over(connection)
