"""`aibrix`: the best match that is not busier than the fleet's spread, after a gate on the fleet's balance.

Formula: if the busiest has more than 2 x (mean + 1) requests and at least 8 more than the least busy, only the least
busy are looked at; among these, by share of the prompt matched (ties: fewer requests, then at random), the first with
no more than mean + 1 standard deviation of the fleet's requests; none, or no match: the fewest requests, ties at
random. Any match counts. Source: AIBrix, the README of its gateway's routing algorithms ("Prefix Cache Aware") and the
defaults of the `AIBRIX_PREFIX_CACHE_*` variables in its main branch (the README still names 16 requests and 2
deviations).

Approximated: AIBrix hashes 128 characters a block and keeps 200,000 blocks in all; here that is twice as many blocks of
16 tokens, and for each replica. Its percentages are whole numbers, and so are these. Counts are of requests sent, as
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from policies import Candidate, Choice, Demand

from .guess import Guess
from .least import Least

_TIMES, _GAP, _DEVIATIONS = 2.0, 8, 1
_TABLE = 400_000


class Aibrix:
    name = "aibrix"
    source = "AIBrix gateway, prefix-cache (pkg/plugins/gateway/algorithms/README.md; defaults of its main branch)"

    def __init__(self, seed: int = 0) -> None:
        self._table, self._least = Guess(_TABLE), Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        loads = [candidate.load.requests for candidate in candidates]
        low, high, mean = min(loads), max(loads), sum(loads) / len(loads)
        looked = list(range(len(loads)))
        if high > _TIMES * (mean + 1) and high - low >= _GAP:
            looked = [index for index in looked if loads[index] == low]
        matches = {index: self._table.blocks(candidates[index].replica, asked.hashes) for index in looked}
        bound = mean + _DEVIATIONS * sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        fit = [index for index in looked if matches[index] and loads[index] <= bound]
        if not fit:
            return Choice(self._least(loads), f"no match within bounds, {low} requests there")
        percents = {index: 100 * matches[index] // len(asked.hashes) for index in fit}
        most = max(percents.values())
        best = [index for index in fit if percents[index] == most]
        return Choice(best[self._least([loads[index] for index in best])], f"{most} % matched")

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        self._table.add(candidates[choice.index].replica, asked.hashes)

    def gone(self, replica: str) -> None:
        self._table.forget(replica)
