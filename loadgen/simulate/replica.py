"""A simulated engine on the fleet's virtual clock.

While requests only decode and none arrives, the times at which an engine's next steps end are known in advance
(`Engine.ahead`): these are its planned steps. The fleet therefore wakes an engine only at the end of the last planned
step or, if a request arrives before, at the end of the step that is running then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

from replicas.simulated.engine import Engine, EngineRequest, Step
from replicas.simulated.profile import FrontEnd, Profile


class Replica:
    """A simulated engine; `wakes` is the virtual time at which the fleet must call `wake`, None while it is idle."""

    __slots__ = ("profile", "engine", "front", "up", "incarnation", "wakes", "turn", "_ends", "_step", "_log")

    def __init__(self, profile: Profile, timed: bool = False) -> None:
        """Start the engine with an empty cache; `timed`: keep the times at which steps end, for `gaps`."""
        self.profile = profile
        self.incarnation = 0
        self._log: list[float] | None = [] if timed else None
        self.start()

    def start(self) -> None:
        """Start the engine with an empty cache, as a process that is new to the gateways."""
        self.engine, self.front = Engine(self.profile), FrontEnd(self.profile)
        self.up = True
        self.incarnation += 1  # counts starts and stops
        self.wakes: float | None = None
        self.turn = 0  # number of changes of `wakes`: a scheduled wake-up with an older number is void
        self._ends: list[float] = []  # when the planned steps end; the engine's state is that after the first of them
        self._step: Step | None = None  # the first planned step; None if it only gives decoding requests a token each

    def stop(self) -> None:
        self.up, self.wakes = False, None
        self.incarnation += 1
        self.turn += 1

    def add(self, request: EngineRequest, now: float) -> bool:
        """Queue a request for the engine's next step; return whether that step begins now, as the engine was idle.

        Raises ValueError if the engine refuses the request.
        """
        self._stop_after_step(now)
        self.engine.add(request)
        return self.wakes is None

    def let_go(self, request: int, now: float) -> bool:
        """Free the KV cache of a request that ended here, which was kept for another engine to fetch.

        `request`: id of the request. Returns whether the engine, which was idle, begins a step now.
        """
        self._stop_after_step(now)
        return self.engine.let_go(request) and self.wakes is None

    def _stop_after_step(self, now: float) -> None:
        """Cancel the planned steps after the current one, so that the engine is woken at the current step's end."""
        if self.wakes is not None and len(self._ends) > 1:
            place = bisect_left(self._ends, now)
            self.engine.leap(place)
            self._note(self._ends[:place])
            if place:
                self._step = None
            self._ends = self._ends[place : place + 1]
            self._wake_at(self._ends[0])

    def wake(self) -> Step | None:
        """End all planned steps, and return the first of them; no later one has outputs.

        Returns None if the first step has no outputs either, because it only gave each decoding request a token.
        """
        if len(self._ends) > 1:
            self.engine.leap(len(self._ends) - 1)
        self._note(self._ends)
        return self._step

    def gaps(self, first: float, last: float) -> list[float]:
        """Return the seconds between the tokens of a request that decoded from time `first` to time `last`.

        Each step gives the request one token. The result is empty unless the replica was made with `timed`.
        """
        if self._log is None:
            return []
        ends = self._log[bisect_left(self._log, first) : bisect_right(self._log, last)]
        return [after - before for before, after in pairwise(ends)]

    def _note(self, ends: list[float]) -> None:
        """Append the end times of steps to the log, if the replica keeps one.

        The first time is skipped if it is already the last one in the log.
        """
        log = self._log
        if log is not None and ends:
            log += ends[1:] if log and ends[0] == log[-1] else ends

    def go_on(self, now: float) -> Step | None:
        """Begin the next step and plan the steps after it, as far as their ends are known.

        Returns the step that begins. Returns None if this step cannot change the cache, because it only gives each
        decoding request a token, or if the engine becomes idle.
        """
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
        """Return the virtual time at which the current step ends, or `now` if the engine is idle."""
        return now if self.wakes is None else self._ends[min(bisect_left(self._ends, now), len(self._ends) - 1)]

    def steps(self, now: float) -> int:
        """Return how many steps the engine has ended by `now`; each gave every decoding request one token."""
        return self.engine.counters.steps - 1 + bisect_right(self._ends, now)

    def _wake_at(self, when: float) -> None:
        self.wakes = when
        self.turn += 1
