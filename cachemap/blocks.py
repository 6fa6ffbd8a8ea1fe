"""BlockTable: which replicas hold which block, in one tier, at about 30 bytes a block.

Three things are kept. `blocks` has every block's 64-bit hash; beside each place lie the
holders (one bit a replica: 8, 16, 32 or 64 bits wide, then further 64-bit arrays) and the
epoch of its last use. For each replica, `aliases` translates the engine's own key of a block,
which is all a removal tells us, to the block's place: one word of fingerprint and place.

The size is bounded by a byte budget that counts all arrays. When it is reached, the blocks
of the oldest epochs go. No block's epoch is later than its parent's, so what goes is
always the ends of chains, never a block with others behind it.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from cachemap.table import CHUNK, FILL, MIX, U64, Buckets, distinct

EPOCHS = 64  # to a table full of uses: the finest it can tell apart is 1.6 % of its blocks
OLDEST = 128  # ages stop here, two tables full of uses; three would wrap in a byte
SHED = 8  # when full, one block in 8 goes: below it, scanning for them costs more than storing
SAMPLE = 1 << 16  # blocks looked at to tell which epochs are the oldest
BYTES_PER_BLOCK = 36  # with one holder: 20.7 in the table, 10.1 its alias, and some slack
BITS = [tuple(i for i in range(8) if byte >> i & 1) for byte in range(256)]
NONE = np.empty(0, np.int64)
NO_BLOCKS = np.empty(0, U64)
HEAD = 256  # blocks of a long prompt looked up before the rest is
# Bits of an alias that name a place: enough for tables of 2 GiB. Gateways that share what their
# replicas hold exchange the rest, the fingerprint of an engine's key, so it must be as wide in all.
PLACE_BITS = 28


Heads = list[tuple[int, int]]


def u64(numbers: Iterable[int]) -> np.ndarray:
    """Ints of up to 64 bits as an array; by way of `array`, a third quicker than numpy's."""
    return np.frombuffer(array("Q", numbers), U64)


class Budget:
    """Bytes allowed for all tables together."""

    def __init__(self, total: int):
        self.total = total
        self.tables: list[BlockTable] = []

    @property
    def used(self) -> int:
        return sum(table.nbytes for table in self.tables)


