"""Lookup: the side of a block table that is read, and all of it that other processes see.

`blocks` has every block's 64-bit hash; beside each place lie the holders (one bit a replica: 8, 16, 32 or 64 bits
wide, then further 64-bit arrays) and the epoch of its last use. The arrays may lie in memory that several processes
map: one writes (`BlockTable`), the others read without locks. What they read while it is being written may be torn:
a block seems absent, or held by whoever the place's next block is held by. It is read once, for one choice.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from cachemap.memory import PRIVATE, Memory
from cachemap.table import U64, Buckets

BITS = [tuple(i for i in range(8) if byte >> i & 1) for byte in range(256)]
NONE = np.empty(0, np.int64)
NO_BLOCKS = np.empty(0, U64)
HEAD = 256  # blocks of a long prompt looked up before the rest is


def u64(numbers: Iterable[int]) -> np.ndarray:
    """Ints of up to 64 bits as an array; by way of `array`, a third quicker than numpy's."""
    return np.frombuffer(array("Q", numbers), U64)


class Lookup:
    """One tier's blocks and who holds them."""

    def __init__(self, memory: Memory = PRIVATE):
        self._memory = memory
        self.blocks = Buckets(1, memory=memory)
        self.holders = [memory.zeros(len(self.blocks.words), np.uint8)]
        self.epochs = memory.zeros(len(self.blocks.words), np.uint8)
        self.told = memory.zeros(2, np.int64)  # what the writer tells readers: the epoch, and whether uses are marked
        memory.laid_out()

    @property
    def arrays(self) -> list[np.ndarray]:
        """What readers need, as `look_at` takes it."""
        blocks = self.blocks
        return [blocks.words, blocks.passed, blocks.spilled, self.epochs, self.told, *self.holders]

    def look_at(self, arrays: list[np.ndarray]) -> None:
        """Read another process's table from now on."""
        words, passed, spilled, self.epochs, self.told, *self.holders = arrays
        self.blocks = Buckets.over(words, passed, spilled)

    def prefix(self, hashes: list[int]) -> np.ndarray:
        """Places of the leading blocks that anyone holds; marks them as used now."""
        if not hashes or self.blocks.at(hashes[0]) < 0:
            return NONE
        if len(hashes) <= 2 * HEAD:
            places = self.blocks.find_prefix(u64(hashes))
        else:
            places = self.blocks.find_prefix(u64(hashes[:HEAD]))
            if len(places) == HEAD:
                rest = self.blocks.find_prefix(u64(hashes[HEAD:]))
                places = np.concatenate((places, rest))
        self._used(places)
        return places

    def _used(self, places: np.ndarray) -> None:
        """Mark them as used now. Any reader may: an epoch is a byte, and whose is the last does not matter."""
        if self.told[1]:
            self.epochs[places] = self.told[0]

    def reach(self, places: np.ndarray, slots: int) -> list[int]:
        """For each of `slots` replicas, how many of these leading blocks it holds in a row."""
        lengths = [0] * slots
        if not len(places):
            return lengths
        for first, words in zip(range(0, slots, 64), self.holders):
            holders = np.bitwise_and.accumulate(words.take(places))
            last = int(holders[-1])
            if holders[0] != last:
                # a replica's bit goes off once: there its run ends
                lost = holders[1:] ^ holders[:-1]
                ends = lost.nonzero()[0]
                for end, bits in zip((ends + 1).tolist(), lost[ends].tolist()):
                    _set(lengths, first, bits, end)
            _set(lengths, first, last, len(places))
        return lengths

    def holds(self, slot: int, place: int) -> bool:
        return bool(int(self.holders[slot >> 6][place]) >> (slot & 63) & 1)

    def holders_of(self, hashes: np.ndarray) -> list[int]:
        """For each block the replicas that hold it, as an int of bits by slot."""
        places = self.blocks.find(hashes)
        found = places >= 0
        result = [0] * len(hashes)
        for shift, words in zip(range(0, 64 * len(self.holders), 64), self.holders):
            for i, bits in enumerate(np.where(found, words[places], 0).tolist()):
                result[i] |= bits << shift
        return result


def _set(lengths: list[int], first: int, bits: int, length: int) -> None:
    """lengths[first + i] = length for every bit i that is set."""
    for byte in bits.to_bytes(8, "little"):
        for i in BITS[byte]:
            lengths[first + i] = length
        first += 8
