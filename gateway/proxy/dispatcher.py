"""Where requests, prompts, the map, the policy and the replicas meet.

The dispatcher answers what is the gateway's own (`/v1/models`, `/health`), turns the rest into a `Life`,
and does for each life what needs to be known about all of them: choose and reserve, release, learn, check.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from random import random
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import orjson

from policies import UNTIMED, Asked, Decision, Demand, Router, Targets
from replicas import State as ReplicaState

from ..prompt import Prompt
from ..http.downstream import Downstream
from ..http.messages import Headers, Request
from .backend import Backend
from .errors import JSON, error_body
from .forwarding import TokenIdForwarding
from .life import Failure, Life
from .newcomers import Newcomers
from .outcomes import Outcomes
from .paths import PROMPT_PATHS, AllowedPaths, refusal
from .preparation import Preparation
from .responses import PATH as RESPONSES
from .responses import Responses, referred_to
from .shadow import Shadows
from .states import State
from .usage import Usage

if TYPE_CHECKING:
    from replicas import Replica

    from ..models import Models
    from ..ops.metrics import Metrics
    from .decisions import Decided
    from .shared import SharedLedger

log = logging.getLogger("hitherto.proxy")

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
TAKE_TRAFFIC = (ReplicaState.READY, ReplicaState.DEGRADED)  # the second only for want of the first
# Seconds that a request without a first byte stays where it was sent once that replica is in this state.
PATIENCE = {ReplicaState.DEGRADED: 10.0, ReplicaState.FAILED: 0.0}
LOST_SILENCE = 10.0  # seconds between two pieces of a stream from a replica that is lost


class Dispatcher:
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
        on_traffic: Callable[[str, str | None], None],
        ask_models: Callable[[], Awaitable[None]],
        on_end: Callable[[Life, str, Usage | None], None] | None = None,
        tokenize_once: bool = True,
        shadows: Sequence[str] = (),
        cached_tokens_header: bool = False,
        allow_paths: Sequence[str] = (),
        life: Callable[[Dispatcher, Downstream, Request, bytes, str], Life] = Life,
    ):
        self.models = models
        self.router = router
        self.metrics = metrics
        self.retries = retries
        self.request_timeout = request_timeout
        self.idle_timeout = idle_timeout
        self.response_headers = response_headers
        self.cached_tokens_header = cached_tokens_header
        self.allowed_paths = AllowedPaths(allow_paths)
        self.replicas = replicas  # all that are known, for the words of a 503; `backends` are those that were ready once
        # (replica id, None, the kind of failure, or "reconnect": a kept connection broke): what health learns from traffic
        self.on_traffic = on_traffic
        self.newcomers = Newcomers(ask_models)
        self.responses = Responses()
        self.on_end = on_end
        self.outcomes = Outcomes(self)
        self.shadows = Shadows(shadows, metrics) if shadows else None
        self.life = life  # with traces, one that makes them
        self.backends: dict[str, Backend] = {}
        self.forwarding = TokenIdForwarding(metrics, tokenize_once, self.backends, models.made_by)
        self.lives: set[Life] = set()
        self.draining = False
        self.held_up_at = 0.0  # the last time at which the event loop went on after it had been held up
        self.preparation = Preparation(self)
        self._chosen: list[Life | Decided] | None = None  # while they are held back
        self.shared: SharedLedger | None = None  # with Redis
        self.names: dict[str, str | None] = {}  # every served name, with the base model of an adapter
        self.adapters: frozenset[str] = frozenset()
        self._serving: dict[str | None, Targets] = {}
        self._with_room: dict[tuple[str | None, int], Targets] = {}  # of models whose replicas differ in context
        self._ids = map(f"{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self._local = {"/v1/models": self._list_models, "/health": self._health}

    # --- replicas come and go

    def add(self, backend: Backend) -> None:
        self.backends[backend.id] = backend
        backend.on_broken = lambda: self.on_traffic(backend.id, "reconnect")
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
        """Some replica's state, models or space changed: who may serve what is found anew."""
        self.models.refresh()
        self._serving.clear()
        self.forwarding.look()
        self._with_room.clear()
        self.names = {name: parent for backend in self._taking(None) for name, parent in backend.replica.models.items()}
        self.adapters = frozenset(name for name, parent in self.names.items() if parent)

    def serving(self, model: str | None) -> Targets:
        """Replicas that may get a request for `model`: the ready ones; degraded ones only if none is ready."""
        found = self._serving.get(model)
        if found is None:
            found = self.router.targets([backend.candidate for backend in self._taking(model)])
            if model is None or model in self.names:  # a client may ask for any name; those are not kept
                self._serving[model] = found
        return found

    def untried(self, prompt: Prompt | None, tried: tuple[Backend, ...], named: str | None = None) -> list[Backend]:
        """Replicas that a request may go to next: ready ones, and degraded ones once all that are ready have failed it.
        `named`: the model of a request without prompt."""
        model = (prompt.model if prompt is not None else named) or None
        found = self._taking(model, tried)
        if prompt is not None and self.models.differ_in_context(model):
            least = self._least_context(model, prompt)
            found = [backend for backend in found if self.models.has_room(backend.id, least)]
        return found

    def _taking(self, model: str | None, tried: tuple[Backend, ...] = ()) -> list[Backend]:
        for state in TAKE_TRAFFIC:
            found = [b for b in self.backends.values() if b.replica.state is state and b not in tried and b.serves(model)]
            if found:
                return found
        return []

    def unheard_of(self, model: str) -> bool:
        """Replicas are ready and have told their models, and this is none of them."""
        return model not in self.names and bool(model and self.names) and not self._taking(model)

    # --- the wire's calls

    def handle(self, client: Downstream, request: Request) -> None:
        path = request.path
        local = self._local.get(path)
        if local is not None and request.method in ("GET", "HEAD") and (self.names or local != self._list_models):
            local(client, request)
            return
        given = request.header(b"x-request-id")
        life = self.life(self, client, request, given.encode("latin-1") if given else next(self._ids).encode(), PROMPT_PATHS.get(path, "other"))
        if path.startswith(RESPONSES):
            life.response = referred_to(request)
        client.exchange = life
        self.lives.add(life)
        if self.draining:
            life.refused(Failure(503, "the gateway is shutting down; ask another one", code="shutting_down"))
        elif local is not None and request.method not in ("GET", "HEAD"):
            life.refused(Failure(405, f"{request.method} is not supported for {path}", allow=b"GET, HEAD"))
        elif path not in PROMPT_PATHS and path not in self.allowed_paths:
            life.refused(Failure(404, refusal(path), code="path_not_allowed"))
        elif path in PROMPT_PATHS and request.method not in ("POST", "OPTIONS"):
            life.refused(Failure(405, f"{request.method} is not supported for {path}", allow=b"POST, OPTIONS"))
        elif request.method not in METHODS:
            life.refused(Failure(405, f"{request.method} is not supported", allow=", ".join(sorted(METHODS)).encode()))
        elif path not in PROMPT_PATHS or request.method != "POST":
            self.preparation.begin_other(life)
        else:
            self.preparation.begin(life)

    def refuse(self, status: int, message: str, target: bytes) -> tuple[Headers, bytes]:
        self.metrics.rejections.inc(str(status))
        body = error_body(target.decode("latin-1"), status, message, code="gateway_full" if status == 503 else None)
        return [*JSON, (b"retry-after", b"1")] if status == 503 else JSON, body

    def held_up(self, now: float) -> None:
        self.held_up_at = now

    def sweep(self, now: float) -> None:
        for life in list(self.lives):
            try:
                life.check(now)
            except Exception:
                log.exception("the sweep failed on a request")
        for backend in self.backends.values():
            backend.pool.sweep(now)
        self.router.rest(now)

    # --- a prompt gets a replica

    def demand(self, prompt: Prompt | None, now: float) -> Demand:
        """What is asked for."""
        if prompt is None:
            return Demand(tokens=0, draw=random())
        alone = self.shared is None or not self.shared.joined  # else others change the load, and nobody tells when
        return demand_of(prompt, now if alone else UNTIMED, random())

    def targets(self, prompt: Prompt | None, tried: tuple[Backend, ...] = (), named: str | None = None) -> Targets:
        """Who may get it now. Raises Failure when nobody can."""
        model = (prompt.model if prompt is not None else named) or None
        targets = self.serving(model)
        if not targets:
            raise self._nobody(model)
        if tried:
            targets = Targets([backend.candidate for backend in self.untried(prompt, tried, named)])
            if not targets:
                raise Failure(503, "no replica is left to try")
        elif prompt is not None and self.models.differ_in_context(model):
            targets = self._roomy(model, self._least_context(model, prompt))
        return targets

    def _least_context(self, model: str | None, prompt: Prompt) -> int:
        """Whom a prompt may be sent to, where the model's replicas differ in the length of their context: those that have room for it
        and its answer, else those that have room for the prompt, which refuse its answer in their own words. Which of them are
        ready does not matter here: a replica that is too small refuses for good what another would answer later."""
        contexts = self.models.contexts.get(model) or self.models.contexts[None]
        wanted = prompt.tokens + (prompt.max_tokens or 1)
        return next((one for one in contexts if one >= wanted), contexts[-1])

    def _roomy(self, model: str | None, least: int) -> Targets:
        found = self._with_room.get((model, least))
        if found is None:
            found = self.router.targets([one.candidate for one in self._taking(model) if self.models.has_room(one.id, least)])
            if not found:
                raise Failure(503, f"the prompt has room only in replicas with a context of {least} tokens, and none of them is ready")
            if model is None or model in self.names:
                self._with_room[model, least] = found
        return found

    def _targets(self, life: Life | Decided) -> Targets:
        """As `targets`, with one alone where only that can do it."""
        targets = self.targets(life.prompt, life.tried, life.model)
        if life.response is not None and (maker := self.responses.maker(life.response)) is not None:
            return targets.only(maker) or targets
        return targets

    def hold_back(self) -> None:
        """Whoever is chosen for from now on is sent on with `send_on`, when all are."""
        self._chosen = []

    def send_on(self) -> None:
        chosen, self._chosen = self._chosen, None
        for life in chosen:
            life.take_step(life.chosen)

    def choose(self, life: Life | Decided) -> None:
        """Choose, and count the load at once: decision and reservation are one step, here or where the load
        of all gateways is known. Calls `life.chosen` or `life.unchosen`."""
        begun, now = perf_counter(), monotonic()
        try:
            targets = self._targets(life)
        except Failure as failure:
            life.unchosen(failure)
            return
        demand = self.demand(life.prompt, now)
        asked = self.router.ask(demand, targets, now)
        seen = self.shadows.see(demand, asked.candidates) if self.shadows is not None else None
        if self.shared is not None:
            if self.shared.joined:
                self.shared.decide(asked, lambda decision: self._decided(life, asked, seen, begun, decision))
                return
            self.metrics.shared_decisions.inc("away")
        self._place(life, asked, seen, now)
        self.metrics.stage_seconds.observe("choose", perf_counter() - begun)
        self._go_on(life)

    def _go_on(self, life: Life | Decided) -> None:
        if self._chosen is None:
            life.chosen()
        else:
            self._chosen.append(life)

    def _place(self, life: Life | Decided, asked: Asked, seen: Any, now: float, decision: Decision | None = None) -> None:
        """Here, or as the shared ledger has decided."""
        placement = life.placement = self.router.take(asked, now, decision)
        life.backend = self.backends[placement.candidate.replica]
        if asked.spaces is not None and life.prompt is not None:
            life.prompt = as_variant(life.prompt, placement.candidate.space)
        if seen is not None:
            self.shadows.acted(seen, asked.choice.index if decision is None else decision.index)

    def _decided(self, life: Life | Decided, asked: Asked, seen: Any, begun: float, decision: Decision | None) -> None:
        """What the shared ledger answers; None: too late, or not at all, and the choice made here stands."""
        self.metrics.stage_seconds.observe("choose", perf_counter() - begun)
        waiting = life.state is State.CHOOSING  # else the client left meanwhile
        candidate = asked.candidates[decision.index if decision is not None else asked.choice.index]
        backend = self.backends.get(candidate.replica)
        there = waiting and backend is not None and backend.candidate is candidate and backend.replica.state in TAKE_TRAFFIC
        if decision is not None and not there:
            self.shared.undo(decision)
        if there:
            self._place(life, asked, seen, monotonic(), decision)
            life.take_step(self._go_on, life)
        elif waiting:
            life.take_step(self.choose, life)  # the replica left while Redis was asked

    def _nobody(self, model: str | None) -> Failure:
        known = self.names
        if model is not None and known and model not in known:
            return Failure(404, f"the model {model[:200]!r} does not exist; served here: {', '.join(sorted(known))}", param="model", code="model_not_found")
        states = "; ".join(f"{one.id} is {one.state}: {one.reason}" for one in self.replicas.values())
        return Failure(503, f"no replica is ready ({states or 'none is known'})")

    def may_retry(self, life: Life) -> bool:
        """Whether a failing answer may be thrown away: an attempt and another replica are left."""
        return len(life.tried) < self.retries and bool(self.untried(life.prompt, (*life.tried, life.backend), life.model))

    def may_be_elsewhere(self, life: Life) -> bool:
        """Whether a replica is left that was not asked for a stored response."""
        return bool(self.untried(life.prompt, (*life.tried, life.backend), life.model))

    def better_elsewhere(self, life: Life, now: float) -> bool:
        """Whether an unanswered request should leave a replica that is lost, or that is unwell and has had its time,
        for one that is ready. What was computed for it is computed again: slowness alone is no reason."""
        patience = PATIENCE.get(life.backend.replica.state)
        if patience is None or now - life.sent_at < patience or not self.may_retry(life):
            return False
        return self.untried(life.prompt, (*life.tried, life.backend), life.model)[0].replica.state is ReplicaState.READY

    def silence(self, backend: Backend) -> float:
        """Seconds without a byte after which a stream is given up. An engine that was asked to stop may have ended its
        core and wait for its connections: for ever, if nobody gives up."""
        return min(self.idle_timeout, LOST_SILENCE) if backend.replica.state is ReplicaState.FAILED else self.idle_timeout

    def waited(self, replica: str, now: float) -> float:
        """Seconds since the oldest prompt there that has no answer was sent."""
        return now - self.oldest_unanswered().get(replica, now)

    def oldest_unanswered(self) -> dict[str, float]:
        """When the oldest prompt that has no answer was sent, by replica; in one pass over all requests."""
        oldest: dict[str, float] = {}
        for life in self.lives:
            if life.unanswered and life.prompt is not None:
                id = life.backend.id
                oldest[id] = min(life.sent_at, oldest.get(id, life.sent_at))
        return oldest

    def has_attempts(self, life: Life) -> bool:
        return len(life.tried) <= self.retries

    # --- answers of the gateway's own

    def _list_models(self, client: Downstream, request: Request) -> None:
        """Only where some name is known: an empty list would be taken for an answer. Until a replica is ready it is 503, as
        for prompts; one that tells the gateway no names (it wants an API key) is asked with what the client brought."""
        data = [
            {
                "id": name, "object": "model", "created": 0, "owned_by": "hitherto", "root": parent or name, "parent": parent,
                "max_model_len": max(self.models.contexts.get(name, ()), default=None),
            }
            for name, parent in sorted(self.names.items())
        ]  # fmt: skip
        client.reply(200, orjson.dumps({"object": "list", "data": data}), JSON)

    def _health(self, client: Downstream, request: Request) -> None:
        ready = bool(self.serving(None)) and not self.draining
        client.reply(200 if ready else 503, b"" if ready else error_body("", 503, "no replica is ready"), [] if ready else JSON)


def as_variant(prompt: Prompt, space: int) -> Prompt:
    """The request as the replicas of this space have it; `also` leads from there to where it was."""
    also = prompt.also
    if prompt.space == space:
        return prompt
    if also is None or also.space != space:
        return replace(prompt, mode="load", note="a third variant of its model has it", hashes=(), token_ids=b"", space=space, also=prompt)
    prompt.also, also.also = None, prompt
    return also


def demand_of(prompt: Prompt, now: float = UNTIMED, draw: float = 0.0) -> Demand:
    """What a prompt asks of a replica."""
    hashes, also = prompt.hashes, prompt.also
    root = hashes[0] if hashes else 0
    return Demand(
        prompt.tokens, prompt.block_size, root, prompt.session, prompt.max_tokens, now, hashes, draw, prompt.reads_cache, prompt.path,
        prompt.space, None if also is None else demand_of(also, now, draw),
    )  # fmt: skip
