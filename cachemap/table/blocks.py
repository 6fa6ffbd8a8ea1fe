"""The blocks of one tier: their hashes, the replicas that hold them, and when they were last used.

A block has a number. Arrays indexed by that number have the block's hash, the number of its holder set (the set of
replicas that hold it, see `HolderSets`) and the epoch of its last use; an `Index` maps the hash to the number. Blocks
that were stored together have consecutive numbers, so most of a prompt is found by one array comparison that starts at
its first block's number, without a search.
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
# A prompt's blocks are looked up in pieces. The first piece has PIECE blocks, each further one as many as were found so
# far, at most MOST: larger arrays would be new memory each time.
PIECE = 256
MOST = 4096
# An epoch ends once a 64th of the table's blocks were used, so that ages differ by 1.6 % of the table.
EPOCHS = 64
# The highest age, in epochs, at which ages are capped. A block reaches it after twice as many uses as the table has
# blocks; with a cap of three times as many, ages would overflow their byte before they are capped.
OLDEST = 128
DATED = 1 << 12  # consecutive blocks whose ages are capped in the same epoch
BYTES_BESIDE = 13  # bytes that a block takes besides the index and the aliases: its hash, set number and epoch
SHORT = 8  # if runs of consecutive numbers have fewer blocks on average, one look-up of all remaining blocks is quicker


def u64(numbers: Iterable[int]) -> np.ndarray:
    """Return ints as a uint64 array; through `array` this takes a third less time than by numpy's own conversion."""
    return np.frombuffer(array("Q", numbers), U64)


class Found:
    """The result of a look-up: the table's numbers of those leading blocks of a prompt that the table has.

    `pieces`: the numbers in the prompt's order, as a slice where they are consecutive and as an array elsewhere.
    `count`: how many blocks all pieces have together.
    """

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
    """The blocks of one memory tier and the replicas that hold them.

    `most`: the most blocks. Their memory is only taken as blocks are added.
    """

    def __init__(self, most: int):
        size = most + 1  # no block has the number 0
        self.hashes = zeros(size, U64)  # 0: no block has this number
        self.sets = zeros(size, np.uint32)  # the number of each block's holder set, in `holders`
        self.epochs = zeros(size, np.uint8)  # the epoch in which each block was last used
        self.epoch, self._used_in_epoch = 0, 0
        self.marks_uses = False  # whether look-ups mark blocks as used; not before half the budget is used
        self.ids = BlockIdAllocator()
        self.index = Index(1, size.bit_length(), self.hashes)
        self.holders = HolderSets()

    @property
    def nbytes(self) -> int:
        return self.ids.top * BYTES_BESIDE + self.index.nbytes + self.holders.nbytes

    def prefix(self, hashes: Sequence[int]) -> Found:
        """Find the prompt's leading blocks that are in the table, and mark them as used now.

        `hashes`: the hashes of the prompt's blocks. A block is in the table if any replica holds it.
        """
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
        """Add to `found` the leading blocks of a piece of a prompt that the table has, by runs of consecutive numbers.

        `hashes`: the block hashes of the piece; `wanted`: the same hashes as an array. `number`: a guess of the first
        block's number in the table. Returns a guess of the number of the block after this piece if the table has the
        whole piece, else 0.
        """
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
        """Return for each replica how many leading blocks of a prompt it holds without a gap.

        `found`: the prompt's leading blocks that the table has. `slots`: the length of the result, whose element i is
        for the replica in slot (index) i.
        """
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
                still = held & mask(number)  # a replica's leading blocks end where it is no longer in the holder set
                if still != held:
                    lost = held ^ still
                    if held is whole and 2 * lost.bit_count() > slots:
                        # Most replicas hold only a beginning such as a system prompt, so they are set all at once:
                        # this takes 5 us instead of 40 for 1,024 replicas.
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
        """Return the replicas that hold each block, as an int with a bit for each replica's slot (index)."""
        sets = self.sets.take(self.index.numbers(hashes)).tolist()
        masks = {number: self.holders.mask(number) for number in set(sets)}
        return [masks[number] for number in sets]

    def holder_words(self, hashes: np.ndarray, word: int) -> np.ndarray:
        """Return for each block which of 64 replicas hold it, as bits of a uint64.

        `word`: which 64 replicas: those whose slots (indices) begin at 64 * `word`.
        """
        return self.holders.words(self.sets.take(self.index.numbers(hashes)), word)

    # ---- use ----

    def _mark_used(self, found: Found) -> None:
        if self.marks_uses:
            for piece in found.pieces:
                self.epochs[piece] = self.epoch
            self.tick(found.count)

    def ages(self, numbers: np.ndarray) -> np.ndarray:
        """Return the ages of these blocks, in epochs since their last use (an epoch is counted in uses, see `tick`)."""
        ages: np.ndarray = self.epoch - self.epochs[numbers].astype(np.int64) & 0xFF
        return ages

    def tick(self, used: int) -> None:
        """Count `used` more uses of blocks, and start a new epoch once a 64th of the table's blocks have been used.

        Epochs are the clock by which the ages of blocks are counted. Each new epoch caps the ages of another 64th of
        all blocks at `OLDEST`, so that no age overflows its byte.
        """
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
        """Mark a chain of blocks as last used when the block before it was, or now if that block is unknown.

        Blocks that were used more recently stay as they are. `chain`: the numbers of consecutive blocks. `parent`: the
        hash of the block before them, or 0.
        """
        number = 0
        if parent and len(chain):
            number = chain.item(0) - 1  # usually the number of the block before the chain; 5 us quicker than the index
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
        """Add blocks that the table does not have, with the highest age, and return their numbers.

        `hashes`: the blocks' hashes. There must be enough free numbers below `end`.
        """
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
        """Add the replica to the holders of these blocks (distinct numbers)."""
        self.sets[numbers] = self.holders.turn(self.sets.take(numbers), slot, True)

    def release(self, slot: int, numbers: np.ndarray) -> None:
        """Remove the replica from the holders of these blocks, and drop blocks that have no holder left."""
        if not len(numbers):
            return
        numbers = distinct(numbers)
        sets = self.sets[numbers] = self.holders.turn(self.sets.take(numbers), slot, False)
        self.drop(numbers[sets == 0])

    def drop(self, numbers: np.ndarray) -> None:
        """Remove these blocks from the table."""
        if not len(numbers):
            return
        self.index.remove(numbers)
        kinds, counts = np.unique(self.sets.take(numbers), return_counts=True)
        for number, count in zip(kinds.tolist(), counts.tolist()):
            self.holders.leave(number, count)
        self.hashes[numbers] = 0
        self.sets[numbers] = 0
        self.ids.give(numbers)
