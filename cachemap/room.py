"""Room: what a block table's arrays need of memory. Growth, and what goes when there is none left.

The size is bounded by a byte budget that counts all arrays. When it is reached, the blocks
of the oldest epochs go. No block's epoch is later than its parent's, so what goes is
always the ends of chains, never a block with others behind it.
"""

from collections import Counter

import numpy as np

from cachemap.lookup import Lookup
from cachemap.memory import PRIVATE, Memory
from cachemap.table import CHUNK, FILL, U64, Buckets, distinct

EPOCHS = 64  # to a table full of uses: the finest it can tell apart is 1.6 % of its blocks
OLDEST = 128  # ages stop here, two tables full of uses; three would wrap in a byte
SHED = 8  # when full, one block in 8 goes: below it, scanning for them costs more than storing
SAMPLE = 1 << 16  # blocks looked at to tell which epochs are the oldest
BYTES_PER_BLOCK = 36  # with one holder: 20.7 in the table, 10.1 its alias, and some slack
# Bits of an alias that name a place: enough for tables of 2 GiB. Gateways that share what their
# replicas hold exchange the rest, the fingerprint of an engine's key, so it must be as wide in all.
PLACE_BITS = 28


class Budget:
    """Bytes allowed for all tables together."""

    def __init__(self, total: int):
        self.total = total
        self.tables: list[Room] = []

    @property
    def used(self) -> int:
        return sum(table.nbytes for table in self.tables)


