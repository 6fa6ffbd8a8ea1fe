"""`least_load`: the replica with the fewest requests.

Formula: argmin of requests reserved there (or of the engine's own waiting queue, where the last
scrape saw a longer one: someone else's traffic); ties at random. Inputs: the ledger; `waiting` may
be missing and then counts as zero. Blind to prefixes and to how long a prompt is.
"""
from __future__ import annotations

import random
from typing import Sequence

from .vocabulary import Bid, Candidate, Choice, Demand, Load


def busy(load: Load) -> int:
    """Requests known to be on a replica."""
    return max(load.requests, load.waiting or 0)


def busy_bid(load: Load) -> Bid:
    """`busy` as a bid."""
    return Bid(0.0, 0.0, least=load.waiting or 0, per_request=1.0)


class LeastLoad:
    name = "least_load"
    slack = (1.0, 0.0)

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        loads = [busy(candidate.load) for candidate in candidates]
        least = min(loads)
        ties = [index for index, load in enumerate(loads) if load == least]
        return Choice(ties[int(self._random() * len(ties))], f"{least} requests there")

    def bids(self, demand: Demand, candidates: Sequence[Candidate]) -> list[Bid | None]:
        return [busy_bid(candidate.load) for candidate in candidates]

    def own_after(self, demand: Demand, overlap: int, candidates: Sequence[Candidate]) -> float:
        return 0.0
