"""The increase of a metric between two looks at it.

Metrics only ever grow, so a figure of the last half minute costs a request nothing more. The overload control looks at
the end of each of its windows, the live page once a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        """Return by how much each of these numbers grew since the last look, without those that did not."""
        before, self._before = self._before, dict(numbers)
        gains = {key: number - before.get(key, 0) for key, number in numbers.items()}
        return {key: gain if gain > 0 else numbers[key] for key, gain in gains.items() if gain}
