"""Blocks: the blocks of one tier, who holds them, and when they were used last.

A block is a number. Beside one another, by number, lie the blocks' hashes, the numbers of their holder sets, and the
epochs of their last use; an `Index` finds the number of a hash. Blocks that came together have consecutive numbers, so
most of a prompt is one comparison of its hashes with those behind the first one's number, and no search at all.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from cachemap.table.buckets import U64, distinct
from cachemap.table.holders import HolderSets, spread
from cachemap.table.ids import BlockIdAllocator
from cachemap.table.index import Index
from cachemap.table.memory import zeros

NO_BLOCKS = np.empty(0, U64)
PIECE = 256  # blocks of a prompt looked up first; then always as many as were found before,
MOST = 4096  # up to this: larger arrays would be new memory each time
EPOCHS = 64  # to a table full of uses: the finest it can tell apart is 1.6 % of its blocks
OLDEST = 128  # ages stop here, two tables full of uses; three would wrap in a byte
DATED = 1 << 12  # blocks whose ages are cut in the same epoch
BYTES_BESIDE = 13  # of a block: hash, set, epoch
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


class Blocks:
    """One tier's blocks and who holds them; at most `most` of them, for which memory is taken as they come."""

    def __init__(self, most: int):
        size = most + 1  # none has the number 0
        self.hashes = zeros(size, U64)  # 0: no block has this number
        self.sets = zeros(size, np.uint32)
        self.epochs = zeros(size, np.uint8)  # of each block's last use
        self.epoch, self._used_in_epoch = 0, 0
        self.marks_uses = False  # before a table is half full, nothing is evicted soon
        self.ids = BlockIdAllocator()
        self.index = Index(1, size.bit_length(), self.hashes)
        self.holders = HolderSets()

    @property
    def nbytes(self) -> int:
        return self.ids.top * BYTES_BESIDE + self.index.nbytes + self.holders.nbytes

    def prefix(self, hashes: Sequence[int]) -> Found:
        """The leading blocks that anyone holds; marks them as used now."""
        found, piece, number = Found(), PIECE, 0
        if not self.index.count:
            return found
        while found.count < len(hashes):
            wanted = hashes[found.count : found.count + piece]
            number = number or self.index.at(wanted[0])
            if not number:
                break
            number = self._lead(wanted, u64(wanted), number, found)
            if not number:
                break
            piece = min(found.count, MOST)
        self._mark_used(found)
        return found

    def _lead(self, hashes: Sequence[int], wanted: np.ndarray, number: int, found: Found) -> int:
        """Find the leading blocks of these, run by run; `number` is where the first may be. If all are there, gives
        where what follows them may be."""
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

    def reach(self, found: Found, slots: int) -> list[int]:
        """For each of `slots` replicas, how many of these leading blocks it holds in a row."""
        lengths = [0] * slots
        mask, whole, held, last, at = self.holders.mask, -1, -1, -1, 0
        for piece in found.pieces:
            sets = self.sets[piece]
            ends = (sets[1:] != sets[:-1]).nonzero()[0] + 1
            changes = (
                zip((0, *ends.tolist()), (int(sets[0]), *sets[ends].tolist())) if len(ends) else ((0, int(sets[0])),)
            )
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

    def holder_words(self, hashes: np.ndarray, word: int) -> np.ndarray:
        """For each block which of 64 replicas hold it, those of slots 64 * `word` and after, as bits of a word."""
        return self.holders.words(self.sets.take(self.index.numbers(hashes)), word)

    # ---- use ----

    def _mark_used(self, found: Found) -> None:
        if self.marks_uses:
            for piece in found.pieces:
                self.epochs[piece] = self.epoch
            self.tick(found.count)

    def ages(self, numbers: np.ndarray) -> np.ndarray:
        ages: np.ndarray = self.epoch - self.epochs[numbers].astype(np.int64) & 0xFF
        return ages

    def tick(self, used: int) -> None:
        """Count uses. In each epoch one in 64 of all ages is cut, so that none wraps."""
        self._used_in_epoch += used
        if self._used_in_epoch * EPOCHS < self.ids.top:
            return
        self._used_in_epoch = 0
        self.epoch = self.epoch + 1 & 0xFF
        for start in range(self.epoch % EPOCHS * DATED, self.ids.top, EPOCHS * DATED):
            piece = slice(start, start + DATED)
            ages = np.minimum(np.uint8(self.epoch) - self.epochs[piece], np.uint8(OLDEST))
            self.epochs[piece] = np.uint8(self.epoch) - ages

    def date(self, chain: np.ndarray, parent: int) -> None:
        """A chain counts as used now, but not later than the block before it was."""
        number = 0
        if parent and len(chain):
            number = chain.item(0) - 1  # as a rule, and 5 us quicker
            if self.hashes.item(number) != parent:
                number = self.index.at(parent)
        age = self.epoch - int(self.epochs[number]) & 0xFF if number else 0
        if age:
            now = self.ages(chain)
            self.epochs[chain] = self.epoch - np.minimum(now, age) & 0xFF
        else:
            self.epochs[chain] = self.epoch

    # ---- blocks come and go ----

    def enter(self, hashes: np.ndarray, end: int) -> np.ndarray:
        """Give numbers below `end` to blocks that are absent; there must be room for them."""
        numbers = self.ids.take(len(hashes), end)
        self.hashes[numbers] = hashes
        known = self.index.insert(hashes, numbers)
        twins = numbers[known != numbers]
        if len(twins):
            self.hashes[twins] = 0
            self.ids.give(twins)
        self.epochs[known] = self.epoch - OLDEST & 0xFF
        return known

    def join(self, slot: int, numbers: np.ndarray) -> None:
        """The replica holds these blocks (distinct) from now on."""
        self.sets[numbers] = self.holders.turn(self.sets.take(numbers), slot, True)

    def release(self, slot: int, numbers: np.ndarray) -> None:
        """The replica no longer holds these; those that nobody holds go."""
        if not len(numbers):
            return
        numbers = distinct(numbers)
        sets = self.sets[numbers] = self.holders.turn(self.sets.take(numbers), slot, False)
        self.drop(numbers[sets == 0])

    def drop(self, numbers: np.ndarray) -> None:
        if not len(numbers):
            return
        self.index.remove(numbers)
        kinds, counts = np.unique(self.sets.take(numbers), return_counts=True)
        for number, count in zip(kinds.tolist(), counts.tolist()):
            self.holders.leave(number, count)
        self.hashes[numbers] = 0
        self.sets[numbers] = 0
        self.ids.give(numbers)
