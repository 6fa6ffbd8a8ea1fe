"""What many rules end with: the least of some numbers, ties at random."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Least:
    """The index of the least cost; of equal ones any, each as likely."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def __call__(self, costs: Sequence[float]) -> int:
        least = min(costs)
        ties = [index for index, cost in enumerate(costs) if cost == least]
        return ties[int(self._random() * len(ties))] if len(ties) > 1 else ties[0]
