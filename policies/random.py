"""`random`: any candidate, each as likely.

Inputs: the seed. Nothing can be missing. Needs no shared state, so many gateways can use it
without knowing of each other; its queues are longer than round robin's at the same load.
"""
from __future__ import annotations

import random
from typing import Sequence

from .vocabulary import Candidate, Choice, Demand


class Random:
    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        return Choice(int(self._random() * len(candidates)), "at random")
