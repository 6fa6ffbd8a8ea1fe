"""A streaming HTTP/1.1 client that records when each chunk arrived.

It is a raw asyncio protocol on llhttp, so that the generator is not the bottleneck: the time is taken in
`data_received` before any parsing, and no coroutine wakes until a reply is complete. A request with an 8 kB body and a
reply of 64 chunks takes 0.8 ms of CPU. Connections are reused for less than vLLM's idle timeout. If a reused connection
closes before the first byte of a reply, the server had already closed it while it was idle. The request is then sent
again on another connection.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import ssl
from collections.abc import Mapping
from time import perf_counter
from urllib.parse import urlsplit

import httptools

from loadgen.drive.records import Record
from loadgen.drive.sse import Reply
from loadgen.options import BadInput

# vLLM's server closes connections idle for 5 s.
IDLE_SECONDS = 4.0
CONNECT_SECONDS = 10.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # OpenSSL's reasons for a peer without TLS
# An endpoint after /v1, which a base URL does not have: such a URL was copied from a request.
_ENDPOINT = re.compile(r"(?<=/v1)/(chat/completions|completions|responses|messages|embeddings|models)/*$")
_KEPT_HEADERS = frozenset(
    b"content-type content-length transfer-encoding x-hitherto-replica x-hitherto-cached-tokens".split()
)


class BadURL(BadInput):
    """An invalid base URL; the message says what is wrong."""


def base_url(text: str) -> str:
    """Return `text`, the value of a flag, if it is a valid base URL. Raises ArgumentTypeError if it is not."""
    try:
        Client(text).close()
    except BadURL as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        # state of the connection
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.idle_since = 0.0
        # state of one reply
        self.reply: Reply | None = None
        self.waiter: asyncio.Future[str | None] | None = None
        self.parser: httptools.HttpResponseParser | None = None
        self.headers: dict[bytes, bytes] = {}
        self.touched = False  # a byte of the reply arrived
        self.framed = True  # the reply's headers say where its body ends
        self.now = 0.0  # when the latest bytes arrived

    def connection_made(self, transport) -> None:
        self.transport = transport

    def ask(self, request: bytes, reply: Reply) -> asyncio.Future[str | None]:
        """Send `request`, and return a future that is done when the reply is complete or has failed.

        Bytes that arrive are passed to `reply`. The future's result is None for a complete reply, else the class of the
        connection's error, such as "closed" (`Record.error`).
        """
        self.reply, self.touched, self.headers = reply, False, {}
        self.parser = httptools.HttpResponseParser(self)
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiter

    def data_received(self, data: bytes) -> None:
        self.now = perf_counter()
        if self.parser is None:
            self.close()  # bytes without a request
            return
        self.touched = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.reply.record.detail = f"unreadable HTTP: {error}"
            self._finish("protocol", keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.waiter is None or self.waiter.done():
            return
        self.now = perf_counter()
        if self.touched and not self.framed and exc is None:
            self._finish(None, keep=False)  # the end of the connection is the end of the body
            return
        self.reply.record.detail = str(exc or "connection closed by the server")
        self._finish("truncated" if self.reply.started else "closed", keep=False)

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def _finish(self, error: str | None, keep: bool) -> None:
        waiter, self.waiter, self.parser = self.waiter, None, None
        if not keep:
            self.close()
        if waiter is not None and not waiter.done():
            waiter.set_result(error)

    # llhttp's callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT_HEADERS:
            self.headers[name] = value

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200:
            self.framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
            self.reply.begin(status, self.headers)

    def on_body(self, data: bytes) -> None:
        self.reply.feed(data, self.now)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.reply.end(self.now)
            self._finish(None, keep=self.framed and self.parser.should_keep_alive())


class Client:
    """A client of one server; `base_url` may end in /v1 or not. Raises BadURL.

    `headers`: sent with every request; `timeout`: seconds from sending a request to the end of its reply. When a server
    fails, no exception is raised: `ask` records the failure, and `get` returns it.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, timeout: float = 600.0):
        if not base_url.isprintable() or " " in base_url:
            raise BadURL(f"{base_url!r}: there is a space or a control character in it, write http://HOST:PORT")
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BadURL(f"{base_url!r}: {error}; write http://HOST:PORT") from None
        if parts.query or parts.fragment:
            raise BadURL(f"{base_url!r}: a base URL has neither ? nor #, write http://HOST:PORT or http://HOST:PORT/v1")
        if endpoint := _ENDPOINT.search(parts.path):
            path = parts.path[: endpoint.start()]
            raise BadURL(f"{base_url!r}: end the URL at /v1, as in {parts.scheme}://{parts.netloc}{path}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadURL(f"{base_url!r} is not an http:// or https:// URL; write http://HOST:PORT")
        self.host, self.path, self.timeout = parts.hostname, parts.path.rstrip("/"), timeout
        self.base_url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        lines = {"host": parts.netloc.rpartition("@")[2], "user-agent": "hitherto-loadgen"}
        lines |= {name.lower(): value for name, value in (headers or {}).items()}
        self.head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.idle: list[Connection] = []
        self.opened = 0

    def target(self, endpoint: str) -> str:
        """Return the path to request for an endpoint such as /v1/models: the base URL's own path comes first."""
        return self.path.removesuffix("/v1" if endpoint.startswith("/v1/") else "") + endpoint

    async def ask(self, endpoint: str, body: bytes, record: Record) -> None:
        """POST `body` to `endpoint` and fill `record` with times and reply; any failure goes to `record.error`."""
        await self._exchange(self._request("POST", endpoint, body), Reply(record))

    async def get(self, endpoint: str) -> tuple[int, bytes, str]:
        """Send a GET request; return (status, body, error in words). The status is 0 when no response came."""
        record = Record("", 0, perf_counter())
        reply = Reply(record)
        await self._exchange(self._request("GET", endpoint, b""), reply)
        problem = f"{record.error}: {record.detail}" if record.error and not record.status else ""
        return record.status, b"".join(reply.body), problem

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def _request(self, method: str, endpoint: str, body: bytes) -> bytes:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        head = f"{method} {self.target(endpoint)} HTTP/1.1\r\n{self.head}{length}\r\n"
        return head.encode("latin-1") + body

    async def _exchange(self, request: bytes, reply: Reply) -> None:
        """Send `request` on a reused or a new connection, and wait until the reply is complete or has failed."""
        record = reply.record
        record.sent = perf_counter()
        connection: Connection | None = None
        error: str | None
        try:
            async with asyncio.timeout(self.timeout):
                for connection in self._reusable():
                    error = await connection.ask(request, reply)
                    if error != "closed" or connection.touched:
                        break
                else:
                    connection = await self._connect()
                    error = await connection.ask(request, reply)
        except TimeoutError:
            error, record.detail = "timeout", f"no end after {self.timeout:g} s"
            self._drop(connection)
        except OSError as problem:
            error, record.detail = "connect", self._in_words(problem)
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        reply.settle(error, connection.now if connection and connection.now else perf_counter())
        if connection is not None and not connection.closed:
            connection.idle_since = perf_counter()
            self.idle.append(connection)

    def _reusable(self):
        """Yield the idle connections that should still be open, most recently used first."""
        while self.idle:
            connection = self.idle.pop()
            if perf_counter() - connection.idle_since > IDLE_SECONDS:
                connection.close()
            if not connection.closed:
                yield connection

    async def _connect(self) -> Connection:
        self.opened += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self.ssl)
        except TimeoutError:
            raise OSError(f"no connection to {self.host}:{self.port} within {CONNECT_SECONDS:g} s") from None
        return connection

    def _in_words(self, problem: OSError) -> str:
        if isinstance(problem, socket.gaierror):
            return f"host name {self.host!r} does not resolve"
        if isinstance(problem, ssl.SSLError) and problem.reason in _NO_TLS:
            return "it does not speak TLS; if it speaks plain HTTP, write http:// in its URL"
        return "nothing listens there" if isinstance(problem, ConnectionRefusedError) else str(problem)

    @staticmethod
    def _drop(connection: Connection | None) -> None:
        if connection is not None:
            connection.waiter = None
            connection.close()
