"""The heads that the gateway writes: of a request to a replica, and what it adds to a response's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..http.messages import HOP_BY_HOP

if TYPE_CHECKING:
    from .life import Life

# A collected body is sent with its length; Host is the replica's.
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"transfer-encoding", b"expect"}


def request_head(life: Life, length: int) -> bytes:
    request = life.request
    backend = life.backend
    version = b"1.0" if request.http10 else b"1.1"
    head = b"%b %b HTTP/%b\r\n%b%b" % (request.method.encode(), request.target, version, backend.host_line, request.end_to_end(backend.not_forwarded))
    if request.header(b"x-request-id") is None:
        head += b"x-request-id: %b\r\n" % life.id
    if length or request.method in ("POST", "PUT", "PATCH"):
        head += b"content-length: %d\r\n" % length
    return head + b"\r\n"


def response_lines(life: Life, last: bool) -> bytes:
    """The header lines that the gateway adds to a replica's answer; `last`: the connection ends with it."""
    dispatcher = life.dispatcher
    lines = b"" if life.held.get(b"x-request-id") is not None else b"x-request-id: %b\r\n" % life.id
    if dispatcher.response_headers:
        lines += b"x-hitherto-replica: %b\r\n" % life.backend.id.encode()
    if dispatcher.cached_tokens_header and life.prompt is not None:
        lines += b"x-hitherto-cached-tokens: %d\r\n" % life.placement.overlap
    if last or life.held.until_close or not life.request.keep_alive:
        lines += b"connection: close\r\n"
    return lines
