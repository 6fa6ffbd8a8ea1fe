"""`llmd_weights`: a weighted sum of scores between 0 and 1, the highest wins.

Formula: 2 x queue + 2 x KV use + 3 x prefix, ties at random. Queue is (max - its queue) / (max - min) over the fleet, 1
for all if equal; KV use is 1 - the share of its KV blocks in use; prefix is the share of the prompt's blocks it holds.
Source: the default profile of llm-d's optimized baseline and of the Gateway API Inference Extension (`queue-scorer` 2,
`kv-cache-utilization-scorer` 2, `prefix-cache-scorer` 3, `max-score-picker`), with KV events for the prefix.

Approximated: llm-d scrapes the engines' waiting queues every 50 ms, a fleet here every second, and a rule that ranks by
a number a second old herds. So the queue is the requests sent there whose first token has not come.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least

_QUEUE, _USAGE, _PREFIX = 2, 2, 3


class LlmdWeights:
    name = "llmd_weights"
    source = "llm-d optimized baseline: queue-scorer 2, kv-cache-utilization-scorer 2, prefix-cache-scorer 3, max-score-picker"

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        queues = [candidate.load.prefilling for candidate in candidates]
        low, high = min(queues), max(queues)
        scores = []
        for candidate, queue in zip(candidates, queues):
            free = (high - queue) / (high - low) if high > low else 1.0
            usage = candidate.load.kv_usage or 0.0
            scores.append(_QUEUE * free + _USAGE * (1 - usage) + _PREFIX * held(asked, candidate))
        index = self._least([-score for score in scores])
        return Choice(index, f"score {scores[index]:.2f}, {candidates[index].overlap} tokens held")


def held(asked: Demand, candidate: Candidate) -> float:
    """The share of the prompt's full blocks that a replica holds: what llm-d calls the prefix score."""
    blocks = asked.tokens // asked.block_size
    return candidate.overlap // asked.block_size / blocks if blocks else 0.0
