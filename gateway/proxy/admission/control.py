"""Overload control: lower service classes are limited while higher ones miss the limits on their latencies.

Latencies are judged once per time window. Then a step may be taken or undone, such as to cap the answers of a class or
to refuse its requests. `policies.Control` decides that, with one instance for the replicas of each model, here called a
fleet. This module has the clock, the metrics and the events. The server's sweep calls `look`. `status` returns the
state and the last events for `/status`. `on_change` is called with each event, for the journal of the live page.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from policies import Control, QosClass
from policies.classes import NO_LIMITS
from policies.control import (
    BORDERS,
    CAP,
    HALVE,
    LATELY,
    SHED,
    TIGHTEN,
    Answers,
    Refusals,
    Seen,
    SloRatio,
    answered,
    is_late,
    slo_ratio,
)
from policies.decisions import OBSERVE

from ...ops.gains import Gains
from ...ops.metrics import quantile

if TYPE_CHECKING:
    from policies import Admission

    from ...ops.metrics import Histogram, Key, Metrics
    from .overload import Overload

log = logging.getLogger("hitherto.proxy")

MOST_EVENTS = 100  # events that are kept
# The texts for each step: when it is taken, and when it is undone.
WORDS = {
    TIGHTEN: (
        "a replica counts as full for class {qos} at 0.8 of what it may have",
        "class {qos} may fill replicas again",
    ),
    CAP: ("answers of class {qos} are capped", "answers of class {qos} are as long as asked for again"),
    HALVE: ("every other request of class {qos} is refused", "class {qos} is admitted again"),
    SHED: ("class {qos} is refused", "every other request of class {qos} is admitted again"),
}
Gain = dict["Key", list[float]]  # by labels: by how much a histogram's buckets, and its sum, have grown
# The texts at the begin and the end of a trial, in which classes that were refused are admitted, to see if it helped.
TRIAL = (
    "admitted for a trial are classes that were refused: limits are missed, or nearly, all the same "
    "({missed:.1f} % of the requests of a higher class)"
)
HELPED, OVER = "the trial is over: without refusing others clearly more requests miss limits", "the trial is over"
MORE, ENOUGH = "more replicas are needed: limits are missed", "no more replicas are needed"


class Fleet:
    """One model's replicas under overload control.

    `names`: the model labels, in metrics, of requests to these replicas, adapters included.
    `base`: the label of their base model, "" if unknown.
    """

    def __init__(self, admission: Admission, control: Control):
        self.admission, self.control = admission, control
        self.refusals = Refusals(admission.refused)
        self.names: set[str] = set()
        self.base = ""

    @property
    def name(self) -> str:
        """The fleet's label for alerts and autoscalers: its base model, or the first of `names` if that is unknown.

        The base model's label is the same in all workers and at all times.
        """
        return self.base or min(self.names, default="")


class Gained:
    """The growth of the answers' latency histograms since the last call of `look`, by class and model."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._of = [(Gains(), one) for one in histograms]
        self.look()

    def look(self) -> list[Gain]:
        return [dict(gains.look(histogram)) for gains, histogram in self._of]


