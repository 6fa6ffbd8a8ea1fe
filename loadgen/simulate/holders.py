"""A map from block hashes to the replicas that hold them, in the form that costs a simulation least.

It answers as `cachemap.CacheMap` does (a test compares them event by event), from one dict: block hash -> a bit per
replica. Events of simulated engines have few blocks, for which the map's arrays take 40 us a call and a dict 0.2 us a
block; the dict takes four times the memory, which is not bounded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, repeat, takewhile

from cachemap.map import LOWER_TIERS, PREDICTED_SECONDS, Match
from cachemap.table.chains import EngineModel
from cachemap.table.routed import Routed


class Holders:
    """The block map of one gateway; replicas are indices.

    `capacities`: blocks of each replica. `observed`: replicas publish events; otherwise their caches are modelled.
    """

    def __init__(self, capacities: Sequence[int], observed: bool) -> None:
        self._holders: dict[int, int] = {}
        # per replica: block -> copies beyond the first
        self._copies: list[dict[int, int]] = [{} for _ in capacities]
        self._routed = Routed(PREDICTED_SECONDS)
        self._models = [] if observed else [EngineModel(capacity) for capacity in capacities]
        self._lower: dict[str, list[set[int]]] = {}  # by tier, per replica: blocks known from events
        self._none = [0] * len(capacities)
        self._last: tuple[list[int], list[int]] = ([], self._none)

    def match(self, hashes: list[int], now: float, most: int | None = None) -> Match:
        """Return how many leading blocks each replica holds: in total, and confirmed by events alone."""
        if self._models:
            return Match([model.reach(hashes) for model in self._models], self._none, {})
        confirmed = self._confirmed(hashes)
        held = confirmed.copy()
        if self._routed:
            for replica, reach in self._routed.reach(hashes, now, confirmed).items():
                held[replica] = self._further(replica, hashes, confirmed[replica], reach)
        self._last = hashes, confirmed
        return Match(held, confirmed, self._in_lower_tiers(hashes, held) if self._lower else {})

    def _in_lower_tiers(self, hashes: list[int], held: list[int]) -> dict[int, list[tuple[str, int]]]:
        """Return, per replica, the runs in slower tiers that follow its leading blocks."""
        lower = {}
        for replica, start in enumerate(held):
            tiers = [(tier, blocks[replica]) for tier, blocks in self._lower.items()]
            found = takewhile(bool, (next((t for t, has in tiers if block in has), "") for block in hashes[start:]))
            if runs := [(tier, sum(1 for _ in run)) for tier, run in groupby(found)]:
                lower[replica] = runs
        return lower

    def last_below(self, replica: int, hashes: list[int], held: int) -> int | None:
        """Return what `CacheMap.last_below` returns where no tier has chunks that are found only as a whole."""
        return 0 if any(hashes[-1] in blocks[replica] for blocks in self._lower.values()) else None

    def leading(self, tier: str, hashes: list[int]) -> list[int]:
        """Return what `CacheMap.leading` returns."""
        if tier not in self._lower:
            return self._none
        return [sum(1 for _ in takewhile(held.__contains__, hashes)) for held in self._lower[tier]]

    def holds_below(self, replica: int) -> bool:
        """Return what `CacheMap.holds_below` returns."""
        return any(blocks[replica] for blocks in self._lower.values())

    def drop(self, replica: int, drops: bool, to_end: bool = True) -> None:
        """Do nothing: no simulated engine drops a block."""

    def drops(self, replica: int) -> bool:
        return False

    def _confirmed(self, hashes: list[int]) -> list[int]:
        lengths = self._none.copy()
        masks = list(iter(map(self._holders.get, hashes).__next__, None))  # of the leading blocks with a holder
        all_ = masks[0] if masks else 0
        for place, having in enumerate(masks):
            if having != all_ and having & all_ != all_:
                for replica in _bits(all_ & ~having):
                    lengths[replica] = place
                all_ &= having
                if not all_:
                    return lengths
        for replica in _bits(all_):
            lengths[replica] = len(masks)
        return lengths

    def _further(self, replica: int, hashes: list[int], known: int, reach: int) -> int:
        """Extend a predicted reach over confirmed blocks that follow it.

        Stops, as the map does, at the first block that no replica holds.
        """
        if known < reach < len(hashes) and self._holders.get(hashes[reach], 0) >> replica & 1:
            leading = next((place for place, block in enumerate(hashes) if block not in self._holders), len(hashes))
            while reach < leading and self._holders[hashes[reach]] >> replica & 1:
                reach += 1
        return reach

    def expect(self, replica: int, hashes: list[int], now: float) -> int:
        """Predict the blocks of a prompt just sent to `replica`, after `match` of the same `hashes`.

        Returns the number of the prediction, for `take_back`.
        """
        last, confirmed = self._last
        if self._models:
            self._models[replica].add(hashes)
        elif last is not hashes or confirmed[replica] < len(hashes):
            return self._routed.add(replica, hashes, now)
        return 0

    def take_back(self, replica: int, hashes: list[int], held: int, number: int) -> None:
        """Withdraw a prediction: the prompt was not computed there."""
        if self._models:
            self._models[replica].take_back(hashes, held)
        else:
            self._routed.take_back(replica, hashes, held, number)

    def learn(self, replica: int, hashes: list[int], predicted: int, reported: int) -> None:
        """Learn from the number of blocks of a prompt that the engine reported as cached."""
        if self._models:
            self._models[replica].learn(predicted, reported)

    def store(self, replica: int, blocks: list[int], tier: str = "gpu") -> None:
        if tier != "gpu":
            if tier not in self._lower:
                self._lower[tier] = [set() for _ in self._none]
                self._lower = {known: self._lower[known] for known in LOWER_TIERS if known in self._lower}
            self._lower[tier][replica].update(blocks)
            return
        holders, bit = self._holders, 1 << replica
        if holders.keys().isdisjoint(blocks):  # fast path: no replica holds any of them, the usual case
            holders.update(dict.fromkeys(blocks, bit))
            return
        for block in blocks:
            having = holders.get(block, 0)
            if having & bit:
                self._copies[replica][block] = self._copies[replica].get(block, 0) + 1
            else:
                holders[block] = having | bit

    def remove(self, replica: int, blocks: list[int], tier: str = "gpu") -> None:
        if tier != "gpu":
            if tier in self._lower:
                self._lower[tier][replica].difference_update(blocks)
            return
        holders, copies, bit = self._holders, self._copies[replica], 1 << replica
        if not copies.keys().isdisjoint(blocks):
            blocks = [block for block in blocks if not _fewer(copies, block)]
        had = list(map(holders.pop, blocks, repeat(0)))
        if had.count(bit) < len(had):  # other replicas hold some of them
            holders.update((block, left) for block, having in zip(blocks, had) if (left := having & ~bit))
            blocks = [block for block, having in zip(blocks, had) if having & bit]
        if blocks:
            self._routed.discard(replica, blocks)

    def clear(self, replica: int) -> None:
        """Forget all blocks of a replica that restarted."""
        if self._models:
            self._models[replica].clear()
            return
        bit = 1 << replica
        self._holders = {block: left for block, having in self._holders.items() if (left := having & ~bit)}
        self._copies[replica] = {}
        for blocks in self._lower.values():
            blocks[replica].clear()
        self._routed.clear(replica)


def _fewer(copies: dict[int, int], block: int) -> bool:
    """Decrement the count of further copies of a block; return whether there was one."""
    if not (beyond := copies.pop(block, 0)):
        return False
    if beyond > 1:
        copies[block] = beyond - 1
    return True


@lru_cache(4096)  # popular prefixes give the same masks again and again
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
