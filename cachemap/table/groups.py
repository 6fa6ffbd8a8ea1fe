"""GroupTables: the further cache groups of engines whose layers are not all alike.

A hit must be one in every group. Full attention needs each of its blocks, and is not held here: its blocks lie in the
table of tier "gpu". A group with a sliding window needs the last blocks of the hit, the ones before may be gone, and
one of Mamba layers needs the last one (`CacheGroup.last`). The longest prefix that is good for all of them is the one
that vLLM's coordinator finds by asking group after group until none shortens it further.
"""

from collections.abc import Container, Sequence

import numpy as np

from cachemap.changes import CacheGroup
from cachemap.table.block_table import BlockTable
from cachemap.table.blocks import u64
from cachemap.table.buckets import U64
from cachemap.table.capacity import Budget

PIECE = 256  # blocks of a prompt looked at together: of 2,048, in five groups, .4 ms; all at once took 1.4


class GroupTables:
    """By group a block table. Replicas are slots; `of` has the groups of those that have any."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self.tables: dict[str, BlockTable] = {}
        self.of: dict[int, dict[str, CacheGroup]] = {}

    def table(self, slot: int, group: CacheGroup) -> BlockTable:
        """The table of a replica's group, of which nothing needs to be known before."""
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
        """The replica has no groups but some of these."""
        for name in [name for name in self.of.get(slot, {}) if name not in names]:
            self.tables[name].capacity.detach(slot)
            del self.of[slot][name]
        if slot in self.of and not self.of[slot]:
            del self.of[slot]

    def held(self, slot: int) -> int:
        return sum(self.tables[name].aliases[slot].count for name in self.of.get(slot, {}))

    def reach(self, hashes: Sequence[int], full: list[int], most: int) -> dict[int, int]:
        """For each replica with groups the blocks of the longest hit, at most `most`. `full`: for each slot those that
        full attention holds."""
        end = min(most, len(hashes))
        reach = {slot: min(full[slot], end) for slot in self.of}
        left = {slot: blocks for slot, blocks in reach.items() if blocks}
        while left:  # from the right, as hits mostly end near where full attention's do
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

    def _good(
        self, hashes: Sequence[int], start: int, stop: int, groups: dict[str, CacheGroup], word: int
    ) -> np.ndarray:
        """By block from `start` to `stop`, for 64 replicas as bits of a word: whether a hit may end after it as far as
        these groups go."""
        good = np.full(stop - start, ~U64(0))
        for name, group in groups.items():
            first = max(0, start + 1 - group.last)
            held = self.tables[name].blocks.holder_words(u64(hashes[first:stop]), word)
            good &= _last(held, group.last)[start - first :]
        return good


def _last(held: np.ndarray, count: int) -> np.ndarray:
    """By block, for 64 replicas as bits of a word: whether they hold the last `count` blocks up to it, or all."""
    runs, length = held.copy(), 1
    while length < min(count, len(runs)):  # runs of twice the length are made of two of these, which may overlap
        step = min(length, count - length)
        runs[step:] &= runs[:-step].copy()
        length += step
    return runs