class OverloadControl:
    """Overload control for all models of the gateway."""

    def __init__(
        self,
        classes: tuple[QosClass, ...],
        window: float,
        metrics: Metrics,
        look_at_queue: Callable[[], None],
        unanswered: Callable[[float], Mapping[tuple[str, str], Sequence[float]]],
    ):
        """Create overload control, without any fleet yet.

        `window`: the seconds of answers that are judged at a time.
        `look_at_queue`: called after a step was taken or undone, so that the queue checks its waiting requests.
        `unanswered(now)`: returns, by class and model, for how many seconds each stream has waited for a first token.
        """
        self._unanswered = unanswered
        self._classes, self._window, self._metrics = classes, window, metrics
        self._look_at_queue = look_at_queue
        self._until = monotonic() + window
        # Split the histograms' buckets at the classes' limits. Buckets are 12 % wide: otherwise answers of 45 ms would
        # be read as 50.1 ms, above a limit of 50 ms.
        ttfts, tpots = [
            [limit for limit in limits if limit is not None] for limits in zip(*[one.slo for one in classes])
        ]
        for histogram, limits in ((metrics.answer_ttft_seconds, ttfts), (metrics.answer_tpot_seconds, tpots)):
            histogram.split([_border(limit * share) for limit in limits for share in BORDERS])
        # The time of a whole answer has no limit. It is read because non-streamed answers are in no other histogram.
        self._histograms = metrics.answer_ttft_seconds, metrics.answer_tpot_seconds, metrics.answer_e2e_seconds
        self._gained = Gained(self._histograms)
        self._late: Gained | None = None  # the growth since the last third of the window began
        self._fleets: dict[Admission, Fleet] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.on_change: Callable[[dict[str, Any]], None] = lambda event: None
        metrics.read_from(self.reading)

    def follow(self, admission: Admission, name: str, base: str = "") -> None:
        """Put the admission of a fleet (a group of replicas) under control, by the latencies of one more model label.

        `admission`: the fleet's queues and limits.
        `name`: the label in metrics of a model that the fleet serves.
        `base`: the label of the fleet's base model, "" if unknown.
        """
        fleet = self._fleets.get(admission)
        if fleet is None:
            fleet = self._fleets[admission] = Fleet(admission, Control(self._classes, admission.observes))
        fleet.names.add(name)
        fleet.base = base

    def keep(self, admissions: Iterable[Admission], models: Set[str]) -> None:
        """Drop the fleets whose admission is not in `admissions`, and all model labels that are not in `models`.

        A fleet that would lose all of its labels keeps them.
        """
        self._fleets = {one: self._fleets[one] for one in admissions if one in self._fleets}
        for fleet in self._fleets.values():
            fleet.names = fleet.names & models or fleet.names

    def look(self, now: float) -> None:
        """Judge the latencies of each class once the window is over, and take or undo steps.

        The server's sweep calls this a few times a second. All fleets have the same window, so that each histogram is
        read once for all of them. With 256 series (class and model) in each histogram, reading takes 3 ms of CPU at the
        window's end, and again when its last third begins. `now`: in monotonic seconds.
        """
        if now < self._until:
            if self._late is None and now >= self._until - LATELY * self._window:
                self._late = Gained(self._histograms)
                for fleet in self._fleets.values():
                    fleet.refusals.last_third()
            return
        self._until = now + self._window
        window, lately = self._gained.look(), self._late.look() if self._late is not None else [{}, {}, {}]
        self._late = None
        waited = self._unanswered(now)
        for fleet in self._fleets.values():
            pressures, late = {}, False
            for one in self._classes:
                seen = self._seen(window, one, fleet)
                refused, refused_lately = fleet.refusals.of(one.name)
                pressures[one.name] = slo_ratio(one.slo, seen, self._seen(lately, one, fleet), refused, refused_lately)
                count = sum(refused) if one.name in fleet.control.highest else refused.owed
                if (limit := one.slo.ttft) is not None:
                    count += sum(age > limit for name in fleet.names for age in waited.get((one.name, name), ()))
                late |= is_late(answered(seen), count, fleet.control.wants_more)
            fleet.refusals.next_window()
            self._judge(fleet, pressures, late, now)

    def _seen(self, gained: Sequence[Gain], qos: QosClass, fleet: Fleet) -> Answers:
        """Return the statistics of a class's answers from a fleet: TTFT, TPOT and the time of whole answers.

        Each of the three is None without any answer. `gained`: the growth of the three histograms, in this order.
        """
        ttft, tpot, whole = [
            _seen(histogram.bounds, gain, qos.name, fleet.names, limit)
            for histogram, gain, limit in zip(self._histograms, gained, (*qos.slo, None))
        ]
        return ttft, tpot, whole

    def _judge(self, fleet: Fleet, pressures: dict[str, SloRatio], late: bool, now: float) -> None:
        """Take or undo steps for a fleet (a group of replicas) at a window's end, and pass changes to its admission.

        `pressures`: by class, the ratio of its latencies to their limits in the window.
        `late`: whether too many requests wait longer than their limit for an answer, or were refused.
        """
        control, wanted, trial = fleet.control, fleet.control.wants_more, fleet.control.trial
        changes = control.ended(pressures, late)
        if control.trial is not None and trial is None:
            self._note(fleet, TRIAL.format(missed=100.0 * control.trial.missed), True, "trial")
        elif control.trial is None and trial is not None:
            self._note(fleet, HELPED if changes and changes[0].taken else OVER, False, "trial")
        for one in changes:
            step, qos = one.step, one.qos
            self._metrics.control_steps.inc(step, qos, "taken" if one.taken else "undone")
            why = f" (pressure of the classes above it {one.pressure:.2f})"
            self._note(fleet, WORDS[step][not one.taken].format(qos=qos) + why, one.taken, step, qos)
        if control.wants_more != wanted:
            self._note(fleet, MORE if control.wants_more else ENOUGH, control.wants_more, "more")
        if changes:
            fleet.admission.obey(control, now)
            self._look_at_queue()

    # --- events and status

    def _note(self, fleet: Fleet, text: str, taken: bool, step: str, qos: str | None = None) -> None:
        """Keep and log an event of a fleet, and pass it to `on_change`.

        `text`: the event in words.
        `taken`: True if a step was taken, False if one was undone.
        `step`, `qos`: the kind of step and the class that it is for (None: no single class).
        """
        event = {
            "at": time(), "model": fleet.name, "step": step, "class": qos, "taken": taken, "level": fleet.control.level,
            "pressures": dict(fleet.control.pressures), "text": text,
        }  # fmt: skip
        self.events.append(event)
        log.log(logging.WARNING if taken else logging.INFO, "overload of %s: %s", fleet.name, text)
        self.on_change(event)

    def status(self) -> dict[str, Any]:
        """Return the state for `/status`: the steps in force for each model, and the last events, oldest first."""
        return {
            "window_seconds": self._window,
            "models": [
                {
                    "model": fleet.name,
                    "level": fleet.control.level,
                    "steps": [
                        {"step": one.kind, "class": one.qos} for one in fleet.control.ladder[: fleet.control.level]
                    ],
                    "pressures": dict(fleet.control.pressures),
                    "wants_more": fleet.control.wants_more,
                    "on_trial": fleet.control.trial is not None,
                }
                for fleet in self._fleets.values()
            ],
            "events": [*self.events],
        }

    def reading(self) -> dict[str, Any]:
        """Return the gauges of overload control, for `Metrics.read_from`.

        If several fleets have the same name, each gauge is the largest of their values.
        """
        level: dict[str, int] = {}
        ratio: dict[tuple[str, str], float] = {}
        wanted: dict[str, int] = {}
        for fleet in self._fleets.values():
            name, control = fleet.name, fleet.control
            level[name] = max(level.get(name, 0), control.level)
            wanted[name] = max(wanted.get(name, 0), int(control.wants_more))
            for qos, value in control.pressures.items():
                if value is not None:
                    ratio[qos, name] = max(ratio.get((qos, name), 0.0), value)
        return {"control_level": level, "control_pressure_ratio": ratio, "more_replicas_wanted": wanted}