class Room(Lookup):
    """A table that grows and sheds. For each replica, `aliases` translates the engine's own key of a
    block to the block's place: one word of fingerprint and place."""

    def __init__(self, budget: Budget, memory: Memory = PRIVATE):
        super().__init__(memory)
        self._budget = budget
        budget.tables.append(self)
        # a place takes at least 8 bytes, so the budget bounds how many bits name one
        self._place_bits = max(PLACE_BITS, (budget.total // 8).bit_length())
        self._place_mask = U64((1 << self._place_bits) - 1)
        self._tag_top = U64(1 << (63 - self._place_bits))
        self._tag_shift = U64(self._place_bits)
        self.aliases: dict[int, Buckets] = {}
        # A block may have several aliases: older engines do not tell a tenant's salt, an adapter may be loaded again
        # under its name. By replica and block, those beyond the first: it holds the block until the last is removed.
        self._twins: dict[int, Counter[int]] = {}
        self._capacity: dict[int, int] = {}
        self._share = 1.0  # of the capacities, what the budget allows
        self._epoch = 0
        self._used_in_epoch = 0
        self._pressed = False
        self.evicted = 0
        self.refused = 0

    @property
    def nbytes(self) -> int:
        return self._block_bytes + sum(alias.nbytes for alias in self.aliases.values())

    def attach(self, slot: int, capacity: int) -> None:
        """Make room for a replica; `capacity` (blocks, 0 if unknown) sizes later growth."""
        self.aliases[slot] = Buckets(1, self._place_bits)
        self._capacity[slot] = capacity
        expected = BYTES_PER_BLOCK * sum(self._capacity.values())
        self._share = min(1.0, self._budget.total / (expected or 1))
        narrow = self.holders[0].dtype.itemsize * 8
        if narrow < 64 and slot >= narrow:
            wide = next(bits for bits in (16, 32, 64) if bits > slot or bits == 64)
            before, self.holders[0] = self.holders[0], self._memory.zeros(len(self.blocks.words), f"u{wide // 8}")
            self.holders[0][:] = before
        while slot >= 64 * len(self.holders):
            self.holders.append(self._memory.zeros(len(self.blocks.words), U64))
        self._memory.laid_out()

    def detach(self, slot: int) -> None:
        self.clear(slot)
        del self.aliases[slot], self._capacity[slot]

    def _used(self, places: np.ndarray) -> None:
        if self._pressed:
            self.epochs[places] = self._epoch
            self._tick(len(places))

    def _ages(self, places: np.ndarray) -> np.ndarray:
        return self._epoch - self.epochs[places].astype(np.int64) & 0xFF

    def _tick(self, used: int) -> None:
        """Count uses. After a table full of them all ages are cut, so that none wraps."""
        self._used_in_epoch += used
        if self._used_in_epoch * EPOCHS < len(self.epochs):
            return
        self._used_in_epoch = 0
        self._epoch = self.told[0] = self._epoch + 1 & 0xFF
        if self._epoch % EPOCHS == 0:
            for start in range(0, len(self.epochs), CHUNK):
                piece = slice(start, start + CHUNK)
                ages = np.minimum(np.uint8(self._epoch) - self.epochs[piece], np.uint8(OLDEST))
                self.epochs[piece] = np.uint8(self._epoch) - ages

    def clear(self, slot: int) -> None:
        """The replica holds nothing."""
        alias = self.aliases[slot]
        filled = alias.words[alias.words.nonzero()]
        self._release(slot, (filled & self._place_mask).view(np.int64))
        self.aliases[slot] = Buckets(1, self._place_bits)
        self._twins.pop(slot, None)

    def _bit(self, slot: int):
        words = self.holders[slot >> 6]
        return words, words.dtype.type(1 << (slot & 63))

    def _release(self, slot: int, places: np.ndarray) -> None:
        """Take the replica's bit off these places and free those that nobody holds."""
        words, bit = self._bit(slot)
        words[places] &= ~bit
        held = words[places] != 0
        for others in self.holders:
            if others is not words:
                held |= others[places] != 0
        if not held.all():
            self.blocks.drop(distinct(places[~held]))

    def _widen_alias(self, slot: int, more: int) -> bool:
        """Room for `more` aliases: by growth, else by dropping the replica's oldest blocks."""
        alias = self.aliases[slot]
        capacity = self._affordable(alias, more, self._capacity[slot], alias.nbytes)
        if not capacity and 4 * len(self.aliases) * alias.nbytes < self._budget.total:
            self._shrink()  # a replica that came late gets its part, too
            capacity = self._affordable(alias, more, self._capacity[slot], alias.nbytes)
        if not capacity:
            self._shed_from(slot, max(more, alias.count // SHED))
            return alias.room >= more
        wider = self.aliases[slot] = Buckets(capacity, self._place_bits)
        for _ in alias.pour(wider):
            pass
        return True

    def _widen_blocks(self, more: int) -> bool:
        """Room for `more` blocks: by growth, else by dropping the oldest of all."""
        expected = sum(self._capacity.values())
        capacity = self._affordable(self.blocks, more, expected, self._block_bytes)
        if not capacity:
            self._shed(max(more, self.blocks.count // SHED))
            return self.blocks.room >= more
        self._move(capacity)
        return True

    def _shrink(self) -> None:
        """Give up a part of the blocks and of the memory they lie in."""
        self._shed(self.blocks.count // SHED)
        capacity = int(len(self.epochs) * FILL)
        self._move(max(self.blocks.count, capacity - capacity // SHED))

    @property
    def _block_bytes(self) -> int:
        beside = self.epochs.nbytes + sum(words.nbytes for words in self.holders)
        return self.blocks.nbytes + beside

    def _affordable(self, table: Buckets, more: int, expected: int, nbytes: int) -> int:
        """The capacity a full table should grow to; 0 if the budget allows no real growth."""
        per_word = nbytes / len(table.words)
        now = int(len(table.words) * FILL)
        left = self._budget.total - self._budget.used
        self._pressed = self.told[1] = left < self._budget.total / 2  # before, nothing is evicted soon
        most = int((len(table.words) + left / per_word) * FILL) - 8
        need = table.count + more
        capacity = min(most, max(need, int(expected * self._share), now + now // 2))
        return capacity if capacity >= max(need, now + now // 16) else 0

    def _move(self, capacity: int) -> None:
        """Lay the blocks out anew, and with them what lies beside and points at them."""
        zeros = self._memory.zeros
        blocks = Buckets(capacity, memory=self._memory)
        size = len(blocks.words)
        holders = [zeros(size, words.dtype) for words in self.holders]
        epochs = zeros(size, np.uint8)
        moved = np.empty(len(self.epochs), np.uint32)
        for old, new in self.blocks.pour(blocks):
            moved[old] = new
            epochs[new] = self.epochs[old]
            for words, before in zip(holders, self.holders, strict=True):
                words[new] = before[old]
        self.blocks, self.holders, self.epochs = blocks, holders, epochs
        self._memory.laid_out()
        for alias in self.aliases.values():
            at = alias.words.nonzero()[0]
            word = alias.words[at]
            alias.words[at] = (word & ~self._place_mask) | moved[word & self._place_mask]

    def _shed(self, want: int) -> None:
        """Drop the blocks longest unused, about `want` of them, for all who hold them.

        How old that is is told from a sample (places are random, so any stride is one).
        """
        stride = 1 + len(self.epochs) // SAMPLE
        sample = self._ages(self.blocks.words[::stride].nonzero()[0] * stride)
        oldest = _nth_oldest(sample, want, self.blocks.count)
        for start in range(0, len(self.epochs), CHUNK):
            filled = self.blocks.words[start : start + CHUNK].nonzero()[0] + start
            gone = filled[self._ages(filled) >= oldest]
            for words in self.holders:
                words[gone] = 0
            for slot in self._twins:
                self._forget_twins(slot, gone)
            self.blocks.drop(gone)
            self.evicted += len(gone)
        for alias in self.aliases.values():
            at = alias.words.nonzero()[0]
            empty = self.blocks.words[alias.words[at] & self._place_mask] == 0
            alias.drop(at[empty])

    def _shed_from(self, slot: int, want: int) -> None:
        """Drop the `want` blocks that this replica holds and were longest unused."""
        alias = self.aliases[slot]
        at = alias.words.nonzero()[0]
        if not len(at):
            return
        places = (alias.words[at] & self._place_mask).view(np.int64)
        ages = self._ages(places)
        gone = ages >= _nth_oldest(ages, want, len(ages))
        alias.drop(at[gone])
        self._forget_twins(slot, places[gone])
        self._release(slot, places[gone])
        self.evicted += int(gone.sum())

    def _forget_twins(self, slot: int, places: np.ndarray) -> None:
        twins = self._twins.get(slot)
        if twins:
            for block in self.blocks.words[places].tolist():
                twins.pop(block, None)


def _nth_oldest(ages: np.ndarray, want: int, count: int) -> int:
    """The age that a share want / count of these ages reach or pass."""
    n = min(len(ages), max(1, len(ages) * want // max(count, 1)))
    return np.partition(ages, -n)[-n] if n else 0
