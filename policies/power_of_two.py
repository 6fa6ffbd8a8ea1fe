"""`power_of_two`: the less loaded of two candidates drawn at random.

Formula: draw two different candidates, take the one with fewer requests (a tie: the first drawn).
Inputs as `least_load`. Source: Mitzenmacher, "The power of two choices in randomized load
balancing", IEEE TPDS 12(10), 2001: the longest queue falls from log n to log log n, and gateways
with stale views do not all pick the same replica.
"""
from __future__ import annotations

import random
from typing import Sequence

from .least_load import busy, busy_bid
from .vocabulary import Bid, Candidate, Choice, Demand


class PowerOfTwo:
    name = "power_of_two"
    slack = (1.0, 0.0)

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        first, second = self._draw(len(candidates))
        if first == second:
            return Choice(0, "the only one")
        if busy(candidates[second].load) < busy(candidates[first].load):
            first = second
        return Choice(first, "less loaded of two")

    def _draw(self, count: int) -> tuple[int, int]:
        """Two different ones, if there are two."""
        first = int(self._random() * count)
        return first, (first + 1 + int(self._random() * (count - 1))) % count if count > 1 else first

    def bids(self, demand: Demand, candidates: Sequence[Candidate]) -> list[Bid | None]:
        drawn = self._draw(len(candidates))
        return [busy_bid(candidate.load) if index in drawn else None for index, candidate in enumerate(candidates)]

    def own_after(self, demand: Demand, overlap: int, candidates: Sequence[Candidate]) -> float:
        return 0.0
