"""Which replicas may get a request, and the choice among them, made here or in the load ledger that gateways share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from random import random
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Protocol

from policies import UNTIMED, Decision, Demand, Evaluation, Router, Targets, legs
from replicas import TAKES_TRAFFIC, State
from replicas.roles import PREFILL

from ..errors import ApiError
from ..prompt.prompt import as_variant
from .backend import Backend
from .exchange import Attempt, Exchange
from .known_models import KnownModels
from .legs import LegPlacing, LegPlan, Roles, Sides
from .paths import WRITES_NOTHING
from .pulling import Pulls
from .responses import Responses
from .shadow import Shadows, Went
from .tails import add_tail

if TYPE_CHECKING:
    from replicas import Replica
    from replicas.pulse import Pulse

    from ..models import Models
    from ..ops.metrics import Metrics
    from ..prompt import Prompt
    from ..tenants.tenant import Tenant
    from .shared import SharedLedger


class Eligibility:
    """The replicas that may get a request, by its model, their state, role and context length."""

    def __init__(self, models: Models, router: Router, replicas: Mapping[str, Replica]):
        """Create the registry; `replicas` are all known ones, `backends` those that have been ready once."""
        self.models, self._router, self._replicas = models, router, replicas
        self.backends: dict[str, Backend] = {}
        self.known = KnownModels(self.backends, replicas)
        self.names: dict[str, str | None] = {}  # served name -> base model of an adapter, None for a base model
        self.adapters: frozenset[str] = frozenset()
        self._ready: dict[str | None, Targets] = {}
        self._with_room: dict[tuple[str | None, int], Targets] = {}  # by model and least context
        self.roles = Roles()
        self.pulls: Pulls | None = None  # is notified when replicas change
        self._sides: dict[str | None, Sides] = {}
        self._slow: dict[str | None, Targets] = {}
        self.spills = False  # whether some replica is of a slow pool
        self.finer = False  # whether some replica finds parts of a block, for which the prompt's ids are needed
        self.full_until = 0.0  # monotonic seconds until which some replica has said that it is full
        self._without_full: dict[Targets, Targets] = {}  # targets in `_ready` and `_with_room` -> those not full
        self._stays_full_until = 0.0  # how long `_without_full` is valid, in monotonic seconds

    def changed(self) -> None:
        """Clear the cached targets after some replica's state, models or space changed."""
        self.models.refresh()
        self._ready.clear()
        self._with_room.clear()
        self._sides.clear()
        self._slow.clear()
        known = [*self.backends.values()]
        self.full_until = max((one.full_until for one in known), default=0.0)
        self._stays_full_until = 0.0
        self.roles.look(known, {one.role for id, one in self._replicas.items() if id not in self.backends})
        if self.pulls is not None:
            self.pulls.changed()
        self.spills = any(one.replica.spill for one in known)
        self.finer = any(one.is_finer for one in known)
        # A name may be a model on one replica and an adapter on another: the replica in the better state, last, wins.
        taking = [one.replica for state in reversed(TAKES_TRAFFIC) for one in known if one.replica.state is state]
        self.names = {name: parent for one in taking for name, parent in one.models.items()}
        self.adapters = frozenset(name for name, parent in self.names.items() if parent)
        self.known.changed(self.names)

    def targets(
        self,
        prompt: Prompt | None,
        tried: tuple[Backend, ...] = (),
        named: str | None = None,
        tenant: Tenant | None = None,
    ) -> Targets:
        """Return the replicas that may get a request now.

        `prompt`: the request's prompt, or None.
        `tried`: replicas that failed the request.
        `named`: the model of a request without prompt.
        `tenant`: the tenant that sent it, for the error.

        Raises ApiError if there are none.
        """
        model = (prompt.model if prompt is not None else named) or None
        targets = self.ready_for(model)
        if not targets:
            raise self.known.no_replica_error(model, tenant)
        if tried:
            targets = Targets([backend.candidate for backend in self.remaining(prompt, tried, named)])
            if not targets:
                raise ApiError(503, "no replica is left to try")
        elif prompt is not None and self.models.routes.differ_in_context(model):
            targets = self._roomy(model, self._least_context(model, prompt))
        return targets

    def ready_for(self, model: str | None) -> Targets:
        """Return the ready replicas of a model; degraded ones only if none is ready."""
        found = self._ready.get(model)
        if found is None:
            taking = self._taking(model)
            if self.roles.any and any(backend.replica.role == PREFILL for backend in taking):
                self.roles.pressed(model)
            found = self._router.targets([backend.candidate for backend in taking])
            if model is None or model in self.names:  # other names, which a client may invent, are not cached
                self._ready[model] = found
        return found

    def remaining(self, prompt: Prompt | None, tried: tuple[Backend, ...], named: str | None = None) -> list[Backend]:
        """Return the replicas that a request may be retried on.

        Degraded replicas follow when all ready ones have failed the request. Other ranks of an engine that failed it
        follow when every other engine has, since a failure is mostly one of the whole process.
        """
        model = (prompt.model if prompt is not None else named) or None
        found = self._taking(model, tried)
        failed = {one.replica.engine for one in tried}
        found = [one for one in found if one.replica.engine not in failed] or found
        if prompt is not None and self.models.routes.differ_in_context(model):
            least = self._least_context(model, prompt)
            found = [backend for backend in found if self.models.has_room(backend.id, least)]
        return found

    def when_full(self, backend: Backend, until: float) -> None:
        """Mark a replica that refused a request as full: it is tried last until this time, in monotonic seconds."""
        backend.full_until = max(backend.full_until, until)
        self.full_until = max(self.full_until, until)
        self._stays_full_until = 0.0

    def not_full(self, backends: list[Backend], now: float) -> list[Backend]:
        """Return the backends that are not marked as full now, or all of them if all are."""
        if now >= self.full_until:
            return backends
        return [one for one in backends if now >= one.full_until] or backends

    def but_full(self, targets: Targets, now: float) -> Targets:
        """Return the targets that are not marked as full now, or all of them if all are.

        The result is cached for as long as the same replicas are full: building its arrays for each request to 256
        replicas takes 1.2 ms.
        """
        if now >= self._stays_full_until:
            self._without_full.clear()
            full = [one.full_until for one in self.backends.values() if one.full_until > now]
            self._stays_full_until = min(full, default=self.full_until)
        found = self._without_full.get(targets)
        if found is None:
            left = self.not_full([self.backends[one.replica] for one in targets.candidates], now)
            found = targets
            if len(left) < len(targets):
                found = self._router.targets([one.candidate for one in left])
            if targets in self._ready.values() or targets in self._with_room.values():
                self._without_full[targets] = found
        return found

    def is_unknown(self, model: str) -> bool:
        """Return whether models are known, and no replica serves this one now or is expected to serve it again."""
        known = model in self.names or not (model and self.names) or self.known.is_away(model)
        return not known and not self._taking(model)

    def _taking(self, model: str | None, tried: tuple[Backend, ...] = ()) -> list[Backend]:
        """Return the replicas for requests in one leg; slow pools and prefillers only where there are no others."""
        passed_over = frozenset(tried)
        left = [one for one in self.backends.values() if one not in passed_over and one.serves(model)]
        if self.spills and _in_best_state(quick := [one for one in left if not one.replica.spill]):
            left = quick
        return _by_role(left) if self.roles.any else _in_best_state(left)

    def slow_pool(self, prompt: Prompt | None) -> Targets | None:
        """Return the ready replicas of slow pools that can serve a prompt; None where there are none."""
        if not self.spills or prompt is None:
            return None
        model = prompt.model or None
        found = self._slow.get(model)
        if found is None:
            slow = [one for one in self.backends.values() if one.replica.spill and one.serves(model)]
            ready = [one for one in slow if one.replica.state is State.READY and one.replica.role != PREFILL]
            found = Targets([one.candidate for one in ready])
            if model is None or model in self.names:
                self._slow[model] = found
        if self.models.routes.differ_in_context(model):
            found = Targets([one for one in found.candidates if self.has_room(self.backends[one.replica], prompt)])
        return found or None

    def sides(self, model: str | None) -> Sides | None:
        """Return the ready replicas for each leg of a model's requests; None where no replica has a role."""
        found = self._sides.get(model)
        if found is None:
            ready = [one for one in self.backends.values() if one.replica.state is State.READY and one.serves(model)]
            found = Sides([one for one in ready if not one.replica.spill])
            if model is None or model in self.names:
                self._sides[model] = found
        return found if found.any else None

    def has_room(self, backend: Backend, prompt: Prompt) -> bool:
        """Return whether a prompt and its answer fit the replica's context, as far as is known."""
        return self.models.has_room(backend.id, prompt.tokens + (prompt.max_tokens or 1))

    def _least_context(self, model: str | None, prompt: Prompt) -> int:
        """Return the least context length, in tokens, of the replicas that a prompt may be sent to.

        This is the shortest context with room for prompt and answer, else the longest, whose replicas then refuse the
        request with their own message. It does not depend on which replicas are ready: a replica with too short a
        context would refuse for good a request that another one could answer later.
        """
        contexts = self.models.routes.contexts.get(model) or self.models.routes.contexts[None]
        wanted = prompt.tokens + (prompt.max_tokens or 1)
        return next((one for one in contexts if one >= wanted), contexts[-1])

    def _roomy(self, model: str | None, least: int) -> Targets:
        found = self._with_room.get((model, least))
        if found is None:
            found = self._router.targets(
                [one.candidate for one in self._taking(model) if self.models.has_room(one.id, least)]
            )
            if not found:
                raise ApiError(
                    503,
                    f"the prompt has room only in replicas with a context of {least} tokens, and none of them is ready",
                )
            if model is None or model in self.names:
                self._with_room[model, least] = found
        return found

    def unnamed_error(self) -> ApiError | None:
        """Return the error for a prompt that names no model where several are served, else None."""
        if not (models := self.models.routes.models):
            return None
        return ApiError(400, f"name a model; served here: {', '.join(models)}", param="model", code="model_not_named")


