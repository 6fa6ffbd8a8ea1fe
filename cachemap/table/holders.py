"""Holder sets: who holds a block, as the number of a set of replicas that many blocks share.

Most blocks have few holders, and blocks of one conversation have the same ones. So each block has a number of 32 bits,
and each distinct set is kept once: a row of bits, one a replica. With 1,024 replicas that is 4 bytes a block and 0.6 kB
a set, where a bit for each replica would be 128 bytes a block. Set 0 is nobody.
"""

from __future__ import annotations

import numpy as np

from cachemap.table.memory import zeros

U64 = np.uint64
ROWS = 1 << 13  # at first, of 64 bits
BITS = [tuple(i for i in range(8) if byte >> i & 1) for byte in range(256)]


class HolderSets:
    """The distinct sets. `uses` counts for each the blocks that have it; one without any goes."""

    def __init__(self) -> None:
        self._masks = [0]
        self.uses = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._rows = zeros(ROWS, U64).reshape(-1, 1)  # the same masks, so that many can be looked at together

    @property
    def width(self) -> int:
        """Words of 64 bits in a row."""
        return self._rows.shape[1]

    @property
    def nbytes(self) -> int:
        """With what Python keeps of a set: its mask twice referred to, its number, its place in a dict."""
        width = self.width
        return (len(self._masks) - len(self._free)) * (180 + 17 * width)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def widen(self, slots: int) -> None:
        """Rows for so many replicas."""
        width = -(-slots // 64)
        if width > self.width:
            self._lay_out(width, max(2 * len(self._masks), ROWS // width))

    def _lay_out(self, width: int, rows: int) -> None:
        before = self._rows[: len(self._masks)]
        self._rows = zeros(rows * width, U64).reshape(rows, width)
        self._rows[: len(before), : before.shape[1]] = before

    def has(self, numbers: np.ndarray, slot: int) -> np.ndarray:
        """Whether each of these sets has the replica. Mostly all are the same one."""
        if (numbers == numbers[:1]).all():
            return np.full(len(numbers), len(numbers) and self._masks[numbers.item(0)] >> slot & 1, bool)
        words = self._rows[:, slot >> 6].take(numbers)
        return (words >> U64(slot & 63) & U64(1)).view(np.int64).astype(bool)

    def words(self, numbers: np.ndarray, word: int) -> np.ndarray:
        """Of each of these sets the members of slots 64 * `word` and after, as bits."""
        if word >= self.width:
            return np.zeros(len(numbers), U64)
        found: np.ndarray = self._rows[:, word].take(numbers)
        return found

    def empty(self, numbers: np.ndarray) -> np.ndarray:
        """Whether each of these sets has nobody: set 0, or one whose last member left by `forget`."""
        masks = self._masks
        kinds, which = np.unique(numbers, return_inverse=True)
        return np.array([not masks[number] for number in kinds.tolist()], bool)[which]

    def turn(self, numbers: np.ndarray, slot: int, joins: bool) -> np.ndarray:
        """The sets that blocks have instead of these, one number a block, when a replica joins them or leaves."""
        first = numbers[0]
        if (numbers == first).all():
            return np.full(len(numbers), self._turned(int(first), slot, joins, len(numbers)), np.uint32)
        kinds, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        turned = [self._turned(number, slot, joins, count) for number, count in zip(kinds.tolist(), counts.tolist())]
        return np.array(turned, np.uint32)[which]

    def _turned(self, number: int, slot: int, joins: bool, count: int) -> int:
        before = self._masks[number]
        mask = before | 1 << slot if joins else before & ~(1 << slot)
        if mask == before:
            return number
        to = self._numbers.get(mask)
        if to is None:
            to = self._new(mask)
        self.uses[to] += count
        self.leave(number, count)
        return to

    def _new(self, mask: int) -> int:
        if self._free:
            number = self._free.pop()
            self._masks[number] = mask
        else:
            number = len(self._masks)
            if number == len(self._rows):
                self._lay_out(self.width, 2 * number)
            self._masks.append(mask)
            self.uses.append(0)
        self._numbers[mask] = number
        self._rows[number] = np.frombuffer(mask.to_bytes(8 * self.width, "little"), U64)
        return number

    def leave(self, number: int, count: int) -> None:
        """So many blocks no longer have this set."""
        if not number:
            return
        self.uses[number] -= count
        if not self.uses[number]:
            mask = self._masks[number]
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            self._masks[number] = 0
            self._free.append(number)

    def forget(self, slot: int) -> None:
        """The replica leaves all sets; 0.5 us for each that has it, however many blocks have those.

        Two sets may be equal from then on. That does no harm: each block has one, and both go in time."""
        rows = self._rows[: len(self._masks)]
        column, bit = rows[:, slot >> 6], U64(1 << (slot & 63))
        with_it = (column & bit).nonzero()[0]
        column[with_it] &= ~bit
        for number in with_it.tolist():
            mask = self._masks[number]
            if not mask >> slot & 1:
                continue  # a free one
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            mask &= ~(1 << slot)
            self._masks[number] = mask
            if mask:
                self._numbers.setdefault(mask, number)


def spread(lengths: list[int], mask: int, length: int) -> None:
    """lengths[i] = length for every bit i that is set."""
    if mask.bit_count() < 8:
        while mask:
            low = mask & -mask
            lengths[low.bit_length() - 1] = length
            mask ^= low
        return
    first = 0
    for byte in mask.to_bytes((mask.bit_length() + 7) // 8, "little"):
        for i in BITS[byte]:
            lengths[first + i] = length
        first += 8
