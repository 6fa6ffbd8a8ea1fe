"""BlockIdAllocator: which numbers blocks have. Those asked for together are consecutive as far as can be, since
`Blocks` walks them."""

import numpy as np

KEPT = 16  # one in 16 may be unused before any is used again: runs that came back piece by piece come together
SORTED = 1 << 14  # unused numbers put in order at a time: 0.2 ms


class BlockIdAllocator:
    """Counts from 1. `top` is the first number never used."""

    def __init__(self) -> None:
        self.top = 1
        self.free = 0
        self._back: list[np.ndarray] = []  # as they came back
        self._ready = np.empty(0, np.int64)  # some of them, in order

    def take(self, count: int, end: int) -> np.ndarray:
        """So many numbers, all below `end`; free ones and those that never were used must suffice."""
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
        """These are no longer used."""
        if len(numbers):
            self.free += len(numbers)
            self._back.append(numbers)