def _in_best_state(backends: list[Backend]) -> list[Backend]:
    for state in TAKES_TRAFFIC:
        if found := [one for one in backends if one.replica.state is state]:
            return found
    return []


def _by_role(backends: list[Backend]) -> list[Backend]:
    """Return the replicas for requests in one leg; prefillers only where there are no others."""
    return _in_best_state([one for one in backends if one.replica.role != PREFILL]) or _in_best_state(backends)


class Asker(Protocol):
    """A request that asks for a replica: an exchange, or a request that another proxy forwards (`decisions`)."""

    @property
    def prompt(self) -> Prompt | None: ...

    @property
    def model(self) -> str | None:
        """The model that a request without prompt names."""

    @property
    def response(self) -> str | None:
        """The id of the stored response that the request refers to, or None."""

    @property
    def tried(self) -> tuple[Backend, ...]:
        """The replicas that must not get the request."""

    @property
    def attempt_type(self) -> type[Attempt]:
        """The class of its attempts."""

    @property
    def stages(self) -> list[tuple[str, float]]:
        """The (stage, seconds) pairs of the gateway's own stages, observed once its client has the answer."""

    @property
    def needs_replica(self) -> bool:
        """Whether the request is still waiting for a replica."""

    def add_attempt(self, attempt: Attempt) -> None:
        """Add an attempt for which a replica was chosen and load reserved."""

    def placed(self) -> None:
        """Send the last attempt that was added."""

    @property
    def tenant(self) -> Tenant | None:
        """The tenant of the request's API key, or None."""

    @property
    def size(self) -> int:
        """The bytes of memory that the request takes while it waits."""

    def held(self) -> None:
        """Note that the request waits in the queue, since no replica has room for it now."""

    def called(self, place: Callable[[Asker], None]) -> None:
        """Place the request again after its wait in the queue, with `place`."""

    def header(self, name: bytes) -> str | None:
        """Return the value of a request header."""

    def unplaced(self, error: ApiError) -> None: ...

    def run_isolated(self, step: Callable[..., None], *given: object) -> None:
        """Call `step`; if it raises, which is a bug in the gateway, only this request ends."""


