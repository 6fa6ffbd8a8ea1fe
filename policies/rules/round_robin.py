"""`round_robin`: the candidates in turn.

Formula: the n-th choice is candidate n mod N. Inputs: the order of the candidates, nothing else,
so nothing can be missing. It spreads requests evenly, not work, and every conversation over all
replicas: the baseline every gateway is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand


class RoundRobin:
    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        return Choice(self._turn % len(candidates), "its turn")

    def placed(self, demand: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        self._turn += 1
