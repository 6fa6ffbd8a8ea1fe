"""The proxy: where requests, prompts, replicas and answers meet.

It answers what is the gateway's own (`/v1/models`, `/health`), makes an `Exchange` of everything else, and puts
together those that carry it: preparation, placing, the conductor, settling.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import orjson

from policies import Router

from ..errors import JSON, ApiError, error_body
from ..http.downstream import Downstream
from ..http.messages import Headers, Request
from .backend import Backend
from .conductor import Conductor
from .exchange import Added, Exchange
from .forwarding import TokenIdForwarding
from .judge import Judge
from .newcomers import Newcomers
from .paths import PROMPT_PATHS, AllowedPaths, refusal
from .placing import Eligibility, Placing
from .preparation import Preparation
from .responses import PATH as RESPONSES
from .responses import Responses, referred_to
from .settling import OnEnd, OnTraffic, Settling
from .shadow import Shadows

if TYPE_CHECKING:
    from replicas import Replica

    from ..models import Models
    from ..ops.metrics import Metrics
    from .traces import Traces

log = logging.getLogger("hitherto.proxy")

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Proxy:
    def __init__(
        self,
        *,
        models: Models,
        router: Router,
        metrics: Metrics,
        retries: int,
        request_timeout: float,
        idle_timeout: float,
        response_headers: bool,
        replicas: Mapping[str, Replica],
        on_traffic: OnTraffic,
        ask_models: Callable[[], Awaitable[None]],
        on_end: Sequence[OnEnd] = (),
        tokenize_once: bool = True,
        shadows: Sequence[str] = (),
        cached_tokens_header: bool = False,
        allow_paths: Sequence[str] = (),
        traces: Traces | None = None,
    ):
        self.models, self.router, self.metrics = models, router, metrics
        self.allowed_paths = AllowedPaths(allow_paths)
        self.eligible = Eligibility(models, router, replicas)
        self.backends = self.eligible.backends
        responses = Responses()
        self.placing = Placing(
            self.eligible, router, responses, metrics, Shadows(shadows, metrics) if shadows else None
        )
        self.newcomers = Newcomers(ask_models)
        self.preparation = Preparation(self.eligible, self.placing, self.newcomers, metrics)
        self.forwarding = TokenIdForwarding(metrics, tokenize_once, self.backends, models.made_by)
        ended = on_end if traces is None else (traces.end, *on_end)
        self.settling = Settling(self.backends, router, metrics, self.forwarding, on_traffic, ended)
        self.conductor = Conductor(
            self.placing, Judge(self.eligible, self.settling, retries), self.settling, self.forwarding, responses, metrics,
            Added(response_headers, cached_tokens_header),
            retries=retries, request_timeout=request_timeout, idle_timeout=idle_timeout, traces=traces,
        )  # fmt: skip
        self.exchanges = self.conductor.under_way
        self._ids = map(f"{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self._local = {"/v1/models": self._list_models, "/health": self._health}

    @property
    def draining(self) -> bool:
        return self.conductor.draining

    def drain(self) -> None:
        """From now on whatever is new is refused."""
        self.conductor.draining = True

    # --- replicas come and go

    def add(self, backend: Backend) -> None:
        self.backends[backend.id] = backend
        self.changed()

    def remove(self, replica: str) -> Backend | None:
        backend = self.backends.pop(replica, None)
        if backend is not None:
            slot = backend.slot
            backend.stop(then=lambda: self.router.map.detach(slot))
            self.router.remove(replica)
            self.changed()
        return backend

    def changed(self) -> None:
        """Some replica's state, models or space changed."""
        self.eligible.changed()
        self.forwarding.look()

    def waited(self, replica: str, now: float) -> float:
        """Seconds since the oldest prompt there that has no answer was sent."""
        return now - self.oldest_unanswered().get(replica, now)

    def oldest_unanswered(self) -> dict[str, float]:
        """When the oldest prompt that has no answer was sent, by replica; in one pass over all requests."""
        oldest: dict[str, float] = {}
        for exchange in self.exchanges:
            if exchange.prompt is not None and (attempt := exchange.unanswered) is not None:
                id = attempt.backend.id
                oldest[id] = min(attempt.sent_at, oldest.get(id, attempt.sent_at))
        return oldest

    # --- the wire's calls

    def handle(self, client: Downstream, request: Request) -> None:
        path = request.path
        label = PROMPT_PATHS.get(path)
        has_prompt = label is not None and request.method == "POST"
        if not has_prompt and self._is_local(request):
            self._local[path](client, request)
            return
        given = request.header(b"x-request-id")
        id = given.encode("latin-1") if given else next(self._ids).encode()
        exchange = client.exchange = Exchange(self.conductor, client, request, id, label or "other")
        if path.startswith(RESPONSES):
            exchange.response = referred_to(request)
        self.conductor.begin(exchange)
        if has_prompt and not self.conductor.draining:
            self.preparation.begin(exchange)
        elif (error := self.refusal(path, request.method)) is not None:
            exchange.refused(error)
        else:
            self.preparation.begin_other(exchange)

    def _is_local(self, request: Request) -> bool:
        """Whether it is answered here."""
        local = self._local.get(request.path) if request.method in ("GET", "HEAD") else None
        return local is not None and (bool(self.eligible.names) or local != self._list_models)

    def refusal(self, path: str, method: str) -> ApiError | None:
        """Why nothing is sent on."""
        if self.draining:
            return ApiError(503, "the gateway is shutting down; ask another one", code="shutting_down")
        if path in self._local and method not in ("GET", "HEAD"):
            return ApiError(405, f"{method} is not supported for {path}", allow=b"GET, HEAD")
        if path in PROMPT_PATHS:
            if method not in ("POST", "OPTIONS"):
                return ApiError(405, f"{method} is not supported for {path}", allow=b"POST, OPTIONS")
        elif path not in self.allowed_paths:
            return ApiError(404, refusal(path), code="path_not_allowed")
        if method not in METHODS:
            return ApiError(405, f"{method} is not supported", allow=", ".join(sorted(METHODS)).encode())
        return None

    def refuse(self, status: int, message: str, target: bytes) -> tuple[Headers, bytes]:
        self.metrics.rejections.inc(str(status))
        body = error_body(target.decode("latin-1"), status, message, code="gateway_full" if status == 503 else None)
        return [*JSON, (b"retry-after", b"1")] if status == 503 else JSON, body

    def held_up(self, now: float) -> None:
        self.settling.held_up_at = now

    def sweep(self, now: float) -> None:
        for exchange in list(self.exchanges):
            try:
                self.conductor.check(exchange, now)
            except Exception:
                log.exception("the sweep failed on a request")
        for backend in self.backends.values():
            backend.pool.sweep(now)
        self.settling.tell_answers()
        self.router.decay_idle_costs(now)

    # --- answers of the gateway's own

    def _list_models(self, client: Downstream, request: Request) -> None:
        """Only where some name is known: an empty list would be taken for an answer. Until a replica is ready it is
        503, as for prompts; one that tells the gateway no names (it wants an API key) is asked with what the client
        brought."""
        data = [
            {
                "id": name, "object": "model", "created": 0, "owned_by": "hitherto", "root": parent or name, "parent": parent,
                "max_model_len": max(self.models.contexts.get(name, ()), default=None),
            }
            for name, parent in sorted(self.eligible.names.items())
        ]  # fmt: skip
        client.reply(200, orjson.dumps({"object": "list", "data": data}), JSON)

    def _health(self, client: Downstream, request: Request) -> None:
        ready = bool(self.eligible.ready_for(None)) and not self.draining
        client.reply(
            200 if ready else 503, b"" if ready else error_body("", 503, "no replica is ready"), [] if ready else JSON
        )