class BlockTable:
    """One tier's blocks. Replicas are small ints; hashes and tags are uint64 arrays."""

    def __init__(self, budget: Budget):
        self._budget = budget
        budget.tables.append(self)
        # a place takes at least 8 bytes, so the budget bounds how many bits name one
        self._place_bits = max(PLACE_BITS, (budget.total // 8).bit_length())
        self._place_mask = U64((1 << self._place_bits) - 1)
        self._tag_top = U64(1 << (63 - self._place_bits))
        self._tag_shift = U64(self._place_bits)
        self.blocks = Buckets(1)
        self.holders = [np.zeros(len(self.blocks.words), np.uint8)]
        self.epochs = np.zeros(len(self.blocks.words), np.uint8)
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
    def tag_bits(self) -> int:
        """How wide a fingerprint is, its top bit, which is always set, included."""
        return 64 - self._place_bits

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
            self.holders[0] = self.holders[0].astype(f"u{wide // 8}")
        while slot >= 64 * len(self.holders):
            self.holders.append(np.zeros(len(self.blocks.words), U64))

    def detach(self, slot: int) -> None:
        self.clear(slot)
        del self.aliases[slot], self._capacity[slot]

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
        if self._pressed:
            self.epochs[places] = self._epoch
            self._tick(len(places))
        return places

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

    def store(self, slot: int, hashes: np.ndarray, tags: np.ndarray, heads: Heads) -> list[int]:
        """The replica now holds these blocks, known to it under these tags.

        The blocks form chains; `heads` has for each chain the index of its first block and
        the hash of the block before that, 0 if the chain starts a prompt. Gives the indices
        of those it held already: a further copy of each.
        """
        places = self._settle(slot, hashes, heads)
        if places is None:
            self.refused += len(hashes)
            return []
        words, bit = self._bit(slot)
        alias = self.aliases[slot]
        packed = (tags << self._tag_shift) | places.view(U64)
        at = alias.find(tags)
        if (at >= 0).any() or (words[places] & bit).any() or len(distinct(places)) < len(places):
            return self._store_again(slot, places, packed, at)
        words[places] |= bit
        lost = alias.words.take(alias.add(packed)) != packed
        if lost.any():  # one tag for two blocks: a key given twice, or a clash
            self._release(slot, places[lost])
        return []

    def _store_again(self, slot: int, places: np.ndarray, packed: np.ndarray, at: np.ndarray) -> list[int]:
        """`store` where a tag or a block is known already or comes twice: tag by tag. `at`: where the tags are, or -1."""
        words, bit = self._bit(slot)
        alias, twins = self.aliases[slot], self._twins.setdefault(slot, Counter())
        known = at >= 0
        again = known.nonzero()[0][self._named(alias, at[known]) == places[known]].tolist()
        renamed = distinct(at[known])
        before = self._named(alias, renamed)
        alias.words[at[known]] = packed[known]
        added = distinct(alias.add(packed[~known])) if len(again) < len(places) else NONE
        now = self._named(alias, renamed)
        moved = before != now
        for place in (*now[moved].tolist(), *self._named(alias, added).tolist()):
            if words[place] & bit:
                twins[int(self.blocks.words[place])] += 1
            else:
                words[place] |= bit
        self._unname(slot, before[moved])
        self._release(slot, places[words[places] & bit == 0])  # whose tag went to another block
        return again

    def _named(self, alias: Buckets, at: np.ndarray) -> np.ndarray:
        """The places of the blocks that these aliases stand for."""
        return (alias.words[at] & self._place_mask).view(np.int64)

    def _unname(self, slot: int, places: np.ndarray) -> np.ndarray:
        """The blocks at these places have an alias less; the replica no longer holds those of which it was the last:
        gives their hashes."""
        hashes = self.blocks.words[places]
        twins = self._twins.get(slot)
        if twins:
            last = np.array([not _fewer(twins, block) for block in hashes.tolist()], bool)
            places, hashes = places[last], hashes[last]
        self._release(slot, places)
        return hashes

    def _settle(self, slot: int, hashes: np.ndarray, heads: Heads) -> np.ndarray | None:
        """The places of these blocks, new ones put in; None if they cannot fit."""
        if self.aliases[slot].room < len(hashes) and not self._widen_alias(slot, len(hashes)):
            return None
        places = self.blocks.find(hashes)
        new = (places < 0).nonzero()[0]
        if len(new) > self.blocks.room:
            if not self._widen_blocks(len(new)):
                return None
            return self._settle(slot, hashes, heads)  # everything may have moved
        if len(new):
            added = self.blocks.add(hashes.take(new))
            places[new] = added
            self.epochs[added] = self._epoch - OLDEST & 0xFF
        ends = [head for head, _ in heads[1:]] + [len(places)]
        for (start, parent), end in zip(heads, ends):
            self._date(places[start:end], parent)
        self._tick(len(places))
        return places

    def _date(self, chain: np.ndarray, parent: int) -> None:
        """A chain counts as used now, but not later than the block before it was."""
        place = self.blocks.at(parent) if parent else -1
        age = self._epoch - int(self.epochs[place]) & 0xFF if place >= 0 else 0
        if age:
            now = self._ages(chain)
            self.epochs[chain] = self._epoch - np.minimum(now, age) & 0xFF
        else:
            self.epochs[chain] = self._epoch

    def _ages(self, places: np.ndarray) -> np.ndarray:
        return self._epoch - self.epochs[places].astype(np.int64) & 0xFF

    def _tick(self, used: int) -> None:
        """Count uses. After a table full of them all ages are cut, so that none wraps."""
        self._used_in_epoch += used
        if self._used_in_epoch * EPOCHS < len(self.epochs):
            return
        self._used_in_epoch = 0
        self._epoch = self._epoch + 1 & 0xFF
        if self._epoch % EPOCHS == 0:
            for start in range(0, len(self.epochs), CHUNK):
                piece = slice(start, start + CHUNK)
                ages = np.minimum(np.uint8(self._epoch) - self.epochs[piece], np.uint8(OLDEST))
                self.epochs[piece] = np.uint8(self._epoch) - ages

    def remove(self, slot: int, tags: np.ndarray) -> np.ndarray:
        """The replica no longer holds these; gives the hashes of those it had."""
        alias = self.aliases[slot]
        at = alias.find(tags)
        at = distinct(at[at >= 0])
        places = self._named(alias, at)
        alias.drop(at)
        return self._unname(slot, places)

    def resolve(self, slot: int, tags: np.ndarray) -> np.ndarray:
        """The hash of each block the replica holds under these tags, 0 where unknown."""
        alias = self.aliases[slot]
        at = alias.find(tags)
        hashes = self.blocks.words[(alias.words[at] & self._place_mask).view(np.int64)]
        hashes[at < 0] = 0
        return hashes

    def contents(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and tags of all the replica holds, those longest unused first."""
        alias = self.aliases[slot]
        words = alias.words[alias.words.nonzero()]
        places = (words & self._place_mask).view(np.int64)
        order = np.argsort(OLDEST * 2 - 1 - self._ages(places), kind="stable")
        return self.blocks.words[places[order]], (words >> self._tag_shift)[order]

    def differing(self, slot: int, hashes: np.ndarray, tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What stands between what the replica holds and these: which of these it does not hold, as
        indices, and the tags it has besides."""
        alias = self.aliases[slot]
        at = alias.find(tags)
        held = self.blocks.words[(alias.words[at] & self._place_mask).view(np.int64)] == hashes
        missing = ((at < 0) | ~held).nonzero()[0]
        besides = alias.words != 0
        besides[at[at >= 0]] = False
        return missing, alias.words[besides] >> self._tag_shift

    def clear(self, slot: int) -> None:
        """The replica holds nothing."""
        alias = self.aliases[slot]
        filled = alias.words[alias.words.nonzero()]
        self._release(slot, (filled & self._place_mask).view(np.int64))
        self.aliases[slot] = Buckets(1, self._place_bits)
        self._twins.pop(slot, None)

    def tags(self, engine_keys: list[int] | list[bytes]) -> np.ndarray:
        """Engine keys as alias tags: mixed, cut to the fingerprint's width, never 0."""
        try:
            keys = u64(engine_keys)
        except (TypeError, OverflowError):  # bytes, or ints that are signed or longer
            keys = u64(map(_key, engine_keys))
        return ((keys * MIX) >> self._tag_shift) | self._tag_top

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
        self._pressed = left < self._budget.total / 2  # before, nothing is evicted soon
        most = int((len(table.words) + left / per_word) * FILL) - 8
        need = table.count + more
        capacity = min(most, max(need, int(expected * self._share), now + now // 2))
        return capacity if capacity >= max(need, now + now // 16) else 0

    def _move(self, capacity: int) -> None:
        """Lay the blocks out anew, and with them what lies beside and points at them."""
        blocks = Buckets(capacity)
        size = len(blocks.words)
        holders = [np.zeros(size, words.dtype) for words in self.holders]
        epochs = np.zeros(size, np.uint8)
        moved = np.empty(len(self.epochs), np.uint32)
        for old, new in self.blocks.pour(blocks):
            moved[old] = new
            epochs[new] = self.epochs[old]
            for words, before in zip(holders, self.holders, strict=True):
                words[new] = before[old]
        self.blocks, self.holders, self.epochs = blocks, holders, epochs
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


def _set(lengths: list[int], first: int, bits: int, length: int) -> None:
    """lengths[first + i] = length for every bit i that is set."""
    for byte in bits.to_bytes(8, "little"):
        for i in BITS[byte]:
            lengths[first + i] = length
        first += 8


def _fewer(counts: Counter[int], block: int) -> bool:
    """One alias of the block went; whether there are others."""
    beyond = counts[block] if block in counts else 0
    if beyond > 1:
        counts[block] = beyond - 1
    elif beyond:
        del counts[block]
    return beyond > 0


def _nth_oldest(ages: np.ndarray, want: int, count: int) -> int:
    """The age that a share want / count of these ages reach or pass."""
    n = min(len(ages), max(1, len(ages) * want // max(count, 1)))
    return np.partition(ages, -n)[-n] if n else 0


def _key(key: int | bytes) -> int:
    """An engine key as u64; of a digest the last 8 bytes, as vLLM itself shortens it."""
    return (int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key) & (1 << 64) - 1
