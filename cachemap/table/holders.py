"""Holder sets: the sets of replicas that hold a block; many blocks share one set.

Most blocks are held by few replicas, and all blocks of one conversation by the same ones. So each block has only the
32-bit number of its set, and each distinct set is kept once, as a row with a bit for each slot. With 1,024 replicas
this takes 4 bytes a block and 0.6 kB a set, where a bit for each replica would take 128 bytes a block. Set 0 is empty.
"""

from __future__ import annotations

import numpy as np

from cachemap.table.memory import zeros

U64 = np.uint64
ROWS = 1 << 13  # words of 64 bits for the sets' rows that are allocated at first
BITS = [tuple(i for i in range(8) if byte >> i & 1) for byte in range(256)]


class HolderSets:
    """The distinct sets of replicas that hold some block, each with a number.

    `uses`: for each set number, how many blocks have the set; a set without blocks is freed, and its number reused.
    """

    def __init__(self) -> None:
        self._masks = [0]
        self.uses = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._rows = zeros(ROWS, U64).reshape(-1, 1)  # the same masks as an array, to look up many at once

    @property
    def width(self) -> int:
        """How many words of 64 bits a set's row has; each bit stands for the replica in one slot (index)."""
        return self._rows.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes used, Python objects included: for each set its row, its mask, its number and its dict entry."""
        width = self.width
        return (len(self._masks) - len(self._free)) * (180 + 17 * width)

    def mask(self, number: int) -> int:
        return self._masks[number]

    def widen(self, slots: int) -> None:
        """Make the rows wide enough for `slots` replicas."""
        width = -(-slots // 64)
        if width > self.width:
            self._lay_out(width, max(2 * len(self._masks), ROWS // width))

    def _lay_out(self, width: int, rows: int) -> None:
        before = self._rows[: len(self._masks)]
        self._rows = zeros(rows * width, U64).reshape(rows, width)
        self._rows[: len(before), : before.shape[1]] = before

    def has(self, numbers: np.ndarray, slot: int) -> np.ndarray:
        """Return for each of these sets, given by number, whether the replica in this slot (index) is in the set.

        Quickest if all numbers are equal.
        """
        if (numbers == numbers[:1]).all():
            return np.full(len(numbers), len(numbers) and self._masks[numbers.item(0)] >> slot & 1, bool)
        words = self._rows[:, slot >> 6].take(numbers)
        return (words >> U64(slot & 63) & U64(1)).view(np.int64).astype(bool)

    def words(self, numbers: np.ndarray, word: int) -> np.ndarray:
        """Return for each of these sets, given by number, which of 64 replicas it has, as bits of a uint64.

        `word`: which 64 replicas: those whose slots (indices) begin at 64 * `word`.
        """
        if word >= self.width:
            return np.zeros(len(numbers), U64)
        found: np.ndarray = self._rows[:, word].take(numbers)
        return found

    def empty(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each of these sets, given by number, whether it is empty: set 0, or a set emptied by `forget`."""
        masks = self._masks
        kinds, which = np.unique(numbers, return_inverse=True)
        return np.array([not masks[number] for number in kinds.tolist()], bool)[which]

    def turn(self, numbers: np.ndarray, slot: int, joins: bool) -> np.ndarray:
        """Return for each block the number of its set of holders after one replica was added or removed.

        `numbers`: the number of each block's present set. `slot`: the replica's index. `joins`: add the replica,
        otherwise remove it. Also updates `uses`, the counts of the blocks that have each set.
        """
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
        """Subtract `count` from the number of blocks that have this set, and free a set without blocks."""
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
        """Remove the replica in this slot (index) from all sets.

        This takes 0.5 us for each set that has the replica, whatever the number of blocks. Two sets may have the same
        members afterwards, which does no harm: each block has one of the two, and a set is freed once no block has it.
        """
        rows = self._rows[: len(self._masks)]
        column, bit = rows[:, slot >> 6], U64(1 << (slot & 63))
        with_it = (column & bit).nonzero()[0]
        column[with_it] &= ~bit
        for number in with_it.tolist():
            mask = self._masks[number]
            if not mask >> slot & 1:
                continue  # this set is free: no block has it
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            mask &= ~(1 << slot)
            self._masks[number] = mask
            if mask:
                self._numbers.setdefault(mask, number)


def spread(lengths: list[int], mask: int, length: int) -> None:
    """Set lengths[i] = length for each i whose bit is set in `mask`."""
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
