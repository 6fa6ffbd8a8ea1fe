"""What the rules share that choose the candidate of the least cost."""

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
    """A rule's cost of a candidate: the sum of its terms, in a unit of the rule's own.

    `name`: the rule's name, which is also that of its formula in `costs.lua`; `names`: those of the terms.
    `of_all(demand, candidates, future=0.0, after=1.0, held=0)` returns each candidate's terms, as if each held at least
    `held` tokens of the prompt. `future`, `after`: numbers of the rule's own, the same for all candidates. Costs up to
    least x slack[0] + slack[1] count as equal: one of them is drawn. Tokens in slower tiers are worth `shares` of them
    by tier; without `shares`, the seconds to fetch them.
    """

    name: str
    names: tuple[str, ...]
    of_all: Callable[..., Sequence[tuple[float, ...]]]
    slack: tuple[float, float] = (1.0, 0.0)
    shares: Mapping[str, float] | None = None

    def with_pauses(self, times: float) -> Cost:
        """Return the same cost in seconds, in which pauses of other streams count `times` as much."""
        return replace(self, of_all=partial(self.of_all, pauses=times))

    def lua(self) -> str:
        """Return the formula in Lua, as a function `cost(request, overlap, lower, fetched, load, speed, pace)`.

        `request`: an array of what the method `request` returns; `overlap`, `lower`, `fetched`: what `held` returns;
        `speed`, `pace`: the replica's factors for prefill and for decode steps.
        """
        return f"{_LUA.read_text()}local cost = costs.{self.name}\n"

    @staticmethod
    def request(demand: Demand, group: CostGroup, future: float, after: float) -> tuple[float, ...]:
        """Return what the formula takes that is the same for all candidates of a group."""
        return (
            *(demand.tokens, demand.output, demand.residual, demand.now, future, after),
            *group.ttft.coefficients,
            *group.step.coefficients,
        )

    def held(self, candidate: Candidate) -> tuple[int, int, float]:
        """Return a candidate's prompt tokens in its first tier and in slower ones, and what the latter are worth."""
        lower, shares = candidate.lower, self.shares
        if not lower:
            return candidate.overlap, 0, 0.0
        if shares is None:
            worth = candidate.fetch_seconds
        else:
            worth = sum([tokens * shares.get(tier, 0.0) for tier, tokens in lower])
        return candidate.overlap, sum([tokens for _, tokens in lower]), worth


def least(costs: Sequence[float], slack: tuple[float, float], draw: float) -> int:
    """Return the index of the least cost, drawn among those that count as equal by `slack`, as `Cost` explains."""
    best = min(costs)
    limit = max(best, best * slack[0] + slack[1])
    equals = []
    for index, cost in enumerate(costs):
        if cost <= limit:
            equals.append(index)
    return equals[0] if len(equals) == 1 else pick(equals, draw)


def least_of(costs: np.ndarray, slack: tuple[float, float], draw: float) -> int:
    """Return the same as `least`, for costs in an array."""
    best = costs.item(costs.argmin())  # 0.2 us; `min` takes 1 us
    limit = max(best, best * slack[0] + slack[1])
    return pick((costs <= limit).nonzero()[0].tolist(), draw)
