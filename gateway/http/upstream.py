"""The replica side: pooled connections whose response bytes pass through untouched.

A parser reads along only to find where the response's head ends, where the message ends, and whether the connection may
be reused. The bytes themselves, chunk framing included, go to the sink (the response's receiver) as they came.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Protocol

import httptools

from replicas.ask import OWN_FAULTS
from replicas.deadline import within

from .messages import HOP_BY_HOP, Headers, connection_tokens, end_to_end
from .sockets import ask_when_silent, has_unacknowledged

log = logging.getLogger("hitherto.wire")

# vLLM (uvicorn) closes a connection that is idle for 5 s; a request sent on it later may be lost.
IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# A reset this soon after a request was sent shows that the request was not read: a kernel resets a connection at once
# if its process closed it, or ended, before reading everything. Later resets may come from proxies and timeouts, after
# the request has run.
UNREAD_SECONDS = 0.25
HEAD_BYTES = 64 * 1024
# The parser buffers a trailer line until it ends, without a callback. So after each SEARCH_BYTES of a chunked response,
# line ends are searched for: there are some between chunks, and no engine sends one chunk of LINE_BYTES.
SEARCH_BYTES, LINE_BYTES = 2**20, 2**24
NEWLINE = 0x0A


class UpstreamError(Exception):
    """A failure of the replica: no connection, closed early, or not HTTP.

    `kind`: the label in metrics.
    `unread`: as far as is known, the replica closed the connection before it can have read the whole request.
    """

    def __init__(self, kind: str, message: str, *, unread: bool = False):
        super().__init__(message)
        self.kind, self.unread = kind, unread


class Sink(Protocol):
    """The receiver of a response. Calls come in the order head, data*, end; or lost, once, at any point.

    If the head does not tell where the body ends, `closed` comes in place of `end`: the answer is complete, or the
    replica died.
    """

    def connected(self, upstream: Upstream) -> None: ...
    def head(self, status: int, head: Head, body: bytes) -> None: ...
    def data(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def closed(self) -> None: ...
    def lost(self, error: UpstreamError) -> None: ...


@dataclass(slots=True)
class Head:
    """A response head.

    `raw`: its bytes as received; `headers`: parsed, with names in lower case.
    `until_close`: the body ends with the connection.
    `clean`: `raw` may go to the client as it is, without hop-by-hop headers to remove.
    """

    raw: bytes
    headers: Headers
    until_close: bool
    clean: bool

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def is_chunked(self) -> bool:
        return self.get(b"transfer-encoding") is not None

    def add(self, header: tuple[bytes, bytes]) -> None:
        """Add a header for the client that the replica did not send."""
        self.raw = b"%b%b: %b\r\n\r\n" % (self.raw[:-2], *header)
        self.headers = [*self.headers, header]

    def without_chunks(self) -> Head:
        """Return this head for the same body without chunked framing, which ends with the connection."""
        return replace(self.without(b"transfer-encoding"), until_close=True)

    def without(self, prefix: bytes) -> Head:
        """Return this head without the headers whose names have this prefix."""
        kept = [header for header in self.headers if not header[0].startswith(prefix)]
        return replace(self, headers=kept, clean=False)

    def with_length(self, length: int) -> Head:
        """Return this head for another body of `length` bytes."""
        framing = (b"content-length", b"transfer-encoding")
        headers = [header for header in self.headers if header[0] not in framing]
        headers.append((b"content-length", b"%d" % length))
        head = replace(self, headers=headers, until_close=False, clean=False)
        return replace(head, raw=head.block(b""), clean=True)

    def block(self, extra: bytes) -> bytes:
        """Return the head as a client gets it: with the header lines `extra`, without hop-by-hop headers."""
        if self.clean:
            return b"%b%b\r\n" % (self.raw[:-2], extra)
        status_line = self.raw[: self.raw.index(b"\r\n") + 2]
        return b"%b%b%b\r\n" % (status_line, end_to_end(self.headers), extra)


class Upstream(asyncio.Protocol):
    """A connection to a replica, which carries one request at a time."""

    __slots__ = (
        # for the connection's life
        "pool", "transport", "parser", "closed", "idle_since", "used", "paused", "unread", "sent_at",
        # the response being read
        "sink", "head_only", "status", "headers", "buffer", "head_done", "forwarding", "complete", "keep", "surplus", "clean", "framed",
        "coding", "length", "unseen", "granted",
    )  # fmt: skip

    def __init__(self, pool: Pool):
        self.pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.parser: httptools.HttpResponseParser = None  # type: ignore[assignment]  # set while connected: a reference cycle
        self.closed = self.used = self.paused = False
        self.idle_since = self.sent_at = 0.0
        self.unread = False  # closed before the replica can have read all of the request
        self.sink: Sink | None = None
        self._clear()

    def _clear(self) -> None:
        self.head_only = self.head_done = self.forwarding = self.complete = self.keep = self.surplus = False
        self.status = 0
        self.headers: Headers = []
        self.buffer = b""
        self.clean = True
        self.framed = False  # the head says where the body ends
        self.coding = b""  # the body's transfer coding, if it is not chunked
        self.length: int | None = None  # bytes of the body, where the head says so
        # Bytes of the body that may still pass without a search for line ends, and all that were granted so far; reads
        # of a chunked body that end a line do not count.
        self.unseen = self.granted = SEARCH_BYTES

    def send(self, sink: Sink, head: bytes, body: bytes, head_only: bool) -> None:
        """Send a request; its response goes to `sink`. `head_only`: the response to HEAD has no body."""
        self.sink = sink
        self.head_only = head_only
        self.sent_at = monotonic()
        # Joining copies the body once; above this, two writes cost less than the copy.
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def pause(self) -> None:
        """Stop reading while the client cannot keep up, so that the replica is slowed down by TCP."""
        if not self.paused and not self.closed:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.closed:
            self.paused = False
            self.transport.resume_reading()

    def drop(self) -> None:
        """Discard the response. Closing the connection makes the engine abort the request."""
        self.sink = None
        self.closed = True
        self.transport.abort()

    def close(self) -> None:
        """Close the connection, on which no request is in progress."""
        self.closed = True
        self.transport.close()

    # --- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpResponseParser(self)

    def eof_received(self) -> None:
        """Close the connection now, as a replica that has closed its side will not answer any more.

        The event loop's own close would first wait until the rest of the request is read.
        """
        if self.sink is not None:
            self.unread = not self.head_done and has_unacknowledged(self.transport)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.parser = None  # type: ignore[assignment]
        self.pool.idle.pop(self, None)
        sink, self.sink = self.sink, None
        if sink is None:
            return
        if self.forwarding and exc is None and self._until_close():
            sink.closed()
        else:
            unread = self.unread
            if isinstance(exc, (ConnectionResetError, BrokenPipeError)):
                just_sent = monotonic() - self.sent_at < UNREAD_SECONDS
                unread = unread or just_sent or has_unacknowledged(self.transport)
            message = f"connection closed by the replica ({exc or 'end of file'})"
            sink.lost(UpstreamError("closed", message, unread=unread and not (self.buffer or self.forwarding)))

    def data_received(self, data: bytes) -> None:
        sink = self.sink
        if sink is None:  # no request is in progress
            return self.drop()
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                return self._broken(f"not valid HTTP: {error}" if self.status != 101 else "switches protocols (101)")
            self.surplus = True
        if self.forwarding:
            if data[-1] == NEWLINE and self.length is None:
                self.unseen = SEARCH_BYTES  # true for nearly all reads of a stream
            elif not self._count(data):
                return self._broken(f"{LINE_BYTES} bytes of a chunked response without the end of a line")
            if not self.complete:
                return sink.data(data)
            if (last := self._to_the_end(data)) is None:
                return self._broken("bytes after the end of the response")
            sink.data(last)
        else:
            self.buffer = self.buffer + data if self.buffer else data
            if not self.head_done:
                if len(self.buffer) > HEAD_BYTES:
                    self._broken(f"response head larger than {HEAD_BYTES} bytes")
                return
            self._forward_head(sink)
        if self.complete and self.sink is sink:
            self._finish(sink)

    def _forward_head(self, sink: Sink) -> None:
        buffer, self.buffer = self.buffer.lstrip(b"\r\n"), b""
        end = buffer.index(b"\r\n\r\n") + 4
        while buffer[9:10] == b"1":  # interim responses (100, 102, 103) are not passed on
            buffer = buffer[end:].lstrip(b"\r\n")
            end = buffer.index(b"\r\n\r\n") + 4
        if end > HEAD_BYTES:
            return self._broken(f"response head larger than {HEAD_BYTES} bytes")
        if not buffer.startswith(b"HTTP/1."):
            return self._broken("it does not answer in HTTP/1.1")
        if self.coding:
            return self._broken(f"its Transfer-Encoding is {self.coding[:100]!r}, which nobody asked for")
        if not 200 <= self.status < 600:
            return self._broken(f"its status is {self.status:03d}, which HTTP does not have")
        self.forwarding = True
        rest = buffer[end:]
        self.unseen -= len(rest)
        body = self._to_the_end(rest) if self.complete else rest
        if body is None:
            return self._broken("bytes after the end of the response")
        until_close = not self.framed and self._until_close()
        sink.head(self.status, Head(buffer[:end], self.headers, until_close, self.clean), body)

    def _until_close(self) -> bool:
        return not (self.framed or self._bodyless())

    def _bodyless(self) -> bool:
        return self.head_only or self.status in (204, 304)

    def _count(self, data: bytes) -> bool:
        """Return whether the response may go on; False after LINE_BYTES of a chunked one without the end of a line."""
        self.unseen -= len(data)
        if self.unseen < 0 and (self.length is not None or not self.framed or b"\n" in data):
            self.granted += SEARCH_BYTES - self.unseen
            self.unseen = SEARCH_BYTES
        return -self.unseen < LINE_BYTES - SEARCH_BYTES

    def _to_the_end(self, data: bytes) -> bytes | None:
        """Return the part of the last piece that belongs to the response; None if that is not known.

        If bytes follow the response, the connection is not used again.
        """
        length = 0 if self._bodyless() else self.length
        if length is None:
            end = len(data)
            while data.endswith(b"\r\n\r\n\r\n", 0, end):  # the parser skips blank lines before a response
                end -= 2
            surplus = len(data) - end
            if self.surplus:
                return None
        else:
            surplus = self.granted - self.unseen - length
        if surplus:
            self.keep = False
            return data[:-surplus]
        return data

    def _finish(self, sink: Sink) -> None:
        self.sink = None
        # An early answer may leave part of the request unsent; the next request would wait for it.
        unsent = self.transport.get_write_buffer_size()
        reusable = self.keep and not unsent and not self.closed and not self.transport.is_closing()
        if self.head_only:
            # The old one still waits for the body that the head announces.
            self.parser = httptools.HttpResponseParser(self)
        self._clear()
        if self.paused:
            self.resume()
        if reusable:
            self.pool.release(self)
        else:
            self.drop()
        sink.end()

    def _broken(self, message: str) -> None:
        sink = self.sink
        self.drop()
        if sink is not None:
            sink.lost(UpstreamError("protocol", message))

    # --- the parser's calls

    def on_message_begin(self) -> None:
        self.surplus = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return
        name = name.lower()
        if name in HOP_BY_HOP:
            self.clean = False
        elif name == b"content-length":
            self.framed, self.length = True, int(value)
        elif name == b"transfer-encoding":
            codings = [coding.strip() for coding in value.lower().split(b",")]
            if codings != [b"chunked"] * len(codings):
                self.coding = value
            if self.framed or len(codings) > 1:
                self.clean = False  # sent twice by servers that copy another's headers; clients' parsers refuse that
            if self.framed:
                return
            self.framed, value = True, codings[0]
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self.parser.get_status_code()
        if 100 <= self.status < 200:
            self.headers, self.clean, self.framed, self.length = [], True, False, None
            return
        self.head_done = True
        if self.head_only:
            self.complete = True
            self.keep = b"close" not in connection_tokens(self.headers)

    def on_message_complete(self) -> None:
        if self.head_done and not self.complete:
            self.complete = True
            self.keep = self.parser.should_keep_alive()  # must be read here, before the parser resets its state


# Returns why nothing may be sent over a connection that has just been opened, or None.
Check = Callable[[], Awaitable[UpstreamError | None]]


class Pool:
    """The connections to one address of one replica.

    The most recently used one is taken first, so that connections beyond those needed become idle and are closed.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, certified: str):
        """Create an empty pool.

        `host`: the address to connect to. `certified`: with `tls`, the host that its certificate has to name.
        """
        self.host = host
        self.port = port
        self.tls = tls
        self.certified = certified if tls else None
        self.idle: dict[Upstream, None] = {}  # the last used last
        self.closed = False
        self._connecting: set[asyncio.Task[Upstream | UpstreamError]] = set()

    def acquire(self) -> Upstream | None:
        """Return a connection idle for less than IDLE_SECONDS, after which the replica may close it, or None."""
        now = monotonic()
        while self.idle:
            upstream, _ = self.idle.popitem()
            if not upstream.closed and not upstream.transport.is_closing() and now - upstream.idle_since < IDLE_SECONDS:
                return upstream
            upstream.close()
        return None

    def connect(self, sink: Sink, check: Check) -> None:
        """Open a connection, and call `sink.connected` or `sink.lost`. `check` may reject the open connection."""
        task = asyncio.get_running_loop().create_task(self._open(check))
        self._connecting.add(task)
        # A callback, not the coroutine's own end: one cancelled before it began would report nothing.
        task.add_done_callback(partial(self._opened, sink))

    def _opened(self, sink: Sink, task: asyncio.Task[Upstream | UpstreamError]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            sink.lost(UpstreamError("removed", "the replica was removed while a connection to it was being opened"))
            return
        if (bug := task.exception()) is not None:
            log.error("opening a connection to %s:%d failed", self.host, self.port, exc_info=bug)
            sink.lost(UpstreamError("connect", f"the gateway failed to open a connection: {type(bug).__name__}"))
            return
        opened = task.result()
        if isinstance(opened, UpstreamError):
            sink.lost(opened)
        elif opened.closed or opened.transport.is_closing():  # closed since then; writing would raise
            where = f"{self.host}:{self.port}"
            message = f"{where} closed a new connection before the request was sent"
            sink.lost(UpstreamError("connect", message, unread=True))
        else:
            sink.connected(opened)

    async def _open(self, check: Check) -> Upstream | UpstreamError:
        loop, where, upstream = asyncio.get_running_loop(), f"{self.host}:{self.port}", Upstream(self)
        opening = loop.create_connection(
            lambda: upstream, self.host, self.port, ssl=self.tls, server_hostname=self.certified
        )
        wrong: UpstreamError | None
        try:
            try:
                await within(CONNECT_SECONDS, opening)
            except TimeoutError:
                return UpstreamError("connect", f"no connection to {where} within {CONNECT_SECONDS:g} s")
            except OSError as error:
                if error.errno in OWN_FAULTS:
                    why = f"the gateway itself cannot open connections: {os.strerror(error.errno)}"
                    return UpstreamError("own", why)
                return UpstreamError("connect", f"no connection to {where}: {error}")
            ask_when_silent(upstream.transport)
            wrong = await check()
        except BaseException:
            if upstream.transport is not None:  # the connection may exist already when this is cancelled
                upstream.drop()
            raise
        if wrong is not None:
            upstream.drop()
        return wrong or upstream

    def release(self, upstream: Upstream) -> None:
        """Take back a connection whose response is complete."""
        if self.closed:
            return upstream.close()
        upstream.used = True
        upstream.idle_since = monotonic()
        self.idle[upstream] = None

    def sweep(self, now: float) -> None:
        """Close the connections that have been idle for too long; the oldest come first."""
        for upstream in list(itertools.takewhile(lambda one: now - one.idle_since >= IDLE_SECONDS, self.idle)):
            del self.idle[upstream]
            upstream.close()

    def close(self) -> None:
        """Close the pool of a removed replica, and cancel connections that are being opened."""
        self.retire()
        for task in self._connecting:
            task.cancel()

    def retire(self) -> None:
        """Close the pool of a replica whose address changed; connections in use are closed once they are released."""
        self.closed = True
        while self.idle:
            self.idle.popitem()[0].close()
