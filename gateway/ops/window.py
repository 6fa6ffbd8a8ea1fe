"""What a metric counted in the last so many seconds.

Metrics only ever grow, and cost a request nothing more when somebody wants to know of the last half minute: a `Window`
looks at one now and then and keeps what was added between two looks. It serves any `Counter` and `Histogram`: the
figures by class and model that the overload control reads (30 s), and what a page shows of the last 15 minutes
(`Window(metrics.request_seconds, step=5.0, span=900.0)`).

Its memory is bounded by its span: per step and series no more numbers than were observed, nor than there are buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .metrics import Counter, Histogram, Key, quantile

Parts = dict[int, float]  # which of a series' numbers grew, and by how much


class Step(NamedTuple):
    until: float  # monotonic seconds
    seconds: float  # that it covers
    added: dict[Key, Parts]


class Window:
    """Times are monotonic seconds. `step`: seconds between two looks that are kept apart; `span`: the longest time that
    can be asked about. Whoever owns it calls `look` about as often as `step`; more often does no harm."""

    def __init__(self, metric: Counter | Histogram, now: float, step: float = 1.0, span: float = 60.0) -> None:
        self.metric, self.step, self.span = metric, step, span
        self._steps: deque[Step] = deque()
        self._looked = now
        self._before = self._numbers()

    def look(self, now: float) -> None:
        """Keep what was added since the last look, if that is a step ago."""
        if now - self._looked < self.step:
            return
        numbers = self._numbers()
        added = {key: parts for key, values in numbers.items() if (parts := self._grown(key, values))}
        self._steps.append(Step(now, now - self._looked, added))
        self._looked, self._before = now, numbers
        while self._steps[0].until <= now - self.span:
            self._steps.popleft()

    def quantile(self, share: float, seconds: float, **where: str) -> float | None:
        """The value below which this share of the observations of the last `seconds` lies, of the series with these
        values of labels; None where there is none. Counted from the last look, as all that is asked here."""
        counts = self._sums(seconds, where)[:-1]
        return quantile(self._bounds, counts, share)

    def count(self, seconds: float, **where: str) -> float:
        """How many observations, or by how much a counter grew."""
        sums = self._sums(seconds, where)
        return sum(sums[:-1]) if isinstance(self.metric, Histogram) else sums[0]

    def mean(self, seconds: float, **where: str) -> float | None:
        """Of observations; None without any."""
        sums = self._sums(seconds, where)
        count = sum(sums[:-1])
        return sums[-1] / count if count else None

    def rate(self, seconds: float, **where: str) -> float:
        """`count` per second of the time that was looked at; 0 before the first step is over."""
        looked = sum(step.seconds for step in self._within(seconds))
        return self.count(seconds, **where) / looked if looked else 0.0

    def values(self, label: str) -> list[str]:
        """The values of a label that anything was added for within the span, in order."""
        at = tuple(self.metric.labels).index(label)
        return sorted({self.metric.values_of(key)[at] for step in self._steps for key in step.added})

    # --- parts

    @property
    def _bounds(self) -> Sequence[float]:
        return self.metric.bounds if isinstance(self.metric, Histogram) else ()

    def _numbers(self) -> dict[Key, list[float]]:
        metric = self.metric
        if isinstance(metric, Histogram):
            return {key: [*numbers] for key, numbers in metric.series.items()}
        return {key: [number] for key, number in metric.values.items()}

    def _grown(self, key: Key, values: list[float]) -> Parts:
        before = self._before.get(key)
        if before is None or _is_new(before, values):  # the replica, or model, was away meanwhile
            return {at: value for at, value in enumerate(values) if value}
        if before == values:
            return {}
        return {at: now - then for at, (then, now) in enumerate(zip(before, values, strict=True)) if now != then}

    def _within(self, seconds: float) -> Iterator[Step]:
        for step in reversed(self._steps):
            if step.until <= self._looked - seconds:
                return
            yield step

    def _sums(self, seconds: float, where: dict[str, str]) -> list[float]:
        labels = tuple(self.metric.labels)
        places = [(labels.index(label), value) for label, value in where.items()]
        sums = [0.0] * (len(self._bounds) + 2 if isinstance(self.metric, Histogram) else 1)
        for step in self._within(seconds):
            for key, parts in step.added.items():
                values = self.metric.values_of(key)
                if all(values[at] == value for at, value in places):
                    for at, number in parts.items():
                        sums[at] += number
        return sums


def _is_new(before: list[float], values: list[float]) -> bool:
    return any(now < then for then, now in zip(before, values, strict=True))
