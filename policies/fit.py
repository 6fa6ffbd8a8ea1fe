"""Which of the ways to serve a request have room for it, and which meet its latency limits.

A *way* to serve a request is one replica, or a pair of replicas for prefill and decode. Its *estimate* is its predicted
latency. `admission` defines room and limits. Predictions are checked against measurements: for predictions that came
near a limit, a running quantile of the ratio of measured to predicted seconds is kept (a margin). Later predictions are
multiplied by it. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import ceil, exp, inf, log

from .class_queue import ClassQueue, QueuedRequest
from .classes import NO_LIMITS, Classes
from .control import TIGHT
from .decisions import AdmissionOptions, Rules
from .estimates import Estimate, Place
from .fair_share import FairShare

_QUANTILE, _GAIN = 0.95, 0.01  # the quantile of the ratios, and the step of its logarithm per observation
_MOST = log(1.5)  # the bound of a margin's logarithm: it learns with delay, so slow answers would raise it too far
_NEAR = 0.25  # the share of a limit from which a prediction is near enough to it to learn from


class Margin:
    """A learned factor: one in twenty measured times exceeds the predicted time multiplied by it.

    It is a running quantile, by stochastic approximation (Robbins and Monro, 1951).
    """

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log)

    def learn(self, predicted: float, met: float, limit: float) -> None:
        """Learn from one request, if its prediction came near the latency limit.

        `predicted`, `met`, `limit`: the predicted, measured and allowed seconds.
        """
        if predicted >= _NEAR * limit and met > 0.0:
            over = log(met / predicted) > self._log
            self._log = min(_MOST, max(0.0, self._log + _GAIN * (_QUANTILE if over else _QUANTILE - 1.0)))


class Question:
    """A request for which admission is deciding whether, and where, it may be sent.

    `estimates`: the predicted latency of each way to serve it (by a replica or a pair of them); `places`: the replicas
    of each way (empty: one estimate for each replica); `offers`: the alternatives if there is no room; `best`: the
    estimate with the lowest TTFT; `waited`: the seconds that it has waited; `room`: the indices of the ways that have
    room for it, once known.
    """

    __slots__ = ("request", "estimates", "best", "places", "replicas", "offers", "now", "waited", "room")

    def __init__(
        self,
        request: QueuedRequest,
        estimates: Sequence[Estimate],
        now: float,
        places: Sequence[Place],
        offers: AdmissionOptions,
    ) -> None:
        self.request, self.estimates, self.places, self.offers, self.now = request, estimates, places, offers, now
        self.best, self.waited = min(estimates), now - request.since - request.held
        self.replicas: frozenset[str] = frozenset().union(*places)
        self.room: Sequence[int] = ()

    @property
    def limited(self) -> bool:
        """Whether the request has latency limits; otherwise every estimate would meet them, and it is never refused."""
        return self.request.slo != NO_LIMITS

    @property
    def ttft(self) -> float:
        """The predicted seconds from the request's arrival to its first token if it is sent now."""
        return self.waited + self.best.ttft

    def computing(self, whole: bool) -> dict[int | str, int]:
        """Return for each replica how many prompts it is computing.

        `whole`: True for the replicas that would serve the request alone, False for the prefill replicas of pairs. The
        keys are the replicas' names, or the indices of the estimates if `places` is empty.
        """
        if not self.places:
            return {index: one.computing for index, one in enumerate(self.estimates)} if whole else {}
        pairs = zip(self.places, self.estimates, strict=True)
        return {place[0]: one.computing for place, one in pairs if (len(place) == 1) is whole}

    def is_whole(self, index: int) -> bool:
        """Return whether the way with this index is one replica for the whole request, not a pair of replicas."""
        return not self.places or len(self.places[index]) == 1


