"""Overload control: what lower classes give up while a higher class misses its limits, or nearly does.

Time is divided into windows of fixed length. At the end of each window, every class has a *pressure*: its p99 (and
p99.9 if it had enough answers) of TTFT and TPOT, divided by its limits. Pressure that the last third of the window no
longer shows counts as over, and no step is taken for it: an engine may have stalled for a moment, or answers may have
begun during a fault and ended after it. The *steps* against a class depend on the highest pressure among the classes
above it:

    tighten   from 0.8   a replica counts as full for the class at 0.8 of its usual capacity
    cap       from 0.9   the class's answers are capped at `max_tokens_floor`
    halve     from 1.0   every other newcomer is refused, unless a replica is idle
    shed      from 1.0   waiting requests are refused at once, and all newcomers, unless a replica is idle

These thresholds hold for the lowest class. A window takes as many steps against it as the pressure demands, but only
one if a single slow answer or refusal causes the pressure. Steps against the next class are taken only once the lowest
is shed and limits are still missed: one step a window, each at a pressure of at least 1.0. No step is taken against the
classes of the highest priority. Steps are undone in reverse order, each once the lasting pressure has fallen below its
threshold by a margin (SLACK). A class that was shed comes back by half once the pressure of a whole window is that low:
without the class's load, the last third says little about what it would do. No earlier step is undone in the same
window, because half of the load shows what all of it would do to others. So everything is undone in two windows if one
class was shed, plus one for each further class. No window both takes and undoes steps.

A request that was refused because no replica could meet its class's limits counts as a miss, like a slow answer, if a
lower class had capacity that the rules would have given to it (`FairShare.is_owed`). If more than one request in a
hundred missed that way, the pressure is at least 1.0 (REFUSED): overloaded replicas refuse most requests and answer
few, all of them in time. Refusals demand no step if the class had its due: it floods the replicas itself, or the lower
classes are shed and have nothing left to give. If the class also had most of the capacity that all classes used, its
slow answers demand no step up to a pressure of 1.25 (FLOODED), since a flood is admitted to just within the limit.

The steps taken for a class are kept for two windows (HOLD) while such refusals last to the end of a window, since a
shed class that comes back may fill all engines for some seconds. They are kept equally long if the class has too
few requests to judge. After that the steps are undone as if there were no pressure, which shows whether the fault is
over, and nothing is taken for a class that no longer asks. What a flood keeps shed is undone by a trial (see the next
paragraph).

No class is refused in vain, either. If limits are only just met (pressure between 0.9 and 1.0), or are missed whatever
is taken because no engine is fast enough, the pressure alone would keep lower classes shed for as long as the higher
one asks. Therefore steps that refuse requests are all undone at once, as a *trial*, after they were unchanged for six
windows at first (PATIENCE). They are taken again in the first window in which clearly more requests than before miss
their limits: more than twice as many, and at least 5 % of all requests (HELPS) more. The next trial then comes after
twice as many windows. Until such a window no request is refused, and the trial ends once the pressure by itself would
have undone the steps.

`wants_more` reports that more replicas are needed, because some class missed its limits whatever was taken from others,
or because too many requests of a class wait for an answer longer than their limit or are refused (`is_late`). For the
highest classes all such refusals count, for others only refusals of requests that were owed capacity. No I/O and no
clock.
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
# The pressure (latency / limit) of a higher class from which each step is taken.
FROM = {TIGHTEN: 0.8, CAP: 0.9, HALVE: 1.0, SHED: 1.0}
TIGHT = 0.8  # the share of its usual capacity at which a replica counts as full for a tightened class
# How far the pressure must fall below a step's threshold for the step to be undone. It is less for `cap`: a tightened
# class that asks for all there is keeps the pressure at about TIGHT (0.72 to 0.84 by window in `bench.chaos`), and with
# more slack it would stay capped.
SLACK = {TIGHTEN: 0.1, CAP: 0.05, HALVE: 0.1, SHED: 0.1}
# The pressures at which steps are taken or undone, as shares of the latency limit.
BORDERS = sorted({share - less for step, share in FROM.items() for less in (0.0, SLACK[step])})
LATELY = 1 / 3  # the share of a window that counts as its end
# The answers in a window from which p99, and p99.9, are used: among fewer, one slow answer says nothing about the
# others.
ENOUGH, ENOUGH_FOR_P999 = 20, 1000
MISSED = 0.01  # the share of a class's requests that may miss its limits
REFUSED = 1.0  # the least pressure if more than the share MISSED are refused
HOLD = 2  # for how many windows in a row steps are kept without evidence that they are needed
# After so many windows in a row without a change, the steps that refuse somebody are undone for a trial: PATIENCE at
# first, MOST_PATIENCE at most.
PATIENCE, MOST_PATIENCE = 6, 48
# The least gain by refusing others, as a share of a class's requests; of 60 requests, as many miss their limits by
# chance.
HELPS = 0.05
REFUSING = [*FROM].index(HALVE)  # the index of the first step that refuses requests
# The highest pressure that a flood of requests explains, as it is admitted to just within the limit. Slower answers
# have another cause.
FLOODED = 1.25


class Seen(NamedTuple):
    """The statistics of one latency of one class over one window, in seconds.

    `answers`: how many answers were measured; `second`: the second slowest latency; `late`: how many answers exceeded
        the limit.
    """

    answers: float
    p99: float
    p999: float
    second: float = inf
    late: float = 0.0


# The statistics of TTFT, TPOT and the duration of whole answers. The duration has no limit. But of answers that are not
# streamed only the duration is known, and its count is needed to compare the number of refusals with.
Answers = tuple[Seen | None, Seen | None, Seen | None]
NO_ANSWERS: Answers = (None, None, None)


class Refused(NamedTuple):
    """Counts of a class's requests that were refused because no replica could meet the class's latency limits.

    `owed`: refused while a lower class had capacity that this class should have had.
    `flood`: refused while no lower class had such capacity, and this class itself had most of all capacity used.
    `beyond`: all other such refusals.
    """

    owed: int = 0
    beyond: int = 0
    flood: int = 0


NONE_REFUSED = Refused()


class Refusals:
    """The counts, by class, of requests refused in the present window and in its last third.

    `counted`: the counts since the start, which `Admission` keeps up to date.
    """

    def __init__(self, counted: Mapping[str, Refused]) -> None:
        self._counted = counted
        self._window, self._lately = dict(counted), dict(counted)

    def last_third(self) -> None:
        """Begin the count of refusals in the last third of the window."""
        self._lately = dict(self._counted)

    def of(self, qos: str) -> tuple[Refused, Refused]:
        """Return the counts of a class's refused requests since the window began, and since its last third began."""
        counted, window, lately = self._counted[qos], self._window[qos], self._lately[qos]
        return Refused(*map(sub, counted, window)), Refused(*map(sub, counted, lately))

    def next_window(self) -> None:
        """Begin both counts of refusals again, for a new window."""
        self._window, self._lately = dict(self._counted), dict(self._counted)


