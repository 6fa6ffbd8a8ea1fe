"""The replica side of HTTP: pooled connections, whose response bytes are passed on unchanged.

The bytes are also parsed, but only to find where the response's head ends, where the response ends, and whether the
connection may be used again. The receiver of the response, its sink, gets the bytes of the body as they came, with
their chunked framing.
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

# How long an idle connection may be used. vLLM (uvicorn) closes one that is idle for 5 s, and a request sent on it at
# that time may be lost.
IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# A reset of the connection this soon after a request was sent shows that the request was not read: a kernel resets a
# connection at once if its process closed it, or ended, before it had read everything. Later resets may come from
# proxies and timeouts, after the request was served.
UNREAD_SECONDS = 0.25
HEAD_BYTES = 64 * 1024
# A peer may send a trailer line that never ends, which the parser buffers without a callback. So after each
# SEARCH_BYTES of a chunked response, line ends are searched for. There are some between chunks, and no engine sends a
# chunk of LINE_BYTES.
SEARCH_BYTES, LINE_BYTES = 2**20, 2**24
NEWLINE = 0x0A


# The kinds of failure of a connection: it was not accepted, it was closed, the peer does not speak HTTP, the replica
# was removed meanwhile, the gateway itself has no file descriptors left.
CONNECT, CLOSED, PROTOCOL, REMOVED, OWN = "connect", "closed", "protocol", "removed", "own"


class UpstreamError(Exception):
    """A failure of a replica to answer a request: no connection, one that was closed early, or no valid answer.

    `kind`: the kind of failure (`proxy.failures.retries`), which is also the label in metrics.
    `unread`: whether the replica cannot have read the whole request, because it closed the connection too early.
    """

    def __init__(self, kind: str, message: str, *, unread: bool = False):
        super().__init__(message)
        self.kind, self.unread = kind, unread


class Sink(Protocol):
    """The receiver of a response.

    Its methods are called in this order: `connected` once a connection is open, `head`, `data` any number of times,
    `end`. At any point `lost` may be called instead, once, as the last of them. If the head does not say where the body
    ends, `closed` is called in place of `end`: the answer is complete, or the replica died.
    """

    def connected(self, upstream: Upstream) -> None: ...
    def head(self, status: int, head: Head, body: bytes) -> None: ...
    def data(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def closed(self) -> None: ...
    def lost(self, error: UpstreamError) -> None: ...


@dataclass(slots=True)
class Head:
    """The head of a response.

    `raw`: its bytes as received.
    `headers`: its headers as parsed, with names in lower case.
    `until_close`: whether the end of the connection ends the body, so that the body's length is not known.
    `clean`: whether `raw` may go to the client unchanged, since no header in it is for one connection only.
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
        """Add a header of the gateway's own to this head, which the client gets."""
        self.raw = b"%b%b: %b\r\n\r\n" % (self.raw[:-2], *header)
        self.headers = [*self.headers, header]

    def without_chunks(self) -> Head:
        """Return this head without its header for chunked framing; the end of the connection then ends the body."""
        return replace(self.without(b"transfer-encoding"), until_close=True)

    def without(self, prefix: bytes) -> Head:
        """Return a copy of this head without the headers whose names begin with `prefix`."""
        kept = [header for header in self.headers if not header[0].startswith(prefix)]
        return replace(self, headers=kept, clean=False)

    def with_length(self, length: int) -> Head:
        """Return a copy of this head for another body, which has `length` bytes."""
        framing = (b"content-length", b"transfer-encoding")
        headers = [header for header in self.headers if header[0] not in framing]
        headers.append((b"content-length", b"%d" % length))
        head = replace(self, headers=headers, until_close=False, clean=False)
        return replace(head, raw=head.block(b""), clean=True)

    def block(self, extra: bytes) -> bytes:
        """Return the bytes of the head for the client, with the header lines `extra`.

        Headers that are for one connection only (hop-by-hop) are removed.
        """
        if self.clean:
            return b"%b%b\r\n" % (self.raw[:-2], extra)
        status_line = self.raw[: self.raw.index(b"\r\n") + 2]
        return b"%b%b%b\r\n" % (status_line, end_to_end(self.headers), extra)


