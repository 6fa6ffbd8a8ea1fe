"""The recent use of a model's replicas (a fleet) by each class of requests, and the order of classes that follows.

The use of a class is its share of the prefill seconds, or of the token-seconds of cache, that all classes together were
admitted to in about the last 10 s (_USED_SECONDS), whichever is larger (dominant resource fairness: Ghodsi et al., NSDI
2011). Its reserve is its `reserved_fraction` of both.

Refused requests should be retried one after the other, at the pace at which requests are admitted. A full queue keeps
predictions just above the limit. If each client retried when the prediction that refused its request falls below the
limit, all would therefore come back at once. Of the requests that retried in this way after a burst of twice what an
engine can answer, 19 % were admitted, and 9 % after a burst of four times that. So each refusal books time after the
earlier refusals of its class: the time that its prompt takes at half of the recent pace. The other half of the pace is
for new requests. With that, 77 and 71 % are admitted.

At most 50 s (_MOST_BOOKED) are booked, and at most 60 s (_FOLLOWED) together with the request's own wait. Clients
ignore a longer `Retry-After` (Anthropic's for Python above 60 s, OpenAI's newest above 120 s), and a client that does
not return leaves a gap. Refusals beyond these limits share the second half of the booked time with others. No I/O and
no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from .classes import Classes, QosClass

_USED_SECONDS = 10.0  # the time constant over which a class's share is averaged
CLEARLY = 4 / 3  # the factor by which a class's share must exceed its reserved fraction to exceed it clearly
MOST = 0.5  # the share of all use from which a class floods the replicas
LITTLE = 0.1  # a share of all use that is too small to be the reason why another class is refused
_BOOKED = 0.5  # the share of the pace that is booked for retries
_LEAST_PACE = 0.25  # seconds of prefill that are assumed to be admitted per second if none were lately
# In seconds: the bound on booked time is between _LEAST_BOOKED and _MOST_BOOKED; _FOLLOWED bounds the whole wait.
_LEAST_BOOKED, _MOST_BOOKED, _FOLLOWED = 10.0, 50.0, 60.0
_FIRST_SWEEP = 256  # once `_computes` has so many replicas, idle ones are dropped from it


class FairShare:
    """The recent use of one model's replicas by each class, the order of the classes, and the retry times booked."""

    def __init__(self, classes: Classes) -> None:
        self._all = classes.all
        # By class: recent seconds of prefill, and tokens of KV cache times seconds.
        self._used = {one.name: [0.0, 0.0] for one in classes.all}
        self._used_at = 0.0
        self._places = {one.name: place for place, one in enumerate(classes.all)}
        self._asked: dict[str, float] = {}  # time of each class's last request
        # By replica and class: the time until which the replica is predicted to compute prompts of the class.
        self._computes: dict[str, dict[str, float]] = {}
        self._sweep_at = _FIRST_SWEEP
        self._booked: dict[str, float] = {}  # by class: the time up to which retries are booked

    def ask(self, qos: QosClass, now: float) -> None:
        """Note that a request of this class came, so that the class counts as active."""
        self._asked[qos.name] = now

    def take(self, qos: QosClass, prefill: float, held: float, now: float) -> None:
        """Add to a class's use; `prefill`: seconds of prefill; `held`: tokens of KV cache times seconds."""
        self.decay(now)
        used = self._used[qos.name]
        used[0] += prefill
        used[1] += held

    def compute(self, qos: QosClass, replica: str, until: float, now: float) -> None:
        """Note that a replica is predicted to compute a prompt of this class until the time `until`."""
        if len(self._computes) >= self._sweep_at:
            self._computes = {name: of for name, of in self._computes.items() if max(of.values()) > now}
            # Scan again at twice the number left; otherwise each call would scan all replicas while all compute.
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._computes))
        of = self._computes.setdefault(replica, {})
        of[qos.name] = max(until, of.get(qos.name, until))

    def computes(self, replica: str, among: Sequence[QosClass], now: float) -> bool:
        """Return whether a replica is predicted to be computing a prompt of one of the classes `among` now."""
        of = self._computes.get(replica)
        return of is not None and any(of.get(one.name, now) > now for one in among)

    def decay(self, now: float) -> None:
        """Let the use of all classes fade up to `now`; the other methods assume that this was done.

        A call with an earlier `now` than the last one does nothing. Such calls come from callers that iterate over the
        queue and keep the time at which they began.
        """
        if now > self._used_at:
            kept = exp((self._used_at - now) / _USED_SECONDS)
            for used in self._used.values():
                used[0] *= kept
                used[1] *= kept
            self._used_at = now

    def pace(self, now: float) -> float:
        """Return how many seconds of prefill all classes together were admitted to per second lately."""
        self.decay(now)
        return sum([prefill for prefill, _ in self._used.values()]) / _USED_SECONDS

    def book_retry(self, qos: QosClass, seconds: float, work: float, pace: float, now: float) -> float:
        """Book time for the retry of a refused request, and return after how many seconds it should come.

        `seconds`: after how many seconds the request would be admitted if no other request retried. `work`: the seconds
        of its prefill. `pace`: how many seconds of prefill leave the queue of its class per second.
        """
        ahead = max(0.0, self._booked.get(qos.name, 0.0) - now)
        most = min(_MOST_BOOKED, max(_LEAST_BOOKED, _FOLLOWED - seconds))
        if ahead > most:
            ahead = 0.5 * most + ahead % (0.5 * most)
        self._booked[qos.name] = now + ahead + work / (_BOOKED * max(_LEAST_PACE, pace, self.pace(now)))
        return max(0.0, seconds) + ahead

    def rank(self, qos: QosClass) -> tuple[bool, int, int]:
        """Return the sort key of a class: first come classes that have not used their reserve, then high priorities."""
        return not self.unused(qos), -qos.priority, self._places[qos.name]

    def unused(self, qos: QosClass) -> float:
        """Return the part of its reserved fraction that a class has not used lately."""
        return max(0.0, qos.reserved_fraction - self._share(qos))

    def above(self, qos: QosClass, now: float) -> list[QosClass]:
        """Return the classes of higher priority that had a request lately and have not used all of their reserve."""
        return [one for one in self._all if one.priority > qos.priority and self._is_within(one, now)]

    def others_yield(self, qos: QosClass, now: float) -> bool:
        """Return whether this class has not used all of its reserve while a class of lower priority is active.

        If so, the limits on streams and KV cache hold back the lower class and not this one.
        """
        return self.unused(qos) > 0.0 and any(
            one.priority < qos.priority and self._is_active(one, now) for one in self._all
        )

    def is_owed(self, qos: QosClass, now: float) -> bool:
        """Return whether classes of lower priority used capacity that this class should have had.

        This needs an active lower class. In addition, this class must have had clearly less than its reserved fraction,
        or a lower one clearly more than its own. "Clearly" means by a factor of 4/3 (CLEARLY): if all classes ask for
        more than there is, each comes within that factor of what the rules give it, and none is owed anything.
        """
        self.decay(now)
        lower = [one for one in self._all if one.priority < qos.priority and self._is_active(one, now)]
        if not lower:
            return False
        had_less = CLEARLY * self._share(qos) < qos.reserved_fraction
        return had_less or any(self._share(one) > max(LITTLE, CLEARLY * one.reserved_fraction) for one in lower)

    def floods(self, qos: QosClass) -> bool:
        """Return whether the class had most of all recent use, and clearly more than its reserved fraction."""
        return self._share(qos) > max(MOST, CLEARLY * qos.reserved_fraction)

    def _is_within(self, qos: QosClass, now: float) -> bool:
        return self._is_active(qos, now) and self.unused(qos) > 0.0

    def _is_active(self, qos: QosClass, now: float) -> bool:
        return now - self._asked.get(qos.name, -inf) < _USED_SECONDS

    def _share(self, qos: QosClass) -> float:
        """Return a class's share of all recent use: of prefill or of KV cache, whichever share is larger."""
        sums = [sum(column) for column in zip(*self._used.values())]
        return max([used / total if total else 0.0 for used, total in zip(self._used[qos.name], sums)])
