"""Lookup: the side of a block table that is read, and all of it that other processes see.

A block is a number. Beside one another, by number, lie the blocks' hashes, the numbers of their holder sets, and the
epochs of their last use; an `Index` finds the number of a hash. Blocks that came together have consecutive numbers, so
most of a prompt is one comparison of its hashes with those behind the first one's number, and no search at all.

The arrays may lie in memory that several processes map: one writes (`BlockTable`), the others read without locks. What
they read while it is being written may be torn: a block seems absent, or held by whoever holds another block. It is read
once, for one choice.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from cachemap.holders import HolderSets, Masks, spread
from cachemap.memory import PRIVATE, Memory
from cachemap.table import U64, Index

NONE = np.empty(0, np.int64)
NO_BLOCKS = np.empty(0, U64)
PIECE = 256  # blocks of a prompt looked up first; then always as many as were found before
SHORT = 8  # where blocks of a prompt lie in shorter runs than this, all at once are looked up quicker


def u64(numbers: Iterable[int]) -> np.ndarray:
    """Ints of up to 64 bits as an array; by way of `array`, a third quicker than numpy's."""
    return np.frombuffer(array("Q", numbers), U64)


class Lookup:
    """One tier's blocks and who holds them; at most `most` of them, for which memory is taken as they come."""

    def __init__(self, memory: Memory = PRIVATE, most: int = 1):
        self._memory = memory
        size = most + 1  # none has the number 0
        self.hashes = memory.zeros(size, U64)  # 0: no block has this number
        self.sets = memory.zeros(size, np.uint32)
        self.epochs = memory.zeros(size, np.uint8)
        self.told = memory.zeros(2, np.int64)  # what the writer tells readers: the epoch, and whether uses are marked
        self.index = Index(1, size.bit_length(), self.hashes, memory)
        self.holders: Masks = HolderSets(memory)
        memory.laid_out()

    @property
    def arrays(self) -> list[np.ndarray]:
        """What readers need, as `look_at` takes it; only the first may be written by them."""
        index = self.index
        return [self.epochs, self.told, self.hashes, self.sets, index.words, index.passed, index.spilled, self.holders.words]

    def look_at(self, arrays: list[np.ndarray]) -> None:
        """Read another process's table from now on."""
        self.epochs, self.told, self.hashes, self.sets, words, passed, spilled, masks = arrays
        self.index = Index.over(words, passed, spilled, len(self.hashes).bit_length(), self.hashes)
        self.holders = Masks(masks)

    def prefix(self, hashes: list[int]) -> np.ndarray:
        """Numbers of the leading blocks that anyone holds; marks them as used now."""
        found, done, piece, last = [], 0, PIECE, 0
        while done < len(hashes):
            wanted = hashes[done : done + piece]
            number = min(last + 1, len(self.hashes) - 1) if last else self.index.at(wanted[0])
            if not number:
                break
            numbers = self._lead(wanted, u64(wanted), number)
            done += len(numbers)
            found.append(numbers)
            if len(numbers) < len(wanted):
                break
            last, piece = int(numbers[-1]), done
        if not found:
            return NONE
        numbers = found[0] if len(found) == 1 else np.concatenate(found)
        self._used(numbers)
        return numbers

    def _lead(self, hashes: list[int], wanted: np.ndarray, number: int) -> np.ndarray:
        """Numbers of the leading blocks of these that are there, run by run; `number` is where the first may be."""
        runs, at, end, numbers = [], 0, len(wanted), self.hashes
        while at < end:
            if numbers.item(number) != hashes[at]:
                number = self.index.at(hashes[at])
                if not number:
                    break
            there = numbers[number : number + end - at]
            same = there == wanted[at : at + len(there)]
            run = len(same) if same.all() else int(same.argmin())
            if not run:
                break  # torn
            runs.append(np.arange(number, number + run))
            at += run
            if len(runs) > 3 and at < SHORT * len(runs):
                rest = self.index.numbers(wanted[at:])
                runs.append(rest if rest.all() else rest[: int((rest == 0).argmax())])
                break
            number = min(number + run, len(numbers) - 1)
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else NONE

    def _used(self, numbers: np.ndarray) -> None:
        """Mark them as used now. Any reader may: an epoch is a byte, and whose is the last does not matter."""
        if self.told[1]:
            self.epochs[numbers] = self.told[0]

    def reach(self, numbers: np.ndarray, slots: int) -> list[int]:
        """For each of `slots` replicas, how many of these leading blocks it holds in a row."""
        lengths = [0] * slots
        if not len(numbers):
            return lengths
        sets = self.sets.take(numbers)
        mask = self.holders.mask
        held = mask(int(sets[0]))
        ends = (sets[1:] != sets[:-1]).nonzero()[0] + 1  # a replica's run ends where it leaves the set
        for end, number in zip(ends.tolist(), sets.take(ends).tolist()):
            still = held & mask(number)
            if still != held:
                spread(lengths, held ^ still, end)
                held = still
                if not held:
                    return lengths
        spread(lengths, held, len(numbers))
        return lengths

    def holds(self, slot: int, number: int) -> bool:
        return bool(self.holders.mask(int(self.sets[number])) >> slot & 1)

    def holders_of(self, hashes: np.ndarray) -> list[int]:
        """For each block the replicas that hold it, as an int of bits by slot."""
        sets = self.sets.take(self.index.numbers(hashes)).tolist()
        masks = {number: self.holders.mask(number) for number in set(sets)}
        return [masks[number] for number in sets]
