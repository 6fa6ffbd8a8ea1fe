"""The cost of a candidate replica, and the choice of the least one: shared by all rules that minimise a cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..costs import CostGroup
from ..vocabulary import Candidate, Demand, pick

_LUA = Path(__file__).with_name("costs.lua")


@dataclass(frozen=True, eq=False)
class Cost:
    """A rule's cost of sending a request to a candidate: the sum of some terms, in a unit of the rule's own.

    `name`: the rule's name, which is also the name of its formula in `costs.lua`; `names`: the names of the terms.
    `of_all(demand, candidates, future=0.0, after=1.0, held=0)` returns each candidate's terms, as if each held at least
    `held` tokens of the prompt. `future`, `after`: weights that the rule chooses for a request, the same for all
    candidates; `least_time` explains those that it uses.
    `slack`: costs up to least x slack[0] + slack[1] count as equal, and one of them is drawn.
    `shares`: for each slower tier, how much a token there counts compared with a token in the first tier. If it is
    None, tokens in slower tiers are counted by the seconds to fetch them.
    """

    name: str
    names: tuple[str, ...]
    of_all: Callable[..., Sequence[tuple[float, ...]]]
    slack: tuple[float, float] = (1.0, 0.0)
    shares: Mapping[str, float] | None = None

    def with_pauses(self, times: float) -> Cost:
        """Return this cost, but with pauses of other streams (the term `stall`) counted `times` as much.

        The cost's formula must take the argument `pauses`, as that of `least_time` does.
        """
        return replace(self, of_all=partial(self.of_all, pauses=times))

    def lua(self) -> str:
        """Return Lua text that defines the function `cost(request, overlap, lower, fetched, load, speed, pace)`.

        It computes this cost. `request`: an array of the numbers that the method `request` returns; `overlap`, `lower`,
        `fetched`: the numbers that `held` returns; `speed`, `pace`: the replica's factors for prefill and decode steps.
        """
        return f"{_LUA.read_text()}local cost = costs.{self.name}\n"

    @staticmethod
    def request(demand: Demand, group: CostGroup, future: float, after: float) -> tuple[float, ...]:
        """Return the inputs of the Lua formula that are the same for all candidates of a cost group."""
        return (
            *(demand.tokens, demand.output, demand.residual, demand.now, future, after),
            *group.ttft.coefficients,
            *group.step.coefficients,
        )

    def held(self, candidate: Candidate) -> tuple[int, int, float]:
        """Return how many of the prompt's tokens a candidate holds: in its first tier, and in slower tiers.

        The third result is what the tokens in slower tiers count as: a number of tokens if the cost has `shares`,
        otherwise the seconds to fetch them.
        """
        lower, shares = candidate.lower, self.shares
        if not lower:
            return candidate.overlap, 0, 0.0
        if shares is None:
            worth = candidate.fetch_seconds
        else:
            worth = sum([tokens * shares.get(tier, 0.0) for tier, tokens in lower])
        return candidate.overlap, sum([tokens for _, tokens in lower]), worth


def least(costs: Sequence[float], slack: tuple[float, float], draw: float) -> int:
    """Return the index of the least cost.

    Costs up to least x slack[0] + slack[1] count as equal. One of them is drawn by the random number `draw`, from 0 to
    1.
    """
    best = min(costs)
    limit = max(best, best * slack[0] + slack[1])
    equals = []
    for index, cost in enumerate(costs):
        if cost <= limit:
            equals.append(index)
    return equals[0] if len(equals) == 1 else pick(equals, draw)


def least_of(costs: np.ndarray, slack: tuple[float, float], draw: float) -> int:
    """Return the index of the least cost, as `least` does, for costs in an array."""
    best = costs.item(costs.argmin())  # 0.2 us; `min` takes 1 us
    limit = max(best, best * slack[0] + slack[1])
    return pick((costs <= limit).nonzero()[0].tolist(), draw)
