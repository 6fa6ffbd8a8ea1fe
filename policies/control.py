"""The control of overload: what lower classes give up while a higher one misses its limits, or nearly does.

At the end of each window every class has a *pressure*: its p99, and its p99.9 where that is known, of the time to the
first token and per token, as shares of its limits. What the last third of the window shows no more is over (an engine
that stalled, or answers that were begun during a fault and end after it): nobody gives anything up for that. The steps
of a class answer to the highest pressure above it:

    tighten   from 0.8   a replica counts as full for it at 0.8 of what it else may have
    cap       from 0.9   its answers are capped at `max_tokens_floor`
    halve     from 1.0   every other newcomer of it is refused, unless a replica is idle
    shed      from 1.0   those that wait are at once, and all newcomers, unless a replica is idle

So it is for the lowest class, from which as many steps are taken in a window as its pressure demands. The next class
follows only once that is shed and limits are missed all the same, from 1.0 for each step, one a window. Nothing is
taken from the classes of the highest priority. Steps are undone in reverse order, as far as the pressure that lasts is
SLACK below where each is taken; where nobody asks any more there is none. A class that was shed comes back by half,
though, once the pressure of a whole window is that low: without its crowd a third says little of what it would do.
Nothing before that is undone in the same window: half of its crowd shows what all of it would do to others. So all is
undone in two windows if one class was shed, and in one more for each further one. In a window steps are taken or
undone, never both.

Besides, `wants_more` says that more replicas are needed: some class missed its limits, whatever was taken from others,
or its requests wait longer than that for an answer (`is_late`): where few are answered no pressure is known.
No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .classes import QosClass, Slo

TIGHTEN, CAP, HALVE, SHED = "tighten", "cap", "halve", "shed"
FROM = {TIGHTEN: 0.8, CAP: 0.9, HALVE: 1.0, SHED: 1.0}  # of the limit
TIGHT = 0.8  # of what a class may else take of a replica
# Below where it is taken a step is undone. For `cap` it is less: a tightened class that asks for all there is keeps the
# pressure about TIGHT, 0.72 to 0.84 by window in `bench.chaos`, and would else be capped as long as it asks.
SLACK = {TIGHTEN: 0.1, CAP: 0.05, HALVE: 0.1, SHED: 0.1}
LATELY = 1 / 3  # of a window, its end
ENOUGH, ENOUGH_FOR_P999 = 20, 1000  # answers in a window: of fewer, one that is slow says nothing of the others


class Seen(NamedTuple):
    """Of so many answers in a window, in seconds."""

    answers: float
    p99: float
    p999: float


Both = tuple[Seen | None, Seen | None]  # of the time to the first token, and per token


class Rung(NamedTuple):
    step: str
    qos: str  # the class that it takes from
    at: float  # the pressure from which it is taken


class Change(NamedTuple):
    """A step that was taken, or undone, at this pressure."""

    rung: Rung
    taken: bool
    pressure: float


class Pressure(NamedTuple):
    """How near a class came to its limits in a window, or how far above them: 1 is the limit, 0 says that nothing is
    known. `lasting`: as far as the last third of the window shows it as well, which is what steps go by, except for
    `shed`: that is undone by `whole`."""

    whole: float = 0.0
    lasting: float = 0.0


def pressure(limits: Slo, window: Both, lately: Both) -> Pressure:
    """Return the pressure of a window. For what is lasting of it the lesser of each figure counts, the time to the
    first token and per token, where the last third (`lately`) has enough answers in proportion."""
    return Pressure(_share(limits, window, (None, None)), _share(limits, window, lately))


def _share(limits: Slo, window: Both, lately: Both) -> float:
    found = [0.0]
    for limit, seen, last in zip(limits, window, lately):
        if limit is not None and seen is not None and seen.answers >= ENOUGH:
            both = [seen] if last is None or last.answers < ENOUGH * LATELY else [seen, last]
            found.append(min([one.p999 if seen.answers >= ENOUGH_FOR_P999 else one.p99 for one in both]) / limit)
    return max(found)


def is_late(answers: float, late: int, wanted: bool) -> bool:
    """Return whether more than one in a hundred of a class have missed the limit on the first token by waiting longer
    than that without one: `late` of them, beside those that were answered. Of few they say nothing, unless more
    replicas are `wanted` already."""
    return late > 0.01 * (answers + late) and (wanted or answers + late >= ENOUGH)


class Control:
    """Of one fleet."""

    def __init__(self, classes: Sequence[QosClass]) -> None:
        self.pressures: dict[str, float] = {one.name: 0.0 for one in classes}  # as the last window had them
        self.wants_more = False
        self._priorities = {one.name: one.priority for one in classes}
        highest = max(self._priorities.values())
        lower = sorted([one for one in classes if one.priority < highest], key=lambda one: one.priority)
        self.rungs = [
            Rung(step, one.name, 1.0 if place else share)
            for place, one in enumerate(lower)
            for step, share in FROM.items()
        ]
        self.level = 0  # of the rungs, those that are taken

    def ended(self, pressures: Mapping[str, Pressure], late: bool = False) -> list[Change]:
        """A window is over, with these pressures by class: return what changes, in its order. `late`: of some class
        (`is_late`)."""
        found = {name: pressures.get(name, Pressure()) for name in self.pressures}
        self.pressures = {name: one.whole for name, one in found.items()}
        worst = max(self.pressures.values())
        self.wants_more = late or worst >= (FROM[SHED] - SLACK[SHED] if self.wants_more else FROM[SHED])
        lasting = {name: one.lasting for name, one in found.items()}
        return self._climb(lasting) or self._descend(lasting)

    def _climb(self, pressures: Mapping[str, float]) -> list[Change]:
        taken: list[Change] = []
        for rung in self.rungs[self.level :]:
            above = self._above(rung, pressures)
            if above < rung.at or (taken and rung.qos != self.rungs[0].qos):
                break
            taken.append(Change(rung, True, above))
        self.level += len(taken)
        return taken

    def _descend(self, lasting: Mapping[str, float]) -> list[Change]:
        undone: list[Change] = []
        for rung in reversed(self.rungs[: self.level]):
            above = self._above(rung, self.pressures if rung.step == SHED else lasting)
            if above >= rung.at - SLACK[rung.step]:
                break
            undone.append(Change(rung, False, above))
            if rung.step == SHED:
                break
        self.level -= len(undone)
        return undone

    def _above(self, rung: Rung, pressures: Mapping[str, float]) -> float:
        """Return the highest pressure of the classes above the one that a step takes from."""
        own = self._priorities[rung.qos]
        return max([value for name, value in pressures.items() if self._priorities[name] > own])

    def taken_from(self, step: str) -> frozenset[str]:
        """Return the classes from which this is taken now."""
        return frozenset(rung.qos for rung in self.rungs[: self.level] if rung.step == step)
