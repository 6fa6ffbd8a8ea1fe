"""`random`: any candidate, each equally likely.

Inputs: the request's draw. The rule needs no shared state, so many gateways can use it independently; its queues are
longer than round robin's at the same load.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..vocabulary import Candidate, Choice, Demand, pick


class Random:
    name = "random"

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        return Choice(pick(range(len(candidates)), demand.draw), "at random")
