"""The recent use of a fleet by each class, which decides what is left of its reserve and which class goes first.

The use of a class is its share of the prefill seconds, or of the token-seconds of cache, that all classes together were
admitted to in the last _USED_SECONDS, whichever is larger (dominant resource fairness: Ghodsi et al., NSDI 2011). Its
reserve is its `reserved_fraction` of both.

Refused requests should be retried one after the other, at the pace at which requests are admitted. If the clients were
told only when the prediction that refused their request falls below its limit, all would come back at once, since a
full queue keeps predictions just above the limit: of requests that retried after a burst of twice what an engine can
answer, 19 % were admitted, and 9 % after four times that. So each refusal books time after the earlier refusals of its
class: what its prompt takes at half of the recent pace; the other half is for new requests. With that, 77 and 71 % are
admitted. At most _MOST_BOOKED seconds are booked, and at most _FOLLOWED together with the request's own wait, since
clients ignore a long `Retry-After` (Anthropic's for Python above 60 s, OpenAI's newest above 120 s), and a client that
does not return leaves a gap. Refusals beyond that share the second half of the booked time with others. No I/O and no
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from .classes import Classes, QosClass

_USED_SECONDS = 10.0  # time constant over which a class's share is averaged
CLEARLY = 4 / 3  # factor by which a class's share exceeds its reserved fraction clearly
MOST = 0.5  # share of all use from which a class floods the fleet
LITTLE = 0.1  # share of all use too small to be the reason why another class is refused
_BOOKED = 0.5  # share of the pace that is booked for retries
_LEAST_PACE = 0.25  # prefill seconds admitted per second, assumed if nothing was admitted lately
# seconds: least and most bound on booked time; on the whole wait
_LEAST_BOOKED, _MOST_BOOKED, _FOLLOWED = 10.0, 50.0, 60.0
_FIRST_SWEEP = 256  # replicas in `_computes` from which idle ones are dropped


class FairShare:
    """The recent use of one fleet by class, its order of service, and the retry times booked for each class."""

    def __init__(self, classes: Classes) -> None:
        self._all = classes.all
        self._used = {one.name: [0.0, 0.0] for one in classes.all}  # prefill seconds, token-seconds
        self._used_at = 0.0
        self._places = {one.name: place for place, one in enumerate(classes.all)}
        self._asked: dict[str, float] = {}  # time of each class's last request
        # By replica and class: until when the replica computes prompts of the class
        self._computes: dict[str, dict[str, float]] = {}
        self._sweep_at = _FIRST_SWEEP
        self._booked: dict[str, float] = {}  # until when retries are booked, by class

    def ask(self, qos: QosClass, now: float) -> None:
        """Note a request of this class."""
        self._asked[qos.name] = now

    def take(self, qos: QosClass, prefill: float, held: float, now: float) -> None:
        """Add seconds of prefill, and token-seconds of cache, to a class's use."""
        self.decay(now)
        used = self._used[qos.name]
        used[0] += prefill
        used[1] += held

    def compute(self, qos: QosClass, replica: str, until: float, now: float) -> None:
        """Note that a replica is predicted to compute a prompt of this class until the time `until`."""
        if len(self._computes) >= self._sweep_at:
            self._computes = {name: of for name, of in self._computes.items() if max(of.values()) > now}
            # Twice what is left; otherwise each call would scan all replicas while all of them compute.
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._computes))
        of = self._computes.setdefault(replica, {})
        of[qos.name] = max(until, of.get(qos.name, until))

    def computes(self, replica: str, among: Sequence[QosClass], now: float) -> bool:
        """Return whether a replica computes a prompt of one of the classes `among`."""
        of = self._computes.get(replica)
        return of is not None and any(of.get(one.name, now) > now for one in among)

    def decay(self, now: float) -> None:
        """Age all use to `now`; the other methods assume that this was done.

        A caller that iterates over the queue keeps its starting time, so some calls come with an earlier `now`: they do
        nothing.
        """
        if now > self._used_at:
            kept = exp((self._used_at - now) / _USED_SECONDS)
            for used in self._used.values():
                used[0] *= kept
                used[1] *= kept
            self._used_at = now

    def pace(self, now: float) -> float:
        """Return how many prefill seconds all classes together get per second."""
        self.decay(now)
        return sum([prefill for prefill, _ in self._used.values()]) / _USED_SECONDS

    def book_retry(self, qos: QosClass, seconds: float, work: float, pace: float, now: float) -> float:
        """Book a retry, and return after how many seconds it should come.

        `seconds`: after how many it would be admitted if no other request retried; `work`: seconds of its prefill;
        `pace`: prefill seconds that leave the queue of its class per second.
        """
        ahead = max(0.0, self._booked.get(qos.name, 0.0) - now)
        most = min(_MOST_BOOKED, max(_LEAST_BOOKED, _FOLLOWED - seconds))
        if ahead > most:
            ahead = 0.5 * most + ahead % (0.5 * most)
        self._booked[qos.name] = now + ahead + work / (_BOOKED * max(_LEAST_PACE, pace, self.pace(now)))
        return max(0.0, seconds) + ahead

    def rank(self, qos: QosClass) -> tuple[bool, int, int]:
        """Return the sort key of a class: classes within their reserve come first, then those of higher priority."""
        return not self.unused(qos), -qos.priority, self._places[qos.name]

    def unused(self, qos: QosClass) -> float:
        """Return the part of its reserved fraction that a class has not used lately."""
        return max(0.0, qos.reserved_fraction - self._share(qos))

    def above(self, qos: QosClass, now: float) -> list[QosClass]:
        """Return the classes of higher priority that are active (had a request lately) and within their reserve."""
        return [one for one in self._all if one.priority > qos.priority and self._is_within(one, now)]

    def others_yield(self, qos: QosClass, now: float) -> bool:
        """Return whether this class is within its reserve while a lower one is active.

        If so, the lower class is the one to be held back where streams are many.
        """
        return self.unused(qos) > 0.0 and any(
            one.priority < qos.priority and self._is_active(one, now) for one in self._all
        )

    def is_owed(self, qos: QosClass, now: float) -> bool:
        """Return whether lower classes had what this one should have had.

        That is so if this class had clearly less than its fraction while a lower one is active, or if a lower one had
        clearly more than its own. Classes that all ask for more than there is come within CLEARLY of what the rules
        give them: none is owed anything.
        """
        self.decay(now)
        lower = [one for one in self._all if one.priority < qos.priority and self._is_active(one, now)]
        if not lower:
            return False
        had_less = CLEARLY * self._share(qos) < qos.reserved_fraction
        return had_less or any(self._share(one) > max(LITTLE, CLEARLY * one.reserved_fraction) for one in lower)

    def floods(self, qos: QosClass) -> bool:
        """Return whether the class had most of all use, and clearly more than its fraction."""
        return self._share(qos) > max(MOST, CLEARLY * qos.reserved_fraction)

    def _is_within(self, qos: QosClass, now: float) -> bool:
        return self._is_active(qos, now) and self.unused(qos) > 0.0

    def _is_active(self, qos: QosClass, now: float) -> bool:
        return now - self._asked.get(qos.name, -inf) < _USED_SECONDS

    def _share(self, qos: QosClass) -> float:
        """Return a class's share of all recent use, of prefill or of cache, whichever share is larger."""
        sums = [sum(column) for column in zip(*self._used.values())]
        return max([used / total if total else 0.0 for used, total in zip(self._used[qos.name], sums)])
