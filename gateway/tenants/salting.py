"""A tenant's own `cache_salt`: what its requests leave in an engine's cache only its requests find.

It is written into the body before anything reads that, so that the gateway's block hashes and the engine's have the
same salt, and in the place of the client's own, so that it cannot choose one. A salt that it sends divides the tenant's
own cache further.
"""

from __future__ import annotations

import base64
import hashlib
import re

from ..errors import ApiError
from ..http.messages import Request
from ..members import no_object, takes_members, with_members

# Whose bodies have no place for a salt: vLLM (0.32) passes over one there, and caches without it.
_WITHOUT_SALT = frozenset(("/cohere/v2/chat", "/v2/embed"))
_NAMED = b'"cache_salt"'
_GIVEN = re.compile(rb'"cache_salt"[ \t\r\n]*:[ \t\r\n]*"([^"\\]*)"')


def salt_request(request: Request, salt: str) -> ApiError | None:
    """Write the salt into a request's body, or tell why the request is refused."""
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
    """The body of a JSON object with this salt; None for what cannot be one."""
    if body.find(_NAMED) >= 0 and (given := _GIVEN.findall(body)):
        salt = _derived(salt, given[-1])
    return with_members(body, {b"cache_salt": b'"%b"' % salt.encode()})


def _derived(salt: str, given: bytes) -> str:
    """Another one for each that a client gives, and for no two tenants the same."""
    return base64.urlsafe_b64encode(hashlib.sha256(b"%b\n%b" % (salt.encode(), given)).digest()[:24]).decode()
