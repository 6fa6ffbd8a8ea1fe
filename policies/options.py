"""The admission of one request: the Router's predictions are passed to an `Admission`, which decides.

The latency of a pair of replicas, of which one computes the prompt and the other writes the answer, is predicted as:

    ttft = the prefiller's prediction for the prompt alone + the transfer + the decoder's step
           + further delays of the decoder: prompts that it computes itself, blocks that must come free
    tpot = a step of the decoder with the streams that are there when the first token is out

A decoder's load includes requests whose prompts are still being computed elsewhere, so it covers what is about to
arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from . import two_legs
from .admission import Admission
from .class_queue import QueuedRequest
from .decisions import SENT, SPILLED, AdmissionDecision, AdmissionOptions
from .estimates import Estimate, Place, after_prefill, first_leg
from .legs import FEW, LegChoice
from .placement import Evaluation, Pairing
from .router import Router, Targets
from .vocabulary import Candidate, Demand


class RouterOptions(AdmissionOptions):
    """The alternatives for a request that no replica has room for: a capped answer, or the overflow pool.

    Their latencies are predicted only when they are asked for. `spill`: a function that returns the overflow pool's
    replicas which can take the request; `may_cap`: whether its answer can be capped; `pairings`: the replicas that may
    compute its prompt, and those that may then write its answer.
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
        self.slow: Sequence[Candidate] = ()  # the overflow pool's candidates, once `in_overflow_pool` was called

    def may_cap(self, most: int) -> bool:
        asked = self._evaluation.demand.max_tokens
        return self._may_cap and (asked is None or asked > most)

    def capped(self, most: int) -> Sequence[Estimate]:
        demand, evaluation = self._evaluation.demand, self._evaluation
        if not self.may_cap(most):
            return ()
        if self.slow or self._pairings:  # what candidates hold was set on them again since
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
    """Decide whether a request is sent, right after `Router.evaluate`; return the decision and what to commit.

    The second result is the evaluation to commit, at once, if the request is sent. If not all replicas (or pairs of
    them) suit the request, the policy chooses again among those that do. `spill`, `may_cap`, `pairings`: those of
    `RouterOptions`.

    Two legs (prompt and answer on different replicas) are taken where they cost less than the request would cost on one
    replica without latency limits. Limits alone therefore never split a request, unless no single replica suits it. A
    class whose requests are always sent (`observe`) stays on one replica even then, because predictions for two legs
    are less certain. Measured with Mooncake's conversations at 8 requests a second, on four engines of both roles and
    four decoders: 80 % of the requests kept their limits with two legs, 89 % without.
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
    """Return the two replicas that compute a request's prompt and write its answer; None if one replica serves it.

    `evaluation`: that of the request on one replica. `allowed`: the pairs of replicas that suit the request; `whole`:
    whether one replica may serve it.
    """
    if not allowed:
        return None
    places = {one.place for one in allowed}
    for must in (False,) if whole else (False, True):
        ways = [one.only(places) for one in two_legs.ways(router, evaluation, pairings, now)]
        found = two_legs.choose_among(router, [one for one in ways if one is not None], must)
        if found is not None:
            return found
    if whole:
        return None
    # None of the cheapest pairs is allowed, so the fastest allowed pair is taken.
    first, second, _ = min(allowed, key=lambda one: one.estimate)
    return LegChoice(first, second, evaluation.demand.tokens - second.overlap, None, None)


class Pair(NamedTuple):
    """A replica that computes a prompt, one that writes the answer, and the predicted latency with both."""

    prefiller: Candidate
    decoder: Candidate
    estimate: Estimate

    @property
    def place(self) -> Place:
        """The names of both replicas, the prefiller's first."""
        return self.prefiller.replica, self.decoder.replica


def pairs(router: Router, whole: Evaluation, pairings: Sequence[Pairing], now: float) -> list[Pair]:
    """Return the pairs of replicas (prefill and decode) that could serve a request, with the predicted latency of each.

    Call this right after the request's evaluation, `whole`. If replicas are many, only the FEW (8) fastest prefillers
    and decoders are all paired with each other. Every other replica is in one pair.
    """
    return [
        Pair(first, second, estimated(router, first, second, whole.demand))
        for ways in two_legs.ways(router, whole, pairings, now)
        for first, second in _combined(ways.demand, ways.prefillers, ways.decoders)
        if first is not second and ways.can_pair(first, second)
    ]


def estimated(router: Router, prefiller: Candidate, decoder: Candidate, demand: Demand) -> Estimate:
    """Return the predicted latency of a request whose prompt and answer are computed by these two replicas.

    What both hold of the prompt must have been set on them before (`Router.weighed`).
    """
    moving = router.transfers.seconds(prefiller.replica, decoder.replica, demand.tokens - decoder.overlap, demand.now)
    return after_prefill(first_leg(prefiller, demand), moving, decoder, demand)


def _combined(
    demand: Demand, prefillers: Sequence[Candidate], decoders: Sequence[Candidate]
) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield the pairs of a prefiller and a decoder to consider: all pairs of the FEW (8) fastest of each kind.

    Every other prefiller is paired with the fastest decoder, and every other decoder with the fastest prefiller.
    """
    firsts = sorted(prefillers, key=lambda one: first_leg(one, demand).ttft)
    seconds = sorted(decoders, key=lambda one: one.costs.step_seconds(one.load))
    yield from [(first, second) for first in firsts[:FEW] for second in seconds[:FEW]]
    yield from [(first, seconds[0]) for first in firsts[FEW:]]
    yield from [(firsts[0], second) for second in seconds[FEW:]]
