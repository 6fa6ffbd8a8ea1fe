"""The client side of HTTP: connections that parse and collect requests, and write responses as bytes.

One `Downstream` is one client's connection. It passes complete requests to the handler, one at a time and in order
(HTTP/1.1 pipelining): the next request waits until the object that answers the present one, its exchange, calls
`finish`. Requests that are not valid HTTP, or exceed a limit, are answered here, in the same order.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import httptools

from replicas.pulse import Pulse

from .chunks import end_of_body, framed
from .messages import (
    HEADER_BYTES,
    KEEP_ALIVE,
    REQUEST_BYTES,
    Headers,
    KnownHead,
    Limits,
    Refusal,
    Request,
    Responder,
    head_fault,
    origin_form,
    response,
    without_upgrade,
)
from .origins import Origins
from .room import Room
from .sockets import has_data, has_left, reset_when_closed

if TYPE_CHECKING:
    from .upstream import Head

log = logging.getLogger("hitherto.wire")

# Pieces of a body of at least this size are kept separately and joined once: for 4 MB that takes 0.1 ms, appending to a
# buffer 1 to 4 ms. Smaller pieces are appended, since 2-byte chunks that are kept separately take 20 times their size.
WHOLE = 4096
# The allowed bytes of chunk sizes and extensions for each byte of a body. A one-byte chunk whose size is written in
# eight digits has 12 such bytes.
FRAMING_PER_BYTE = 16
# A read (256 kB at most) is parsed in pieces of PIECE bytes, within a body of BODY_PIECE bytes. While parsed requests
# wait for their turn, the rest of the read stays unparsed: parsing 256 kB of pipelined requests with 200 headers each
# would take 14 MB of memory, and 0.1 s of the event loop.
PIECE, BODY_PIECE = 4096, 65536


class RequestHandler(Protocol):
    """The handler of complete requests, as connections and the server use it.

    `pulse`: detects stalls of the event loop; the server skips the sweep right after a stall.
    """

    pulse: Pulse

    def handle(self, client: Downstream, request: Request) -> None:
        """Answer a request at once with `client.reply`, or set `client.exchange` to an object that answers it later."""

    def refuse(self, status: int, message: str, target: bytes) -> tuple[Headers, bytes]:
        """Return the headers and the body of an error with which a connection itself answers a request.

        `status`: the HTTP status. `message`: the error's text. `target`: the request's target, b"" if it was not read.
        """

    def sweep(self, now: float) -> None:
        """Enforce the deadlines of requests; called a few times a second, with monotonic seconds."""


class Clients:
    """The state that all clients' connections of one server share: handler, limits, bytes of requests in memory."""

    __slots__ = ("handler", "limits", "head_fault", "origins", "room", "on_full", "held", "draining", "closed")  # fmt: skip

    def __init__(self, handler: RequestHandler, limits: Limits):
        self.handler, self.limits, self.head_fault = handler, limits, head_fault
        self.origins: Origins | None = None  # which sites' pages may use this server from a browser
        self.room: Room[Downstream] = Room()  # all connections, limited by the process's open files
        self.on_full: Callable[[], None] = lambda: None  # called when a connection is refused for lack of files
        self.held = 0  # bytes of all requests in memory, limited by `Limits.requests_bytes`
        self.draining = False  # the server is to end: each connection is closed after its answer
        self.closed = False  # the server has ended: a connection that is still accepted is closed at once


