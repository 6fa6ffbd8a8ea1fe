"""A request gets a replica, here or where the load of all gateways is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import random
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Protocol

from policies import UNTIMED, Decision, Demand, Evaluation, Router

from ..errors import ApiError
from .attempt import Attempt
from .eligibility import TAKE_TRAFFIC, Eligibility
from .responses import Responses
from .shadow import Seen, Shadows

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from ..prompt import Prompt
    from .backend import Backend
    from .shared import SharedLedger


class Asker(Protocol):
    """Who wants a replica: an exchange, or a request whose bytes pass elsewhere."""

    @property
    def prompt(self) -> Prompt | None: ...

    @property
    def model(self) -> str | None:
        """What a request without prompt names."""

    @property
    def response(self) -> str | None:
        """The stored response that it is about."""

    @property
    def tried(self) -> tuple[Backend, ...]:
        """Replicas that it is not to get."""

    @property
    def needs_replica(self) -> bool:
        """Whether it still wants one."""

    def add_attempt(self, attempt: Attempt) -> None:
        """Go on with this attempt: a replica is found, and the request is counted there."""

    def placed(self) -> None:
        """Go on with what it has."""

    def unplaced(self, error: ApiError) -> None: ...

    def run_isolated(self, step: Callable[..., None], *given: object) -> None:
        """Call `step`; an exception in it, a bug of ours, ends this request alone."""


class Placing:
    def __init__(
        self,
        eligible: Eligibility,
        router: Router,
        responses: Responses,
        metrics: Metrics,
        shadows: Shadows | None = None,
    ):
        self.eligible, self.router, self.responses = eligible, router, responses
        self._metrics, self.shadows = metrics, shadows
        self.shared: SharedLedger | None = None  # with Redis
        self._found: list[Asker] | None = None  # while they are held back

    def begin_batch(self) -> None:
        """Whoever gets a replica from now on goes on with `end_batch`, when all have theirs."""
        self._found = []

    def end_batch(self) -> None:
        found, self._found = self._found, None
        for asker in found or ():
            asker.run_isolated(asker.placed)

    def demand(self, prompt: Prompt | None, now: float) -> Demand:
        """What is asked for."""
        if prompt is None:
            return Demand(tokens=0, draw=random())
        alone = self.shared is None or not self.shared.joined  # else others change the load, and nobody tells when
        return demand_of(prompt, now if alone else UNTIMED, random())

    def place(self, asker: Asker) -> None:
        """Choose, and count the load at once: decision and reservation are one step, here or where the load
        of all gateways is known. Calls `asker.placed` or `asker.unplaced`."""
        begun, now = perf_counter(), monotonic()
        prompt = asker.prompt
        try:
            targets = self.eligible.targets(prompt, asker.tried, asker.model)
        except ApiError as error:
            asker.unplaced(error)
            return
        if asker.response is not None and (maker := self.responses.maker(asker.response)) is not None:
            targets = targets.only(maker) or targets
        demand = self.demand(prompt, now)
        evaluation = self.router.evaluate(demand, targets, now)
        seen = self.shadows.see(demand, evaluation.candidates) if self.shadows is not None else None
        shared = self.shared
        if shared is not None:
            if shared.joined:
                shared.decide(
                    evaluation, lambda decision: self._decided(shared, asker, evaluation, seen, begun, decision)
                )
                return
            self._metrics.shared_decisions.inc("away")
        self._take(asker, evaluation, seen, now)
        self._metrics.stage_seconds.observe("choose", perf_counter() - begun)
        self._go_on(asker)

    def _take(
        self, asker: Asker, evaluation: Evaluation, seen: Seen | None, now: float, decision: Decision | None = None
    ) -> None:
        """Here, or as the shared ledger has decided."""
        placement = self.router.commit(evaluation, now, decision)
        prompt = asker.prompt
        if evaluation.spaces is not None and prompt is not None:
            prompt = as_variant(prompt, placement.candidate.space)
        asker.add_attempt(
            Attempt(
                self.eligible.backends[placement.candidate.replica],
                placement,
                prompt,
                prompt is not None and prompt.stream,
                now,
            )
        )
        if self.shadows is not None and seen is not None:
            self.shadows.acted(seen, evaluation.choice.index if decision is None else decision.index)

    def _go_on(self, asker: Asker) -> None:
        if self._found is None:
            asker.placed()
        else:
            self._found.append(asker)

    def _decided(
        self,
        shared: SharedLedger,
        asker: Asker,
        evaluation: Evaluation,
        seen: Seen | None,
        begun: float,
        decision: Decision | None,
    ) -> None:
        """What the shared ledger answers; None: too late, or not at all, and the choice made here stands."""
        self._metrics.stage_seconds.observe("choose", perf_counter() - begun)
        waiting = asker.needs_replica  # else the client left meanwhile
        candidate = evaluation.candidates[decision.index if decision is not None else evaluation.choice.index]
        backend = self.eligible.backends.get(candidate.replica)
        there = (
            waiting and backend is not None and backend.candidate is candidate and backend.replica.state in TAKE_TRAFFIC
        )
        if decision is not None and not there:
            shared.undo(decision)
        if there:
            self._take(asker, evaluation, seen, monotonic(), decision)
            asker.run_isolated(self._go_on, asker)
        elif waiting:
            asker.run_isolated(self.place, asker)  # the replica left while Redis was asked


def as_variant(prompt: Prompt, space: int) -> Prompt:
    """The request as the replicas of this space have it; `also` leads from there to where it was."""
    also = prompt.also
    if prompt.space == space:
        return prompt
    if also is None or also.space != space:
        return replace(
            prompt,
            mode="load",
            note="a third variant of its model has it",
            hashes=(),
            token_ids=b"",
            space=space,
            also=prompt,
        )
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
