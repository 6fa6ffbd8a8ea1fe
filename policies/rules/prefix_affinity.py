"""`prefix_affinity`: the replica with the longest match, unless the match is short or load is out of balance.

Formula: if max - min > 64 requests and max > 1.5 min over the replicas, the one with the fewest requests; else, if the
longest overlap is more than 0.3 of the prompt, the replica that holds it (ties: fewer requests); else the one with the
fewest requests. Inputs: overlaps and the ledger; without overlaps it is `least_load`. Source: the `cache_aware` rule of
sglang's router with its default thresholds, here on exact tokens where the original matches characters in its own tree.
The thresholds count requests, so a small fleet may never reach them, and one replica can take everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand
from .least_load import busy, fewest_requests

_MATCH, _APART, _TIMES = 0.3, 64, 1.5


class PrefixAffinity:
    name = "prefix_affinity"

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        loads = [busy(candidate.load) for candidate in candidates]
        low, high = min(loads), max(loads)
        if high - low > _APART and high > _TIMES * low:
            index = fewest_requests(demand, candidates)
            return Choice(index, f"out of balance, {low} to {high} requests")
        index = max(range(len(candidates)), key=lambda i: (candidates[i].overlap, -loads[i]))
        overlap = candidates[index].overlap
        if overlap > _MATCH * demand.tokens:
            return Choice(index, f"holds {overlap} of {demand.tokens} tokens")
        index = fewest_requests(demand, candidates)
        return Choice(index, f"nobody holds more than {_MATCH:.0%}")
