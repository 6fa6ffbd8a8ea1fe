"""`power_of_two`: the less loaded of two candidates drawn at random.

Formula: draw two different candidates, take the one with fewer requests (a tie: the first drawn). Inputs: those of
`least_load`. Source: Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10), 2001: the
longest queue falls from log n to log log n, and gateways with stale views do not all pick the same replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand
from .least_load import COST, busy


class PowerOfTwo:
    name = "power_of_two"
    cost = COST

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        drawn = _draw(demand.draw, len(candidates))
        if len(drawn) == 1:
            return Choice(0, "the only one")
        return Choice(min(drawn, key=lambda index: busy(candidates[index].load)), "less loaded of two", among=drawn)


def _draw(draw: float, count: int) -> tuple[int, ...]:
    """Return two different indices below `count`, drawn at random, or only 0 if `count` is 1.

    `draw`: a random number, 0 <= draw < 1. It decides the first index, and the remainder decides the second.
    """
    first = int(draw * count)
    return (first, (first + 1 + int((draw * count - first) * (count - 1))) % count) if count > 1 else (first,)
