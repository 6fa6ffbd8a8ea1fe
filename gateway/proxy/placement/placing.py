"""The choice of a replica for each request, made in this process or in the load ledger that gateways share in Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import random
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from policies import UNTIMED, Candidate, Decision, Demand, Evaluation, Placement, Router, Targets, legs
from replicas import TAKES_TRAFFIC

from ...errors import ApiError
from ...prompt.prompt import as_variant
from ..backend import Backend
from ..disagg.legs import LegPlacing, LegPlan
from ..observers.shadow import Shadows, Went
from ..paths import WRITES_NOTHING
from ..responses.stored import Responses
from .askers import Asker
from .eligibility import Eligibility
from .pulling import Pulls

if TYPE_CHECKING:
    from replicas.pulse import Pulse

    from ...ops.metrics import Metrics
    from ...prompt import Prompt
    from .shared import Send, SharedLedger

TOKEN_BYTES = 4

Acted = Callable[[Went], None]  # a callback of an `Onlooker`, called with the chosen replica once it is chosen


class Onlooker(Protocol):
    """An observer of the choices of replicas, such as the shadow policies."""

    def see(self, asker: Asker, evaluation: Evaluation, ways: Callable[[], Sequence[legs.Ways]]) -> Acted | None:
        """Observe a request that is about to be placed by this evaluation.

        Returns a callback that is to be called with the choice once the request is placed, or None.

        `evaluation`: the policy's choice and its candidates. Read it at once: the candidates are reused by the next
            evaluation, also by the one that `ways` makes.
        `ways`: returns the replicas for two legs (prefill and decode) with their costs; none where no replica has a
            role.
        """


class Placing:
    """The choice of a replica for each request, by the load that this gateway knows or by that of all gateways."""

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
        self.shared: SharedLedger | None = None  # the load ledger of all gateways, with Redis
        self.queue: Any = None  # with service classes or limits: the `Queue`, whose module imports this one

    def demand(self, prompt: Prompt | None, now: float, path: str = "") -> Demand:
        """Return a request's demand (the properties by which policies choose), with a random number drawn for it.

        `now`: in monotonic seconds.
        `path`: the path of a request without a prompt.
        """
        if prompt is None:
            return Demand(tokens=0, draw=random(), writes=path not in WRITES_NOTHING)
        return demand_of(prompt, now, random())

    def place(self, asker: Asker, placed: list[Any] | None = None) -> None:
        """Choose one replica or two (legs) for a request, and reserve its load in one step, here or in Redis.

        Then `asker.placed` or `asker.unplaced` is called. This happens at once, when the shared ledger in Redis has
        answered, or when the request has left the queue.

        `placed`: for a request of a batch. If a replica is chosen at once, the request is added to this list, and the
            caller calls `asker.placed` once all of the batch are placed. It is not used if Redis or the queue decides.
        """
        begun, now = perf_counter(), monotonic()
        if now > self.pulse.late_at:  # the event loop was stalled: note that before any replica counts as late
            self.pulse.look(now)
        prompt = asker.prompt
        targets = self.eligible.usual.get(prompt.model or None) if prompt is not None and not asker.tried else None
        if targets is None:
            try:
                targets = self.eligible.targets(prompt, asker.tried, asker.model, asker.tenant, asker.able)
            except ApiError as error:
                if self.queue is None or not self.queue.await_replica(asker, error, now):
                    asker.unplaced(error)
                return
        if asker.response is not None and (maker := self.responses.maker(asker.response)) is not None:
            targets = targets.only(maker) or targets
        elif now < self.eligible.full_until:
            targets = self.eligible.but_full(targets, now)
        demand = self.demand(None, now, asker.request.path) if prompt is None else demand_of(prompt, now, random())
        peers = self.pulls.peers(asker) if self.pulls.any else ()
        evaluation = self.router.evaluate(demand, targets, now, peers=peers)
        if self.queue is not None:
            evaluation = self.queue.admit(asker, evaluation, now)
            if evaluation is None:
                return
        acted = plan = None
        if self.onlooker is not None:
            roles = self.eligible.roles.any
            acted = self.onlooker.see(
                asker, evaluation, (lambda: self.legs.ways(asker, evaluation, now)) if roles else tuple
            )
        if self.eligible.roles.any and asker.is_forwarded:
            plan = self.legs.plan(asker, evaluation, now)
            if plan is not None and acted is not None:
                acted(plan.chosen)
        if (shared := self.shared) is not None:
            if shared.joined:
                self._decide(shared, asker, evaluation, plan, acted, begun)
                return
            self._metrics.shared_decisions.inc("away")
        self._take(asker, evaluation, plan, acted, now)
        asker.stages.append(("choose", perf_counter() - begun))
        if placed is None:
            asker.placed()
        else:
            placed.append(asker)

    def _decide(
        self,
        shared: SharedLedger,
        asker: Asker,
        evaluation: Evaluation,
        plan: LegPlan | None,
        acted: Acted | None,
        begun: float,
    ) -> None:
        """Have the load ledger in Redis choose among the candidates, then place the request by its decision.

        If that comes too late, the choice made here holds. If the chosen replica has left before Redis answered, the
        request is placed again.
        """

        def decided(found: tuple[Decision, ...] | None) -> Send | None:
            asker.stages.append(("choose", perf_counter() - begun))
            waiting, there = asker.needs_replica, False  # it no longer waits if the client has left meanwhile
            if waiting and plan is not None:
                there = all(map(self._is_there, plan.among(found).chosen[:2]))
            elif waiting:
                index = evaluation.choice.index if found is None else found[0].index
                there = self._is_there(evaluation.candidates[index])
            if there:
                if asker.run_isolated(self._go_on_with, asker, evaluation, plan, acted, found):
                    return partial(asker.run_isolated, asker.placed)
                return None
            for one in found or ():
                shared.undo(one)
            if waiting:
                asker.run_isolated(self.place, asker)
            return None

        if plan is None:
            shared.decide(evaluation, lambda one: decided(None if one is None else (one,)))
        else:
            shared.decide_legs(*plan.to_decide(evaluation), decided)

    def _is_there(self, candidate: Candidate) -> bool:
        """Return whether a chosen replica is still the same process and accepts requests."""
        backend = self.eligible.backends.get(candidate.replica)
        return backend is not None and backend.candidate is candidate and backend.replica.state in TAKES_TRAFFIC

    def _go_on_with(
        self,
        asker: Asker,
        evaluation: Evaluation,
        plan: LegPlan | None,
        acted: Acted | None,
        decided: tuple[Decision, ...] | None,
    ) -> None:
        """Place a request by the decision of the shared ledger, or by the choice made here if `decided` is None."""
        now = monotonic()
        if plan is not None:
            plan = plan.among(decided)
            # Candidates have the cached tokens (overlap) of the request that was evaluated last, which is another one.
            self.router.weighed(evaluation.demand, Targets([plan.chosen.prefiller, plan.chosen.decoder]), now)
        self._take(asker, evaluation, plan, acted, now, decided)

    def _take(
        self,
        asker: Asker,
        evaluation: Evaluation,
        plan: LegPlan | None,
        acted: Acted | None,
        now: float,
        decided: tuple[Decision, ...] | None = None,
    ) -> None:
        """Reserve load by the choice made here, or by what the shared ledger `decided`, and add the attempt."""
        if plan is not None and asker.is_forwarded:
            self.legs.take(asker, evaluation, plan, now, decided)
            return
        decision = None if decided is None else decided[0]
        placement = self.router.commit(evaluation, now, decision)
        prompt = asker.prompt
        if evaluation.spaces is not None and prompt is not None:
            prompt = as_variant(prompt, placement.candidate.space)
        backend = self.eligible.backends[placement.candidate.replica]
        if self.eligible.finer and prompt is not None:
            add_tail(placement, backend, prompt)
        body = None
        if placement.pull is not None and prompt is not None:
            body = self.pulls.body(asker, placement)
            prompt.forget_ids()  # a request with a pull is sent as text
        streams = prompt is not None and prompt.stream
        asker.add_attempt(asker.attempt_type(backend, placement, prompt, streams, now, body=body))
        if acted is not None:
            acted(evaluation.choice.index if decision is None else decision.index)


def demand_of(prompt: Prompt, now: float = UNTIMED, draw: float = 0.0) -> Demand:
    """Return a prompt's demand: the properties by which policies choose a replica.

    `now`: in monotonic seconds.
    `draw`: a random number in [0, 1), for policies that choose by chance.
    """
    hashes, also = prompt.hashes, prompt.also
    root = hashes[0] if hashes else 0
    return Demand(
        prompt.tokens, prompt.block_size, root, prompt.session, prompt.max_tokens, now, hashes, draw, prompt.reads_cache, prompt.path,
        prompt.space, None if also is None else demand_of(also, now, draw), prompt.stream,
        prompt.path not in WRITES_NOTHING,
    )  # fmt: skip


def add_tail(placement: Placement, backend: Backend, prompt: Prompt) -> None:
    """Raise a placement's predicted cached tokens (`overlap`) by the cached part of the block that follows them.

    Only done for a replica whose cache hits may end inside a block. The choice of the replica ignores this part, since
    it is less than a block.
    """
    if not backend.is_finer or backend.intake is None or not prompt.token_ids or not prompt.reads_cache:
        return
    if prompt.several or placement.lower:
        return
    held, tokens = placement.overlap // prompt.block_size, memoryview(prompt.token_ids)
    # The last token is always computed.
    found = tokens[: (prompt.tokens - 1) * TOKEN_BYTES]
    placement.overlap = backend.intake.reach(held, prompt.hashes, prompt.seed, found)
