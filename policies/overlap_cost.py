"""`overlap_cost`: fewest blocks to compute and to keep, after what is cached.

Formula: max(0, queued prefill blocks + prompt blocks - weighted overlap blocks) + decode blocks,
the least wins, ties at random; blocks in slower tiers count 0.75 (cpu) and 0.25 (disk, remote).
Inputs: overlaps, tiers, the ledger; nothing is scraped. Without overlaps it balances tokens. A
block to compute and a block to decode over weigh the same, whatever the hardware says. Source: the
cost of NVIDIA Dynamo's KV router (1.6), which vllm-router's `kv_aware` resembles.
"""
from __future__ import annotations

import random
from typing import Sequence

from .vocabulary import Bid, Candidate, Choice, Demand

_TIERS = {"cpu": 0.75, "disk": 0.25, "remote": 0.25}


def _credit(candidate: Candidate) -> float:
    """Tokens it need not compute."""
    credit = candidate.overlap
    for tier, tokens in candidate.lower:
        credit += _TIERS.get(tier, 0.0) * tokens
    return credit


class OverlapCost:
    name = "overlap_cost"
    slack = (1.0, 0.0)

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        costs = []
        for candidate in candidates:
            load = candidate.load
            costs.append(max(0, load.prefill_tokens + demand.tokens - _credit(candidate)) + load.context_tokens)
        least = min(costs)
        ties = [index for index, cost in enumerate(costs) if cost == least]
        index = ties[int(self._random() * len(ties))]
        return Choice(index, f"cost {least / demand.block_size:.0f} blocks, {candidates[index].overlap} tokens held")

    def bids(self, demand: Demand, candidates: Sequence[Candidate]) -> list[Bid | None]:
        return [Bid(max(0.0, demand.tokens - _credit(candidate)), 1.0, per_prefill_token=1.0, per_context_token=1.0)
                for candidate in candidates]

    def own_after(self, demand: Demand, overlap: int, candidates: Sequence[Candidate]) -> float:
        return float(demand.tokens - overlap)