class Upstream(asyncio.Protocol):
    """A connection to a replica, with one request at a time."""

    __slots__ = (
        # for the connection's life
        "pool", "transport", "parser", "closed", "idle_since", "used", "paused", "unread", "sent_at",
        # the response that is being read
        "sink", "head_only", "status", "headers", "buffer", "head_done", "forwarding", "complete", "keep", "surplus", "clean", "framed",
        "coding", "length", "unseen", "granted",
    )  # fmt: skip

    def __init__(self, pool: Pool):
        self.pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.parser: httptools.HttpResponseParser = None  # type: ignore[assignment]  # set while connected: a reference cycle
        self.closed = self.used = self.paused = False
        self.idle_since = self.sent_at = 0.0
        self.unread = False  # the replica has closed its side before it can have read all of the request
        self.sink: Sink | None = None
        self._clear()

    def _clear(self) -> None:
        """Reset the state of the response that is being read."""
        self.head_only = self.head_done = self.forwarding = self.complete = self.keep = self.surplus = False
        self.status = 0
        self.headers: Headers = []
        self.buffer = b""
        self.clean = True
        self.framed = False  # whether the head says where the body ends, by a length or chunked framing
        self.coding = b""  # the body's transfer coding, if it is another one than chunked
        self.length: int | None = None  # the body's length in bytes, if the head states it
        # `unseen`: how many bytes of the body may still pass until line ends are searched for; `granted`: how many were
        # allowed so far in all. Reads of a chunked body that end with a line end are not counted.
        self.unseen = self.granted = SEARCH_BYTES

    def send(self, sink: Sink, head: bytes, body: bytes, head_only: bool) -> None:
        """Write a request to the replica, whose response goes to `sink`.

        `head_only`: whether the response has no body, as the one to HEAD.
        """
        self.sink = sink
        self.head_only = head_only
        self.sent_at = monotonic()
        # Joining head and body copies the body. For a longer body, two writes cost less than the copy.
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def pause(self) -> None:
        """Stop reading while the client cannot keep up, so that TCP's flow control slows down the replica."""
        if not self.paused and not self.closed:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.closed:
            self.paused = False
            self.transport.resume_reading()

    def drop(self) -> None:
        """Discard the response and close the connection, so that the engine aborts the request."""
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
        """Close the connection now, since a replica that has closed its side does not answer any more.

        Without this, the event loop would close it only after the replica has read the rest of the request.
        """
        if self.sink is not None:
            self.unread = not self.head_done and has_unacknowledged(self.transport)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Call the sink's `closed` if the end of the connection ends this response's body, otherwise its `lost`.

        If no byte of the response has come, the error says whether the replica can have read the whole request.
        """
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
            sink.lost(UpstreamError(CLOSED, message, unread=unread and not (self.buffer or self.forwarding)))

    def data_received(self, data: bytes) -> None:
        """Parse a read from the replica, and pass its bytes to the sink once the head is complete.

        If the response is not valid HTTP, the connection is closed, and the sink gets an error.
        """
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
        """Pass the response's head to the sink, with the bytes of the body that came with it.

        If the head is invalid, the connection is closed and the sink gets an error.
        """
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
        """Return whether the end of the connection ends the body, because the head does not say where it ends."""
        return not (self.framed or self._bodyless())

    def _bodyless(self) -> bool:
        return self.head_only or self.status in (204, 304)

    def _count(self, data: bytes) -> bool:
        """Count a read; return False if a chunked response has sent LINE_BYTES (16 MiB) without the end of a line.

        A trailer line without an end would otherwise fill the parser's memory.
        """
        self.unseen -= len(data)
        if self.unseen < 0 and (self.length is not None or not self.framed or b"\n" in data):
            self.granted += SEARCH_BYTES - self.unseen
            self.unseen = SEARCH_BYTES
        return -self.unseen < LINE_BYTES - SEARCH_BYTES

    def _to_the_end(self, data: bytes) -> bytes | None:
        """Return the part of the last read that belongs to the response, or None if the end of the response is unknown.

        If other bytes follow the response, the connection will not be used again.
        """
        length = 0 if self.head_only or self.status in (204, 304) else self.length  # as `_bodyless`, for each answer
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
        """End a complete response: return the connection to its pool, or close it, then tell the sink."""
        self.sink = None
        # If the replica has answered early, a part of the request may be unsent, which the next one would wait for.
        unsent = self.transport.get_write_buffer_size()
        reusable = self.keep and not unsent and not self.closed and not self.transport.is_closing()
        if self.head_only:
            # The old parser still waits for the body that the head announces.
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
        """Close the connection because the response is invalid, and tell the sink so."""
        sink = self.sink
        self.drop()
        if sink is not None:
            sink.lost(UpstreamError(PROTOCOL, message))

    # --- the parser's calls

    def on_message_begin(self) -> None:
        self.surplus = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the response.

        Also note whether it states where the body ends, and whether clients must not get it as it is (`clean`).
        """
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
        """Note that the head is complete. The headers of an interim response (status 1xx) are dropped instead."""
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


