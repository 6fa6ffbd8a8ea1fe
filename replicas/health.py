"""The health of a replica: whether it can be trusted with requests, first by its traffic, then by probes.

No clock is read: callers pass `now`, in seconds of `Pulse.clock`, which stands still while this process is stalled.
Only faults of the engine count: a 4xx is the client's fault, and a 503 that means "full, try another" is load, so
callers do not report these.

Rules, in this order, each with its verdict in capitals:

  0. Two probes in a row were turned away (connection refused, or /health says 503) while requests are on open
     connections to the engine: LEAVING. The engine finishes these requests and takes no new ones. Such a probe does
     not count as silence for rule 2. It does count if rule 6 had already made the engine LEAVING: vLLM 0.32 has then
     ended its core and closed its port, and only waits for idle connections.
  1. Two connection refusals in a row (from probes or traffic) mean that no process listens: LOST.
  2. For `lost_after` seconds all probes, at least `fall` of them, failed and no request was answered: LOST (hung).
     (Two failed probes with a long time without probes in between show nothing.)
  3. `fall` requests in a row failed: TROUBLE for 2 s, then for 4, 8 ... 30 s as long as the first request after each
     such time fails too. One answered request ends it at once.
  4. `fall` probes in a row failed and no request was answered meanwhile: TROUBLE, until `rise` probes in a row succeed.
     A busy engine may answer probes late; while it answers requests, it is healthy.
  5. The share of its requests that fail is far above that of its siblings, the other engines of the model
     (`Health.compare`, which the fleet calls): TROUBLE for 2 s, then for 4, 8 ... 30 s as long as this happens again.
     An answered request does not end it: an engine that fails every second request answers the next one with even odds.
  6. `fall` answers in a row were errors, and no other engine answered those requests, so either the engine or the
     requests may be at fault. The watcher then sends the engine a test request of its own (`in_question`), at most one
     per QUESTION_SECONDS, and none while clients' requests are answered. If the test request fails as well, rule 3
     holds. While the engine still computes earlier requests, one error is enough for a test request; if that fails, the
     engine is LEAVING until it answers a test request. An engine that is shutting down exits soon after its last
     request. An engine that is still there `lost_after` seconds after its last request is not shutting down: rule 3
     holds from then on, until the engine answers a test request.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

FAULTS = ("connect", "closed", "timeout", "5xx", "refused", "foreign")
FIRST_HOLD, LONGEST_HOLD = 2.0, 30.0
QUESTION_SECONDS = 2.0  # between two test requests to one engine (rule 6)
WINDOW = 10.0  # seconds; the requests of the last 10 to 20 s count for rule 5
# Rule 5: failed requests before a replica is compared with its siblings the first time, and again; the least share of
# its requests that must fail, and the least multiple of its siblings' share.
FAILED_AT_FIRST, FAILED_AGAIN, FAILED_SHARE, TIMES_SIBLINGS = 5, 1, 0.2, 3.0


class Verdict(Enum):
    """What the rules of this module say about an engine. The module's docstring says which rule gives which verdict."""

    GOOD = "good"
    TROUBLE = "trouble"
    LEAVING = "leaving"
    LOST = "lost"