def control_of(
    overload: Overload,
    metrics: Metrics,
    look_at_queue: Callable[[], None],
    unanswered: Callable[[float], Mapping[tuple[str, str], Sequence[float]]],
) -> OverloadControl | None:
    """Return the overload control that the settings ask for, or None.

    It is None if there is no time window, if full replicas are only observed and nothing is ever refused, or if no
    class has limits on its latencies.
    """
    classes, rules = overload.classes.all, overload.rules
    if rules.control_window is None or rules.when_full == (OBSERVE,) or all(one.slo == NO_LIMITS for one in classes):
        return None
    return OverloadControl(classes, rules.control_window, metrics, look_at_queue, unanswered)


def _seen(
    bounds: Sequence[float], gained: Mapping[Key, list[float]], qos: str, names: Iterable[str], limit: float | None
) -> Seen | None:
    """Return the statistics of a class's answers over several models, from the growth of a histogram.

    Returns None if the histogram has counted no such answer.

    `bounds`: the bounds of the histogram's buckets, in seconds; `limit`, the class's limit, is one of them.
    `gained`: the growth of each bucket and of the sum, by class and model.
    `names`: the models' labels.
    """
    found = [gain for name in names if (gain := gained.get((qos, name))) is not None]
    if not found:
        return None
    counts = [*map(sum, zip(*found))][:-1]  # without the sum
    answers = sum(counts)
    if not answers:
        return None
    if limit is None:  # only the number of answers matters
        return Seen(answers, 0.0, 0.0)
    # Slightly less, so that a share at the border of two buckets is in the lower one, and the limit itself is met.
    shares = [max(0.0, share - 1e-9) for share in (0.99, 0.999, 1.0 - 1.0 / answers)]
    p99, p999, second = [quantile(bounds, counts, share) or 0.0 for share in shares]
    late = sum(counts[bisect_right(bounds, _border(limit)) :])
    return Seen(answers, p99, p999, second, late)


def _border(seconds: float) -> float:
    """Return a bucket's border in seconds, rounded to 12 significant digits.

    A limit of 39.3 ms is then the same float whether it was read from the settings or computed.
    """
    return float(f"{seconds:.12g}")