class Downstream(asyncio.Protocol):
    """The connection of one client."""

    __slots__ = (
        # for the connection's life
        "clients", "transport", "write", "parser", "closing", "close_at", "close_last", "unsent", "active_at",
        "reading_paused", "writing_paused", "known", "read",
        # the request that is being read
        "reading", "read_begun", "head_bytes", "unfinished", "told", "head_done", "target", "headers", "body", "body_bytes",
        "refused", "expects", "again", "framing", "before", "behind", "piece", "completed", "rated", "rated_at",
        # the request that is being answered, and those that wait behind it
        "exchange", "current", "waiting", "head",
        # the bytes that were received after these requests and are not parsed yet: those of `rest` from `rest_at` on
        "rest", "rest_at",
        # the bytes of all these requests, and of the one being answered, as counted in `clients.held`
        "held", "answering",
        "stranger",  # the last request had no valid API key
        "crowded",  # no file was free for this connection when it came, so its first request may be refused
    )  # fmt: skip

    def __init__(self, clients: Clients):
        self.clients = clients
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.parser = httptools.HttpRequestParser(self)  # a reference cycle, which `connection_lost` breaks
        self.closing = self.refused = self.reading_paused = self.writing_paused = False
        self.close_at = self.close_last = 0.0
        self.unsent = 0  # bytes not sent yet, when the sweep last checked this closing connection
        self.active_at = monotonic()  # when the last bytes came, or the last answer ended
        self.again = b""  # a head without its offer to upgrade the connection, to be parsed again
        self.before = bytearray()  # the earlier reads that contain a part of the unfinished head
        self.behind = False  # whether another request ended in the first of them
        self.piece = b""  # the bytes that are being parsed
        self.known: KnownHead | None = None  # the last request's head, if it can be reused
        self.read: Request | None = None  # the last request that was parsed from the present read
        self.told = 0  # how many bytes of the present read the parser has reported by its callbacks
        self.completed = False  # whether a request ended in the present read
        self.exchange: Responder | None = None
        self.current: Request | None = None
        self.waiting: deque[Request | Refusal] = deque()
        self.head: Head | None = None  # of the last replica's answer that was begun here, until idle
        self.rest, self.rest_at = b"", 0
        self.held, self.answering, self.stranger, self.crowded = 0, 0, False, False
        self._clear()

    def _clear(self) -> None:
        """Reset the state of the request that is being read."""
        self.reading = self.head_done = self.expects = False
        self.read_begun = 0.0
        self.head_bytes = 0
        self.unfinished = 0  # bytes that were read since the parser's last callback
        self.framing = 0  # bytes after the head that belong neither to the body nor to a trailer
        self.target = b""
        self.headers: Headers = []
        self.body: list[bytes | bytearray] = []
        self.body_bytes = 0
        self.rated = 0  # the value of `body_bytes` when the rate was last checked
        self.rated_at = self.active_at

    # --- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        # Relays bytes of an answer as the replica framed them; no method of ours is called for each read of a stream.
        self.write = self.transport.write
        if self.clients.closed:
            self.transport.abort()
        else:
            self.crowded = not self.clients.room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that the connection keeps, and end the request that is being answered.

        The object that answers it is told whether the server ended the connection (`shut_down`) or the client
        (`client_gone`).
        """
        self.clients.room.leave(self)
        self.closing = True
        self.waiting.clear()
        exchange, self.exchange, self.current = self.exchange, None, None
        if exchange is not None and self.clients.closed:
            exchange.shut_down()
        elif exchange is not None:
            exchange.client_gone()
        self._hold(-self.held)
        self.answering = 0
        # The parser and this object refer to each other and to the uploaded bytes, which otherwise only the garbage
        # collector would free, hours later.
        self.parser = None  # type: ignore[assignment]
        self.known = self.read = None
        self.again = self.rest = self.piece = b""
        self._clear()

    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.exchange is not None:
            self.exchange.pause_reading()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.exchange is not None:
            self.exchange.resume_reading()
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        """Parse a read from the client; a request whose head equals the last one is not parsed again (`KnownHead`).

        While two requests wait, or bytes are left unparsed, reading from the client is paused.
        """
        now = monotonic()
        if self.closing:
            self.close_at = min(now + self.clients.limits.linger_seconds, self.close_last)
            return
        if self.refused:
            return
        self.active_at = now
        if self.rest:
            self._hold(len(data))
            self.rest += data
        elif self.reading:
            self._feed(data)
            self.read = None
        elif (
            self.known is not None
            and (request := self.known.read(data)) is not None
            and len(request.body) <= self.clients.limits.body_bytes
        ):
            self._take(request, 0)
        else:
            self._feed(data)
            request, self.read = self.read, None
            self.known = KnownHead.of(data, request) if request is not None else None
        if (self.rest or len(self.waiting) > 1) and not self.reading_paused and not self.closing:
            self.reading_paused = True
            self.transport.pause_reading()

    def _feed(self, data: bytes, at: int = 0) -> None:
        """Parse `data` from offset `at` on, piece by piece.

        The loop stops early when two requests wait for their turn, or when a long read has completed a request. The
        bytes that are left are kept in `rest` and parsed later.
        """
        begun = at
        while not (self.refused or self.closing):
            end = at + (BODY_PIECE if self.reading and self.head_done else PIECE)
            piece = data if at == 0 and end >= len(data) else data[at:end]
            if upgrade := self._parse(piece):
                # Some clients offer h2c (HTTP/2 without TLS) with every request, and the parser stops at such a head.
                # As the request may be answered without it, its head is parsed again without the offer.
                head, self.again = self.again, b""
                self.parser = httptools.HttpRequestParser(self)
                if not self.refused:
                    self._parse(head)
            at += upgrade or len(piece)
            if at >= len(data):
                return
            if len(self.waiting) > 1 or (self.completed and at - begun >= PIECE):
                break
        if not (self.refused or self.closing):
            if self.stranger:
                self._refuse(401, "without a valid API key no more requests may be sent ahead of their answers")
            else:
                self.rest, self.rest_at = data, at
                self._hold(len(data))
                if not self._fits(0):
                    self._refuse_more()
            if len(self.waiting) <= 1:
                asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        """Parse the bytes that were kept, then resume reading from the client. Does nothing while two requests wait."""
        if self.closing or not self.reading_paused or len(self.waiting) > 1:
            return
        self.active_at = self.read_begun = monotonic()
        if self.rest:
            data, self.rest = self.rest, b""
            self._hold(-len(data))
            self._feed(data, self.rest_at)
            self.read = None
        if not (self.rest or self.closing or len(self.waiting) > 1):
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> int:
        """Parse `data`; return 0, or the offset where it stopped: after a head that offers to upgrade the connection.

        The parser calls the `on_` methods for what it finds. Requests that are not valid HTTP are refused.
        """
        self.told, self.completed, self.piece = 0, False, data
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            end: int = upgrade.args[0]
            return end
        except httptools.HttpParserCallbackError as error:
            self._failed(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        self.piece = b""
        self._count_untold(len(data) - self.told)
        if self.reading and not self.head_done:
            self.behind = self.completed or bool(self.before and self.behind)
            self.before += data
        elif self.before:
            self.before.clear()
        return 0

    def _count_untold(self, size: int) -> None:
        """Limit the bytes that the parser buffers without a callback: refuse a request that has too many.

        The parser reports a line only once it is complete, and never reports chunk extensions. If a request ended in
        the last read, its unreported bytes are not counted, since they may belong to either of two requests. Such a
        read has at most 256 kB.

        `size`: the number of bytes in the last read that the parser has not reported.
        """
        limit = self.clients.limits.head_bytes
        if self.completed:
            self.unfinished = self.framing = 0
        elif self.reading and self.head_done:
            self.framing += size
            self.unfinished = 0 if self.told else self.unfinished + size
            if self.unfinished > limit or self.framing > limit + FRAMING_PER_BYTE * self.body_bytes:
                self._refuse(400, f"more than {limit} bytes of chunk extensions, or of a trailer line without an end")
        else:  # the bytes belong to a head, or to blank lines before one
            self.unfinished = size if self.told else self.unfinished + size
            if self.unfinished > limit:
                self._refuse_head()

    # --- the parser's calls

    def on_message_begin(self) -> None:
        self._clear()
        self.clients.room.idle.pop(self, None)
        self.reading = True
        self.read_begun = self.active_at

    def on_url(self, url: bytes) -> None:
        self.target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:  # a trailer, which has no meaning for these requests
            self._count_head(len(name) + len(value))
            return
        self.headers.append((name.lower(), value))
        self._count_head(len(name) + len(value))
        if len(self.headers) > self.clients.limits.header_count:
            self._refuse(431, f"more than {self.clients.limits.header_count} headers")

    def _count_head(self, size: int) -> None:
        self.told += size
        self.head_bytes += size
        if self.head_bytes > self.clients.limits.head_bytes:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Refuse a request whose head is faulty or announces too large a body; ask for the body if the client waits."""
        self.head_done = True
        version = self.parser.get_http_version()
        self.crowded = self.crowded and not self.clients.room.admit(self)
        if self.crowded:
            self._refuse_connection()
        elif (fault := self.clients.head_fault(version, self.headers)) is not None:
            self._refuse(*fault)
        elif self._is_foreign():
            self._refuse(400, "malformed HTTP request: the request line is not METHOD TARGET HTTP/1.1")
        if self.refused or self.parser.should_upgrade():  # `_feed` has the head parsed again without its offer
            return
        for name, value in self.headers:
            if name == b"content-length":
                if int(value) > self.clients.limits.body_bytes:
                    self._refuse_body()
                elif not self._fits(int(value)):
                    self._refuse_more()
            elif name == b"expect":
                self.expects = version == "1.1"
        if self.expects and not self.refused and self.current is None and not self.waiting:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _is_foreign(self) -> bool:
        """Return whether the request line is one of another protocol (RTSP, ICE), which the parser accepts as well.

        The parser does not report the protocol, so the line is looked for in the bytes that were read. It is no such
        line if they begin with it as a line of HTTP. Otherwise, or if another request may come before it in these
        bytes, a line of RTSP or ICE counts wherever it is.
        """
        line = b"%b %b" % (self.parser.get_method(), self.target)
        read = self.before + self.piece if self.before else self.piece
        if not (self.completed or (self.before and self.behind)) and read.startswith(line + b" HTTP/"):
            return False
        return re.search(re.escape(line) + b" +(?:RTSP|ICE)/", read) is not None

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body, or refuse the request if the body or all requests together become too large."""
        if self.refused:
            return
        self.told += len(body)
        self.body_bytes += len(body)
        self._hold(len(body))
        if self.body_bytes > self.clients.limits.body_bytes:
            self._refuse_body()
        elif not self._fits(0):
            self._refuse_more()
        elif len(body) >= WHOLE or not self.body:
            self.body.append(body)
        elif type(self.body[-1]) is bytearray:
            self.body[-1] += body
        else:
            self.body.append(bytearray(body))

    def on_message_complete(self) -> None:
        """Begin to answer a complete request, or let it wait for its turn.

        If the head offers to upgrade the connection, it is stored in `again` without the offer, and `_feed` parses
        that.
        """
        self.completed = True
        if self.refused:
            return
        method = self.parser.get_method().decode("ascii")
        if self.parser.should_upgrade():
            if method == "CONNECT":
                self._refuse(405, "CONNECT is not supported: this is no forward proxy")
            version = self.parser.get_http_version().encode()
            kept = b"".join([b"%b: %b\r\n" % header for header in without_upgrade(self.headers)])
            self.again = b"%b %b HTTP/%b\r\n%b\r\n" % (method.encode(), self.target, version, kept)
            return
        request = Request(
            method,
            self.target,
            self.headers,
            b"".join(self.body),
            self.parser.get_http_version() == "1.0",
            self.parser.should_keep_alive(),
        )
        request.size = max(REQUEST_BYTES, self.head_bytes + HEADER_BYTES * len(self.headers))
        held = self.body_bytes
        self._clear()
        self.read = request
        self._take(request, held)

    def _take(self, request: Request, held: int) -> None:
        """Begin to answer a complete request, let it wait for its turn, or refuse it if it exceeds the budget of bytes.

        `held`: how many of its bytes are counted in `clients.held` already.
        """
        clients, more = self.clients, request.size + len(request.body) - held
        # What `_fits` and `_hold` do, without the calls, for each request.
        if self.held + clients.held + 2 * more > clients.limits.requests_bytes:
            self._hold(-held)
            return self._refuse_more(request)
        self.held += more
        clients.held += more
        if self.current is None and not self.waiting and not self.writing_paused:
            self._begin(request)
        else:
            self.waiting.append(request)

    # --- the budget of bytes

    def _hold(self, size: int) -> None:
        """Count `size` more bytes of requests in memory, for this connection and for all; fewer if it is negative."""
        self.held += size
        self.clients.held += size

    def _fits(self, size: int) -> bool:
        """Return whether this connection may keep `size` more bytes of requests in the gateway's memory.

        With them, the free part of the budget must still be at least as large as the connection's own part. A few
        clients with large requests thus always leave room for many clients with small ones.
        """
        return self.held + self.clients.held + 2 * size <= self.clients.limits.requests_bytes

    # --- for the handler and its exchanges

    def serve_stranger(self) -> None:
        """Mark the client as one without a valid API key: none of its requests is kept while another is being answered.

        If the client has not read an earlier answer completely, the connection ends after the current request.
        """
        self.stranger = True
        if self.current is not None and self.transport.get_write_buffer_size():
            self.current.keep_alive = False

    def reply(self, status: int, body: bytes, headers: Headers) -> None:
        """Answer the current request with a complete response that the gateway itself makes, and end the request."""
        request = self.current
        assert request is not None
        close = not request.keep_alive or self.clients.draining
        if request.http10 and not close:
            headers = [*headers, KEEP_ALIVE]
        if self.clients.origins is not None:
            headers = [*headers, *self.clients.origins.headers(request.header(b"origin"))]
        self.transport.write(response(status, body, headers, head_only=request.method == "HEAD", close=close))
        self.finish()

    def begin_answer(self, head: Head, lines: bytes, data: bytes) -> None:
        """Write a replica's response head and the first bytes of its body, in answer to the current request.

        What the head says about the connection, and about the sites whose pages may read the answer (CORS), is the
        gateway's own, not the replica's.

        `lines`: header lines to add, each with its line end. `data`: the first bytes of the body.
        """
        request, clients = self.current, self.clients
        assert request is not None
        if clients.draining or head.until_close or not request.keep_alive:
            lines += b"connection: close\r\n"
        elif request.http10:
            lines += b"%b: %b\r\n" % KEEP_ALIVE
        if clients.origins is not None:  # replaces the engine's own
            head = head.without(b"access-control-")
            lines += clients.origins.lines(request.header(b"origin"))
        self.head = head
        self.write(b"%b%b\r\n%b" % (head.raw[:-2], lines, data) if head.clean else head.block(lines) + data)

    def end_stream(self, event: bytes) -> None:
        """Write a last event to a stream that is under way, and end the current request.

        If the stream has chunked framing, the end of the body is written and the connection stays open, since closing
        it would fail the client's next request. Without that framing, closing the connection ends the stream.
        """
        head = self.head
        assert head is not None  # of the stream
        self.write(framed(event, head) + end_of_body(head))
        self.finish(keep_alive=head.is_chunked)

    def release(self) -> None:
        """Drop the current request's body, which will not be needed again."""
        if self.current is not None:
            self._hold(self.current.size - self.answering)
            self.answering = self.current.size
            self.current.body = b""

    def finish(self, keep_alive: bool = True) -> None:
        """End the current request, whose answer has been written; then begin the next one, or close the connection."""
        request, self.current, self.exchange = self.current, None, None
        self.held -= self.answering  # what `_hold` does, without the call, for each request
        self.clients.held -= self.answering
        self.answering = 0
        self.active_at = monotonic()
        if not keep_alive or request is None or not request.keep_alive or self.clients.draining:
            self._close()
        elif self.waiting:
            # Called by the event loop, so that many pipelined requests that are answered at once do not nest calls.
            asyncio.get_running_loop().call_soon(self._next)
        elif self.expects:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif not (self.reading or self.rest):
            self.head = None
            self.clients.room.idle[self] = None

    def abort(self) -> None:
        """Cut the connection in the middle of an answer, so that the client cannot take the answer for complete."""
        self.break_off()
        self.exchange = self.current = None
        self.closing = True

    def break_off(self) -> None:
        """Close the connection now, and drop the bytes that are not sent yet.

        If the client would take a close for the end of its answer, the connection is reset instead.
        """
        if self.head is not None and self.head.until_close and self.busy:
            reset_when_closed(self.transport)
        self.transport.abort()

    # --- inside

    def _begin(self, request: Request) -> None:
        """Make a request the current one, and pass it to the handler."""
        self.clients.room.idle.pop(self, None)
        self.current = request
        self.answering = request.size + len(request.body)
        try:
            if self.clients.origins is not None and (answer := self.clients.origins.preflight(request)) is not None:
                return self.reply(*answer)
            self.clients.handler.handle(self, request)
        except Exception as error:
            self._failed(error)

    def failed(self, exchange: Responder, error: Exception) -> None:
        """Handle an exception in the code that answers a request: log it, and answer 500 if that is still possible.

        `exchange`: the object that answers the request. If it no longer answers the current request, the error is only
        logged.
        """
        if self.exchange is exchange:
            self._failed(error)
        else:
            log.error("a request that was answered made the gateway fail", exc_info=error)

    def _next(self) -> None:
        """Begin the next waiting request, or send a waiting refusal, if no request is being answered."""
        if self.closing or self.current is not None or self.writing_paused or not self.waiting:
            return
        item = self.waiting.popleft()
        if isinstance(item, Refusal):
            self._answer_refusal(item)
        else:
            self._begin(item)
            self._read_on()

    def _failed(self, error: BaseException) -> None:
        """Log an exception, which is a bug of the gateway, answer 500, and end this connection."""
        log.error("a request made the gateway fail", exc_info=error)
        self.waiting.clear()
        self.refused = False  # else `_refuse` does nothing; a refusal that waited was dropped above
        exchange, request = self.exchange, self.current
        self.exchange = self.current = None
        if exchange is not None:
            exchange.client_gone()
        self._refuse(500, "the gateway failed on this request; its log says why", request)

    def refuse_at_once(self) -> None:
        """Send a 503 to a client for whose connection no file is free, and close it, without waiting for a request."""
        self._refuse_connection()
        # Close the connection in the next event-loop iteration: the 503 is sent in this one.
        asyncio.get_running_loop().call_soon(self.break_off)

    def can_give_way(self) -> bool:
        """Return whether this connection can be closed without losing an answer or a request."""
        return not self.busy and not has_data(self.transport)

    def _refuse_connection(self) -> None:
        if not (self.refused or self.closing):
            self.clients.on_full()
        self._refuse(503, "the gateway may open no more files, and no connection is idle; try again")

    def _refuse_head(self) -> None:
        self._refuse(431, f"request head larger than {self.clients.limits.head_bytes} bytes")

    def _refuse_more(self, request: Request | None = None) -> None:
        self._refuse(503, "the gateway holds as many bytes of requests as it may (request_budget); try again", request)

    def _refuse_body(self) -> None:
        self._refuse(413, f"request body larger than {self.clients.limits.body_bytes} bytes (max_body_bytes)")

    def _refuse(self, status: int, message: str, request: Request | None = None) -> None:
        """Read no more requests from the client, and answer with this error once its earlier requests are answered.

        The connection is closed after the error. `request`: the refused request if it was read completely, or None if
        it is the one that is being read.
        """
        if self.refused or self.closing:
            return
        if request is not None:
            refusal = Refusal(status, message, request.target, request.method == "HEAD", request.headers)
        else:  # as long as there is no target, the parser's method is that of the previous request
            head_only = self.target != b"" and self.parser.get_method() == b"HEAD"
            refusal = Refusal(status, message, self.target, head_only, self.headers)
        self.refused = True
        self.reading = False
        self._hold(-self.body_bytes)
        self.body, self.body_bytes = [], 0
        self._hold(-len(self.rest))
        self.rest = b""
        if self.current is None and not self.waiting:
            self._answer_refusal(refusal)
        else:
            self.waiting.append(refusal)

    def _answer_refusal(self, refusal: Refusal) -> None:
        """Write an error as the last answer on this connection, and begin to close the connection."""
        target = origin_form(refusal.target)
        headers, body = self.clients.handler.refuse(refusal.status, refusal.message, target)
        if refusal.request_id:
            headers = [*headers, (b"x-request-id", refusal.request_id)]
        if self.clients.origins is not None:
            headers = [*headers, *self.clients.origins.headers(refusal.origin)]
        self.transport.write(response(refusal.status, body, headers, head_only=refusal.head_only, close=True))
        # Closing the connection with unread data in its socket would reset it, and the client would lose the answer. So
        # only the sending side is closed. What the client still sends is discarded, until it closes the connection or
        # pauses for `linger_seconds`, but for `flush_seconds` at most.
        limits, now = self.clients.limits, monotonic()
        self.closing = True
        self.close_at, self.close_last = now + limits.linger_seconds, now + limits.flush_seconds
        self._resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self) -> None:
        """Close the connection once everything is sent, or once nothing could be sent for `keep_alive_seconds`."""
        self.closing = self.refused = True
        self._hold(self.answering - self.held)
        self.waiting.clear()
        self.rest, self.body, self.body_bytes = b"", [], 0
        self.unsent = self.transport.get_write_buffer_size()
        self.close_at = self.close_last = monotonic() + self.clients.limits.keep_alive_seconds
        self.transport.close()

    def end(self) -> None:
        """Close this connection because the server ends; called only if no request is being answered.

        If a request is still being received, it is refused with a 503 first.
        """
        if self.reading:
            self._refuse(503, "the server is shutting down")
        if not self.closing:
            self.transport.close()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, or an answer is not sent completely."""
        return self.current is not None or self.transport.get_write_buffer_size() > 0

    def check(self, now: float) -> None:
        """Enforce the connection's deadlines: refuse a request that comes too slowly, close an idle connection.

        Called by the server's sweep. `now`: in monotonic seconds.
        """
        limits, ran = self.clients.limits, self.clients.handler.pulse.ran
        if self.reading_paused and not self.closing and has_left(self.transport):
            self._close()
        elif self.closing:
            left = self.transport.get_write_buffer_size()
            if left < self.unsent:  # the client is still reading
                self.unsent = left
                self.close_at = self.close_last = now + limits.keep_alive_seconds
            elif now > self.close_at:
                self.break_off()
        elif self.reading:
            if self.reading_paused or (self.expects and (self.current is not None or self.waiting)):
                self.read_begun = self.rated_at = now  # the client waits for the gateway
            elif not self.head_done:
                if ran(self.read_begun, now) > limits.head_seconds:
                    self._refuse(408, f"request head not complete after {limits.head_seconds:g} s")
            elif ran(self.read_begun, now) > limits.body_seconds:
                self._refuse(408, f"request body not complete after {limits.body_seconds:g} s (upload_timeout_s)")
            elif ran(self.rated_at, now) > limits.body_gap_seconds:
                if self.body_bytes - self.rated < limits.body_rate * limits.body_gap_seconds:
                    self._refuse(
                        408,
                        f"less than {limits.body_rate} bytes a second of the request body for {limits.body_gap_seconds:g} s",
                    )
                self.rated, self.rated_at = self.body_bytes, now
        elif self.crowded and self.current is None and now - self.active_at > limits.linger_seconds:
            self._refuse_connection()
        elif self.current is None and now - self.active_at > limits.keep_alive_seconds:
            self._close()
