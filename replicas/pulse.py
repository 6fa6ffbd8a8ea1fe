"""When this process did not run, and so saw nothing of what came meanwhile.

A process that is stopped, a machine with too few cores, a long call on the event loop: when the loop goes on, every
deadline has passed at once, and what met them in time lies unread in the sockets. So whoever measures how long somebody
else took asks here instead of subtracting (`ran`, `clock`), teaches nothing with a time of which a part was not seen
(`saw`), and looks again before a failure that came `fresh` out of such a time counts.

Whoever reads a socket may come before the timer that would note the time, so what they ask looks for it itself.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from math import inf
from time import monotonic

BEAT_SECONDS = 0.25
LATE_SECONDS = 0.5  # a beat later than this shows that the loop was held up
# What breaks because nobody read it (a connection that an engine or a proxy before it gave up) takes seconds to, and
# its end is read within one second after that.
# Reading it all may hold the loop up again, which makes that second longer, up to so many.
BREAKS_FROM, FRESH_SECONDS, MOST_FRESH_SECONDS = 2.0, 1.0, 5.0
REMEMBERED = 256  # such times; of older ones nothing is left out of what is measured


class Pulse:
    """The times at which the event loop of this process was held up. `start` begins to look for them."""

    def __init__(self) -> None:
        self.on_held_up: list[
            Callable[[float, float], None]
        ] = []  # called with now, and for how many seconds until then
        self.ended = -inf  # when the last such time did
        self._total = 0.0
        self._fresh_until = self._fresh_at_most = -inf
        self._ends: list[float] = []
        self._before: list[float] = []  # for each of `_ends`, seconds of those before it
        self.late_at = inf  # after this, if nobody has looked since, it was held up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat from now on. To be called in the loop; a second call changes nothing."""
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
        """Note whether the loop was held up until now."""
        if now > self.late_at:
            due, self.late_at = self.late_at - LATE_SECONDS, now + BEAT_SECONDS + LATE_SECONDS
            self.held_up(now - due, now)

    def held_up(self, seconds: float, now: float) -> None:
        """It was, for so long."""
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
        """Seconds from `since`, when it ran, to `now` in which it ran, as far as the latest look knows. For timers,
        which come after the beat that was due with them."""
        if since >= self.ended:
            return now - since
        return max(0.0, now - since - (self._total - self._before[bisect_right(self._ends, since)]))

    def clock(self) -> float:
        """A monotonic clock that stands still while it does not run."""
        now = monotonic()
        self.look(now)
        return now - self._total

    def saw(self, since: float, now: float) -> bool:
        """Whether it ran all the time."""
        self.look(now)
        return since >= self.ended

    def fresh(self, now: float) -> bool:
        """Whether it only just goes on, after so long that what was under way may have broken because of that."""
        self.look(now)
        return now < self._fresh_until
