"""`mooncake`: the least estimated TTFT, in seconds.

Formula: argmin of T_queue + T_prefill, ties at random: T_queue is the prefill of all prompts queued there, T_prefill
that of this prompt by its length and the prefix cached there. Source: Qin et al., "Mooncake: a KVCache-centric
disaggregated architecture for LLM serving" (arXiv 2407.00079, FAST '25), Algorithm 1.

Approximated: the paper fits T_prefill offline, here it is the learned costs; the queued prompts are taken to be equally
long and to compute without context. Left out: fetching the prefix from a better holder where that is
`kvcache_balancing_threshold` times as long, since these engines send each other no KV; rejection by the SLO; and decode
instances, which are apart there.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least


class Mooncake:
    name = "mooncake"
    source = "Mooncake, arXiv 2407.00079, Algorithm 1 (cache-aware prefill scheduling), without transfers"

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        seconds = []
        for candidate in candidates:
            load, costs = candidate.load, candidate.costs
            queue = 0.0
            if load.prefilling:
                queue = load.prefilling * costs.prefill_seconds(load.prefill_tokens / load.prefilling, 0)
            seconds.append(queue + costs.prefill_seconds(asked.tokens - candidate.overlap, candidate.overlap))
        index = self._least(seconds)
        return Choice(index, f"{seconds[index] * 1e3:.1f} ms, {candidates[index].overlap} tokens held")
