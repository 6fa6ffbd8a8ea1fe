"""The `cache_salt` of a tenant: only the tenant's own requests find what they left in an engine's cache.

A salt is part of the hashes of KV cache blocks. The tenant's salt is written into the request's body before anything
reads the body, so that the gateway's block hashes and the engine's have the same salt. If the client sends a salt too,
one derived from both is written. A client therefore cannot choose the salt of another tenant, but can divide the
tenant's own cache further.
"""

from __future__ import annotations

import base64
import hashlib
import re

from ..errors import ApiError
from ..http.messages import Request
from ..members import no_object, takes_members, with_members

# Paths whose bodies take no salt: vLLM (0.32) ignores it there, and caches without it.
_WITHOUT_SALT = frozenset(("/cohere/v2/chat", "/v2/embed"))
_NAMED = b'"cache_salt"'
_GIVEN = re.compile(rb'"cache_salt"[ \t\r\n]*:[ \t\r\n]*"([^"\\]*)"')


def salt_request(request: Request, salt: str) -> ApiError | None:
    """Write the tenant's cache salt into a request's body and return None, or return the error that refuses it."""
    if not takes_members(request):
        return None
    if request.path in _WITHOUT_SALT:
        return ApiError(
            403,
            f"engines take no cache_salt at {request.path}, and this API key has a cache of its own: ask at another path",
            code="path_not_allowed",
        )
    salted = with_salt(request.body, salt)
    if salted is None:
        return no_object("this API key has a cache of its own, and that is where its salt goes")
    request.body = salted
    return None


def with_salt(body: bytes, salt: str) -> bytes | None:
    """Return the JSON object in `body` with this cache salt added; None if the body cannot be a JSON object.

    If the body has a salt already, one derived from both takes its place.
    """
    if body.find(_NAMED) >= 0 and (given := _GIVEN.findall(body)):
        salt = _derived(salt, given[-1])
    return with_members(body, {b"cache_salt": b'"%b"' % salt.encode()})


def _derived(salt: str, given: bytes) -> str:
    """Return a salt derived from the tenant's salt and the one that the client sent.

    Another tenant's request with the same salt from its client gets a different result.
    """
    return base64.urlsafe_b64encode(hashlib.sha256(b"%b\n%b" % (salt.encode(), given)).digest()[:24]).decode()
