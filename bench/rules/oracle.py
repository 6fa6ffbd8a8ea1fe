"""`oracle`, `oracle_answer`: the replica where the request truly takes the fewest seconds.

Formula: argmin of `truth.seconds(index, asked)` (`oracle`: to the first token) or of `truth.answer_seconds(index,
asked)` (`oracle_answer`: to the last one, with what it adds to the answers of others), ties at random. Both are read
off the simulated engines themselves, real caches, queues, step times and lengths of replies, with no event delay and
nothing to learn. No gateway can know this. They look one request ahead only, so they are what a perfect view is worth
to a greedy rule, not the best schedule there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least
from .truth import Truth


class Oracle:
    name = "oracle"
    source = "the simulator's own state; no gateway has it"

    def __init__(self, seed: int, truth: Truth) -> None:
        self._least, self._truth = Least(seed), truth

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        seconds = [self._seconds(index, asked) for index in range(len(candidates))]
        index = self._least(seconds)
        return Choice(index, f"{seconds[index] * 1e3:.1f} ms in truth")

    def _seconds(self, index: int, asked: Demand) -> float:
        return self._truth.seconds(index, asked)


class OracleAnswer(Oracle):
    name = "oracle_answer"

    def _seconds(self, index: int, asked: Demand) -> float:
        return self._truth.answer_seconds(index, asked)
