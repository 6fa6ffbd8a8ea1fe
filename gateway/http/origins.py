"""CORS: which other sites' pages may use this server from a browser (Fetch standard; `--allow-origin`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .messages import Headers, Request

ANY = "*"
PREFLIGHT_SECONDS = b"600"  # how long a browser caches the answer to a preflight; engines send the same value
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"


def check_origin(text: str) -> str:
    """Return one value of `--allow-origin` if it is valid, else raise ValueError."""
    if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@\"']+", text):
        raise ValueError(
            f"{text[:300]!r} is not an origin as browsers write it, like https://app.example or "
            "http://localhost:3000, without a path; * allows every page"
        )
    return text


class Origins:
    """The origins whose pages may use this server, and the CORS headers for them.

    `allowed`: the origins; "*" allows all.
    `exposed`: the names of response headers that their pages may read, separated by commas.
    """

    def __init__(self, allowed: Sequence[str], exposed: bytes):
        self._all, self._allowed, self._exposed = ANY in allowed, frozenset(allowed), exposed

    def headers(self, origin: str | None) -> Headers:
        """Return the CORS headers for a response. `origin`: the request's Origin header, or None."""
        found: Headers = [] if self._all else [(b"vary", b"Origin")]
        if (allowed := self._allowed_as(origin)) is not None:
            found += (b"access-control-allow-origin", allowed), (b"access-control-expose-headers", self._exposed)
        return found

    def lines(self, origin: str | None) -> bytes:
        """Return the CORS headers for a response as header lines."""
        return b"".join([b"%b: %b\r\n" % header for header in self.headers(origin)])

    def preflight(self, request: Request) -> tuple[int, bytes, Headers] | None:
        """Return the (status, body, headers) that answer a browser's preflight request; None for any other request.

        The caller still has to add the CORS headers that every answer gets (`headers`).
        """
        origin = request.header(b"origin")
        if request.method != "OPTIONS" or origin is None or request.header(b"access-control-request-method") is None:
            return None
        if self._allowed_as(origin) is None:
            return 400, b"pages of this origin may not use this server (--allow-origin)", []
        headers: Headers = []
        wanted = request.header(b"access-control-request-headers")
        if wanted:
            headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        headers += (b"access-control-allow-methods", METHODS), (b"access-control-max-age", PREFLIGHT_SECONDS)
        return 200, b"", headers

    def _allowed_as(self, origin: str | None) -> bytes | None:
        """Return the value of `access-control-allow-origin` for this origin, or None if it is not allowed."""
        if origin is None or not (self._all or origin in self._allowed):
            return None
        return b"*" if self._all else origin.encode("latin-1")
