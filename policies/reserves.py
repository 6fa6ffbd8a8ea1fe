"""What classes have had of a fleet lately, and so how much of their reserve is left and who goes before whom.

What a class has had is its share of the prefill seconds or of the cache's token-seconds that were admitted in the last
_USED_SECONDS, whichever is more (dominant resource fairness: Ghodsi et al., NSDI 2011). No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from .classes import Classes, QosClass

_USED_SECONDS = 10.0  # over which a class's share is taken
CLEARLY = 4 / 3  # times a fraction
MOST = 0.5  # of what all had
LITTLE = 0.1  # of what all had, too little to be why another class is refused
_FIRST_SWEEP = 256  # replicas at which those that compute for nobody any more are forgotten for the first time


class Reserves:
    def __init__(self, classes: Classes) -> None:
        self._all = classes.all
        self._used = {one.name: [0.0, 0.0] for one in classes.all}  # prefill seconds, token-seconds
        self._used_at = 0.0
        self._places = {one.name: place for place, one in enumerate(classes.all)}
        self._asked: dict[str, float] = {}  # when each class was asked for last
        self._computes: dict[str, dict[str, float]] = {}  # by replica and class: until when it computes its prompts
        self._sweep_at = _FIRST_SWEEP  # that many replicas

    def ask(self, qos: QosClass, now: float) -> None:
        """The class is asked for now."""
        self._asked[qos.name] = now

    def take(self, qos: QosClass, prefill: float, held: float, now: float) -> None:
        """It gets so many seconds of prefill and so many token-seconds of cache."""
        self.decay(now)
        used = self._used[qos.name]
        used[0] += prefill
        used[1] += held

    def compute(self, qos: QosClass, replica: str, until: float, now: float) -> None:
        """A replica computes a prompt of this class, by what is predicted until then."""
        if len(self._computes) >= self._sweep_at:
            self._computes = {name: of for name, of in self._computes.items() if max(of.values()) > now}
            # Twice what is left: where all compute, each call would go through all of them otherwise.
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._computes))
        of = self._computes.setdefault(replica, {})
        of[qos.name] = max(until, of.get(qos.name, until))

    def computes(self, replica: str, among: Sequence[QosClass], now: float) -> bool:
        """Return whether a replica computes a prompt of one of these classes."""
        of = self._computes.get(replica)
        return of is not None and any(of.get(one.name, now) > now for one in among)

    def decay(self, now: float) -> None:
        """It is `now`, which all that follows goes by. A caller that goes through those that wait keeps the time at
        which it began, so some calls come with an earlier one: no time passes by those."""
        if now > self._used_at:
            kept = exp((self._used_at - now) / _USED_SECONDS)
            for used in self._used.values():
                used[0] *= kept
                used[1] *= kept
            self._used_at = now

    def pace(self, now: float) -> float:
        """Return how many seconds of prefill all classes together get in a second."""
        self.decay(now)
        return sum([prefill for prefill, _ in self._used.values()]) / _USED_SECONDS

    def rank(self, qos: QosClass) -> tuple[bool, int, int]:
        """Classes of lower ranks go first: those within their reserve, then those of higher priority."""
        return not self.unused(qos), -qos.priority, self._places[qos.name]

    def unused(self, qos: QosClass) -> float:
        """Return what it has reserved and not used lately."""
        return max(0.0, qos.reserved_fraction - self._share(qos))

    def above(self, qos: QosClass, now: float) -> list[QosClass]:
        """Return the classes of higher priority that ask, and have not had their reserve."""
        return [one for one in self._all if one.priority > qos.priority and self._is_within(one, now)]

    def others_yield(self, qos: QosClass, now: float) -> bool:
        """Whether it is within its reserve while a lower class asks: then it is that one which is held back where
        streams are many."""
        return self.unused(qos) > 0.0 and any(
            one.priority < qos.priority and self._is_active(one, now) for one in self._all
        )

    def is_owed(self, qos: QosClass, now: float) -> bool:
        """Return whether lower classes had what should have been this one's: it has had clearly less than its fraction
        while one of them asks, or one of them clearly more than its own. Classes that all ask for more than there is
        come to within CLEARLY of what the rules give them, so none of them is owed anything."""
        self.decay(now)
        lower = [one for one in self._all if one.priority < qos.priority and self._is_active(one, now)]
        if not lower:
            return False
        had_less = CLEARLY * self._share(qos) < qos.reserved_fraction
        return had_less or any(self._share(one) > max(LITTLE, CLEARLY * one.reserved_fraction) for one in lower)

    def floods(self, qos: QosClass) -> bool:
        """Return whether it has had most of what all had, and clearly more than its fraction."""
        return self._share(qos) > max(MOST, CLEARLY * qos.reserved_fraction)

    def _is_within(self, qos: QosClass, now: float) -> bool:
        return self._is_active(qos, now) and self.unused(qos) > 0.0

    def _is_active(self, qos: QosClass, now: float) -> bool:
        return now - self._asked.get(qos.name, -inf) < _USED_SECONDS

    def _share(self, qos: QosClass) -> float:
        """Return what the class has had lately, of the resource of which it had more."""
        sums = [sum(column) for column in zip(*self._used.values())]
        return max([used / total if total else 0.0 for used, total in zip(self._used[qos.name], sums)])