# A function that returns why no request may be sent on a connection that was just opened, or None if one may be.
Check = Callable[[], Awaitable[UpstreamError | None]]


class Pool:
    """A pool of connections to one address of one replica: it opens them, and keeps idle ones for the next requests.

    The most recently used connection is taken first, so that surplus connections stay idle until they are closed.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, certified: str):
        """Create an empty pool.

        `host`: the address to connect to.
        `tls`: the context of TLS connections; None: connections without TLS.
        `certified`: with TLS, the host that the replica's certificate has to name.
        """
        self.host = host
        self.port = port
        self.tls = tls
        self.certified = certified if tls else None
        self.idle: dict[Upstream, None] = {}  # in the order in which they became idle
        self.closed = False
        self._connecting: set[asyncio.Task[Upstream | UpstreamError]] = set()

    def acquire(self) -> Upstream | None:
        """Take an idle connection out of the pool and return it, or return None if there is none.

        Connections that have been idle for IDLE_SECONDS are closed instead, since the replica may be about to close
        them.
        """
        now = monotonic()
        while self.idle:
            upstream, _ = self.idle.popitem()
            if not upstream.closed and not upstream.transport.is_closing() and now - upstream.idle_since < IDLE_SECONDS:
                return upstream
            upstream.close()
        return None

    def connect(self, sink: Sink, check: Check) -> None:
        """Open a connection in a task, which calls `sink.connected` or `sink.lost` when it is done.

        `check`: called once the connection is open; if it returns an error, the connection is closed.
        """
        task = asyncio.get_running_loop().create_task(self._open(check))
        self._connecting.add(task)
        # A callback of the task reports the end: a coroutine that is cancelled before it has begun could not.
        task.add_done_callback(partial(self._opened, sink))

    def _opened(self, sink: Sink, task: asyncio.Task[Upstream | UpstreamError]) -> None:
        """Tell the sink how the opening of a connection has ended."""
        self._connecting.discard(task)
        if task.cancelled():
            sink.lost(UpstreamError(REMOVED, "the replica was removed while a connection to it was being opened"))
            return
        if (bug := task.exception()) is not None:
            log.error("opening a connection to %s:%d failed", self.host, self.port, exc_info=bug)
            sink.lost(UpstreamError(CONNECT, f"the gateway failed to open a connection: {type(bug).__name__}"))
            return
        opened = task.result()
        if isinstance(opened, UpstreamError):
            sink.lost(opened)
        elif opened.closed or opened.transport.is_closing():  # it was closed since then, and writing to it would raise
            where = f"{self.host}:{self.port}"
            message = f"{where} closed a new connection before the request was sent"
            sink.lost(UpstreamError(CONNECT, message, unread=True))
        else:
            sink.connected(opened)

    async def _open(self, check: Check) -> Upstream | UpstreamError:
        """Open a connection and check it; return the connection, or why it cannot be used."""
        loop, where, upstream = asyncio.get_running_loop(), f"{self.host}:{self.port}", Upstream(self)
        opening = loop.create_connection(
            lambda: upstream, self.host, self.port, ssl=self.tls, server_hostname=self.certified
        )
        wrong: UpstreamError | None
        try:
            try:
                await within(CONNECT_SECONDS, opening)
            except TimeoutError:
                return UpstreamError(CONNECT, f"no connection to {where} within {CONNECT_SECONDS:g} s")
            except OSError as error:
                if error.errno in OWN_FAULTS:
                    why = f"the gateway itself cannot open connections: {os.strerror(error.errno)}"
                    return UpstreamError(OWN, why)
                return UpstreamError(CONNECT, f"no connection to {where}: {error}")
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
        """Take back a connection whose response is complete, for the next request; close it if the pool is closed."""
        if self.closed:
            return upstream.close()
        upstream.used = True
        upstream.idle_since = monotonic()
        self.idle[upstream] = None

    def sweep(self, now: float) -> None:
        """Close the connections that have been idle for IDLE_SECONDS or longer; `now`: in monotonic seconds."""
        for upstream in list(itertools.takewhile(lambda one: now - one.idle_since >= IDLE_SECONDS, self.idle)):
            del self.idle[upstream]
            upstream.close()

    def close(self) -> None:
        """Close the pool of a replica that is removed, and cancel the opening of connections."""
        self.retire()
        for task in self._connecting:
            task.cancel()

    def retire(self) -> None:
        """Close the pool of an address that is no longer used; connections in use are closed once they are released."""
        self.closed = True
        while self.idle:
            self.idle.popitem()[0].close()
