"""Block tables of KV cache groups, for engines whose layers are not all alike.

Such an engine keeps separate blocks for each group of like layers (`CacheGroup`). A prefix is a hit only if every group
has it. Full attention needs all blocks of the prefix; its blocks are in the table of tier "gpu", not here. A group with
a sliding window needs only the last blocks of the prefix, and a group of Mamba layers only the very last one
(`CacheGroup.last`). vLLM's coordinator finds the longest hit by asking one group after the other until no group
shortens the hit further.

An engine with EAGLE or MTP (until vLLM 0.32) drops the last block that it finds, in each group that holds keys and
values. Such a group must therefore hold one block more than the hit has, unless the prompt ends there. vLLM asks full
attention first, which drops one block. It then asks each other group for the prefix that is left. The first time a
group is asked, it looks one block further than that prefix and drops the block it finds there. If a group that has
already dropped a block then finds less than it is asked for, every group drops a block again. For this reason a hit can
end at a place where some groups no longer hold the next block.

With decode context parallelism a block of full attention is larger than a block of Mamba, and prompts are hashed in
blocks of Mamba's size. Full attention then finds its own whole blocks. Within the first block that it lacks, it also
finds the longest end of an earlier prompt that was stored there (`CacheGroup.of_parts`). Mamba's states may end at each
hashed block.
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
    """A block table for each cache group (like layers with blocks of their own), shared by all replicas that have it.

    `tables`: the tables by the group's tier name. `of`: by slot (the replica's index), the groups besides full
    attention of each replica that has any, by tier name.
    """

    def __init__(self, budget: Budget):
        self._budget = budget
        self.tables: dict[str, BlockTable] = {}
        self.of: dict[int, dict[str, CacheGroup]] = {}

    def table(self, slot: int, group: CacheGroup) -> BlockTable:
        """Return the block table of a cache group (like layers with blocks of their own); create it if there is none.

        The group is also added to the groups of the replica in this slot (index), if that has not been done yet.
        """
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
        """Remove the replica's cache groups and their blocks, but keep the groups whose tier names are in `names`."""
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
        """Return for each replica with several cache groups how many leading blocks of a prompt are a hit in all.

        The result is by slot, the replica's index. `full`: for each slot, how many leading blocks full attention holds.
        `most`: how many of the prompt's blocks can be hits.
        """
        end = min(most, len(hashes))
        reach = {slot: self._of_full(slot, hashes, min(full[slot], end), end) for slot in self.of}
        left = {slot: blocks for slot, blocks in reach.items() if blocks}
        while left:  # search from the prompt's end: most hits end near the place where full attention's hit ends
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
        """Return how many blocks of a prompt are a hit in all groups of a replica that drops the last block it finds.

        The replica's engine speculates with EAGLE or MTP, as the module's docstring explains. `full`: how many leading
        blocks full attention holds. `most`: how many blocks can be hits. `end`: how many blocks of the prompt the
        engine looks up.
        """
        groups: dict[CacheGroup, np.ndarray] = {}  # groups of one kind that need equally many last blocks count as one
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
        """Return how many leading blocks of a prompt the full-attention layers of a replica can use.

        `slot`: the replica's index. `full`: how many leading blocks the full-attention table has for it. The result is
        `full` if the engine's full-attention blocks are as large as the map's. If they are larger, the result has only
        whole large blocks, and in the next large block the part up to the last place where an earlier prompt ended.
        That place is looked for up to block `end` of the prompt.
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
        """Return for each block from `start` to `stop` which replicas may have a hit that ends after that block.

        A hit may end there if all of `groups`, the replicas' cache groups besides full attention, have the blocks they
        need. Each element has one bit for each of the 64 replicas whose slots (indices) begin at 64 * `word`.
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
    """Return for each block which of 64 replicas hold the `count` blocks that end with it.

    If there are fewer than `count` blocks up to it, all of these must be held. `held`: for each block, a bit for each
    replica that holds it; the result has the same form.
    """
    runs, length = held.copy(), 1
    while length < min(count, len(runs)):  # a run of up to twice the length consists of two runs, which may overlap
        step = min(length, count - length)
        runs[step:] &= runs[:-step].copy()
        length += step
    return runs


def _lengths(held: np.ndarray) -> np.ndarray:
    """Return for each block how many consecutive blocks ending with it are held (`held` has 0 where one is not)."""
    places = np.arange(1, len(held) + 1)
    return places - np.maximum.accumulate(np.where(held == 0, places, 0))


def _ends(run: np.ndarray, count: int) -> int:
    """Return how many leading blocks a hit can have if its last `count` blocks (or all of them) must be held.

    `run`: for each block how many consecutive blocks ending with it are held, from `_lengths`.
    """
    good = (run >= np.minimum(count, np.arange(1, len(run) + 1))).nonzero()[0]
    return int(good[-1]) + 1 if len(good) else 0
