"""What both sides of the wire share: status lines, hop-by-hop headers, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1, and the older names that proxies strip as well. `transfer-encoding` is not here:
# responses keep their own framing, and a collected request body gets a content-length instead.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"upgrade",
    )
)

ABSOLUTE = re.compile(rb"^[a-zA-Z][\w+.-]*://[^/?]*")

STATUS_LINE = {s.value: b"HTTP/1.1 %d %s\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client may make the gateway hold. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    header_count: int = 200
    body_bytes: int = 64 * 1024 * 1024
    head_seconds: float = 10.0
    body_gap_seconds: float = 30.0
    keep_alive_seconds: float = 75.0
    linger_seconds: float = 2.0  # after a refusal: how long a client may pause while we read on into nothing
    flush_seconds: float = 30.0  # how long a closing connection may take to send what is left, or to linger in all


class Request:
    """One request, complete: head parsed, body collected."""

    __slots__ = ("method", "target", "path", "headers", "body", "http10", "keep_alive", "begun")

    def __init__(self, method: str, target: bytes, headers: Headers, body: bytes, http10: bool, keep_alive: bool, begun: float):
        self.method = method
        if target[:1] != b"/" and b"://" in target:  # absolute form, which a server must accept (RFC 9112, 3.2.2)
            target = ABSOLUTE.sub(b"", target)
            target = target if target[:1] == b"/" else b"/" + target
        self.target = target
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.headers = headers
        self.body = body
        self.http10 = http10
        self.keep_alive = keep_alive
        self.begun = begun

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None


def connection_tokens(headers: Headers) -> set[bytes]:
    """Header names that a `Connection` header declares to be hop-by-hop (RFC 9110, 7.6.1)."""
    return {
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    }


def end_to_end(headers: Headers, drop: frozenset[bytes] = HOP_BY_HOP) -> bytes:
    """The header block without hop-by-hop headers, nor those that `Connection` names, nor `drop`."""
    named = connection_tokens(headers)
    return b"".join(
        [b"%b: %b\r\n" % (name, value) for name, value in headers if name not in drop and name not in named]
    )


def response(status: int, body: bytes, headers: Headers = [], *, head_only: bool = False, close: bool = False) -> bytes:
    """A whole response of ours. `head_only` states the length of the body but leaves it out (HEAD)."""
    lines = [STATUS_LINE[status]]
    lines += [b"%b: %b\r\n" % h for h in headers]
    lines.append(b"content-length: %d\r\n" % len(body))
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)