class ControlStep(NamedTuple):
    """One step of overload control against one class of requests; `Control.ladder` has all steps in order."""

    kind: str  # TIGHTEN, CAP, HALVE or SHED
    qos: str  # the name of the class against which the step is taken
    at: float  # the pressure of a higher class from which the step is taken


class Change(NamedTuple):
    """A step of overload control that was taken or undone, with the pressure (highest latency / limit) at that time."""

    step: str
    qos: str
    taken: bool
    pressure: float


class SloRatio(NamedTuple):
    """The pressure of a class in a window: its highest latency divided by its limit, so that 1 is the limit.

    `whole`: the pressure over the whole window, None if it has too few requests; only undoing `shed` depends on it.
    `lasting`: the pressure that the last third of the window shows as well; the other steps depend on it.
    `firm`: the lasting pressure that does not rest on a single slow answer or a single refusal.
    `unsure`: whether many requests were refused, and it is unknown whether other classes caused that.
    `missed`: the share of requests that missed the limits, including refused ones.
    """

    whole: float | None = None
    lasting: float = 0.0
    firm: float = 0.0
    unsure: bool = False
    missed: float = 0.0


def slo_ratio(
    limits: Slo,
    window: Answers,
    lately: Answers,
    refused: Refused = NONE_REFUSED,
    refused_lately: Refused = NONE_REFUSED,
) -> SloRatio:
    """Return a class's pressure in a window: how near it came to its latency limits, or how far it exceeded them.

    `window`, `lately`: statistics of the answers in the whole window, and of those in its last third. `refused`,
    `refused_lately`: counts of the requests refused in these two periods. The lasting pressure takes, for TTFT and TPOT
    each, the lower figure of the two periods. If the last third has too few answers, the figure of the whole window
    counts.
    """
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
    return SloRatio(whole, lasting or 0.0, firm or 0.0, unsure, missed)


