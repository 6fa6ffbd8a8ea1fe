"""`overlap_cost`: the replica with the fewest blocks to compute and to keep, after what is cached.

Formula: max(0, queued prefill blocks + prompt blocks - weighted overlap blocks) + decode blocks; the least wins, ties
at random. Blocks in slower tiers count 0.75 (cpu) and 0.25 (disk, remote). Inputs: overlaps, tiers, the ledger; nothing
is scraped. Without overlaps it balances tokens. A block to compute weighs as much as a block of context to decode over,
whatever the hardware. Source: the cost of NVIDIA Dynamo's KV router (1.6), which vllm-router's `kv_aware` resembles.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ledger import Load
from ..vocabulary import Candidate, Choice, Demand
from .least_cost import Cost, least


def terms(
    tokens: float,
    output: float,
    residual: float,
    now: float,
    future: float,
    after: float,
    ttft: Sequence[float],
    step: Sequence[float],
    overlap: float,
    lower: float,
    fetched: float,
    load: Load,
    speed: float,
    pace: float,
) -> tuple[float, ...]:
    return max(0, load.prefill_tokens + tokens - overlap - fetched), load.context_tokens


COST = Cost(("prefill", "decode"), terms, shares={"cpu": 0.75, "disk": 0.25, "remote": 0.25})


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
