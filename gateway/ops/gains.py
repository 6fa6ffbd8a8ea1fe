"""The increase of a metric between two looks at it.

Metrics only ever grow, so a figure of the last half minute costs a request nothing more. The overload control looks at
the end of each of its windows, the live page once a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import Any

from .metrics import Counter, Histogram


class Gains:
    """The increase of each series of a metric since the last look: a number, or a histogram's buckets and sum.

    A series that is smaller than before was forgotten meanwhile, and counts from zero again.
    """

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}

    def look(self, metric: Counter | Histogram) -> Iterator[tuple[Any, Any]]:
        """Yield each series that changed since the last look, with its increase."""
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
