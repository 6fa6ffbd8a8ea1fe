"""`vllm_kv_aware`: prefill there, times the requests that share it.

Formula: (uncached tokens of the prompt + uncached tokens queued there) x (requests there + 1), the least wins, ties at
random. A token in host memory counts 0.8 as cached, in an external store 0.6, on disk 0.3. Overlaps come from KV
events. Source: vllm-router 0.1.17, policy `kv_aware` at its default temperature 0, its flags `--kv-penalty-host`,
`-external` and `-disk` with their defaults; the product is stated in none of its documents, it was read in that
release. What it costs to ask the engines to tokenize each prompt is not here.

Approximated: its tie rule is not stated.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least

_CREDIT = {"cpu": 0.8, "remote": 0.6, "disk": 0.3}


class VllmKvAware:
    name = "vllm_kv_aware"
    source = "vllm-router 0.1.17, kv_aware: product of prefill tokens and requests, tier credits 1 / 0.8 / 0.6 / 0.3"

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        costs = []
        for candidate in candidates:
            load, cached = candidate.load, float(candidate.overlap)
            for tier, tokens in candidate.lower:
                cached += _CREDIT.get(tier, 0.0) * tokens
            costs.append((asked.tokens - cached + load.prefill_tokens) * (load.requests + 1))
        index = self._least(costs)
        return Choice(index, f"cost {costs[index]:.0f}, {candidates[index].overlap} tokens held")
