"""Allocation of block numbers, consecutive where possible for blocks stored together, since `Blocks` walks them."""

import numpy as np

KEPT = 16  # one number in 16 may be free before any is reused, so that runs freed piece by piece join again
SORTED = 1 << 14  # free numbers sorted at a time: 0.2 ms


class BlockIdAllocator:
    """An allocator of numbers from 1 on. `top` is the first number never used."""

    def __init__(self) -> None:
        self.top = 1
        self.free = 0
        self._back: list[np.ndarray] = []  # free numbers as they were returned
        self._ready = np.empty(0, np.int64)  # free numbers, sorted

    def take(self, count: int, end: int) -> np.ndarray:
        """Return `count` numbers below `end`; free numbers and those never used must suffice."""
        if self.top + count <= end and self.free < max(count, self.top // KEPT):
            self.top += count
            return np.arange(self.top - count, self.top)
        parts = []
        while count and self.free:
            if not len(self._ready):
                self._put_in_order()
            part, self._ready = self._ready[:count], self._ready[count:]
            parts.append(part)
            count -= len(part)
            self.free -= len(part)
        if count:
            self.top += count
            parts.append(np.arange(self.top - count, self.top))
        return np.concatenate(parts)

    def _put_in_order(self) -> None:
        some, size = [], 0
        while self._back and size < SORTED:
            some.append(self._back.pop())
            size += len(some[-1])
        self._ready = np.sort(np.concatenate(some))

    def give(self, numbers: np.ndarray) -> None:
        """Return these numbers to the free ones."""
        if len(numbers):
            self.free += len(numbers)
            self._back.append(numbers)
