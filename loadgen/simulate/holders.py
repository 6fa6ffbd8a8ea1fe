"""A map from KV block hashes to the replicas that hold the blocks, in the form that is fastest in a simulation.

This map answers as the real gateway's `cachemap.CacheMap` does (a test compares them event by event), but is one dict:
block hash -> a bit per replica. KV events of simulated engines have few blocks, for which `CacheMap`'s arrays take
40 us a call and a dict 0.2 us a block. The dict takes four times the memory, and its size has no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, repeat, takewhile

from cachemap.map import LOWER_TIERS, PREDICTED_SECONDS, Match
from cachemap.table.chains import EngineModel
from cachemap.table.routed import Routed


class Holders:
    """The map of one gateway: which replica, given by index, holds which KV blocks.

    `capacities`: KV blocks in the cache of each replica. `observed`: replicas publish KV events. If they do not, a
    model of each replica's cache predicts what is in it from the prompts that were sent there.
    """

    def __init__(self, capacities: Sequence[int], observed: bool) -> None:
        self._holders: dict[int, int] = {}
        # by replica: block -> how many copies the replica has beyond the first
        self._copies: list[dict[int, int]] = [{} for _ in capacities]
        self._routed = Routed(PREDICTED_SECONDS)
        self._models = [] if observed else [EngineModel(capacity) for capacity in capacities]
        self._lower: dict[str, list[set[int]]] = {}  # by tier slower than the GPU, by replica: blocks, from KV events
        self._none = [0] * len(capacities)
        self._last: tuple[list[int], list[int]] = ([], self._none)

    def match(self, hashes: list[int], now: float, most: int | None = None) -> Match:
        """Return how many of a prompt's leading KV blocks each replica holds, and how many of those are confirmed.

        A block is confirmed by KV events. Otherwise it is predicted, because a prompt with it was just sent to the
        replica, or by the model of the replica's cache. `hashes`: hashes of the prompt's blocks; `most`: not used, but
        a parameter of `CacheMap.match`.
        """
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
        """Return by replica the runs of a prompt's blocks in slower memory tiers, such as host memory.

        `held`: by replica, how many leading blocks it holds on the GPU; its runs begin right after them. A run is
        (tier, number of blocks). A replica without runs is left out.
        """
        lower = {}
        for replica, start in enumerate(held):
            tiers = [(tier, blocks[replica]) for tier, blocks in self._lower.items()]
            found = takewhile(bool, (next((t for t, has in tiers if block in has), "") for block in hashes[start:]))
            if runs := [(tier, sum(1 for _ in run)) for tier, run in groupby(found)]:
                lower[replica] = runs
        return lower

    def last_below(self, replica: int, hashes: list[int], held: int) -> int | None:
        """Return how many tokens the engine leaves out when it counts a prompt's last block as found in a slower tier.

        Simulated engines leave out none, so the result is 0, or None if no slower tier of the replica has the block.
        `held`: not used, but a parameter of `CacheMap.last_below`.
        """
        return 0 if any(hashes[-1] in blocks[replica] for blocks in self._lower.values()) else None

    def leading(self, tier: str, hashes: list[int]) -> list[int]:
        """Return for each replica how many of a prompt's leading blocks its memory tier `tier` (not the GPU) holds."""
        if tier not in self._lower:
            return self._none
        return [sum(1 for _ in takewhile(held.__contains__, hashes)) for held in self._lower[tier]]

    def holds_below(self, replica: int) -> bool:
        """Return whether the replica is known to hold any block in a tier slower than the GPU, such as host memory."""
        return any(blocks[replica] for blocks in self._lower.values())

    def drop(self, replica: int, drops: bool, to_end: bool = True) -> None:
        """Do nothing; this method exists because the Router may call it on a `CacheMap`.

        There it sets whether an engine recomputes ("drops") the last block of every cache hit. No simulated engine
        does.
        """

    def drops(self, replica: int) -> bool:
        return False

    def _confirmed(self, hashes: list[int]) -> list[int]:
        """Return for each replica how many of the prompt's leading blocks KV events have confirmed."""
        lengths = self._none.copy()
        # the holders of each leading block, a bit per replica, up to the first block that no replica holds
        masks = list(iter(map(self._holders.get, hashes).__next__, None))
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
        """Return how many leading blocks the replica is predicted to hold, with the confirmed blocks that follow them.

        `known`: how many leading blocks are confirmed; `reach`: how many are predicted. As in `CacheMap`, following
        blocks count only up to the prompt's first block that no replica is confirmed to hold.
        """
        if known < reach < len(hashes) and self._holders.get(hashes[reach], 0) >> replica & 1:
            leading = next((place for place, block in enumerate(hashes) if block not in self._holders), len(hashes))
            while reach < leading and self._holders[hashes[reach]] >> replica & 1:
                reach += 1
        return reach

    def expect(self, replica: int, hashes: list[int], now: float) -> int:
        """Predict that a replica will hold the blocks of a prompt that was just sent to it.

        Returns the number of the prediction, with which `take_back` withdraws it. The number is 0 if no prediction is
        needed: because a model of the cache now has the prompt, or because the last call of `match` got this same list
        and found all of its blocks confirmed.
        """
        last, confirmed = self._last
        if self._models:
            self._models[replica].add(hashes)
        elif last is not hashes or confirmed[replica] < len(hashes):
            return self._routed.add(replica, hashes, now)
        return 0

    def take_back(self, replica: int, hashes: list[int], held: int, number: int) -> None:
        """Withdraw a prediction of `expect`, because the replica did not compute the prompt.

        `number`: the number of the prediction, as `expect` returned it; `held`: how many of the prompt's blocks the
        replica held before.
        """
        if self._models:
            self._models[replica].take_back(hashes, held)
        else:
            self._routed.take_back(replica, hashes, held, number)

    def learn(self, replica: int, hashes: list[int], predicted: int, reported: int) -> None:
        """Correct the model of a replica's cache, if there is one, by the outcome of a prompt.

        `predicted`: blocks of the prompt that the map predicted as cached; `reported`: those that the engine reported
        as cached.
        """
        if self._models:
            self._models[replica].learn(predicted, reported)

    def store(self, replica: int, blocks: list[int], tier: str = "gpu") -> None:
        """Add blocks that a replica has stored in a memory tier, as its KV event says.

        On the GPU, a block that is stored again has one more copy.
        """
        if tier != "gpu":
            if tier not in self._lower:
                self._lower[tier] = [set() for _ in self._none]
                self._lower = {known: self._lower[known] for known in LOWER_TIERS if known in self._lower}
            self._lower[tier][replica].update(blocks)
            return
        holders, bit = self._holders, 1 << replica
        if holders.keys().isdisjoint(blocks):  # the usual case: no replica holds any of these blocks
            holders.update(dict.fromkeys(blocks, bit))
            return
        for block in blocks:
            having = holders.get(block, 0)
            if having & bit:
                self._copies[replica][block] = self._copies[replica].get(block, 0) + 1
            else:
                holders[block] = having | bit

    def remove(self, replica: int, blocks: list[int], tier: str = "gpu") -> None:
        """Remove blocks that a replica has dropped from a memory tier, as its KV event says.

        If a block has several copies on the GPU, one of them is removed.
        """
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
        """Forget all blocks of a replica, confirmed and predicted, as its process was lost."""
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
    """Remove one of a block's extra copies; return False if it has none.

    `copies`: by block, how many copies a replica has beyond the first.
    """
    if not (beyond := copies.pop(block, 0)):
        return False
    if beyond > 1:
        copies[block] = beyond - 1
    return True


@lru_cache(4096)  # popular prefixes give the same masks again and again
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
