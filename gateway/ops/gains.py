"""What a metric counted between two looks at it.

Metrics only ever grow, and cost a request nothing more when somebody wants to know of the last half minute. The control
of overload looks at the end of each of its windows, the live page once a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import Any

from .metrics import Counter, Histogram


class Gains:
    """What each series of a metric gained between two looks: a number, or those of a histogram's buckets and sum. Where
    it is less than before it was forgotten meanwhile, and counts from nothing again."""

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}

    def look(self, metric: Counter | Histogram) -> Iterator[tuple[Any, Any]]:
        before = self._before
        if isinstance(metric, Histogram):
            self._before = {key: [*numbers] for key, numbers in metric.series.items()}
            for key, numbers in self._before.items():
                known = before.get(key)
                if numbers != known:
                    gain = [*map(sub, numbers, known)] if known is not None else numbers
                    yield key, gain if min(gain) >= 0 else numbers
        else:
            self._before = dict(metric.values)
            for key, number in self._before.items():
                if gain := number - before.get(key, 0):
                    yield key, gain if gain > 0 else number
