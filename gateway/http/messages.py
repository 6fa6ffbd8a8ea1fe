"""The parts of HTTP/1.1 that both sides use, clients' and replicas': requests, header lines, responses, limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

Headers = list[tuple[bytes, bytes]]

# The headers that are valid for one connection and not forwarded: those of RFC 9110, 7.6.1, and older names that
# proxies remove as well. `transfer-encoding` is not one of them: responses keep their framing, and a request's body,
# which is collected, is sent with a content-length instead.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer upgrade".split()
)

ABSOLUTE = re.compile(rb"^[a-zA-Z][\w+.-]*://[^/?]*")

# The longest head that a connection keeps (`KnownHead`): idle connections keep theirs, and a client may have thousands.
KNOWN_BYTES = 8 * 1024

# The most headers of such a head: as Python objects, short headers take 50 times their bytes.
KNOWN_HEADERS = 64

# The approximate bytes of memory of a small request without its body, and of each header without its own bytes: a pair,
# two strings, an entry by name.
REQUEST_BYTES, HEADER_BYTES = 2048, 256

LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.I)

# Headers that say where a message ends, or to whom it goes. A `Connection` header must not name them (RFC 9110, 7.6.1):
# a recipient that removes the named headers would read another message than one that does not.
FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))
# Headers of an offer to upgrade the connection to another protocol, which is never accepted.
UPGRADE = frozenset((b"upgrade", b"http2-settings"))

# The most digits of a Content-Length. The parser accepts any number of leading zeros, `int` at most 4,300 digits.
LENGTH_DIGITS = 20

STATUS_LINE = {s.value: b"HTTP/1.1 %d %s\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on what clients may make the gateway keep in memory; sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    header_count: int = 200
    body_bytes: int = 64 * 1024 * 1024
    # All clients' requests together that are being received, wait, are being prepared, or have no byte of an answer.
    requests_bytes: int = 512 * 1024 * 1024
    head_seconds: float = 10.0  # for receiving a request's head
    body_seconds: float = 300.0  # for receiving a request's body
    body_gap_seconds: float = 30.0  # in each such interval a body must come at `body_rate` bytes a second or more
    body_rate: int = 512
    keep_alive_seconds: float = 75.0  # after which an idle connection is closed
    # After a refusal, what the client still sends is discarded, until it pauses for `linger_seconds`, and at most for
    # `flush_seconds`; then its connection is closed.
    linger_seconds: float = 2.0
    flush_seconds: float = 30.0


def origin_form(target: bytes) -> bytes:
    """Return a request target as path and query, without the scheme and host that it may begin with.

    Servers must accept targets that begin with scheme and host (absolute form; RFC 9112, 3.2.2).
    """
    if target[:1] == b"/" or b"://" not in target:
        return target
    target = ABSOLUTE.sub(b"", target)
    return target if target[:1] == b"/" else b"/" + target


class Responder(Protocol):
    """The object that answers a request, whose methods the client's connection calls.

    `client_gone`: the client has left.
    `shut_down`: the server ends before the answer does.
    `pause_reading`: the client reads more slowly than the answer comes.
    `resume_reading`: the client has caught up.
    """

    def client_gone(self) -> None: ...
    def shut_down(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Request:
    """A complete request of a client, with its head parsed and its body collected."""

    __slots__ = ("method", "target", "path", "headers", "body", "http10", "keep_alive", "size", "named", "_kept")

    def __init__(self, method: str, target: bytes, headers: Headers, body: bytes, http10: bool, keep_alive: bool):
        self.method = method
        self.target = target = origin_form(target)
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.set_headers(headers)
        self.body = body
        self.http10 = http10
        self.keep_alive = keep_alive
        self.size = REQUEST_BYTES  # approximate bytes of memory without the body

    def set_headers(self, headers: Headers) -> None:
        """Set the headers, whose names are in lower case.

        Content-Length is left out, since `body` has the length. `KnownHead` can then use the headers for another body.
        """
        self.headers = [one for one in headers if one[0] != b"content-length"]
        self.named = dict(reversed(self.headers))  # the first value of each name
        self._kept: dict[frozenset[bytes], bytes] = {}

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header with this (lower-case) name, or None."""
        value = self.named.get(name)
        return None if value is None else value.decode("latin-1")

    def forwarded(self, lines: bytes, drop: frozenset[bytes], length: int) -> bytes:
        """Return the bytes of a request head with which this request can be sent on to a replica.

        The client's header lines are cached for each `drop`, and shared by all requests that `again` makes from this
        one.

        `lines`: header lines to add, each with its line end.
        `drop`: names of the client's headers, in lower case, that are left out.
        `length`: the bytes of the body that is sent.
        """
        kept = self._kept.get(drop)
        if kept is None:
            kept = self._kept[drop] = end_to_end(self.headers, drop)
        head = self.method.encode(), self.target, lines, kept
        if length or self.method in ("POST", "PUT", "PATCH"):
            return b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (*head, length)
        return b"%b %b HTTP/1.1\r\n%b%b\r\n" % head

    def again(self, body: bytes) -> Request:
        """Return a request with the same head and another body, which shares all that was computed from the head."""
        other: Request = object.__new__(Request)
        other.method, other.target, other.path, other.headers = self.method, self.target, self.path, self.headers
        other.http10, other.keep_alive, other.body, other.size = self.http10, self.keep_alive, body, REQUEST_BYTES
        other.named, other._kept = self.named, self._kept
        return other


