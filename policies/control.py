"""The control of overload: what lower classes give up while a higher one misses its limits, or nearly does.

At the end of each window every class has a *pressure*: its p99, and its p99.9 where that is known, of the time to the
first token and per token, as shares of its limits. What the last third of the window shows no more is over (an engine
that stalled, or answers that were begun during a fault and end after it): nobody gives anything up for that. The steps
of a class answer to the highest pressure above it:

    tighten   from 0.8   a replica counts as full for it at 0.8 of what it else may have
    cap       from 0.9   its answers are capped at `max_tokens_floor`
    halve     from 1.0   every other newcomer of it is refused, unless a replica is idle
    shed      from 1.0   those that wait are at once, and all newcomers, unless a replica is idle

So it is for the lowest class, from which as many steps are taken in a window as its pressure demands, though only one
for a single slow answer or refusal. The next class follows only once that is shed and limits are missed all the same,
from 1.0 for each step, one a window. Nothing is taken from the classes of the highest priority. Steps are undone in
reverse order, as far as the pressure that lasts is SLACK below where each is taken. A class that was shed comes back by
half, though, once the pressure of a whole window is that low: without its crowd a third says little of what it would
do. Nothing before that is undone in the same window: half of its crowd shows what all of it would do to others. So all
is undone in two windows if one class was shed, and in one more for each further one. In a window steps are taken or
undone, never both.

A request that was refused because nobody could meet its class's limits has missed them like a slow answer, where a
lower class had what the rules would have given to it (`Reserves.is_owed`). Where more than one in a hundred missed them
so, the pressure is REFUSED at least: an overloaded fleet refuses most and answers few, all of them in time. Those that
were refused while their class had its due (a flood, or all that there is once lower classes are shed) demand no step;
and where the class had most of what all had, nor do the answers beside them, up to FLOODED: a flood is admitted to
just within the limit. But as long as there are such to the end of a window (a class that was shed and comes back may
fill all engines for some seconds), or so few requests that nothing is known of a class, what was taken for it is kept,
for HOLD windows: then it is undone as if there was no pressure, and what a flood keeps shed by a trial (below). That
shows whether the fault is over, and nobody gives anything up for those who ask no more.

Nor is a class refused for nothing. Where limits are kept by little, with the pressure between 0.9 and 1.0, or are
missed whatever is taken, since no engine is quick enough for them, the pressure alone would keep it shed for as long as
the higher class asks. So where steps that refuse somebody were held without a change for PATIENCE windows, they are
undone for a trial, all at once. They are taken again in the first window in which limits are missed by more than twice
as many requests as before, HELPS more at least, and the next trial comes after twice as many windows. As long as that
does not happen nobody is refused, and the trial is over once the pressure would have given the class back by itself.

Besides, `wants_more` says that more replicas are needed: some class missed its limits, whatever was taken from others,
or its requests wait longer than that for an answer (`is_late`), or are refused, of the highest classes whatever they
ask for.
No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import sub
from statistics import fmean
from typing import NamedTuple

from .classes import QosClass, Slo

TIGHTEN, CAP, HALVE, SHED = "tighten", "cap", "halve", "shed"
FROM = {TIGHTEN: 0.8, CAP: 0.9, HALVE: 1.0, SHED: 1.0}  # of the limit
TIGHT = 0.8  # of what a class may else take of a replica
# Below where it is taken a step is undone. For `cap` it is less: a tightened class that asks for all there is keeps the
# pressure about TIGHT, 0.72 to 0.84 by window in `bench.chaos`, and would else be capped as long as it asks.
SLACK = {TIGHTEN: 0.1, CAP: 0.05, HALVE: 0.1, SHED: 0.1}
BORDERS = sorted({share - less for step, share in FROM.items() for less in (0.0, SLACK[step])})  # of the limit
LATELY = 1 / 3  # of a window, its end
ENOUGH, ENOUGH_FOR_P999 = 20, 1000  # answers in a window: of fewer, one that is slow says nothing of the others
MISSED = 0.01  # share of a class's requests that may miss its limits
REFUSED = 1.0  # pressure where more than that are refused
HOLD = 2  # windows in a row in which steps are kept though nothing says that they are needed
# Windows in a row in which steps that refuse somebody are held without a change, until they are undone for a trial
PATIENCE, MOST_PATIENCE = 6, 48
HELPS = 0.05  # share of a class's requests by which refusing others has to help: of 60, as many miss by chance
REFUSING = [*FROM].index(HALVE)  # of the rungs, the first that refuses somebody
FLOODED = 1.25  # of the limit: a flood is admitted to just within it, as predicted; what is slower has another cause


class Seen(NamedTuple):
    """Of so many answers in a window, in seconds. `second`: the second slowest; `late`: how many were above the
    limit."""

    answers: float
    p99: float
    p999: float
    second: float = inf
    late: float = 0.0


# Of the time to the first token, per token, and of the whole answer: that has no limit, but it is all that is known of
# answers that are not streamed, beside which those that were refused are many or few.
Answers = tuple[Seen | None, Seen | None, Seen | None]
NO_ANSWERS: Answers = (None, None, None)


class Refused(NamedTuple):
    """How many of a class's requests were refused because nobody could meet its limits: `owed` while a lower class had
    more than its due, `flood` while none had and it had most of all, and `beyond` while each had its due."""

    owed: int = 0
    beyond: int = 0
    flood: int = 0


NONE_REFUSED = Refused()


class Refusals:
    """What a count of the refused by class, which only rises, gained in a window and in its last third."""

    def __init__(self, counted: Mapping[str, Refused]) -> None:
        self._counted = counted
        self._window, self._lately = dict(counted), dict(counted)

    def last_third(self) -> None:
        """It begins now."""
        self._lately = dict(self._counted)

    def of(self, qos: str) -> tuple[Refused, Refused]:
        """Return how many of a class were refused since the window began, and since its last third did."""
        counted, window, lately = self._counted[qos], self._window[qos], self._lately[qos]
        return Refused(*map(sub, counted, window)), Refused(*map(sub, counted, lately))

    def next_window(self) -> None:
        """It begins now."""
        self._window, self._lately = dict(self._counted), dict(self._counted)


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
    """How near a class came to its limits in a window, or how far above them: 1 is the limit, None says that nothing is
    known. `lasting`: as far as the last third of the window shows it as well, which is what steps go by, except for
    `shed`: that is undone by `whole`. `firm`: as far as more than one request shows it. `unsure`: some were refused of
    whom it is not known whether others made them. `missed`: the share of requests that were not within the limits,
    refused ones included."""

    whole: float | None = None
    lasting: float = 0.0
    firm: float = 0.0
    unsure: bool = False
    missed: float = 0.0


def pressure(
    limits: Slo,
    window: Answers,
    lately: Answers,
    refused: Refused = NONE_REFUSED,
    refused_lately: Refused = NONE_REFUSED,
) -> Pressure:
    """Return the pressure of a window. For what is lasting of it the lesser of each figure counts, the time to the
    first token and per token, where the last third (`lately`) has enough answers in proportion."""
    whole, lasting, firm = (
        _share(limits, window, *which) for which in ((NO_ANSWERS, False), (lately, False), (lately, True))
    )
    answers = answered(window)
    if _is_missed(answers, refused.owed, ENOUGH):
        over = _is_over(lately, refused_lately.owed)
        whole = max(whole or 0.0, REFUSED)
        lasting = max(lasting or 0.0, 0.0 if over else REFUSED)
        firm = max(firm or 0.0, 0.0 if over or refused.owed < 2 else REFUSED)
    elif _is_missed(answers, refused.flood, ENOUGH) and (lasting or 0.0) <= FLOODED:
        lasting = firm = 0.0
    unsure = _is_missed(answers, refused.beyond + refused.flood, ENOUGH) and not _is_over(
        lately, refused_lately.beyond + refused_lately.flood
    )
    late, turned_away = max([one.late for one in window if one is not None], default=0.0), sum(refused)
    missed = (late + turned_away) / max(1.0, answers + turned_away)
    return Pressure(whole, lasting or 0.0, firm or 0.0, unsure, missed)


def answered(seen: Answers) -> float:
    """Return how many requests were answered."""
    return max([one.answers for one in seen if one is not None], default=0)


def _is_missed(answers: float, missed: int, enough: float) -> bool:
    return answers + missed >= enough and missed > MISSED * (answers + missed)


def _is_over(lately: Answers, missed: int) -> bool:
    """Whether the last third of a window says enough, and shows no more of what was missed in it."""
    answers = answered(lately)
    return answers + missed >= ENOUGH * LATELY and not _is_missed(answers, missed, 0)


def _share(limits: Slo, window: Answers, lately: Answers, firm: bool) -> float | None:
    found = []
    for limit, seen, last in zip(limits, window, lately):
        if limit is not None and seen is not None and seen.answers >= ENOUGH:
            both = [seen] if last is None or last.answers < ENOUGH * LATELY else [seen, last]
            slow = min([one.p999 if seen.answers >= ENOUGH_FOR_P999 else one.p99 for one in both])
            found.append((min(slow, seen.second) if firm else slow) / limit)
    return max(found, default=None)


def is_late(answers: float, late: int, wanted: bool) -> bool:
    """Return whether more than one in a hundred of a class have missed the limit on the first token by waiting longer
    than that without one, or were refused: `late` of them, beside those that were answered. Of few they say nothing,
    unless more replicas are `wanted` already."""
    return _is_missed(answers, late, 0 if wanted else ENOUGH)


class Trial(NamedTuple):
    """While what refuses somebody is undone to see whether it helps: the level before, and the mean of
    `Pressure.missed` then."""

    level: int
    missed: float


class Control:
    """Of one fleet."""

    def __init__(self, classes: Sequence[QosClass], observes: Callable[[QosClass], bool] = lambda _: False) -> None:
        """`observes`: whether all requests of a class are sent, whatever is predicted: then there is nothing to take
        from it."""
        # As the last window had them; None: too few requests to say
        self.pressures: dict[str, float | None] = {one.name: None for one in classes}
        self.wants_more = False
        self._unsure = {one.name: HOLD for one in classes}  # for how many windows in a row nothing was known
        self._priorities = {one.name: one.priority for one in classes}
        most = max(self._priorities.values())
        self.highest = frozenset(one.name for one in classes if one.priority == most)
        lower = [one for one in classes if one.priority < most and not observes(one)]
        lower.sort(key=lambda one: one.priority)
        self.rungs = [
            Rung(step, one.name, 1.0 if place else share)
            for place, one in enumerate(lower)
            for step, share in FROM.items()
        ]
        self.level = 0  # of the rungs, those that are taken
        self.trial: Trial | None = None
        self._unchanged: deque[float] = deque(maxlen=MOST_PATIENCE)  # what missed limits, by window without a change
        self._patience = PATIENCE

    def ended(self, pressures: Mapping[str, Pressure], late: bool = False) -> list[Change]:
        """A window is over, with these pressures by class: return what changes, in its order. `late`: of some class
        (`is_late`)."""
        found = {name: pressures.get(name, Pressure()) for name in self.pressures}
        self.pressures = {name: one.whole for name, one in found.items()}
        for name, one in found.items():
            self._unsure[name] = self._unsure[name] + 1 if one.whole is None or one.unsure else 0
        worst = max([value for value in self.pressures.values() if value is not None], default=0.0)
        held = self.wants_more and any(self._is_held(name) for name in found)
        wanted = FROM[SHED] - SLACK[SHED] if self.wants_more else FROM[SHED]
        self.wants_more = late or worst >= wanted or held
        changes = self._judge_trial(found) or self._climb(found) or self._descend(found) or self._try_without(found)
        if changes:
            self._unchanged.clear()
        if self.level <= REFUSING and self.trial is None:
            self._patience = PATIENCE
        return changes

    def _judge_trial(self, found: Mapping[str, Pressure]) -> list[Change]:
        if self.trial is None:
            return []
        (level, before), first = self.trial, self.rungs[0]
        above, missed = self._highest(first, found)
        if above >= FROM[HALVE] and missed > max(2.0 * before, before + HELPS):
            taken = [Change(rung, True, above) for rung in self.rungs[self.level : level]]
            self.level, self.trial, self._patience = level, None, min(MOST_PATIENCE, 2 * self._patience)
            return taken
        if above < FROM[HALVE] - SLACK[HALVE] and not self._is_kept(first):
            self.trial = None
        return []

    def _try_without(self, found: Mapping[str, Pressure]) -> list[Change]:
        if self.level <= REFUSING:
            return []
        above, missed = self._highest(self.rungs[0], found)
        self._unchanged.append(missed)
        if len(self._unchanged) < self._patience or self._is_kept(self.rungs[0]):
            return []
        undone = [Change(rung, False, above) for rung in reversed(self.rungs[REFUSING : self.level])]
        self.trial, self.level = Trial(self.level, fmean(self._unchanged)), REFUSING
        return undone

    def _highest(self, rung: Rung, found: Mapping[str, Pressure]) -> tuple[float, float]:
        """Return the highest pressure that lasts, of the classes above that one, and the most that missed limits."""
        above = self._above(rung, found)
        return max([one.lasting for one in above]), max([one.missed for one in above])

    def _climb(self, found: Mapping[str, Pressure]) -> list[Change]:
        taken: list[Change] = []
        for rung in self.rungs[self.level : REFUSING if self.trial is not None else None]:
            above = max([one.firm if taken else one.lasting for one in self._above(rung, found)])
            if above < rung.at or (taken and rung.qos != self.rungs[0].qos):
                break
            taken.append(Change(rung, True, above))
        self.level += len(taken)
        return taken

    def _descend(self, found: Mapping[str, Pressure]) -> list[Change]:
        undone: list[Change] = []
        for rung in reversed(self.rungs[: self.level]):
            above = max([(one.whole or 0.0) if rung.step == SHED else one.lasting for one in self._above(rung, found)])
            if above >= rung.at - SLACK[rung.step] or self._is_kept(rung):
                break
            undone.append(Change(rung, False, above))
            if rung.step == SHED:
                break
        self.level -= len(undone)
        return undone

    def _above(self, rung: Rung, found: Mapping[str, Pressure]) -> list[Pressure]:
        """Return the pressures of the classes above the one that a step takes from."""
        return [one for name, one in found.items() if self._is_above(name, rung)]

    def _is_above(self, name: str, rung: Rung) -> bool:
        return self._priorities[name] > self._priorities[rung.qos]

    def _is_kept(self, rung: Rung) -> bool:
        return any(self._is_above(name, rung) and self._is_held(name) for name in self._unsure)

    def _is_held(self, name: str) -> bool:
        """Whether what was taken for a class is kept, though nothing is known of it. The silence of one that is shed
        itself says nothing."""
        return 0 < self._unsure[name] <= HOLD and name not in self.taken_from(SHED)

    def taken_from(self, step: str) -> frozenset[str]:
        """Return the classes from which this is taken now."""
        return frozenset(rung.qos for rung in self.rungs[: self.level] if rung.step == step)