class Opinion(NamedTuple):
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The thresholds of this module's health rules.

    `fall`: failures in a row from which the engine counts as bad. `rise`: successful probes in a row from which it
    counts as good again. `lost_after`: seconds without any answer after which it counts as hung.
    """

    fall: int = 3
    rise: int = 2
    lost_after: float = 15.0


class Recent:
    """Counts of answered and failed requests in the current window of WINDOW (10) seconds and the one before."""

    __slots__ = ("_answered", "_failed", "_until")

    def __init__(self) -> None:
        self._answered, self._failed, self._until = [0, 0], [0, 0], 0.0

    def _turn(self, now: float) -> None:
        gone = now >= self._until + WINDOW  # nothing for a whole window: the counts before it are too old
        self._answered = [0, 0 if gone else self._answered[0]]
        self._failed = [0, 0 if gone else self._failed[0]]
        self._until = now + WINDOW

    def count(self, now: float, answered: int, failed: int) -> None:
        if now >= self._until:
            self._turn(now)
        self._answered[0] += answered
        self._failed[0] += failed

    def totals(self, now: float) -> tuple[int, int]:
        """Return the numbers of answered and of failed requests in the last 10 to 20 s."""
        if now >= self._until:
            self._turn(now)
        return sum(self._answered), sum(self._failed)


class Health:
    """The health of one process of one engine, by the rules of this module.

    When another process of the engine answers, a new object is needed.
    """

    def __init__(self, limits: Limits = Limits()):
        self.limits = limits
        self._refusals = 0
        self._traffic_failures = 0
        self._probe_failures = 0
        self._probe_successes = 0
        self._silent_since: float | None = None
        self._hold = 0.0
        self._held_until: float | None = None
        self._trouble = False
        self._last_error = ""
        self._turned_away = 0  # rule 0: probes in a row that were turned away
        self._unconfirmed, self._asked_at = 0, float("-inf")  # rule 6: errors in a row; time of the last test request
        self._fails_newcomers = False
        self.stayed = False  # rule 6 made it LEAVING, and it did not exit
        self._computed_at = float("-inf")
        self.recent = Recent()
        self._out_for, self._out_until, self._out_reason = 0.0, float("-inf"), ""  # rule 5: TROUBLE

    def succeeded(self, now: float, count: int = 1) -> None:
        """Count `count` requests for which the first byte of an answer arrived, with any status below 500.

        This ends TROUBLE, unless the engine fails far more often than its siblings (rule 5).
        """
        self.recent.count(now, count, 0)
        self._refusals = self._traffic_failures = self._probe_failures = self._unconfirmed = 0
        self._hold, self._held_until, self._silent_since = 0.0, None, None
        self._trouble = False

    def failed(self, now: float, kind: str) -> None:
        """Count a request that failed by the engine's fault. Raises ValueError if `kind` is not one of FAULTS."""
        if kind not in FAULTS:
            raise ValueError(f"{kind!r} is not a fault of the engine; one of {', '.join(FAULTS)}")
        self.recent.count(now, 0, 1)
        self._traffic_failures += 1
        self._refusals = self._refusals + 1 if kind == "connect" else 0
        self._last_error = f"requests fail ({kind})"
        again = self._hold and self._held_until is None  # the first request after a time in TROUBLE
        if self._traffic_failures >= self.limits.fall or again:
            if self._held_until is None:
                self._hold = min(self._hold * 2 or FIRST_HOLD, LONGEST_HOLD)
                self._held_until = now + self._hold
            self._trouble = True

    def unconfirmed(self) -> None:
        """Count an error answer for which the engine or the request may be at fault.

        If the engine turns out to be at fault, call `failed` too.
        """
        self._unconfirmed += 1

    def in_question(self, now: float, computes: bool = False) -> bool:
        """Return whether the watcher should send a test request now (rule 6); report its outcome with `asked`.

        `computes`: the engine has work and makes progress.
        """
        # One error is also enough for an engine that failed the watcher's last request.
        enough = 1 if self._hold or computes else self.limits.fall
        in_question = self._unconfirmed >= enough or self._fails_newcomers
        return in_question and now - self._asked_at >= QUESTION_SECONDS

    def asked(self, now: float, fails: bool | None, computes: bool = False) -> None:
        """Count the outcome of a test request that the watcher sent (rule 6).

        `fails`: whether the answer was an error. None means that no answer came, which shows nothing, as a busy engine
        may answer late. `computes`: the engine has work and makes progress.
        """
        self._asked_at, was_leaving = now, self._fails_newcomers
        if computes:
            self._computed_at = now
        stays = was_leaving and now - self._computed_at >= self.limits.lost_after
        if fails is None and not stays:
            return
        fails = fails is not False
        self._unconfirmed, self.stayed = 0, fails and (self.stayed or stays)
        self._fails_newcomers = fails and not self.stayed and (computes or was_leaving)
        if was_leaving and not fails:
            self.succeeded(now, 0)
        if fails and not self._fails_newcomers:
            for _ in range(self.limits.fall):
                self.failed(now, "5xx")

    def probed(self, now: float, fault: str = "", error: str = "", turned_away: bool = False) -> None:
        """Count a probe that succeeded or failed.

        `fault`: the kind of failure, "" if there was none; `error` describes it. `turned_away`: the probe was turned
        away while requests are on open connections to the engine, so rule 0 applies.
        """
        turned_away = turned_away and not self._fails_newcomers
        self._turned_away = self._turned_away + 1 if turned_away else 0
        if fault:
            self._probe_failures += 1
            self._probe_successes = 0
            self._refusals = self._refusals + 1 if fault == "connect" else 0
            self._silent_since = None if turned_away else now if self._silent_since is None else self._silent_since
            self._last_error = error
            if self._probe_failures >= self.limits.fall:
                self._trouble = True
            return
        self._probe_successes += 1
        self._refusals = self._probe_failures = 0
        self._silent_since = None
        held = self._held_until is not None and now < self._held_until
        if self._trouble and not held and self._probe_successes >= self.limits.rise:
            self._trouble, self._held_until, self._traffic_failures = False, None, 0

    def compare(self, now: float, answered: int, failed: int) -> bool:
        """Compare the engine's share of failed requests with that of its siblings, the model's other engines (rule 5).

        Returns True if the share is far higher, so that the engine is in TROUBLE from now on. `answered`, `failed`: the
        numbers of recent requests to all siblings together.
        """
        own_answered, own_failed = self.recent.totals(now)
        if now < self._out_until or own_failed < (FAILED_AGAIN if now < self._out_until + WINDOW else FAILED_AT_FIRST):
            return False
        share, siblings = own_failed / (own_answered + own_failed), failed / max(answered + failed, 1)
        if share < max(FAILED_SHARE, TIMES_SIBLINGS * siblings):
            return False
        again = now < self._out_until + WINDOW
        self._out_for = min(self._out_for * 2, LONGEST_HOLD) if again else FIRST_HOLD
        self._out_until = now + self._out_for
        self._out_reason = f"{share:.0%} of its requests fail ({self._last_error}), {siblings:.0%} of its siblings'"
        self.recent = Recent()  # the next comparison starts from fresh counts
        return True

    def hung(self, now: float) -> bool:
        """Return whether the engine hangs: for `lost_after` seconds all probes failed, and no request was answered."""
        if self._silent_since is None or self._probe_failures < self.limits.fall:
            return False
        return now - self._silent_since >= self.limits.lost_after

    def silence(self, now: float) -> str:
        """Return a message: for how long no probe has been answered, and why the last one failed."""
        since = now if self._silent_since is None else self._silent_since
        return f"no answer for {now - since:.0f} s: {self._last_error}"

    @property
    def answers(self) -> bool:
        """Whether the last probe was answered without a fault."""
        return self._probe_successes > 0

    def opinion(self, now: float) -> Opinion:
        """Return the verdict of this module's rules, with the reason; GOOD and "" if none of them applies."""
        if self._turned_away >= 2:
            return Opinion(Verdict.LEAVING, f"takes nothing new, and finishes what it has: {self._last_error}")
        if self.hung(now):
            return Opinion(Verdict.LOST, self.silence(now))
        if self._refusals >= 2:
            return Opinion(Verdict.LOST, self._last_error)
        if self._fails_newcomers:
            return Opinion(Verdict.LEAVING, "fails what it is newly sent, and goes on with what it has")
        if self._trouble:
            return Opinion(Verdict.TROUBLE, self._last_error)
        if now < self._out_until:
            return Opinion(Verdict.TROUBLE, self._out_reason)
        return Opinion(Verdict.GOOD, "")