def answered(seen: Answers) -> float:
    """Return how many requests were answered, from the statistics of TTFT, TPOT and duration."""
    return max([one.answers for one in seen if one is not None], default=0)


def _is_missed(answers: float, missed: int, enough: float) -> bool:
    """Return whether too many requests missed their latency limits: more than 1 % (MISSED) of at least `enough`.

    `answers`: how many requests were answered. `missed`: how many further ones were refused or have no answer yet, all
    of which count as missed. With fewer than `enough` requests in all, the result is False.
    """
    return answers + missed >= enough and missed > MISSED * (answers + missed)


def _is_over(lately: Answers, missed: int) -> bool:
    """Return whether a window's last third shows that requests no longer miss their limits.

    False if that third has too few requests to judge. `lately`: statistics of its answers. `missed`: how many requests
    were refused in it.
    """
    answers = answered(lately)
    return answers + missed >= ENOUGH * LATELY and not _is_missed(answers, missed, 0)


def _share(limits: Slo, window: Answers, lately: Answers, firm: bool) -> float | None:
    """Return how near answers came to their limits: the larger of TTFT / limit and TPOT / limit, by high percentiles.

    `window`, `lately`: statistics of the whole window and of its last third. If the last third has enough answers, the
    lower latency of the two periods counts. `firm`: leave out the slowest answer. Returns None if no latency has a
    limit and enough answers in the window.
    """
    found = []
    for limit, seen, last in zip(limits, window, lately):
        if limit is not None and seen is not None and seen.answers >= ENOUGH:
            both = [seen] if last is None or last.answers < ENOUGH * LATELY else [seen, last]
            slow = min([one.p999 if seen.answers >= ENOUGH_FOR_P999 else one.p99 for one in both])
            found.append((min(slow, seen.second) if firm else slow) / limit)
    return max(found, default=None)


def is_late(answers: float, late: int, wanted: bool) -> bool:
    """Return whether more than one in a hundred requests of a class missed the TTFT limit and have no answer.

    `answers`: how many requests were answered. `late`: how many have waited longer than the limit, or were refused.
    `wanted`: more replicas are wanted already; without that, the result is False for few requests.
    """
    return _is_missed(answers, late, 0 if wanted else ENOUGH)


class Trial(NamedTuple):
    """A trial of overload control: for some windows the steps that refuse requests are undone, to see if they help.

    `level`: `Control.level` before the trial; `missed`: the mean of `SloRatio.missed` in the windows before it.
    """

    level: int
    missed: float


