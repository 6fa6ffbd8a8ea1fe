"""The memory of a block table: growth within the byte budget, and eviction once the budget is used up.

Growth and eviction advance a step with each call that stores blocks. The budget counts all arrays. When it is used up,
the least recently used blocks are evicted, replica by replica. No block is recorded as used later than the block before
it in its chain (a prompt's blocks in order), so eviction takes the ends of chains.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from cachemap.table.blocks import BYTES_BESIDE, OLDEST, Blocks
from cachemap.table.buckets import FILL, Buckets, distinct
from cachemap.table.index import Index
from cachemap.table.memory import LARGE, give_back

BESIDE = 4  # at most a quarter of the budget is used outside the tables
SHED = 8  # a full table evicts one block in 8 per pass: with fewer, scanning for them costs more than storing
SAMPLE = 1 << 16  # blocks sampled to find the oldest epochs
CHUNK = 1 << 15  # places of a replica's alias table that are scanned in a step of eviction
# The epochs that an eviction pass may last. A pass evicts blocks above an age limit, which rises with each epoch that
# begins meanwhile. If the limit reached OLDEST, the cap of all ages, later steps would evict blocks that the first
# steps would have spared, and leave the blocks that follow these in their chains.
MOST_PASS = 32
LEFT = 1 << 11  # blocks of a detached or cleared replica that are freed in one step: 1 to 4 ms
# The factor by which a table grows at most, as zeroing memory takes time. With a factor of 4 a table that grows to 50 M
# words moves twice as many words on the way.
JUMP = 8
SMALL = 1 << 15  # places to which any table may grow at once, whatever its present size
LEAST_BYTES = 29  # bytes of a block that one replica holds: BYTES_BESIDE, 5.6 in the index, 10.5 for its alias
BYTES_PER_BLOCK = 33  # LEAST_BYTES with some slack
SLACK = 1 << 12  # bytes of the budget kept free for holder sets (sets of replicas) that a call creates
MOST_BLOCKS = 1 << 29  # blocks of a table: their numbers leave two bits of the index's words for the hash
# The bits of an alias that hold the block's number; the other bits are the tag of the engine's key. Gateways that share
# a map exchange tags, so the width of tags must be the same in all of them: with tables of up to 7 GiB it is.
NUMBER_BITS = 28


class Budget:
    """The memory budget of all block tables together.

    `total`: the allowed bytes. `beside`: bytes in use outside the tables, for decoding events.
    """

    def __init__(self, total: int):
        self.total = total
        self.tables: list[Capacity] = []
        self.beside = 0

    @property
    def used(self) -> int:
        return self.beside + sum(table.nbytes for table in self.tables)

    def hold(self, more: int) -> bool:
        """Count `more` bytes as used outside the tables; a negative number takes bytes off that count.

        Returns False, and counts nothing, if the bytes outside the tables would exceed a quarter of the budget, or if
        the budget has fewer than `more` bytes left. Eviction could not help, as it frees entries of tables, not bytes.
        """
        if more > 0 and (self.beside + more > self.total // BESIDE or more > self.left):
            return False
        self.beside += more
        return True

    @property
    def left(self) -> int:
        return self.total - self.used


class Capacity:
    """The memory of one block table, which makes room for blocks by growth or by eviction.

    `aliases`: for each replica, by its slot (index), a table that maps the engine's key of a block to the block's
    number. An entry is one word, made of the key's tag (its shortened form) and the number.
    """

    def __init__(self, budget: Budget):
        self.blocks = Blocks(min(budget.total // LEAST_BYTES, MOST_BLOCKS))
        self._budget = budget
        self.id_bits = max(NUMBER_BITS, len(self.blocks.hashes).bit_length())
        self.aliases: dict[int, Buckets] = {}
        self._alias_bytes = 0
        # A block may have several aliases (engine keys): older engines do not report a tenant's salt, and an adapter
        # may be loaded again under its name. The replica holds the block until its last alias is removed. `twins`: by
        # slot and block hash, the number of aliases beyond the first.
        self.twins: dict[int, Counter[int]] = {}
        self._capacity: dict[int, int] = {}
        self._share = 1.0  # the part of the replicas' capacities that the budget allows
        self._left: deque[np.ndarray] = deque()  # numbers of blocks of replicas that were detached or cleared
        self._outgrown: deque[np.ndarray] = deque()  # arrays whose memory is being released, piece by piece
        self._given = 0  # bytes of the first array in `_outgrown` that are released already
        self._shedding: dict[int | None, Iterator[bool]] = {}  # eviction passes in progress, by slot or None for all
        self.evicted = 0
        budget.tables.append(self)

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self._alias_bytes

    # ---- replicas ----

    def attach(self, slot: int, capacity: int) -> None:
        """Add a replica without blocks under this slot (index).

        `capacity`: the size of its KV cache in blocks, 0 if unknown; tables grow with the replicas' sizes in view.
        """
        self._set_alias(slot, Buckets(1, self.id_bits))
        self._capacity[slot] = capacity
        self._expect()
        self.blocks.holders.widen(slot + 1)

    def detach(self, slot: int) -> None:
        self.clear(slot)
        self._alias_bytes -= self.aliases.pop(slot).nbytes
        del self._capacity[slot]
        self._shedding.pop(slot, None)
        self._expect()

    def expect(self, slot: int, capacity: int) -> None:
        """Set the size of the replica's KV cache in blocks, 0 if unknown; tables grow with these sizes in view."""
        self._capacity[slot] = capacity
        self._expect()

    def _expect(self) -> None:
        expected = BYTES_PER_BLOCK * sum(self._capacity.values())
        self._share = min(1.0, self._budget.total / (expected or 1))

    def clear(self, slot: int) -> None:
        """Forget all blocks of the replica.

        Lookups stop finding them immediately. The memory of blocks that no other replica holds is freed step by step,
        with later calls of `clean`.
        """
        alias = self.aliases[slot]
        numbers = alias.payloads(alias.words.nonzero()[0])
        self.blocks.holders.forget(slot)
        self._set_alias(slot, Buckets(1, self.id_bits))
        self.twins.pop(slot, None)
        for start in range(0, len(numbers), LEFT):
            self._left.append(numbers[start : start + LEFT])
        self.clean()

    def clean(self) -> None:
        """Do the next step of freeing the memory that `clear` and growth left unused."""
        if self._outgrown:
            self._given = give_back(self._outgrown[0], self._given)
            if not self._given:
                self._outgrown.popleft()
        if self._left:
            numbers = distinct(self._left.popleft())
            numbers = numbers[self.blocks.hashes.take(numbers) != 0]
            if len(numbers):
                self.blocks.drop(numbers[self.blocks.holders.empty(self.blocks.sets.take(numbers))])

    def _set_alias(self, slot: int, alias: Buckets) -> None:
        before = self.aliases.get(slot)
        self._alias_bytes += alias.nbytes - (before.nbytes if before is not None else 0)
        if before is not None:
            self._retire(before)
        self.aliases[slot] = alias

    # ---- growth ----

    def end(self) -> int:
        """Return the limit of block numbers: the memory budget and the arrays have room for all numbers below it."""
        return min(len(self.blocks.hashes), self.blocks.ids.top + max(self._budget.left - SLACK, 0) // BYTES_BESIDE)

    def fit(self, slot: int, more: int) -> bool:
        """Make room for `more` blocks of this replica by growth or by eviction; return whether there is room now."""
        self.clean()
        self._shed_step(slot)
        self._shed_step(None)
        alias = self.aliases[slot]
        if alias.wider is not None:
            alias = self._carry_on(slot, alias, more)
        if alias.room < more and not self._widen_alias(slot, alias, more):
            return False
        index = self.blocks.index
        if index.wider is not None:
            self._lead_on(index.go_on(more))
        if self.blocks.index.room < more:
            self._widen_index(more)
        left = self._budget.left
        self.blocks.marks_uses = left < self._budget.total / 2
        if left >= 0 and self._has_room(more):
            return True
        self._shed(None, lambda: self._has_room(more) and self._budget.left >= 0)
        return self._has_room(more)

    def _has_room(self, more: int) -> bool:
        numbers = self.blocks.ids
        return self.blocks.index.room >= more and (
            numbers.free >= more or numbers.free + self.end() - numbers.top >= more
        )

    def _carry_on(self, slot: int, alias: Buckets, more: int) -> Buckets:
        """Do the next step of the growth of a replica's alias table, and return the table to use from now on.

        The table maps the engine's keys to block numbers. `more`: how many entries the caller will add.
        """
        before = alias.nbytes
        further = self.aliases[slot] = alias.go_on(more)
        self._alias_bytes += further.nbytes - before
        if further is not alias:
            self._retire(alias)
        return further

    def _widen_alias(self, slot: int, alias: Buckets, more: int) -> bool:
        """Make room for `more` entries in a replica's alias table, which maps engine keys to block numbers.

        The table grows if the budget allows it; otherwise the replica's least recently used blocks are evicted. Returns
        whether there is room now.
        """
        capacity = self._affordable(alias, more, self._capacity[slot])
        if not capacity and 4 * len(self.aliases) * alias.nbytes < self._budget.total:
            self._shrink()  # so that a replica attached late gets its part of the budget, too
            alias = self.aliases[slot]  # the replica that shrank may be this one
            capacity = self._affordable(alias, more, self._capacity[slot])
        if not capacity:
            self._shed(slot, lambda: alias.room >= more)
            return alias.room >= more
        before = alias.nbytes
        alias.widen(capacity)
        self._alias_bytes += alias.nbytes - before
        self._carry_on(slot, alias, more)
        return True

    def _widen_index(self, more: int) -> None:
        capacity = self._affordable(self.blocks.index, more, sum(self._capacity.values()))
        if capacity:
            self.blocks.index.widen(capacity)
            self._lead_on(self.blocks.index.go_on(more))

    def _lead_on(self, index: Buckets) -> None:
        if index is not self.blocks.index:
            assert isinstance(index, Index)
            self._retire(self.blocks.index)
            self.blocks.index = index

    def _retire(self, table: Buckets) -> None:
        """Queue the table's memory for release by later calls: releasing an index of 39 M words at once takes 13 ms."""
        self._outgrown += (array for array in table.arrays if array.nbytes >= LARGE)

    def _affordable(self, table: Buckets, more: int, expected: int) -> int:
        """Return the capacity in words to which a full table should grow; 0 if the budget allows too little growth.

        `more`: words that must fit in addition. `expected`: words that the table will hold once all replicas' caches
        are full. While words move, the old and the new table both take memory. A table that is half as large as the
        budget allows therefore grows to the limit at once, while there is still memory for both.
        """
        now, need = int(len(table.words) * FILL), table.count + more
        ceiling = self._budget.total // LEAST_BYTES
        wanted = max(now + now // 2, min(int(expected * self._share), max(JUMP * now, SMALL)))
        if 2 * now >= ceiling:
            wanted = ceiling
        per_word = table.nbytes / len(table.words)
        most = int((self._budget.left - SLACK) / per_word * FILL) - 8
        capacity = min(most, max(need, wanted))
        return capacity if capacity >= max(need, now + now // 16) else 0

    def _shrink(self) -> None:
        """Evict some blocks of the replica with the largest alias table (engine keys), and shrink that table."""
        slot = max(self.aliases, key=lambda slot: len(self.aliases[slot].words))
        alias = self.aliases[slot].grown()
        for _ in self._shed_pass(slot):
            pass  # all steps at once: another replica needs the room now
        alias.widen(alias.count)
        self._set_alias(slot, alias.grown())

    # ---- shedding ----

    def _shed(self, slot: int | None, enough: Callable[[], bool]) -> None:
        """Evict the least recently used blocks of one replica until `enough()` is true, in at most two passes.

        `slot`: the replica's index; None means all replicas.
        """
        for _ in range(2):
            while slot in self._shedding:
                self._shed_step(slot)
                if enough():
                    return
            self._shedding[slot] = self._shed_pass(slot)

    def _shed_step(self, slot: int | None) -> None:
        """Do the next step of the eviction pass that is in progress for a replica (None: for all), if there is one.

        A pass is finished even if there is enough room before its end. Otherwise the table would always be nearly full,
        and 1 word in 15 would lie in neither of its two buckets.
        """
        if slot in self._shedding and not next(self._shedding[slot], False):
            del self._shedding[slot]

    def _shed_pass(self, slot: int | None) -> Iterator[bool]:
        """Evict about one block in 8, the least recently used, of one replica or of all; yield after each step.

        `slot`: the replica's index; None means all replicas. The age from which blocks are evicted comes from a sample
        of the blocks' ages.
        """
        if slot is None:
            some = np.arange(1, self.blocks.ids.top, 1 + self.blocks.ids.top // SAMPLE)
            some = some[self.blocks.hashes.take(some) != 0]
        else:
            alias = self.aliases[slot]
            some = alias.payloads(alias.words[:SAMPLE].nonzero()[0])
        if not len(some):
            return
        oldest = min(_nth_oldest(self.blocks.ages(some), len(some) // SHED), OLDEST - MOST_PASS)
        begun = self.blocks.epoch
        for one in list(self.aliases) if slot is None else [slot]:
            start = 0
            while one in self.aliases and start < len(self.aliases[one].words):
                since = self.blocks.epoch - begun & 0xFF
                self._shed_piece(one, start, min(oldest + since, OLDEST))
                start += CHUNK
                yield True

    def _shed_piece(self, slot: int, start: int, oldest: int) -> None:
        """Evict the replica's blocks of age `oldest` or more (in epochs) in one piece of its alias table.

        `slot`: the replica's index. `start`: the first of the CHUNK places of the table that are examined.
        """
        alias, before = self.aliases[slot], self.blocks.index.count
        at = alias.words[start : start + CHUNK].nonzero()[0] + start
        numbers = alias.payloads(at)
        if not len(numbers):
            return
        gone = self.blocks.ages(numbers) >= oldest
        alias.drop(at[gone])
        numbers = numbers[gone]
        self._forget_twins(slot, numbers)
        self.blocks.release(slot, numbers)
        self.evicted += before - self.blocks.index.count

    def _forget_twins(self, slot: int, numbers: np.ndarray) -> None:
        twins = self.twins.get(slot)
        if twins:
            for block in self.blocks.hashes[numbers].tolist():
                twins.pop(block, None)


def _nth_oldest(ages: np.ndarray, n: int) -> int:
    """Return the `n`-th highest of these ages; the highest if `n` is less than 1."""
    n = max(1, n)
    return int(np.partition(ages, -n)[-n])
