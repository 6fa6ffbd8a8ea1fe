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
        end = min(max(full[slot] for slot in self.of), most, len(hashes))
        wanted = u64(hashes[:end])
        found: dict[int, int] = {}
        good: dict[tuple[int, tuple[str, ...]], np.ndarray] = {}
        for slot, groups in self.of.items():
            reach, alike = min(full[slot], end), (slot >> 6, tuple(groups))
            if reach:
                if alike not in good:
                    good[alike] = self._good(wanted, groups, slot >> 6)
                here = (good[alike][:reach] >> U64(slot & 63) & U64(1)).nonzero()[0]
                reach = int(here[-1]) + 1 if len(here) else 0
            found[slot] = reach
        return found

    def _good(self, wanted: np.ndarray, groups: dict[str, CacheGroup], word: int) -> np.ndarray:
        """By block, for 64 replicas as bits of a word: whether a hit may end after it as far as these groups go."""
        good = np.full(len(wanted), ~U64(0))
        for name, group in groups.items():
            good &= _last(self.tables[name].blocks.holder_words(wanted, word), min(group.last, len(wanted)))
        return good


def _last(held: np.ndarray, count: int) -> np.ndarray:
    """By block, for 64 replicas as bits of a word: whether they hold the last `count` blocks up to it, or all."""
    runs, length = held.copy(), 1
    while length < count:  # runs of twice the length are made of two of these, which may overlap
        step = min(length, count - length)
        runs[step:] &= runs[:-step].copy()
        length += step
    return runs
