"""Stalls: the times in which this process did not run and so noticed nothing of what happened.

The process may be stopped, the machine may have too few cores, or a long call may block the event loop. When the loop
resumes, every deadline has passed at once, and answers that arrived in time lie unread in the sockets. So code that
measures how long engines took has to use these methods of `Pulse`: `ran` and `clock` instead of subtracting times,
`saw` to disregard a measurement with a stall in it, and `fresh` to repeat a probe that failed right after a stall.

After a stall a socket's callback may run before the timer that records the stall, so `clock`, `saw` and `fresh` check
for one themselves. `ran` does not, and is for timers only.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from math import inf
from time import monotonic

BEAT_SECONDS = 0.25
LATE_SECONDS = 0.5  # a beat later than this shows that the loop was stalled
# A connection that breaks because this process did not read it (the engine or a proxy gave up) takes BREAKS_FROM
# seconds to break, and this process notices it within FRESH_SECONDS after the stall. Reading everything that arrived
# may stall the loop again, which extends this time up to MOST_FRESH_SECONDS.
BREAKS_FROM, FRESH_SECONDS, MOST_FRESH_SECONDS = 2.0, 1.0, 5.0
REMEMBERED = 256  # stalls that are kept; older ones count as time in which the loop ran


class Pulse:
    """The times at which the event loop of this process was stalled. `start` begins to watch for them."""

    def __init__(self) -> None:
        self.on_held_up: list[Callable[[float, float], None]] = []  # called with now, and the seconds of the stall
        self.ended = -inf  # end of the last stall
        self._total = 0.0
        self._fresh_until = self._fresh_at_most = -inf
        self._ends: list[float] = []
        self._before: list[float] = []  # for each of `_ends`, seconds of the stalls before it
        self.late_at = inf  # if `look` runs later than this, the loop was stalled
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer; must be called in the event loop. A second call changes nothing."""
        if self._timer is None:
            self._beat()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.late_at = None, inf

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)
        now = monotonic()
        self.look(now)
        self.late_at = now + BEAT_SECONDS + LATE_SECONDS

    def look(self, now: float) -> None:
        """Record a stall if the loop was stalled until `now`, in monotonic seconds."""
        if now > self.late_at:
            due, self.late_at = self.late_at - LATE_SECONDS, now + BEAT_SECONDS + LATE_SECONDS
            self.held_up(now - due, now)

    def held_up(self, seconds: float, now: float) -> None:
        """Record a stall of `seconds` that ends now."""
        if len(self._ends) == REMEMBERED:
            del self._ends[0], self._before[0]
        self._ends.append(now)
        self._before.append(self._total)
        self._total += seconds
        self.ended = now
        if seconds >= BREAKS_FROM:
            self._fresh_until, self._fresh_at_most = now + FRESH_SECONDS, now + MOST_FRESH_SECONDS
        elif now - seconds < self._fresh_until:
            self._fresh_until = min(now + FRESH_SECONDS, self._fresh_at_most)
        for call in self.on_held_up:
            call(now, seconds)

    def ran(self, since: float, now: float) -> float:
        """Return the seconds from `since` to `now` in which the loop ran, by the stalls recorded so far.

        `since` must be a time at which the loop ran. Call this only from timers: they run after this object's own timer
        if both are due, so the last stall is recorded already.
        """
        if since >= self.ended:
            return now - since
        return max(0.0, now - since - (self._total - self._before[bisect_right(self._ends, since)]))

    def clock(self) -> float:
        """Return the time, in seconds, by a monotonic clock that stands still while the loop is stalled."""
        now = monotonic()
        self.look(now)
        return now - self._total

    def saw(self, since: float, now: float) -> bool:
        """Return whether the loop ran all the time from `since` to `now`."""
        self.look(now)
        return since >= self.ended

    def fresh(self, now: float) -> bool:
        """Return whether a long stall of this process, of 2 s or more, ended in about the last second.

        Connections to engines may break after such a stall, since nothing was read from them meanwhile. If a probe
        fails while this is True, it should be repeated. Further stalls extend the second, to at most 5 s after the long
        one.
        """
        self.look(now)
        return now < self._fresh_until
