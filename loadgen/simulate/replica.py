"""One simulated engine on the fleet's virtual clock.

Between two steps that somebody looks at, an engine's next ends of steps are known (`Engine.ahead`), and it need not be
woken for each of them: only for the last, or for the one under way when a request arrives.
"""

from __future__ import annotations

from bisect import bisect_left

from replicas.simulated.engine import Engine, EngineRequest, Step
from replicas.simulated.profile import FrontEnd, Profile


class Replica:
    """`wakes` is when the fleet is to call `wake`; None: there is nothing to do."""

    __slots__ = ("profile", "engine", "front", "up", "incarnation", "wakes", "turn", "_ends", "_step")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.incarnation = 0
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
        if self.wakes is not None and len(self._ends) > 1:
            place = bisect_left(self._ends, now)
            self.engine.leap(place)
            if place:
                self._step = None
            self._ends = self._ends[place : place + 1]
            self._wake_at(self._ends[0])
        self.engine.add(request)
        return self.wakes is None

    def wake(self) -> Step | None:
        """The last step planned for ends. Gives it if it has outputs."""
        if len(self._ends) > 1:
            self.engine.leap(len(self._ends) - 1)
        return self._step

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

    def _wake_at(self, when: float) -> None:
        self.wakes = when
        self.turn += 1
