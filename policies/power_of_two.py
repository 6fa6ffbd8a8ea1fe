"""`power_of_two`: the less loaded of two candidates drawn at random.

Formula: draw two different candidates, take the one with fewer requests (a tie: the first drawn).
Inputs as `least_load`. Source: Mitzenmacher, "The power of two choices in randomized load
balancing", IEEE TPDS 12(10), 2001: the longest queue falls from log n to log log n, and gateways
with stale views do not all pick the same replica.
"""
from __future__ import annotations

import random
from typing import Sequence

from .least_load import busy
from .vocabulary import Candidate, Choice, Demand


class PowerOfTwo:
    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        count = len(candidates)
        first = int(self._random() * count)
        if count == 1:
            return Choice(0, "the only one")
        second = (first + 1 + int(self._random() * (count - 1))) % count
        if busy(candidates[second].load) < busy(candidates[first].load):
            first = second
        return Choice(first, "less loaded of two")