class Gate(Protocol):
    """Admission control, which places, queues or refuses each request; `queue.Queue` implements it."""

    def admit(self, asker: Asker, evaluation: Evaluation, now: float) -> Evaluation | None:
        """Return the evaluation to place the request by, or None if it was queued or refused."""

    def look(self) -> None:
        """Check the queued requests soon: there may be room for them, or no replica left."""

    def keep(self, spaces: Mapping[int, str], models: Set[str]) -> None:
        """Drop the queues of prompt spaces not in `spaces` (number -> name), and figures of models not in `models`."""

    def await_replica(self, asker: Asker, error: ApiError, now: float) -> bool:
        """Queue a request that no replica can take now; return False if the caller is to answer it with `error`."""

    def forget(self, asker: Asker) -> None:
        """Drop a request that has ended or does not need a replica any more."""


Acted = Callable[[Went], None]  # called with the chosen replica of an observed request, see `Onlooker`


class Onlooker(Protocol):
    """An observer of decisions."""

    def see(self, asker: Asker, evaluation: Evaluation, ways: Callable[[], Sequence[legs.Ways]]) -> Acted | None:
        """Observe a request that is about to be placed by this evaluation.

        Returns a callable to be called with the choice once the request has been placed, or None.

        `evaluation`: valid until the next evaluation is made or `ways` is called.
        `ways`: returns the pairs of replicas for two legs, where replicas have roles.
        """


