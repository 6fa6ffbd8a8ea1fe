"""`lmetric`: prefill there, times the batch there.

Formula: (uncached tokens of the prompt + uncached tokens queued there) x requests there, the least wins, ties at
random. No weights: a factor on either indicator would not change who is least. Source: LMetric, arXiv 2603.15202, "new
prefill tokens if routed to an instance" times "current batch size of the instance".

It differs from `vllm_kv_aware` at a replica without requests, whose product is 0 whatever it holds, so that an idle
replica is preferred to one that has the prompt's prefix. Approximated: its tie rule is not stated; cached tokens are
those in GPU memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least


class LMetric:
    name = "lmetric"
    source = "LMetric, arXiv 2603.15202: new prefill tokens x batch size"

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        costs = [
            (asked.tokens - candidate.overlap + candidate.load.prefill_tokens) * candidate.load.requests
            for candidate in candidates
        ]
        index = self._least(costs)
        return Choice(index, f"cost {costs[index]:.0f}, {candidates[index].overlap} tokens held")
