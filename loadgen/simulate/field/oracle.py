"""`oracle`: the replica where the request truly takes the fewest seconds.

Formula: argmin of `truth.seconds(index, asked)`, ties at random: the time to its first token plus the delay
to others, read off the simulated engines themselves, real caches, queues and step times, with no event delay
and nothing to learn. No gateway can know this. It looks one request ahead only, so it is what a perfect view
is worth to a greedy rule, not the best schedule there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies import Candidate, Choice, Demand

from .least import Least


class Truth(Protocol):
    def seconds(self, index: int, asked: Demand) -> float:
        """Time to the first token on candidate `index`, and the delay this puts on others there."""
        ...


class Oracle:
    name = "oracle"
    source = "the simulator's own state; no gateway has it"

    def __init__(self, seed: int, truth: Truth) -> None:
        self._least, self._truth = Least(seed), truth

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        seconds = [self._truth.seconds(index, asked) for index in range(len(candidates))]
        index = self._least(seconds)
        return Choice(index, f"{seconds[index] * 1e3:.1f} ms in truth")