class Placing:
    """The choice of a replica for each request, by this gateway's own view or in the shared ledger."""

    def __init__(
        self,
        eligible: Eligibility,
        router: Router,
        responses: Responses,
        metrics: Metrics,
        pulse: Pulse,
        shadows: Shadows | None = None,
    ):
        self.eligible, self.router, self.responses = eligible, router, responses
        self._metrics, self.pulse, self.shadows = metrics, pulse, shadows
        self.onlooker: Onlooker | None = shadows
        self.legs = LegPlacing(eligible, router, metrics)
        self.pulls = eligible.pulls = Pulls(eligible.backends, router, metrics)
        self.shared: SharedLedger | None = None  # with Redis
        self.queue: Gate | None = None  # where requests are admitted by class or limit
        self._found: list[Asker] | None = None  # placed requests of the present batch; None outside of a batch

    def begin_batch(self) -> None:
        """Keep back requests that are placed from now on; `end_batch` sends them."""
        self._found = []

    def end_batch(self) -> None:
        """Send the requests that were placed since `begin_batch`."""
        found, self._found = self._found, None
        for asker in found or ():
            asker.run_isolated(asker.placed)

    def demand(self, prompt: Prompt | None, now: float, path: str = "") -> Demand:
        """Return a request's demand, from which policies compute its costs. `path` is used only without a prompt."""
        if prompt is None:
            return Demand(tokens=0, draw=random(), writes=path not in WRITES_NOTHING)
        return demand_of(prompt, now, random())

    def place(self, asker: Asker) -> None:
        """Choose a replica for a request and reserve its load in one step, here or in the shared ledger.

        Calls `asker.placed` or `asker.unplaced`, at once or when the shared ledger has answered, or `asker.held` if the
        request has to wait in the queue.
        """
        begun, now = perf_counter(), monotonic()
        if now > self.pulse.late_at:  # the loop was held up: account for it before judging any replica late
            self.pulse.look(now)
        prompt = asker.prompt
        try:
            targets = self.eligible.targets(prompt, asker.tried, asker.model, asker.tenant)
        except ApiError as error:
            if self.queue is None or not self.queue.await_replica(asker, error, now):
                asker.unplaced(error)
            return
        if asker.response is not None and (maker := self.responses.maker(asker.response)) is not None:
            targets = targets.only(maker) or targets
        elif now < self.eligible.full_until:
            targets = self.eligible.but_full(targets, now)
        demand = self.demand(prompt, now, asker.request.path if isinstance(asker, Exchange) else "")
        peers = self.pulls.peers(asker) if self.pulls.any else ()
        evaluation = self.router.evaluate(demand, targets, now, peers=peers)
        if self.queue is not None:
            admitted = self.queue.admit(asker, evaluation, now)
            if admitted is None:
                return
            evaluation = admitted
        acted = self._seen(self.onlooker, asker, evaluation, now) if self.onlooker is not None else None
        if self.eligible.roles.any and isinstance(asker, Exchange):
            plan = self.legs.plan(asker, evaluation, now)
            if plan is not None:
                if acted is not None:
                    acted(plan.chosen)
                self._place_legs(asker, evaluation, plan, begun, now)
                return
        shared = self.shared
        if shared is not None:
            if shared.joined:
                shared.decide(
                    evaluation, lambda decision: self._decided(shared, asker, evaluation, acted, begun, decision)
                )
                return
            self._metrics.shared_decisions.inc("away")
        self._take(asker, evaluation, acted, now)
        asker.stages.append(("choose", perf_counter() - begun))
        self._go_on(asker)

    def _seen(self, onlooker: Onlooker, asker: Asker, evaluation: Evaluation, now: float) -> Acted | None:
        def ways() -> Sequence[legs.Ways]:
            return self.legs.ways(asker, evaluation, now) if isinstance(asker, Exchange) else ()

        return onlooker.see(asker, evaluation, ways if self.eligible.roles.any else tuple)

    def _place_legs(self, exchange: Exchange, evaluation: Evaluation, plan: LegPlan, begun: float, now: float) -> None:
        shared = self.shared
        if shared is None or not shared.joined:
            if shared is not None:
                self._metrics.shared_decisions.inc("away")
            self.legs.take(exchange, evaluation, plan, now)
            self._metrics.stage_seconds.observe("choose", perf_counter() - begun)
            self._go_on(exchange)
            return
        first, second = plan.to_decide(evaluation)

        def answer(decided: tuple[Decision, Decision] | None) -> None:
            exchange.stages.append(("choose", perf_counter() - begun))
            self._legs_decided(shared, exchange, evaluation, plan.among(first.candidates, decided), decided)

        shared.decide_legs(first, second, answer)

    def _legs_decided(
        self,
        shared: SharedLedger,
        exchange: Exchange,
        evaluation: Evaluation,
        plan: LegPlan,
        decided: tuple[Decision, Decision] | None,
    ) -> None:
        """Go on with the shared ledger's decision for both legs; place the request again if a replica has left."""
        waiting = exchange.needs_replica
        there = waiting and self.legs.are_there(plan.chosen)
        if decided is not None and not there:
            for one in decided:
                shared.undo(one)
        if there:
            exchange.run_isolated(self._go_on_with_legs, exchange, evaluation, plan, decided)
        elif waiting:
            exchange.run_isolated(self.place, exchange)

    def _go_on_with_legs(
        self, exchange: Exchange, evaluation: Evaluation, plan: LegPlan, decided: tuple[Decision, Decision] | None
    ) -> None:
        now, chosen = monotonic(), plan.chosen
        # Candidates hold the overlap found by the last evaluation, and other requests were evaluated meanwhile.
        self.router.weighed(evaluation.demand, Targets([chosen.prefiller, chosen.decoder]), now)
        self.legs.take(exchange, evaluation, plan, now, decided)
        self._go_on(exchange)

    def _take(
        self, asker: Asker, evaluation: Evaluation, acted: Acted | None, now: float, decision: Decision | None = None
    ) -> None:
        """Commit the choice made here, or the shared ledger's `decision`, and add the attempt."""
        placement = self.router.commit(evaluation, now, decision)
        prompt = asker.prompt
        if evaluation.spaces is not None and prompt is not None:
            prompt = as_variant(prompt, placement.candidate.space)
        backend = self.eligible.backends[placement.candidate.replica]
        if self.eligible.finer and prompt is not None:
            add_tail(placement, backend, prompt)
        body = None
        if placement.pull is not None and prompt is not None and isinstance(asker, Exchange):
            body = self.pulls.body(asker, placement)
            prompt.token_ids = b""  # a request with a pull is sent as text
        asker.add_attempt(
            asker.attempt_type(
                backend,
                placement,
                prompt,
                prompt is not None and prompt.stream,
                now,
                body=body,
            )
        )
        if acted is not None:
            acted(evaluation.choice.index if decision is None else decision.index)

    def _go_on(self, asker: Asker) -> None:
        if self._found is None:
            asker.placed()
        else:
            self._found.append(asker)

    def _go_on_with(self, asker: Asker, evaluation: Evaluation, acted: Acted | None, decision: Decision | None) -> None:
        self._take(asker, evaluation, acted, monotonic(), decision)
        self._go_on(asker)

    def _decided(
        self,
        shared: SharedLedger,
        asker: Asker,
        evaluation: Evaluation,
        acted: Acted | None,
        begun: float,
        decision: Decision | None,
    ) -> None:
        """Go on with the shared ledger's decision, or with the choice made here if there is none in time."""
        asker.stages.append(("choose", perf_counter() - begun))
        waiting = asker.needs_replica  # False if the client left meanwhile
        candidate = evaluation.candidates[decision.index if decision is not None else evaluation.choice.index]
        backend = self.eligible.backends.get(candidate.replica)
        there = (
            waiting
            and backend is not None
            and backend.candidate is candidate
            and backend.replica.state in TAKES_TRAFFIC
        )
        if decision is not None and not there:
            shared.undo(decision)
        if there:
            asker.run_isolated(self._go_on_with, asker, evaluation, acted, decision)
        elif waiting:
            asker.run_isolated(self.place, asker)  # the replica left before Redis answered


def demand_of(prompt: Prompt, now: float = UNTIMED, draw: float = 0.0) -> Demand:
    """Return a prompt's demand, from which policies compute its costs.

    `now`: monotonic seconds.
    `draw`: a random number in [0, 1) for policies that choose by chance.
    """
    hashes, also = prompt.hashes, prompt.also
    root = hashes[0] if hashes else 0
    return Demand(
        prompt.tokens, prompt.block_size, root, prompt.session, prompt.max_tokens, now, hashes, draw, prompt.reads_cache, prompt.path,
        prompt.space, None if also is None else demand_of(also, now, draw), prompt.stream,
        prompt.path not in WRITES_NOTHING,
    )  # fmt: skip
