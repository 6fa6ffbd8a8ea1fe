"""`round_robin`: the candidates in turn.

Formula: the n-th choice among the same candidates is candidate n mod N. Inputs: the order of the candidates. It spreads
requests evenly, but not work, and scatters every conversation over all replicas: the baseline that every gateway is
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand

_MOST = 4096  # the most sets of candidates whose turns are kept


class RoundRobin:
    name = "round_robin"

    def __init__(self) -> None:
        # How many choices there were, by the first candidate and the number of candidates. With one count for all, two
        # models requested alternately would each use only every other replica.
        self._turns: dict[tuple[str, int], int] = {}

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        return Choice(self._turns.get((candidates[0].replica, len(candidates)), 0) % len(candidates), "its turn")

    def placed(self, demand: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        key = candidates[0].replica, len(candidates)
        self._turns[key] = self._turns.pop(key, 0) + 1
        if len(self._turns) > _MOST:
            del self._turns[next(iter(self._turns))]
