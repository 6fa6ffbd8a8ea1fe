"""The access rules of the admin API.

Whoever adds a replica there receives prompts and API keys. Three kinds of strangers are kept out, each by its own rule:

* Web pages of other sites in an operator's browser. Such a page may post a form to `http://gateway:8081/replicas`, or
  send any request to an engine with a mere link to `/replicas/ID/engine/PATH`. Browsers tell from which site a request
  comes: `Origin` must be this very host, and `Sec-Fetch-Site` must not contradict it. Browsers send `Sec-Fetch-Site`
  only to localhost and over https, so this header alone is no protection. Requests that may change something must also
  be `application/json`, which a form cannot send.
* Pages whose host name was rebound to this machine's address after they were loaded (DNS rebinding). A browser takes
  the gateway for their own site, so `Origin` does not give them away, but `Host` has the page's name. `Host` must
  therefore name this machine, or be a name given with `--admin-allow-host`. An address is always allowed, since nobody
  can rebind one.
* Everybody else on the network. Without a token the admin API listens on a loopback address only (`settings` enforces
  that). With a token, each request must carry it, as `Authorization: Bearer TOKEN` or as the password of HTTP Basic,
  for which a browser asks. Only the two probes, /livez and /readyz, are answered without the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import socket
from collections.abc import Collection

from aiohttp import hdrs, web

from replicas.names import is_address

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::\d{0,5})?")
PROBES = frozenset(("/livez", "/readyz"))
READS = frozenset(("GET", "HEAD"))
PASSED_ON = "engine"  # the name of the route to engines; any request on it may change something in an engine
# The allowed types of bodies. Another site's page may send these only after a CORS preflight, which is never granted.
# The second type is that of a streamed answer posted to /decide/ID/done.
BODIES = frozenset(("application/json", "text/event-stream"))
# Types that any page's form may send without a preflight, also with no body.
FORMS = frozenset(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
CHALLENGE = 'Basic realm="Hitherto: any user, the admin token as password", charset="UTF-8"'


class Refusal(Exception):
    """Raised to answer a request with an error: an HTTP status, a message and an error code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Guard:
    """The check of each request to the admin API.

    `names`: host names that requests may use besides this machine's own. `token`: the admin token, or None if none is
    required.
    """

    def __init__(self, names: Collection[str] = (), token: str | None = None) -> None:
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower().rstrip(".") for name in names)}
        self._token = token.encode() if token else None

    def check(self, request: web.Request) -> None:
        """Raise Refusal for a request that is not allowed. The request's body is not read."""
        self._check_host(request)
        self._check_page(request)
        if request.path not in PROBES and not self.knows_token(request):
            given = hdrs.AUTHORIZATION in request.headers
            what = "this is not the admin token" if given else "the admin side asks for its token"
            how = "send `Authorization: Bearer TOKEN` with the token that the gateway was started with"
            raise Refusal(401, f"{what}: {how} (--admin-token, HITHERTO_ADMIN_TOKEN)", "admin_token")
        if _may_write(request):
            self._check_body(request)

    def _check_host(self, request: web.Request) -> None:
        given = request.headers.getall(hdrs.HOST, [])
        if not given:
            return  # HTTP/1.0: a health check, no browser
        host = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if host is None:
            raise Refusal(400, "the request has no valid Host header", "invalid_host")
        name = host[1].lower().rstrip(".")
        if name not in self._names and not is_address(name.strip("[]")):
            shown = name[:253]
            raise Refusal(
                403,
                f"the admin side does not answer to the host name {shown!r}. Use its address, "
                f"or start the gateway with --admin-allow-host {shown}",
                "host_not_allowed",
            )

    def _check_page(self, request: web.Request) -> None:
        host = request.headers.get(hdrs.HOST, "").lower()
        origins = [origin.lower().partition("://")[2] for origin in request.headers.getall(hdrs.ORIGIN, [])]
        cross_site = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if any(origin != host for origin in origins) or (cross_site and _may_write(request)):
            message = "requests from other sites' pages are refused; use curl or this server's own page"
            raise Refusal(403, message, "cross_site")

    def _check_body(self, request: web.Request) -> None:
        kind = request.content_type
        if kind not in BODIES if request.body_exists else kind in FORMS:
            given = request.headers.get(hdrs.CONTENT_TYPE) or "not given"
            how = "send it as application/json (curl: -H 'content-type: application/json')"
            raise Refusal(415, f"the body's Content-Type is {given}; {how}", "unsupported_media_type")

    def knows_token(self, request: web.Request) -> bool:
        """Return whether the request has the admin token; True if no token is required."""
        if self._token is None:
            return True
        scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        said = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                said = base64.b64decode(said, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(said, self._token)


def _may_write(request: web.Request) -> bool:
    return request.method not in READS or request.match_info.route.name == PASSED_ON
