"""What is decided about a request before its prompt is read.

Which tenant's API key it has, whether the gateway answers it itself (`/v1/models`, `/v1/models/NAME`, `/health`), and
whether it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from replicas.ask import GATEWAY

from .. import __version__
from ..errors import JSON, ApiError, compressed, error_body
from ..http.downstream import Downstream
from ..http.messages import Request
from ..prompt.api.named import named_model
from ..prompt.pipeline import OFFLOAD_BYTES
from ..prompt.prompt import PROMPT_PATHS
from ..tenants.handover import refusal_of_head
from ..tenants.salting import salt_request
from .paths import MODELS, AllowedPaths, model_in, refusal
from .placement.eligibility import Eligibility
from .settling import Settling

if TYPE_CHECKING:
    from ..tenants.keys import Keys
    from ..tenants.metering import Metering
    from ..tenants.tenant import Tenant
    from .exchange import Exchange

GATEWAY_SIGN = GATEWAY.encode(), __version__.encode()  # shows other gateways that this is not an engine
READ_ONLY = (b"allow", b"GET, HEAD, OPTIONS")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

Answer = Callable[[Downstream, Request, "Tenant | None"], None]


class Door:
    """The check of API keys, the gateway's answers for its own paths, and its errors for what it does not forward."""

    def __init__(
        self, eligible: Eligibility, settling: Settling, allow_paths: Sequence[str], keys: Keys | None, metering: Metering | None
    ):  # fmt: skip
        """Create the answers and the list of paths that are forwarded.

        `allow_paths`: values of `--allow-path`.
        `keys`, `metering`: API keys and tenants' token limits, None without them. With keys, errors do not mention what
            only operators can do.
        """
        self._eligible, self._settling, self.keys, self._metering = eligible, settling, keys, metering
        self.allowed = AllowedPaths(allow_paths)
        self.draining = False  # the gateway shuts down and refuses new requests
        self._local: dict[str, Answer] = {MODELS: self._list_models, "/health": self._health}

    def tenant_of(self, client: Downstream, request: Request) -> Tenant | ApiError | None:
        """Return the tenant that a request's API key belongs to, or the error for a request without a valid key.

        Returns None for a path that needs no key. The client's connection notes whether there was a valid key. Without
        one, the client may not send further requests ahead of the answer to this one.
        """
        assert self.keys is not None
        tenant = self.keys.authenticate(request)
        if tenant is None or isinstance(tenant, ApiError):
            client.serve_stranger()
        else:
            client.stranger = False
        return tenant

    def refusal_of_tenant(self, exchange: Exchange, tenant: Tenant | ApiError) -> ApiError | None:
        """Return the error that refuses a tenant's request before its prompt is read; None if the request may go on.

        Before that, the request is assigned to its tenant, whose tokens are counted. If there is no error, the tenant's
        cache salt is written into the request's body.

        `tenant`: the API key's tenant, or the error for an invalid key.
        """
        if isinstance(tenant, ApiError):
            return tenant
        exchange.belong_to(tenant)
        if self._metering is not None and (over := self._metering.refusal(tenant)) is not None:
            request = exchange.request
            if len(request.body) <= OFFLOAD_BYTES:  # for the access log
                exchange.names(named_model(request.header(b"content-type") or "", request.body))
            return over
        if (error := refusal_of_head(exchange.request, exchange.id)) is not None:
            return error
        return salt_request(exchange.request, tenant.cache_salt) if tenant.cache_salt is not None else None

    def answer_to(self, request: Request, tenant: Tenant | None) -> Answer | None:
        """Return the function that answers a request for one of the gateway's own paths; None for other requests.

        Returns None for the list of models, too, as long as no model is known.
        """
        if request.method not in ("GET", "HEAD"):
            return None
        name = model_in(request.path)
        if name is not None and (name in self._eligible.names or not (tenant is None or tenant.may_use(name))):
            return self._tell_model
        answer = self._local.get(request.path)
        return answer if self._eligible.names or answer != self._list_models else None

    def is_known_without_slash(self, path: str) -> bool:
        """Return whether a path ends with a slash and would be forwarded, or answered here, without that slash."""
        return path.endswith("/") and path not in self.allowed and self._is_known(path.rstrip("/"))

    def _is_known(self, path: str) -> bool:
        return path in self.allowed or model_in(path) is not None

    def refusal(self, path: str, method: str, tenant: Tenant | None = None) -> ApiError | None:
        """Return the error for a request with this path and method that is not forwarded; None if it is.

        While the gateway shuts down, this is an error for every request.
        """
        if self.draining:
            return shutting_down()
        if method == "OPTIONS" and (path in self._local or model_in(path) is not None):
            return None  # forwarded: an engine answers it, as for its other paths
        if path in self._local and method not in ("GET", "HEAD"):
            return ApiError(405, f"{method} is not supported for {path}", headers=[READ_ONLY])
        if path in PROMPT_PATHS:
            if method not in ("POST", "OPTIONS"):
                return ApiError(405, f"{method} is not supported for {path}", headers=[(b"allow", b"POST, OPTIONS")])
        elif path not in self.allowed:
            if (model := model_in(path)) is not None:
                return self._no_model(model, method, tenant)
            return ApiError(404, refusal(path, self.keys is not None), code="path_not_allowed")
        if method not in METHODS:
            return ApiError(
                405, f"{method} is not supported", headers=[(b"allow", ", ".join(sorted(METHODS)).encode())]
            )
        return None

    def _list_models(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Answer with the list of served models; for a tenant, with those that the tenant may use.

        Called only while at least one model is known, since a client would believe an empty list. As long as none is
        known, the request is forwarded to a replica. If no replica is ready, it gets 503. If the replicas report their
        models only to clients with an API key, a replica answers the request.
        """
        names = [name for name in sorted(self._eligible.names) if tenant is None or tenant.may_use(name)]
        data = [self._described(name) for name in names]
        client.reply(200, orjson.dumps({"object": "list", "data": data}), JSON)

    def _tell_model(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Answer with the description of one model, or with an error if the tenant may not use the model."""
        name = model_in(request.path) or ""
        if tenant is not None and (error := tenant.refusal(name)) is not None:
            self._settling.turned_away(error)
            client.reply(error.status, error.body(request.path), JSON)
        else:
            client.reply(200, orjson.dumps(self._described(name)), JSON)

    def _described(self, name: str) -> dict[str, Any]:
        """Return the description of a served model or adapter, in the format of OpenAI's API."""
        parent = self._eligible.names[name]
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "hitherto", "root": parent or name, "parent": parent,
            "max_model_len": max(self._eligible.models.routes.contexts.get(name, ()), default=None),
        }  # fmt: skip

    def _no_model(self, name: str, method: str, tenant: Tenant | None) -> ApiError:
        """Return the error for a request to `/v1/models/NAME` that names a model which is not listed."""
        if method not in ("GET", "HEAD"):
            return ApiError(405, f"{method} is not supported for {MODELS}/NAME", headers=[READ_ONLY])
        if self._eligible.names or not self._eligible.ready_for(None):
            return self._eligible.known.no_replica_error(name, tenant)
        return ApiError(
            404,
            f"the replicas tell what they serve only to those who bring an API key: ask GET {MODELS}, which passes it on",
            param="model",
            code="model_not_found",
        )

    def _health(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Answer 200 if a replica is ready; 503 if none is, or while the gateway shuts down."""
        if self.draining:
            client.reply(503, shutting_down().body(""), [*JSON, GATEWAY_SIGN])
        elif self._eligible.ready_for(None):
            client.reply(200, b"", [GATEWAY_SIGN])
        else:
            client.reply(503, error_body("", 503, "no replica is ready"), [*JSON, GATEWAY_SIGN])


def refusal_of_coding(request: Request) -> ApiError | None:
    """Return the error for a request whose body has another content coding than `identity`, such as "gzip"; or None."""
    values = [value for name, value in request.headers if name == b"content-encoding"]
    codings = [one.strip().lower() for one in b",".join(values).decode("latin-1").split(",")]
    return next((compressed(one) for one in codings if one not in ("", "identity")), None)


def shutting_down() -> ApiError:
    """Return the 503 for requests that come while the gateway shuts down."""
    return ApiError(503, "the gateway is shutting down; ask another one", code="shutting_down")
