"""The check of clients' API keys against the key file.

The key file is read again whenever it changes. If the new contents cannot be used, the keys read before stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..errors import ApiError
from ..files import Followed
from ..http.messages import Headers, Request, head_fault
from .key_file import KeyFileError, digest, read
from .tenant import Tenant

log = logging.getLogger("hitherto")

OPEN_PATHS = frozenset(("/health",))
# Browsers send a preflight request without a key; engines compute nothing for it.
OPEN_METHODS = frozenset(("OPTIONS",))
CLIENT_KEYS = frozenset((b"authorization", b"x-api-key"))  # the headers in which a client's key may be
# Without a valid key, a body of up to this many bytes is read before the request is refused. Meanwhile the body counts
# in the memory budget of all requests, which strangers must not fill: to fill 512 MiB they need 131,072 connections.
LARGE_BYTES = 4 * 1024
CHALLENGE = ((b"www-authenticate", b"Bearer"),)


class Keys:
    """The API keys of one key file. Raises KeyFileError if the file cannot be used.

    `classes`: the names of the priority classes that tenants may have; if empty, tenants may have any.
    """

    def __init__(self, path: Path, classes: Collection[str] = ()):
        self._path, self._classes = path, classes
        self._files = Followed([path])
        self._keys = read(path, classes)  # by the hashes of the keys
        self.names: dict[str, None] = {}  # the present tenants' names, in order; the dict itself is never replaced
        self._name_all()
        self._loaded = time.time()
        self.problem = ""  # why the file as it is now cannot be used; "" if it can
        self.on_gone: list[Callable[[str], None]] = []  # called with the name of each tenant that is gone

    def authenticate(self, request: Request) -> Tenant | ApiError | None:
        """Return the tenant whose key the request has, or the error that refuses it.

        Returns None for a request without a valid key that is open to everybody, such as /health.
        """
        key = _key(request.header(b"authorization"), request.header(b"x-api-key"))
        if (tenant := self._tenant(key)) is not None:
            return tenant
        if request.path in OPEN_PATHS or request.method in OPEN_METHODS:
            return None
        return ApiError(401, _refusal(key), code="invalid_api_key", headers=CHALLENGE)

    def head_fault(self, version: str, headers: Headers) -> tuple[int, str] | None:
        """Return the HTTP status and error text for a request head that is refused, or None.

        Besides faults of HTTP (`messages.head_fault`), a head that announces a large body is refused with 401 if it has
        no valid key. This bounds the memory that unknown clients can occupy.
        """
        fault = head_fault(version, headers)
        if fault is not None or not any(_is_large(*header) for header in headers):
            return fault
        named = dict(reversed(headers))  # the first of each name
        key = _key(named.get(b"authorization"), named.get(b"x-api-key"))
        return None if self._tenant(key) is not None else (401, _refusal(key))

    def _tenant(self, key: str | None) -> Tenant | None:
        # The time of the lookup reveals no key: only hashes are compared, and nobody can choose the bytes of a hash.
        return self._keys.get(digest(key)) if key else None

    def status(self) -> dict[str, Any]:
        return {
            "file": str(self._path),
            "tenants": len(self.names),
            "keys": len(self._keys),
            "loaded_seconds_ago": round(time.time() - self._loaded, 3),
            "problem": self.problem,
        }

    async def follow(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        await self._files.run(self._reload)

    async def _reload(self) -> None:
        try:
            tenants = await asyncio.to_thread(read, self._path, self._classes)
        except KeyFileError as error:
            self.problem = str(error)
            log.error("API keys: the file cannot be used, the keys known so far stay: %s", error)
            return
        self._keys, self._loaded, self.problem = tenants, time.time(), ""
        gone = self._name_all()
        log.info("API keys: %d keys of %d tenants were read from %s", len(tenants), len(self.names), self._path)
        for told in self.on_gone:
            for name in gone:
                told(name)

    def _name_all(self) -> list[str]:
        """Update `names` to the tenants of the keys read last, and return the names that the key file no longer has."""
        now = {tenant.name for tenant in self._keys.values()}
        gone = [name for name in self.names if name not in now]
        for name in gone:
            del self.names[name]
        self.names.update(dict.fromkeys(sorted(now)))
        return gone


def _key(authorization: str | bytes | None, api_key: str | bytes | None) -> str | None:
    """Return the API key in the values of these two headers, or None if there is none.

    OpenAI's clients send the key as `Authorization: Bearer KEY`, and Anthropic's as `x-api-key`. If a request has both
    headers, only `Authorization` is read.
    """
    given = api_key if authorization is None else authorization
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    if authorization is None or text is None:
        return text
    scheme, _, key = text.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _refusal(key: str | None) -> str:
    what = "this API key is not known here" if key else "an API key is needed"
    return f"{what}: send `Authorization: Bearer KEY` or `x-api-key: KEY` with the one that you were given"


def _is_large(name: bytes, value: bytes) -> bool:
    """Return whether a header announces a body that may have more than 4 KiB (LARGE_BYTES)."""
    return name == b"transfer-encoding" or (name == b"content-length" and (len(value) > 9 or int(value) > LARGE_BYTES))
