"""Lookup: the side of a block table that is read.

A block is a number. Beside one another, by number, lie the blocks' hashes, the numbers of their holder sets, and the
epochs of their last use; an `Index` finds the number of a hash. Blocks that came together have consecutive numbers, so
most of a prompt is one comparison of its hashes with those behind the first one's number, and no search at all.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from cachemap.table.holders import HolderSets, spread
from cachemap.table.index import Index
from cachemap.table.memory import zeros
from cachemap.table.buckets import U64

NO_BLOCKS = np.empty(0, U64)
PIECE = 256  # blocks of a prompt looked up first; then always as many as were found before,
MOST = 4096  # up to this: larger arrays would be new memory each time
SHORT = 8  # where blocks of a prompt lie in shorter runs than this, all at once are looked up quicker


def u64(numbers: Iterable[int]) -> np.ndarray:
    """Ints of up to 64 bits as an array; by way of `array`, a third quicker than numpy's."""
    return np.frombuffer(array("Q", numbers), U64)


class Found:
    """The numbers of a prompt's leading blocks, as pieces that select them: slices where they are consecutive."""

    __slots__ = ("count", "pieces")

    def __init__(self) -> None:
        self.count = 0
        self.pieces: list[slice | np.ndarray] = []

    def add(self, piece: slice | np.ndarray, count: int) -> None:
        self.pieces.append(piece)
        self.count += count

    def number(self, at: int) -> int:
        for piece in self.pieces:
            count = piece.stop - piece.start if isinstance(piece, slice) else len(piece)
            if at < count:
                return piece.start + at if isinstance(piece, slice) else int(piece[at])
            at -= count
        raise IndexError(at)


class Lookup:
    """One tier's blocks and who holds them; at most `most` of them, for which memory is taken as they come."""

    def __init__(self, most: int):
        size = most + 1  # none has the number 0
        self.hashes = zeros(size, U64)  # 0: no block has this number
        self.sets = zeros(size, np.uint32)
        self.index = Index(1, size.bit_length(), self.hashes)
        self.holders = HolderSets()

    def prefix(self, hashes: Sequence[int]) -> Found:
        """The leading blocks that anyone holds; marks them as used now."""
        found, piece, number = Found(), PIECE, 0
        while found.count < len(hashes):
            wanted = hashes[found.count : found.count + piece]
            number = number or self.index.at(wanted[0])
            if not number:
                break
            number = self._lead(wanted, u64(wanted), number, found)
            if not number:
                break
            piece = min(found.count, MOST)
        self._used(found)
        return found

    def _lead(self, hashes: Sequence[int], wanted: np.ndarray, number: int, found: Found) -> int:
        """Find the leading blocks of these, run by run; `number` is where the first may be. If all are there, gives where
        what follows them may be."""
        at, end, runs, numbers = 0, len(wanted), 0, self.hashes
        while at < end:
            if number == len(numbers) or numbers.item(number) != hashes[at]:
                number = self.index.at(hashes[at])
                if not number:
                    return 0
            there = numbers[number : number + end - at]
            same = there == wanted[at : at + len(there)]
            run = len(same) if same.all() else int(same.argmin())
            found.add(slice(number, number + run), run)
            at, number, runs = at + run, number + run, runs + 1
            if runs > 3 and at < SHORT * runs and at < end:
                rest = self.index.numbers(wanted[at:])
                known = len(rest) if rest.all() else int((rest == 0).argmax())
                if known:
                    found.add(rest[:known], known)
                return int(rest[-1]) + 1 if known == len(rest) else 0
        return number

    def _used(self, found: Found) -> None:
        """They were asked for now."""

    def reach(self, found: Found, slots: int) -> list[int]:
        """For each of `slots` replicas, how many of these leading blocks it holds in a row."""
        lengths = [0] * slots
        mask, whole, held, last, at = self.holders.mask, -1, -1, -1, 0
        for piece in found.pieces:
            sets = self.sets[piece]
            ends = (sets[1:] != sets[:-1]).nonzero()[0] + 1
            changes = zip((0, *ends.tolist()), (int(sets[0]), *sets[ends].tolist())) if len(ends) else ((0, int(sets[0])),)
            for end, number in changes:
                if number == last:
                    continue
                last = number
                if held < 0:
                    whole = held = mask(number)
                    continue
                still = held & mask(number)  # a replica's run ends where it leaves the set
                if still != held:
                    lost = held ^ still
                    if held is whole and 2 * lost.bit_count() > slots:
                        # a system prompt that all hold: 5 us instead of 40 with 1,024 replicas
                        lengths = [at + end] * slots
                        spread(lengths, (1 << slots) - 1 & ~whole, 0)
                    else:
                        spread(lengths, lost, at + end)
                    held = still
                    if not held:
                        return lengths
            at += len(sets)
        if held > 0:
            spread(lengths, held, at)
        return lengths

    def holds(self, slot: int, number: int) -> bool:
        return bool(self.holders.mask(int(self.sets[number])) >> slot & 1)

    def holders_of(self, hashes: np.ndarray) -> list[int]:
        """For each block the replicas that hold it, as an int of bits by slot."""
        sets = self.sets.take(self.index.numbers(hashes)).tolist()
        masks = {number: self.holders.mask(number) for number in set(sets)}
        return [masks[number] for number in sets]