class Control:
    """The overload control of the replicas of one model: what lower classes give up while a higher one is too slow.

    `level`: how many steps of `ladder`, from the first, are taken now; `trial`: the present trial, if any.
    """

    def __init__(self, classes: Sequence[QosClass], observes: Callable[[QosClass], bool] = lambda _: False) -> None:
        """Build the ladder of possible steps against the classes below the highest priority, the lowest class first.

        `observes`: a function that returns whether requests of a class are always sent. No steps are taken against such
        a class.
        """
        # The pressure (latency / limit) of each class in the last window; None: too few requests to tell.
        self.pressures: dict[str, float | None] = {one.name: None for one in classes}
        self.wants_more = False
        self._unsure = {one.name: HOLD for one in classes}  # for how many windows in a row the pressure was uncertain
        self._priorities = {one.name: one.priority for one in classes}
        most = max(self._priorities.values())
        self.highest = frozenset(one.name for one in classes if one.priority == most)
        lower = [one for one in classes if one.priority < most and not observes(one)]
        lower.sort(key=lambda one: one.priority)
        self.ladder = [
            ControlStep(step, one.name, 1.0 if place else share)
            for place, one in enumerate(lower)
            for step, share in FROM.items()
        ]
        self.level = 0  # how many steps of `ladder` are taken
        self.trial: Trial | None = None
        self._unchanged: deque[float] = deque(maxlen=MOST_PATIENCE)  # share of misses in each window without a change
        self._patience = PATIENCE

    def ended(self, pressures: Mapping[str, SloRatio], late: bool = False) -> list[Change]:
        """Close a window: take or undo steps against lower classes, and return these changes in order.

        `pressures`: by class name, how near the class came to its latency limits; `late`: whether some class has too
        many requests without an answer (`is_late`).
        """
        found = {name: pressures.get(name, SloRatio()) for name in self.pressures}
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

    def _judge_trial(self, found: Mapping[str, SloRatio]) -> list[Change]:
        """End the trial, if there is one, once it has done harm or is no longer needed; return the steps taken again.

        A trial undoes the steps that refuse requests. It does harm if clearly more requests miss their limits.
        """
        if self.trial is None:
            return []
        (level, before), first = self.trial, self.ladder[0]
        above, missed = self._highest(first, found)
        if above >= FROM[HALVE] and missed > max(2.0 * before, before + HELPS):
            taken = [Change(step.kind, step.qos, True, above) for step in self.ladder[self.level : level]]
            self.level, self.trial, self._patience = level, None, min(MOST_PATIENCE, 2 * self._patience)
            return taken
        if above < FROM[HALVE] - SLACK[HALVE] and not self._is_kept(first):
            self.trial = None
        return []

    def _try_without(self, found: Mapping[str, SloRatio]) -> list[Change]:
        """Begin a trial without the steps that refuse requests, if these were unchanged for long enough.

        Returns the steps that are undone for it.
        """
        if self.level <= REFUSING:
            return []
        above, missed = self._highest(self.ladder[0], found)
        self._unchanged.append(missed)
        if len(self._unchanged) < self._patience or self._is_kept(self.ladder[0]):
            return []
        undone = [Change(step.kind, step.qos, False, above) for step in reversed(self.ladder[REFUSING : self.level])]
        self.trial, self.level = Trial(self.level, fmean(self._unchanged)), REFUSING
        return undone

    def _highest(self, step: ControlStep, found: Mapping[str, SloRatio]) -> tuple[float, float]:
        """Return the highest lasting pressure and the highest share of misses among the classes above a step.

        These classes have a higher priority than the class against which the step is taken. `found`: by class name, how
        near each class came to its latency limits.
        """
        above = self._above(step, found)
        return max([one.lasting for one in above]), max([one.missed for one in above])

    def _climb(self, found: Mapping[str, SloRatio]) -> list[Change]:
        """Take the steps against lower classes that the higher classes' pressures demand, and return them.

        A pressure is a class's highest latency divided by its limit. `found`: the pressures by class name.
        """
        taken: list[Change] = []
        for step in self.ladder[self.level : REFUSING if self.trial is not None else None]:
            above = max([one.firm if taken else one.lasting for one in self._above(step, found)])
            if above < step.at or (taken and step.qos != self.ladder[0].qos):
                break
            taken.append(Change(step.kind, step.qos, True, above))
        self.level += len(taken)
        return taken

    def _descend(self, found: Mapping[str, SloRatio]) -> list[Change]:
        """Undo the steps against lower classes that the higher classes' pressures no longer demand; return them.

        A pressure is a class's highest latency divided by its limit. `found`: the pressures by class name.
        """
        undone: list[Change] = []
        for step in reversed(self.ladder[: self.level]):
            above = max([(one.whole or 0.0) if step.kind == SHED else one.lasting for one in self._above(step, found)])
            if above >= step.at - SLACK[step.kind] or self._is_kept(step):
                break
            undone.append(Change(step.kind, step.qos, False, above))
            if step.kind == SHED:
                break
        self.level -= len(undone)
        return undone

    def _names_above(self, step: ControlStep) -> list[str]:
        """Return the names of the classes of higher priority than the one against which a step is taken."""
        return [name for name, priority in self._priorities.items() if priority > self._priorities[step.qos]]

    def _above(self, step: ControlStep, found: Mapping[str, SloRatio]) -> list[SloRatio]:
        return [found[name] for name in self._names_above(step)]

    def _is_kept(self, step: ControlStep) -> bool:
        """Return whether a step is kept because the pressure of a higher class is uncertain (`_is_held`)."""
        return any(map(self._is_held, self._names_above(step)))

    def _is_held(self, name: str) -> bool:
        """Return whether the steps taken in favour of this class are kept while its pressure is uncertain.

        They are kept for at most two windows in a row (HOLD). They are not kept at all if the class is shed itself: its
        requests are refused, so its pressure cannot be known.
        """
        return 0 < self._unsure[name] <= HOLD and name not in self.taken_from(SHED)

    def taken_from(self, kind: str) -> frozenset[str]:
        """Return the names of the classes against which a step of this kind (such as CAP) is taken now."""
        return frozenset(step.qos for step in self.ladder[: self.level] if step.kind == kind)
