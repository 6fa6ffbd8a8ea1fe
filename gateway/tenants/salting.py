"""The `cache_salt` of a tenant: only the tenant's own requests find what they left in an engine's cache.

It is written into the body before anything reads that, so that the gateway's block hashes and the engine's have the
same salt. It replaces a salt of the client's, so that a client cannot choose one; a different one from the client
divides the tenant's own cache further.
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
    """Write the salt into a request's body, or return the error that refuses the request."""
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
    """Return the JSON object in `body` with this salt; None if it cannot be an object."""
    if body.find(_NAMED) >= 0 and (given := _GIVEN.findall(body)):
        salt = _derived(salt, given[-1])
    return with_members(body, {b"cache_salt": b'"%b"' % salt.encode()})


def _derived(salt: str, given: bytes) -> str:
    """Return a salt for this tenant and the client's salt; no two tenants get the same one."""
    return base64.urlsafe_b64encode(hashlib.sha256(b"%b\n%b" % (salt.encode(), given)).digest()[:24]).decode()
