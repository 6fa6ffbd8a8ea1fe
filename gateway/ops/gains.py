"""The increase of counters and histograms between two readings of them, called looks.

Counters only grow, so the difference of two looks is the increase in between, and requests do no extra work for it.
Overload control looks at the end of each of its windows, the live page once a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import sub
from typing import Any

from .metrics import Counter, Histogram


class Gains:
    """The increase of each series of one metric since the last look.

    An increase is a number, or a list of a histogram's bucket counts and sum. If a series is smaller than at the last
    look, it was dropped in between and has started at zero again, so its whole value is the increase.
    """

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}

    def look(self, metric: Counter | Histogram) -> Iterator[tuple[Any, Any]]:
        """Yield the label values and the increase of each series that has changed since the last look."""
        if not isinstance(metric, Histogram):
            yield from self.grown(metric.values).items()
            return
        before, self._before = self._before, {key: [*numbers] for key, numbers in metric.values.items()}
        for key, numbers in self._before.items():
            known = before.get(key)
            if numbers != known:
                gain = [*map(sub, numbers, known)] if known is not None else numbers
                yield key, gain if min(gain) >= 0 else numbers

    def grown(self, numbers: Mapping[Any, float]) -> dict[Any, float]:
        """Return by how much each of these numbers has grown since the last look; numbers that stayed are left out."""
        before, self._before = self._before, dict(numbers)
        gains = {key: number - before.get(key, 0) for key, number in numbers.items()}
        return {key: gain if gain > 0 else numbers[key] for key, gain in gains.items() if gain}
