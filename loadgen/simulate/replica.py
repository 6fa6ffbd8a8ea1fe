"""One simulated engine on the fleet's virtual clock.

Between two steps that somebody looks at, an engine's next ends of steps are known (`Engine.ahead`), and it need not be
woken for each of them: only for the last, or for the one under way when a request arrives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

from replicas.simulated.engine import Engine, EngineRequest, Step
from replicas.simulated.profile import FrontEnd, Profile


class Replica:
    """`wakes` is when the fleet is to call `wake`; None: there is nothing to do."""

    __slots__ = ("profile", "engine", "front", "up", "incarnation", "wakes", "turn", "_ends", "_step", "_log")

    def __init__(self, profile: Profile, timed: bool = False) -> None:
        """`timed`: keep the ends of all steps, for `gaps`."""
        self.profile = profile
        self.incarnation = 0
        self._log: list[float] | None = [] if timed else None
        self.start()

    def start(self) -> None:
        """With an empty cache, as a new incarnation."""
        self.engine, self.front = Engine(self.profile), FrontEnd(self.profile)
        self.up = True
        self.incarnation += 1
        self.wakes: float | None = None
        self.turn = 0  # how often `wakes` was set: earlier plans are void
        self._ends: list[float] = []  # of steps; the engine is where it is after the first
        self._step: Step | None = None  # the one that ends first

    def stop(self) -> None:
        self.up, self.wakes = False, None
        self.incarnation += 1
        self.turn += 1

    def add(self, request: EngineRequest, now: float) -> bool:
        """Queue a request for the next step; whether that begins now. ValueError if the engine refuses it."""
        self._stop_after_step(now)
        self.engine.add(request)
        return self.wakes is None

    def let_go(self, request: int, now: float) -> bool:
        """Free what an ended request keeps; whether a step begins now because of that."""
        self._stop_after_step(now)
        return self.engine.let_go(request) and self.wakes is None

    def _stop_after_step(self, now: float) -> None:
        """Have the fleet called at the end of the step under way, not at that of the last one planned."""
        if self.wakes is not None and len(self._ends) > 1:
            place = bisect_left(self._ends, now)
            self.engine.leap(place)
            self._note(self._ends[:place])
            if place:
                self._step = None
            self._ends = self._ends[place : place + 1]
            self._wake_at(self._ends[0])

    def wake(self) -> Step | None:
        """The last step planned for ends. Gives it if it has outputs."""
        if len(self._ends) > 1:
            self.engine.leap(len(self._ends) - 1)
        self._note(self._ends)
        return self._step

    def gaps(self, first: float, last: float) -> list[float]:
        """The seconds between the tokens of a request that decoded from `first` to `last`: one token a step."""
        if self._log is None:
            return []
        ends = self._log[bisect_left(self._log, first) : bisect_right(self._log, last)]
        return [after - before for before, after in pairwise(ends)]

    def _note(self, ends: list[float]) -> None:
        """These steps have ended. The first may be the end that was noted last: plans without a step begin there."""
        log = self._log
        if log is not None and ends:
            log += ends[1:] if log and ends[0] == log[-1] else ends

    def go_on(self, now: float) -> Step | None:
        """Begin the next step, and plan for as many as need nobody. Gives it if it may have changed the cache."""
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
        """When the step under way ends; now, if there is none."""
        return now if self.wakes is None else self._ends[min(bisect_left(self._ends, now), len(self._ends) - 1)]

    def steps(self, now: float) -> int:
        """Steps that have ended: in each, every request that decodes has had a token."""
        return self.engine.counters.steps - 1 + bisect_right(self._ends, now)

    def _wake_at(self, when: float) -> None:
        self.wakes = when
        self.turn += 1