class Refusal:
    """An error with which a client's connection itself answers a request, instead of passing it to the handler.

    `target`: the request's target, b"" if it was not read.
    `head_only`: whether to answer without a body, since the method is HEAD.
    `headers`: the request's headers, as far as they were read.
    """

    __slots__ = ("status", "message", "target", "head_only", "request_id", "origin")

    def __init__(self, status: int, message: str, target: bytes, head_only: bool, headers: Headers):
        self.status, self.message, self.target, self.head_only = status, message, target, head_only
        named = dict(reversed(headers))  # the first of each name
        self.request_id = named.get(b"x-request-id", b"")
        origin = named.get(b"origin")
        self.origin = None if origin is None else origin.decode("latin-1")


class KnownHead:
    """The bytes of the last request's head on a connection, and the request that was parsed from them.

    A client usually sends the same head again, except for the body's length, and the parser would give the same result
    for the same bytes. Not parsing it again, and keeping the header lines for the replica, saves 14 of 124 us per
    request.
    """

    __slots__ = ("_before", "_after", "_request")

    def __init__(self, before: bytes, after: bytes, request: Request):
        self._before, self._after, self._request = before, after, request

    @classmethod
    def of(cls, data: bytes, request: Request) -> KnownHead | None:
        """Return the head at the beginning of `data`, from which `request` was parsed; None if it cannot be reused.

        It can be reused if `data` is exactly one request, with a Content-Length, and its head is not too long.
        """
        end = data.find(b"\r\n\r\n") + 4
        length, size = LENGTH.search(data, 0, end), len(data) - end  # a tenant's salt is in `request.body` by now
        if end > KNOWN_BYTES or len(request.headers) > KNOWN_HEADERS or b"expect" in request.named:
            return None
        if length is None or int(length[1]) != size:
            return None
        return cls(data[: length.start(1)], data[length.end(1) : end], request.again(b""))

    def read(self, data: bytes) -> Request | None:
        """Return the request in `data` if `data` is exactly one request with this head, else None."""
        before = self._before
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r\n", start, start + 12)
        if end < 0 or not data.startswith(self._after, end):
            return None
        length, body = data[start:end], data[end + len(self._after) :]
        return self._request.again(body) if length.isdigit() and int(length) == len(body) else None


def connection_tokens(headers: Headers) -> set[bytes]:
    """Return the names in `Connection` headers, in lower case: headers for this connection only (RFC 9110, 7.6.1)."""
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


# This header tells an HTTP/1.0 client that the connection stays open; without it the client waits for the close.
KEEP_ALIVE = (b"connection", b"keep-alive")


def head_fault(version: str, headers: Headers) -> tuple[int, str] | None:
    """Return the status and the message that refuse a request because of its head, or None."""
    if version not in ("1.0", "1.1"):
        return 505, f"HTTP/{version} is not spoken here; HTTP/1.1 is"
    for name, value in headers:
        if name == b"content-length" and len(value) > LENGTH_DIGITS:
            return 400, f"a Content-Length of more than {LENGTH_DIGITS} digits"
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return 501, f"transfer coding {value.decode('latin-1')!r} is not known; only chunked is"
        if name == b"connection" and not FRAMING.isdisjoint(connection_tokens([(name, value)])):
            return 400, "the Connection header names a header that frames the message"
        if name == b"expect" and version == "1.1" and value.lower() != b"100-continue":
            return 417, f"unknown expectation {value.decode('latin-1')!r}; only 100-continue is known"
    hosts = [name for name, _ in headers].count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return 400, "a request needs exactly one Host header"
    return None


def without_upgrade(headers: Headers) -> Headers:
    """Return the headers without an offer to upgrade the connection to another protocol.

    The other names in `Connection` headers are kept.
    """
    kept = []
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for one in value.split(b",") if (token := one.strip()).lower() not in UPGRADE)
        kept += [(name, value)] if value and name not in UPGRADE else []
    return kept


def end_to_end(headers: Headers, drop: frozenset[bytes] = HOP_BY_HOP) -> bytes:
    """Return the header lines to forward: all headers but those that `drop` or a `Connection` header names."""
    named = connection_tokens(headers) - FRAMING
    return b"".join(
        [b"%b: %b\r\n" % (name, value) for name, value in headers if name not in drop and name not in named]
    )


def response(
    status: int,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    head_only: bool = False,
    close: bool = False,
) -> bytes:
    """Return the bytes of a complete HTTP/1.1 response, with a content-length.

    `head_only`: leave the body out, but state its length, as in the answer to HEAD.
    `close`: tell the client that the connection will be closed.
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    ending = b"connection: close\r\n" if close else b""
    end = b"" if head_only else body
    return b"%bcontent-length: %d\r\n%b\r\n%b" % (STATUS_LINE[status] + lines, len(body), ending, end)
