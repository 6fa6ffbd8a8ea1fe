"""The HTTP server: it accepts clients, enforces deadlines, and at its end waits for answers in progress (drain)."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from time import monotonic

from .downstream import Clients, Downstream, RequestHandler
from .messages import Limits

log = logging.getLogger("hitherto.wire")

SWEEP_SECONDS = 0.25  # between two sweeps, which check deadlines
# If there are many connections, a sweep checks only a part of them: 10,000 at once stalled the event loop for 3.4 ms
# and took 1.6 % of a core. All are checked within 16 sweeps (4 s), and at least 64 in each. The shortest deadline of a
# connection is 2 s.
SWEEPS_TO_SEE_ALL, SEEN_AT_LEAST = 16, 64
FLUSH_SECONDS = 2.0  # for sending the last bytes of answers when the server ends
# For closing a TLS connection: the rest of an answer is sent, then the client has to answer the close. The sweep closes
# connections of clients that do not read earlier than that.
SHUTDOWN_SECONDS = 3600.0


def allow_many_connections() -> None:
    """Raise the process's limit of open files to the hard limit; the usual 1,024 files are enough for 370 streams."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Accepted(asyncio.Protocol):
    """An accepted connection before its TLS handshake.

    Event loops do not report a handshake before it is done, so handshakes in progress could not be counted. Therefore
    the socket is duplicated here, and the server starts the handshake on the copy in a task that it counts.
    """

    def __init__(self, server: Server, tls: ssl.SSLContext):
        self._server, self._tls = server, tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            self._server.shake_hands(transport.get_extra_info("socket").dup(), self._tls)
        except OSError as error:  # no descriptor is left
            log.warning("a connection is closed before its TLS handshake: %s", error.strerror)
        transport.abort()  # type: ignore[attr-defined]  # socket transports have it


class Server:
    """The HTTP server of one process.

    `handler`: answers the requests of all connections.
    `limits`: the limits on clients' requests. The budget for requests in memory is shared by all connections.
    """

    def __init__(self, handler: RequestHandler, limits: Limits = Limits()):
        self.clients = Clients(handler, limits)
        self._unseen: list[Downstream] = []  # connections not yet checked in this round of sweeps
        self._part = 0
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self._was_late = False
        self._drained_by = 0.0

    @property
    def connections(self) -> set[Downstream]:
        return self.clients.room.connections

    @property
    def open(self) -> int:
        """The number of connections, including those whose TLS handshake is still under way."""
        return self.clients.room.open

    @property
    def held(self) -> int:
        """The bytes in memory of the requests of all connections."""
        return self.clients.held

    async def start(self, host: str, port: int, shared: bool = False, tls: ssl.SSLContext | None = None) -> int:
        """Begin to listen on `host` and `port` (0: any free port), and return the port; raises OSError if it is taken.

        `shared`: whether other processes listen on the same port; the kernel spreads connections over all of them.
        `tls`: the context if clients must use TLS, else None.
        """
        loop = asyncio.get_running_loop()

        def made() -> asyncio.Protocol:
            return Downstream(self.clients) if tls is None else _Accepted(self, tls)

        self._listener = await loop.create_server(made, host, port, backlog=4096, reuse_port=shared)
        self.clients.handler.pulse.start()
        self._sweep()
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def shake_hands(self, client: socket.socket, tls: ssl.SSLContext) -> None:
        """Begin the TLS handshake of an accepted connection; if too many are under way, cancel the oldest of these."""
        room = self.clients.room
        if room.handshakes and len(room.handshakes) >= room.most_handshakes:
            oldest = next(iter(room.handshakes))
            del room.handshakes[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._secure(client, tls))
        room.handshakes[task] = None
        task.add_done_callback(lambda task: room.handshakes.pop(task, None))

    async def _secure(self, client: socket.socket, tls: ssl.SSLContext) -> None:
        """Perform the TLS handshake of a connection, after which its requests are answered."""
        loop, seconds = asyncio.get_running_loop(), self.clients.limits.head_seconds
        connection = Downstream(self.clients)
        try:
            # The limit for closing is long, since the sweep ends a close earlier if the client does not read any more.
            await loop.connect_accepted_socket(
                lambda: connection,
                client,
                ssl=tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except OSError as error:  # not TLS, the client has left, or it took too long
            log.debug("a TLS handshake failed: %s", error)
        finally:
            if connection.transport is None:
                connection.parser = None  # as `connection_lost` does

    def _sweep(self) -> None:
        """Check the deadlines of a part of the connections, and let the handler check those of requests."""
        # Schedule the next sweep first: deadlines must be kept even if this one fails.
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        now = monotonic()
        pulse = self.clients.handler.pulse
        ran = pulse.saw(self._swept_at or now, now)
        self._was_late = not self._was_late and not ran
        self._swept_at = now
        if self._was_late:
            # After a stall, timers run before sockets are read: peers may have been in time, so deadlines wait for the
            # next sweep.
            return
        self.clients.room.keep()
        for connection in self._next_part():
            try:
                connection.check(now)
            except Exception:
                log.exception("the sweep failed on a connection")
        self.clients.handler.sweep(now)

    def _next_part(self) -> list[Downstream]:
        """Return the connections to check in this sweep; several sweeps together check all of them."""
        if not self._unseen:
            self._unseen = list(self.connections)
            self._part = max(SEEN_AT_LEAST, len(self._unseen) // SWEEPS_TO_SEE_ALL + 1)
        part, self._unseen = self._unseen[-self._part :], self._unseen[: -self._part]
        return [connection for connection in part if connection in self.connections]

    @property
    def busy(self) -> int:
        """The number of connections with an answer in progress."""
        return sum(connection.busy for connection in self.connections)

    async def drain(self, seconds: float) -> None:
        """Have each connection closed after its answer, and wait up to `seconds` for answers in progress.

        Idle connections stay open: a client that sends a request on one gets a 503 from the handler, not a reset.
        """
        self.clients.draining = True
        self._drained_by = monotonic() + seconds
        while self.busy and monotonic() < self._drained_by:
            await asyncio.sleep(0.02)

    def hurry(self) -> None:
        """Make a running `drain` return now."""
        self._drained_by = 0.0

    async def end(self) -> int:
        """Close all connections and stop listening; return how many answers were cut off in progress.

        Complete answers are sent first, for up to FLUSH_SECONDS.
        """
        await self._flush(monotonic() + FLUSH_SECONDS)
        cut = self.busy
        await self.close()
        return cut

    async def _flush(self, deadline: float) -> None:
        """Send the rest of all answers that are complete, and refuse requests that are still being received.

        Returns when these connections are closed, or at `deadline` (monotonic seconds). They have to be closed in
        order, since a TLS connection may have unsent bytes in the transport below it, which cannot be seen from here.
        """
        answered = {connection for connection in self.connections if connection.current is None}
        for connection in answered:
            connection.end()
        while answered & self.connections and monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Cut all connections now and stop listening."""
        self.clients.closed = True
        self.clients.handler.pulse.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            self._listener.close()
        for handshake in self.clients.room.handshakes:
            handshake.cancel()
        for connection in list(self.connections):
            connection.break_off()
        while self.open:  # `connection_lost` is called in the loop's next iterations
            await asyncio.sleep(0.001)
        if self._listener is not None:
            await self._listener.wait_closed()
