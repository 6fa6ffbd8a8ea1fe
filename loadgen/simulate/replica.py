"""A simulated engine on the fleet's virtual clock.

While requests only decode and none arrives, the ends of an engine's next steps are known in advance (`Engine.ahead`).
The fleet therefore wakes an engine only at the end of the last of these steps or, when a request arrives, at the end of
the step that is running then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

from replicas.simulated.engine import Engine, EngineRequest, Step
from replicas.simulated.profile import FrontEnd, Profile


class Replica:
    """A simulated engine; `wakes` is when the fleet has to call `wake`, None while the engine is idle."""

    __slots__ = ("profile", "engine", "front", "up", "incarnation", "wakes", "turn", "_ends", "_step", "_log")

    def __init__(self, profile: Profile, timed: bool = False) -> None:
        """Start with an empty cache; `timed`: keep the ends of all steps, for `gaps`."""
        self.profile = profile
        self.incarnation = 0
        self._log: list[float] | None = [] if timed else None
        self.start()

    def start(self) -> None:
        """Start as a new incarnation with an empty cache."""
        self.engine, self.front = Engine(self.profile), FrontEnd(self.profile)
        self.up = True
        self.incarnation += 1  # counts starts and stops
        self.wakes: float | None = None
        self.turn = 0  # number of changes of `wakes`: a scheduled wake-up with an older number is void
        self._ends: list[float] = []  # of planned steps; the engine's state is that after the first
        self._step: Step | None = None  # the one that ends first

    def stop(self) -> None:
        self.up, self.wakes = False, None
        self.incarnation += 1
        self.turn += 1

    def add(self, request: EngineRequest, now: float) -> bool:
        """Queue a request for the next step; return whether that step begins now.

        Raises ValueError if the engine refuses the request.
        """
        self._stop_after_step(now)
        self.engine.add(request)
        return self.wakes is None

    def let_go(self, request: int, now: float) -> bool:
        """Free the cache kept for an ended request; return whether a step begins now because of that."""
        self._stop_after_step(now)
        return self.engine.let_go(request) and self.wakes is None

    def _stop_after_step(self, now: float) -> None:
        """Move the wake-up from the end of the last planned step to the end of the current step."""
        if self.wakes is not None and len(self._ends) > 1:
            place = bisect_left(self._ends, now)
            self.engine.leap(place)
            self._note(self._ends[:place])
            if place:
                self._step = None
            self._ends = self._ends[place : place + 1]
            self._wake_at(self._ends[0])

    def wake(self) -> Step | None:
        """End all planned steps; return the only one that can have outputs, or None if there is none."""
        if len(self._ends) > 1:
            self.engine.leap(len(self._ends) - 1)
        self._note(self._ends)
        return self._step

    def gaps(self, first: float, last: float) -> list[float]:
        """Return the seconds between the tokens of a request that decoded from `first` to `last`, one per step."""
        if self._log is None:
            return []
        ends = self._log[bisect_left(self._log, first) : bisect_right(self._log, last)]
        return [after - before for before, after in pairwise(ends)]

    def _note(self, ends: list[float]) -> None:
        """Log the ends of these steps, without the first if it is logged already (a plan may begin with `now`)."""
        log = self._log
        if log is not None and ends:
            log += ends[1:] if log and ends[0] == log[-1] else ends

    def go_on(self, now: float) -> Step | None:
        """Begin the next step and plan the steps after it; return the next step if it may have changed the cache."""
        engine = self.engine
        if ahead := engine.ahead(now):
            self._ends, self._step = [now, *ahead], None
        elif (step := engine.step()) is None:
            self.wakes = None
            self.turn += 1
            return None
        else:
            self._ends, self._step = [now + step.seconds], step
            if not step.outputs:
                self._ends += engine.ahead(self._ends[0])
        self._wake_at(self._ends[-1])
        return self._step

    def step_ends(self, now: float) -> float:
        """Return when the current step ends, or `now` if there is none."""
        return now if self.wakes is None else self._ends[min(bisect_left(self._ends, now), len(self._ends) - 1)]

    def steps(self, now: float) -> int:
        """Return how many steps have ended by `now`; each gave every decoding request one token."""
        return self.engine.counters.steps - 1 + bisect_right(self._ends, now)

    def _wake_at(self, when: float) -> None:
        self.wakes = when
        self.turn += 1