class Fit:
    """The room that the replicas of one model have for requests.

    `fair_share`: how much of the replicas each class of requests has used; `tight`: the names of the classes for which
    overload control narrows the limits.
    """

    def __init__(self, classes: Classes, rules: Rules, fair_share: FairShare) -> None:
        self._rules, self._fair_share = rules, fair_share
        self.ttft_margin, self.tpot_margin = Margin(), Margin()
        self.tight: frozenset[str] = frozenset()
        self._tpot = min([one.slo.tpot for one in classes.all if one.slo.tpot is not None], default=inf)

    def room(
        self,
        asked: Question,
        estimates: Sequence[Estimate],
        fits: Callable[[Estimate, float, float], bool] | None = None,
    ) -> Sequence[int]:
        """Return the indices of the estimates whose replicas have room for a request of its class.

        Each estimate is for one way to serve the request: by one replica, or by a pair for prefill and decode. Higher
        classes have reserved fractions of the replicas, which are kept for them in three ways.
        Prefills: a prefill that has begun cannot be interrupted. So as many replicas as these fractions amount to are
            kept free of lower classes' prefills.
        Streams and KV cache: only the part of these fractions that the higher classes have not used lately is kept
            free.
        Shared steps: a request does not join a prefill of a higher class. The engine would compute both prompts in one
            step, which takes as long as both.

        `fits(estimate, share, tight)`: a test of one estimate to use in place of `has_room`.
        """
        qos, fair_share, fits = asked.request.qos, self._fair_share, fits or self.has_room
        above, first = fair_share.above(qos, asked.now), fair_share.others_yield(qos, asked.now)
        tight = TIGHT if qos.name in self.tight else 1.0
        share = inf if first else tight * (1.0 - sum([fair_share.unused(one) for one in above]))
        kept = sum([one.reserved_fraction for one in above])
        clear = [_clear(asked.computing(whole).values(), kept) for whole in (False, True)]
        room = [
            index
            for index, one in enumerate(estimates)
            if clear[asked.is_whole(index)] >= (not one.computing)
            and fits(one, share, tight)
            and not (one.computing and asked.places and fair_share.computes(asked.places[index][0], above, asked.now))
        ]
        return [index for index in room if not estimates[index].computing] or room if first else room

    def has_room(self, estimate: Estimate, share: float, tight: float) -> bool:
        """Return whether an engine has room for a request, whatever the request's own latency limits are.

        An idle engine always has. Otherwise its queue, the classes' strictest TPOT limit and its KV cache decide.
        `share`: the share of the KV cache and of the TPOT limit that the request may use; `tight`: a factor on the
        longest queue that may be ahead of it.
        """
        if not estimate.there:
            return True
        return (
            estimate.wait <= tight * self._rules.engine_wait
            and estimate.tpot * self.tpot_margin.factor <= share * self._tpot
            and estimate.full <= share
        )

    def fast(self, request: QueuedRequest, estimates: Sequence[Estimate], room: Sequence[int]) -> Sequence[int]:
        """Keep only the estimates in `room` that meet the request's own TPOT limit or whose replicas are idle.

        `room`: indices of `estimates`. Returns the indices that are left.
        """
        limit = request.slo.tpot
        if limit is None or limit >= self._tpot:
            return room
        factor = self.tpot_margin.factor
        return [index for index in room if not estimates[index].there or estimates[index].tpot * factor <= limit]

    def meeting(self, estimates: Sequence[Estimate], asked: Question) -> list[int]:
        """Return the indices of the estimates that meet the request's latency limits; [] if it has no limits."""
        return [i for i, one in enumerate(estimates) if self.too_much(one, asked) is None] if asked.limited else []

    def too_much(self, estimate: Estimate, asked: Question) -> str | None:
        """Return which latency limit an estimate exceeds, "ttft" or "tpot"; None if it meets both.

        The TPOT limit is the strictest one of all classes, or the request's own if that is stricter.
        """
        ttft, tpot = asked.request.slo
        if ttft is not None and not self.within(estimate, asked.waited, ttft):
            return "ttft"
        limit = self._tpot if tpot is None else min(self._tpot, tpot)
        return "tpot" if estimate.tpot * self.tpot_margin.factor > limit else None

    def within(self, estimate: Estimate, waited: float, limit: float) -> bool:
        """Return whether the first token should come within `limit` seconds of the request's arrival.

        `waited`: the seconds that have passed since then.
        """
        return waited + estimate.ttft * self.ttft_margin.factor <= limit


def _clear(computing: Collection[int], kept: float) -> int:
    """Return how many of the replicas that compute no prompt may be used, with the others kept for higher classes.

    `computing`: for each replica, how many prompts it computes. `kept`: the share of all replicas to keep free. At
    least one replica is not kept.
    """
    return sum([not one for one in computing]) - min(ceil(kept * len(computing) - 1e-9), len(computing) - 1)


def unclaimed(room: Sequence[int], places: Sequence[Place], ahead: Sequence[ClassQueue]) -> Sequence[int]:
    """Keep only the ways in `room` that use no replica for which a request in one of the queues `ahead` waits.

    `room`: indices of ways to serve a request. `places`: the replicas of each way. Returns the indices that are left.
    """
    if not ahead or not room:
        return room
    if not places:
        return ()
    claimed: frozenset[str] = frozenset().union(*[one.targets for one in ahead])
    return [index for index in room if claimed.isdisjoint(places[index])]
