"""The admission of one request: the Router's predictions, put before an `Admission` step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .admission import Admission
from .class_queue import QueuedRequest
from .decisions import SENT, SPILLED, AdmissionDecision, AdmissionOptions
from .estimates import Estimate
from .legs import LegChoice
from .pairs import Pair, best_legs, estimated, pairs
from .placement import Evaluation, Pairing
from .router import Router, Targets
from .vocabulary import Candidate


class RouterOptions(AdmissionOptions):
    """The alternatives for a request: a capped answer, or the overflow pool. Quotes for them are made on demand.

    `spill`: returns the overflow pool's replicas that can take the request; `may_cap`: whether its answer can be
    capped; `pairings`: the prefillers and decoders that may serve it in two legs.
    """

    def __init__(
        self,
        router: Router,
        evaluation: Evaluation,
        now: float,
        spill: Callable[[], Targets | None],
        may_cap: bool,
        pairings: Sequence[Pairing],
    ) -> None:
        self._router, self._evaluation, self._now = router, evaluation, now
        self._spill, self._may_cap, self._pairings = spill, may_cap, pairings
        self.slow: Sequence[Candidate] = ()  # the overflow pool's candidates, once `spilled` was called

    def may_cap(self, most: int) -> bool:
        asked = self._evaluation.demand.max_tokens
        return self._may_cap and (asked is None or asked > most)

    def capped(self, most: int) -> Sequence[Estimate]:
        demand, evaluation = self._evaluation.demand, self._evaluation
        if not self.may_cap(most):
            return ()
        if self.slow or self._pairings:  # candidates were weighed again since
            targets = Targets([*evaluation.candidates])
            evaluation = self._router.evaluate(demand, targets, self._now, peers=evaluation.peers)
        demand.output, output = min(demand.output, most), demand.output
        try:
            whole = self._router.estimates(evaluation)
            return whole + [one.estimate for one in pairs(self._router, evaluation, self._pairings, self._now)]
        finally:
            demand.output = output

    def in_overflow_pool(self) -> Sequence[Estimate]:
        targets = self._spill()
        if not targets:
            return ()
        found = self._router.evaluate(self._evaluation.demand, targets, self._now, peers=self._evaluation.peers)
        self.slow = [*found.candidates]
        return self._router.estimates(found)

    def has_separate_overflow_pool(self) -> bool:
        targets = self._spill()
        if not targets:
            return False
        slow = {one.replica for one in targets.candidates}
        return slow.isdisjoint(one.replica for one in self._evaluation.candidates)


def admit(
    router: Router,
    admission: Admission,
    request: QueuedRequest,
    evaluation: Evaluation,
    now: float,
    spill: Callable[[], Targets | None] = lambda: None,
    may_cap: bool = False,
    pairings: Sequence[Pairing] = (),
) -> tuple[AdmissionDecision, Evaluation]:
    """Decide whether a request is sent, right after `Router.evaluate`; return the verdict and the evaluation to commit.

    If not all ways to serve the request suit it, the policy chooses again among those that do. A request that is sent
    must be committed at once. `spill`, `may_cap`, `pairings`: as in `RouterOptions`.

    Two legs (prompt and answer on different replicas) are taken where they cost less than the request would on one
    replica without limits. So limits alone never split a request, unless no single replica suits it. A class whose
    requests are always sent (`observe`) stays on one replica even then, because predictions for two legs are less
    certain (Mooncake's conversations on four engines of both roles and four decoders, 8 requests a second: 80 % kept
    their limits with two legs, 89 % without).
    """
    demand, candidates, unlimited = evaluation.demand, evaluation.candidates, evaluation
    estimates = router.estimates(evaluation)
    paired = pairs(router, evaluation, pairings, now) if pairings else []
    offers = RouterOptions(router, evaluation, now, spill, may_cap, pairings)
    best, whole_best = min(paired, key=lambda one: one.estimate, default=None), candidates[evaluation.choice.index]
    computing = whole_best if best is None or best.estimate >= min(estimates) else best.prefiller
    verdict = admission.ask(
        request,
        demand.tokens - computing.cached,
        estimates + [one.estimate for one in paired],
        now,
        [*[(one.replica,) for one in candidates], *[one.place for one in paired]],
        offers,
    )
    if verdict.decision not in SENT:
        return verdict, evaluation
    if verdict.cap:
        demand.max_tokens = verdict.cap
        if demand.also is not None:
            demand.also.max_tokens = verdict.cap
    whole, allowed = [index for index in verdict.among if index < len(estimates)], paired
    if verdict.decision == SPILLED:
        candidates, allowed, whole = offers.slow, [], [*verdict.among]
    elif verdict.among:
        allowed = [paired[index - len(estimates)] for index in verdict.among if index >= len(estimates)]
    if offers.slow or verdict.cap or (whole and evaluation.choice.index not in whole):
        targets = Targets([candidates[index] for index in whole or range(len(candidates))])
        evaluation = router.evaluate(demand, targets, now, peers=evaluation.peers)
        estimates = router.estimates(evaluation)
        if verdict.decision == SPILLED or len(targets) < len(candidates):
            evaluation = evaluation._replace(narrowed=verdict.decision)
    writer, legs = evaluation.candidates[evaluation.choice.index], None
    if pairings:
        may_go_whole = bool(whole) or not verdict.among or admission.observes(request.qos)
        legs = _legs(router, unlimited, pairings, now, allowed, may_go_whole)
        evaluation = evaluation._replace(settled=True, legs=legs)
    chosen, computing = estimates[evaluation.choice.index], writer
    if legs is not None:
        computing, writer = legs.prefiller, legs.decoder
        chosen = estimated(router, computing, writer, demand)
    admission.sent(request, chosen, writer.costs, demand.tokens + demand.output, now, computing.replica)
    return verdict, evaluation


def _legs(
    router: Router,
    evaluation: Evaluation,
    pairings: Sequence[Pairing],
    now: float,
    allowed: Sequence[Pair],
    whole: bool,
) -> LegChoice | None:
    """Return the legs in which a request goes, or None if it goes whole or to the overflow pool.

    `allowed`: the pairs that suit it; `whole`: whether it may go whole.
    """
    if not allowed:
        return None
    places = {one.place for one in allowed}
    for must in (False,) if whole else (False, True):
        if (found := best_legs(router, evaluation, pairings, now, places, must)) is not None:
            return found
    if whole:
        return None
    first, second, _ = min(allowed, key=lambda one: one.estimate)  # none of the cheapest pairs is allowed
    return LegChoice(first, second, evaluation.demand.tokens - second.overlap, None, None)
