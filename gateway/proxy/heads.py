"""The heads that the gateway writes: of a request to a replica, and what it adds to a response's."""

from __future__ import annotations

from typing import NamedTuple

from .attempt import Attempt
from .exchange import Exchange


class Parent(NamedTuple):
    """The span that the replica's own are to be below: the header's value, and which of the client's it replaces."""

    value: bytes
    replaces: frozenset[bytes]


def request_head(exchange: Exchange, attempt: Attempt, length: int, parent: Parent | None) -> bytes:
    """`parent`: None where what the client said of that stands."""
    request, backend = exchange.request, attempt.backend
    version = b"1.0" if request.http10 else b"1.1"
    dropped, named = backend.not_forwarded, request.header(b"x-request-id")
    if named == "":
        dropped |= {b"x-request-id"}
    if parent is not None:
        dropped |= parent.replaces
    head = b"%b %b HTTP/%b\r\n%b%b" % (
        request.method.encode(),
        request.target,
        version,
        backend.host_line,
        request.end_to_end(dropped),
    )
    if parent is not None:
        head += b"traceparent: %b\r\n" % parent.value
    if not named:
        head += b"x-request-id: %b\r\n" % exchange.id
    if length or request.method in ("POST", "PUT", "PATCH"):
        head += b"content-length: %d\r\n" % length
    return head + b"\r\n"


class Added:
    """The header lines that the gateway adds to a replica's answer. `replica`: which one it was; `cached_tokens`: how
    many tokens of the prompt it was predicted to hold."""

    def __init__(self, replica: bool, cached_tokens: bool):
        self._replica, self._cached_tokens = replica, cached_tokens

    def lines(self, exchange: Exchange, attempt: Attempt, last: bool) -> bytes:
        """`last`: the connection ends with this answer."""
        lines = b"" if attempt.response_head.get(b"x-request-id") is not None else b"x-request-id: %b\r\n" % exchange.id
        if self._replica:
            lines += b"x-hitherto-replica: %b\r\n" % attempt.backend.id.encode()
        if self._cached_tokens and attempt.prompt is not None:
            lines += b"x-hitherto-cached-tokens: %d\r\n" % attempt.placement.overlap
        if last or attempt.response_head.until_close or not exchange.request.keep_alive:
            lines += b"connection: close\r\n"
        return lines
