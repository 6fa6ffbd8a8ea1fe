"""`overlap_cost`: the replica with the fewest KV cache blocks to compute and to decode over.

Formula: max(0, queued prefill blocks + prompt blocks - weighted overlap blocks) + decode blocks; the least wins, ties
at random. An overlap block is one that the replica has cached; it counts 1 on the GPU, 0.75 in host memory (cpu) and
0.25 in slower tiers (disk, remote). Decode blocks are the context of the streams there. Inputs: overlaps, tiers, the
ledger's loads; nothing is scraped. Without overlaps the rule balances tokens. A block to compute weighs as much as a
block of context, whatever the hardware. Source: the cost of NVIDIA Dynamo's KV router (1.6); the rule `kv_aware` of
vllm-router is similar.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand
from .least_cost import Cost, least


def _of_all(
    demand: Demand, candidates: Sequence[Candidate], future: float = 0.0, after: float = 1.0, held: int = 0
) -> Sequence[tuple[float, ...]]:
    tokens, found = demand.tokens, []
    for candidate in candidates:
        overlap, _, worth = COST.held(candidate)
        if overlap < held:
            overlap, worth = held, 0.0
        load = candidate.load
        found.append((max(0.0, load.prefill_tokens + tokens - overlap - worth), float(load.context_tokens)))
    return found


COST = Cost("overlap_cost", ("prefill", "decode"), _of_all, shares={"cpu": 0.75, "disk": 0.25, "remote": 0.25})


class OverlapCost:
    name = "overlap_cost"
    cost = COST

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        costs = [sum(terms) for terms in COST.of_all(demand, candidates)]
        index = least(costs, COST.slack, demand.draw)
        return Choice(
            index,
            f"cost {costs[index] / demand.block_size:.0f} blocks, {candidates[index].overlap} tokens held",
            among=range(len(costs)),
        )
