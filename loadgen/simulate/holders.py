"""A map from block hashes to the replicas that hold them, in the form that costs a simulation least.

This map answers as `cachemap.CacheMap` does (a test compares them event by event), but is one dict: block hash -> a bit
per replica. Events of simulated engines have few blocks, for which `CacheMap`'s arrays take 40 us a call and a dict 0.2
us a block. The dict takes four times the memory, and nothing bounds it.
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

    `capacities`: KV blocks in the cache of each replica. `observed`: replicas publish KV events; if they do not, a
    model of each cache, fed with the prompts that were sent, predicts what is in it.
    """

    def __init__(self, capacities: Sequence[int], observed: bool) -> None:
        self._holders: dict[int, int] = {}
        # per replica: block -> copies beyond the first
        self._copies: list[dict[int, int]] = [{} for _ in capacities]
        self._routed = Routed(PREDICTED_SECONDS)
        self._models = [] if observed else [EngineModel(capacity) for capacity in capacities]
        self._lower: dict[str, list[set[int]]] = {}  # by slower tier, per replica: blocks known from events
        self._none = [0] * len(capacities)
        self._last: tuple[list[int], list[int]] = ([], self._none)

    def match(self, hashes: list[int], now: float, most: int | None = None) -> Match:
        """Return how many of the prompt's leading blocks each replica holds: predicted or confirmed, and confirmed.

        `hashes`: of the prompt's blocks; KV events are what confirms a block.
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
        """Return by replica the blocks that follow its `held` leading ones in slower tiers: (tier, blocks) in order."""
        lower = {}
        for replica, start in enumerate(held):
            tiers = [(tier, blocks[replica]) for tier, blocks in self._lower.items()]
            found = takewhile(bool, (next((t for t, has in tiers if block in has), "") for block in hashes[start:]))
            if runs := [(tier, sum(1 for _ in run)) for tier, run in groupby(found)]:
                lower[replica] = runs
        return lower

    def last_below(self, replica: int, hashes: list[int], held: int) -> int | None:
        """Return 0 if a slower tier of the replica has the prompt's last block, else None (`CacheMap.last_below`)."""
        return 0 if any(hashes[-1] in blocks[replica] for blocks in self._lower.values()) else None

    def leading(self, tier: str, hashes: list[int]) -> list[int]:
        """Return for each replica how many leading blocks its slower tier `tier` holds."""
        if tier not in self._lower:
            return self._none
        return [sum(1 for _ in takewhile(held.__contains__, hashes)) for held in self._lower[tier]]

    def holds_below(self, replica: int) -> bool:
        """Return whether the replica is known to hold anything in slower tiers."""
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
        """Return the predicted number of leading blocks, `reach`, plus the confirmed blocks that follow them directly.

        `known`: leading blocks that are confirmed. As in `CacheMap`, blocks from the prompt's first one that no replica
        holds do not count.
        """
        if known < reach < len(hashes) and self._holders.get(hashes[reach], 0) >> replica & 1:
            leading = next((place for place, block in enumerate(hashes) if block not in self._holders), len(hashes))
            while reach < leading and self._holders[hashes[reach]] >> replica & 1:
                reach += 1
        return reach

    def expect(self, replica: int, hashes: list[int], now: float) -> int:
        """Predict that `replica`, to which a prompt was just sent, will hold its blocks.

        Returns the number of the prediction, for `take_back`. No prediction is needed, and 0 is returned, where the
        last call of `match` with these `hashes` found all blocks confirmed.
        """
        last, confirmed = self._last
        if self._models:
            self._models[replica].add(hashes)
        elif last is not hashes or confirmed[replica] < len(hashes):
            return self._routed.add(replica, hashes, now)
        return 0

    def take_back(self, replica: int, hashes: list[int], held: int, number: int) -> None:
        """Withdraw prediction `number`, as the replica did not compute the prompt; `held`: its blocks there before."""
        if self._models:
            self._models[replica].take_back(hashes, held)
        else:
            self._routed.take_back(replica, hashes, held, number)

    def learn(self, replica: int, hashes: list[int], predicted: int, reported: int) -> None:
        """Correct a modelled cache by the blocks of a prompt that the engine `reported` as cached."""
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
        """Forget all blocks of a replica that was lost."""
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
    """Take away one further copy of a block (beyond the first); return whether there was one."""
    if not (beyond := copies.pop(block, 0)):
        return False
    if beyond > 1:
        copies[block] = beyond - 1
    return True


@lru_cache(4096)  # popular prefixes give the same masks again and again
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
