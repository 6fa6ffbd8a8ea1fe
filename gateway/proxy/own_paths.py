"""The paths that the gateway answers itself (`/v1/models`, `/v1/models/NAME`, `/health`); the check of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from replicas.ask import GATEWAY

from .. import __version__
from ..errors import JSON, ApiError, error_body
from ..http.downstream import Downstream
from ..http.messages import Request
from ..prompt.prompt import PROMPT_PATHS
from .paths import MODELS, AllowedPaths, model_in, refusal
from .placement.eligibility import Eligibility
from .settling import Settling

if TYPE_CHECKING:
    from ..tenants.tenant import Tenant

GATEWAY_SIGN = GATEWAY.encode(), __version__.encode()  # shows other gateways that this is not an engine
READ_ONLY = (b"allow", b"GET, HEAD, OPTIONS")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

Answer = Callable[[Downstream, Request, "Tenant | None"], None]


class OwnPaths:
    """The gateway's answers for its own paths, and its errors for paths and methods that it does not forward."""

    def __init__(self, eligible: Eligibility, settling: Settling, allow_paths: Sequence[str], has_tenants: bool):
        """Create the answers and the list of paths that are forwarded.

        `allow_paths`: values of `--allow-path`.
        `has_tenants`: whether API keys are required; errors then do not mention what only operators can do.
        """
        self._eligible, self._settling, self._has_tenants = eligible, settling, has_tenants
        self.allowed = AllowedPaths(allow_paths)
        self.draining = False  # the gateway shuts down and refuses new requests
        self._local: dict[str, Answer] = {MODELS: self._list_models, "/health": self._health}

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
            return ApiError(404, refusal(path, self._has_tenants), code="path_not_allowed")
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


def shutting_down() -> ApiError:
    """Return the 503 for requests that come while the gateway shuts down."""
    return ApiError(503, "the gateway is shutting down; ask another one", code="shutting_down")
