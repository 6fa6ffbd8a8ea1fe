"""Block tables of the further KV cache groups of engines whose layers are not all alike.

A prefix is a hit only if every group has it. Full attention needs all blocks of the prefix; its blocks are in the table
of tier "gpu", not here. A group with a sliding window needs only the last blocks of the prefix, and a group of Mamba
layers only the very last one (`CacheGroup.last`). vLLM's coordinator finds the longest hit by asking one group after
the other until no group shortens it further.

An engine with EAGLE or MTP (until vLLM 0.32) drops the last block that it finds, in each group that holds keys and
values. Such a group must therefore hold one block more than the hit has, unless the prompt ends there. vLLM asks full
attention first, which drops one block. It then asks each other group for the prefix that is left. The first time a
group is asked, it looks one block further than that prefix and drops the block it finds there. If a group that has
already dropped a block then finds less than it is asked for, every group drops a block again. For this reason a hit can
end at a place where some groups no longer hold the next block.

With decode context parallelism the blocks of full attention are larger than Mamba's, and prompts are hashed in Mamba's.
Full attention then finds its own whole blocks. Within the first block that it lacks, it also finds the longest end of a
prompt that was stored there (`CacheGroup.of_parts`). Mamba's states may end at each block.
"""

from collections.abc import Container, Sequence

import numpy as np

from cachemap.changes import EVERY, CacheGroup
from cachemap.table.block_table import BlockTable
from cachemap.table.blocks import u64
from cachemap.table.buckets import U64
from cachemap.table.capacity import Budget

PIECE = 256  # blocks of a prompt looked up at a time: 2,048 in five groups take 0.4 ms, all at once took 1.4


class GroupTables:
    """A block table for each cache group. `of` has, by slot, the groups of the replicas that have any."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self.tables: dict[str, BlockTable] = {}
        self.of: dict[int, dict[str, CacheGroup]] = {}

    def table(self, slot: int, group: CacheGroup) -> BlockTable:
        """Return the table of a replica's group, adding the group to the replica and creating the table if needed."""
        name = group.tier
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = BlockTable(self._budget)
        groups = self.of.setdefault(slot, {})
        if name not in groups:
            groups[name] = group
            table.capacity.attach(slot, 0)
        return table

    def keep(self, slot: int, names: Container[str]) -> None:
        """Remove the replica's groups that are not among `names`."""
        for name in [name for name in self.of.get(slot, {}) if name not in names]:
            self.tables[name].capacity.detach(slot)
            del self.of[slot][name]
        if slot in self.of and not self.of[slot]:
            del self.of[slot]

    def of_slot(self, slot: int) -> list[BlockTable]:
        return [self.tables[name] for name in self.of.get(slot, {})]

    def held(self, slot: int) -> int:
        return sum(self.tables[name].aliases[slot].count for name in self.of.get(slot, {}))

    def reach(self, hashes: Sequence[int], full: list[int], most: int) -> dict[int, int]:
        """Return by slot, for replicas with groups, the length in blocks of the longest hit, at most `most`.

        `full` has for each slot the leading blocks that full attention holds.
        """
        end = min(most, len(hashes))
        reach = {slot: self._of_full(slot, hashes, min(full[slot], end), end) for slot in self.of}
        left = {slot: blocks for slot, blocks in reach.items() if blocks}
        while left:  # search from the right: hits mostly end near where full attention's do
            stop = max(left.values())
            start = max(0, stop - PIECE)
            good: dict[tuple[int, tuple[str, ...]], np.ndarray] = {}
            for slot in [slot for slot, blocks in left.items() if blocks > start]:
                alike = slot >> 6, tuple(self.of[slot])
                if alike not in good:
                    good[alike] = self._good(hashes, start, stop, self.of[slot], slot >> 6)
                here = (good[alike][: left[slot] - start] >> U64(slot & 63) & U64(1)).nonzero()[0]
                reach[slot] = left[slot] = start + int(here[-1]) + 1 if len(here) else start
                if len(here) or not start:
                    del left[slot]
        return reach

    def reach_dropping(self, slot: int, hashes: Sequence[int], full: int, most: int, end: int) -> int:
        """Return the longest hit of a replica that drops the last block it finds, at most `most` blocks.

        `full` is the number of leading blocks that full attention holds, `end` the number of blocks that the engine
        looks at.
        """
        groups: dict[CacheGroup, np.ndarray] = {}  # groups with equal rules are looked up as one
        for group in sorted(self.of[slot].values(), key=lambda one: (one.last != EVERY, one.told_as)):
            if group.has_parts:
                continue
            held = self.tables[group.tier].blocks.holder_words(u64(hashes[:end]), slot >> 6) >> U64(slot & 63)
            alike = CacheGroup(group.index - group.told_as, group.last)
            groups[alike] = groups.get(alike, U64(1)) & held
        runs = {group: _lengths(held & U64(1)) for group, held in groups.items()}
        hit, full = most, max(0, self._of_full(slot, hashes, min(full, end), end) - 1)
        dropped: set[CacheGroup] = set()
        while True:
            reach = min(hit, full)
            for group, run in runs.items():
                drops = group not in dropped and not group.has_states
                found = _ends(run[: min(reach + drops, end)], group.last + drops)
                if group not in dropped:
                    dropped.add(group)
                    found = max(0, found - drops)
                elif found < reach:
                    dropped.clear()
                reach = found
            if reach >= hit or len(runs) == 1:
                return reach
            hit = reach

    def _of_full(self, slot: int, hashes: Sequence[int], full: int, end: int) -> int:
        """Return how many blocks full attention finds, at most `end`, if it holds the first `full`.

        These are whole blocks of its own, and the part of the next one that an earlier prompt ended in.
        """
        for name, group in self.of[slot].items():
            if group.has_parts:
                full -= full % group.last
                words = self.tables[name].blocks.holder_words(
                    u64(hashes[full : min(full + group.last, end)]), slot >> 6
                )
                held = (words >> U64(slot & 63) & U64(1)).nonzero()[0]
                return full + int(held[-1]) + 1 if len(held) else full
        return full

    def _good(
        self, hashes: Sequence[int], start: int, stop: int, groups: dict[str, CacheGroup], word: int
    ) -> np.ndarray:
        """Return for each block from `start` to `stop` whether these groups allow a hit to end after it.

        The answers for 64 replicas, those from slot 64 * `word` on, are the bits of a uint64.
        """
        good = np.full(stop - start, ~U64(0))
        for name, group in groups.items():
            if group.has_parts:
                continue
            first = max(0, start + 1 - group.last)
            held = self.tables[name].blocks.holder_words(u64(hashes[first:stop]), word)
            good &= _last(held, group.last)[start - first :]
        return good


def _last(held: np.ndarray, count: int) -> np.ndarray:
    """Return for each block which of 64 replicas (bits) hold the last `count` blocks up to it, or all if fewer."""
    runs, length = held.copy(), 1
    while length < min(count, len(runs)):  # a run of twice the length consists of two runs, which may overlap
        step = min(length, count - length)
        runs[step:] &= runs[:-step].copy()
        length += step
    return runs


def _lengths(held: np.ndarray) -> np.ndarray:
    """Return for each block how many blocks in a row are held up to it."""
    places = np.arange(1, len(held) + 1)
    return places - np.maximum.accumulate(np.where(held == 0, places, 0))


def _ends(run: np.ndarray, count: int) -> int:
    """Return the largest number of blocks after which the last `count`, or all, are held; `run` is from `_lengths`."""
    good = (run >= np.minimum(count, np.arange(1, len(run) + 1))).nonzero()[0]
    return int(good[-1]) + 1 if len(good) else 0
