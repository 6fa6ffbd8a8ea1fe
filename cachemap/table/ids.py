"""Allocation of block numbers.

Blocks stored together get consecutive numbers where possible, since `Blocks` finds them by counting up.
"""

import numpy as np

# One number in 16 may be free before free numbers are reused, so that numbers freed piece by piece form long runs
# again.
KEPT = 16
SORTED = 1 << 14  # free numbers sorted at a time: 0.2 ms


class BlockIdAllocator:
    """An allocator of block numbers, the indices of a table's arrays, from 1 on.

    `top`: the first number that was never used. `free`: how many numbers below `top` are free.
    """

    def __init__(self) -> None:
        self.top = 1
        self.free = 0
        self._back: list[np.ndarray] = []  # free numbers as they were returned
        self._ready = np.empty(0, np.int64)  # free numbers, sorted

    def take(self, count: int, end: int) -> np.ndarray:
        """Return `count` free or never used numbers below `end`, consecutive ones where possible.

        The caller must have made sure that there are so many.
        """
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
        """Make these numbers free again."""
        if len(numbers):
            self.free += len(numbers)
            self._back.append(numbers)
