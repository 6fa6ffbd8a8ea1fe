"""The choice that most rules end with: the candidate of the least cost, by a formula that is stated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..costs import STEP_PRIOR, TTFT_PRIOR, CostGroup
from ..ledger import ZERO_TOGETHER, Load
from ..roster import Roster
from ..statement import (
    OVERLAP,
    REQUEST,
    STANDING,
    Arrays,
    Expression,
    Text,
    branches,
    compiled,
    expressions,
    lua,
    symbol,
)
from ..vocabulary import Candidate, Demand, pick

_TTFT = [f"ttft_{index}" for index in range(len(TTFT_PRIOR))]
_STEP = [f"step_{index}" for index in range(len(STEP_PRIOR))]
_DEMAND = ["tokens", "output", "residual", "now", "future", "after", *_TTFT, *_STEP]
_HELD = ["overlap", "lower", "fetched"]
_REPLICA = ["load", "speed", "pace"]


class Cost:
    """A rule's cost of a candidate: the sum of its terms, in a unit of the rule's own.

    `statement(tokens, output, residual, now, future, after, ttft, step, overlap, lower, fetched, load, speed, pace)`
    returns a number for each of `names`; `statement.py` says what it may contain. Its parameters:

    `tokens`: of the prompt; `now`: the time in seconds.
    `output`, `residual`: expected tokens of the answer, and those still to come at a random moment of it.
    `ttft`, `step`: the coefficients of the replica's cost group for TTFT and decode steps.
    `speed`, `pace`: the replica's own factors for prefill and for decode steps.
    `overlap`, `lower`: prompt tokens held in the GPU's cache and in slower tiers.
    `fetched`: the tokens in slower tiers, weighted by tier with `shares`; without `shares`, the seconds to fetch them.
    `future`, `after`: numbers of the rule's own, the same for all candidates.

    Costs up to least x slack[0] + slack[1] count as equal: one of them is drawn.
    """

    def __init__(
        self,
        names: Sequence[str],
        statement: Callable[..., tuple[float, ...]],
        shares: Mapping[str, float] | None = None,
        slack: tuple[float, float] = (1.0, 0.0),
        weights: Mapping[str, float] = {},
    ) -> None:
        """Compile the statement. `weights`: factors of terms by their names, 1 where missing."""
        self.names, self.slack, self._shares = tuple(names), slack, shares
        self._statement = statement
        load = SimpleNamespace(**{field.name: symbol(f"load.{field.name}", STANDING) for field in fields(Load)})

        def stated(*held: Any) -> tuple[Expression, ...]:
            known = {name: symbol(name, REQUEST) for name in _DEMAND}
            terms: tuple[Expression, ...] = expressions(
                statement,
                known["tokens"],
                known["output"],
                known["residual"],
                known["now"],
                known["future"],
                known["after"],
                tuple(map(known.get, _TTFT)),
                tuple(map(known.get, _STEP)),
                *held,
                load,
                symbol("speed", STANDING),
                symbol("pace", STANDING),
            )
            return tuple(
                weights[name] * term if name in weights else term for name, term in zip(self.names, terms, strict=True)
            )

        zeros = [[getattr(load, name) for name in names] for names in ZERO_TOGETHER]
        self._stated = stated(*[symbol(name, OVERLAP) for name in _HELD])
        # of_all(demand, candidates, future=0.0, after=1.0, held=0) returns the terms of each candidate, as if each held
        # at least `held` tokens. It is an attribute because a method would cost one more frame, twice a decision.
        self.of_all = _of_all(self._stated, zeros, self._lower)
        self._arrays = Arrays(
            reduce(add, stated(symbol("overlap", OVERLAP), 0, 0)),
            _REPLICA,
            _DEMAND,
            ["overlap"],
            keep=[load.decoding, load.recent],
            zeros=zeros,
        )

    def weighted(self, weights: Mapping[str, float]) -> Cost:
        """Return the same cost with other `weights` (factors by the names of terms, 1 where missing), compiled anew."""
        known = {name: weight for name, weight in weights.items() if name in self.names}
        return Cost(self.names, self._statement, self._shares, self.slack, known)

    def _lower(self, candidate: Candidate) -> tuple[int, float]:
        """Return the prompt tokens that the candidate holds in slower tiers, and the formula's argument `fetched`.

        `fetched` is the predicted seconds to fetch them, or with `_shares` their sum weighted by tier.
        """
        lower, shares = candidate.lower, self._shares
        if shares is None:
            worth = candidate.fetch_seconds
        else:
            worth = sum([tokens * shares.get(tier, 0.0) for tier, tokens in lower])
        return sum([tokens for _, tokens in lower]), worth

    def totals(self, demand: Demand, roster: Roster, future: float = 0.0, after: float = 1.0) -> np.ndarray:
        """Return the total cost of each candidate of a roster, none of which holds tokens in slower tiers."""
        return self._arrays(
            roster.columns(self._column), self.request(demand, roster.group, future, after), (roster.overlaps,)
        )

    def streams_and_recent(self, roster: Roster) -> tuple[float, float]:
        """Return the sums of `Load.decoding` and `Load.recent` over the candidates."""
        return tuple(roster.columns(self._column)[-2:].dot(roster.ones).tolist())  # half the time of `sum`

    def lua(self) -> str:
        """Return the statement in Lua, as two functions.

        `terms` has the statement's parameters; `cost(request, overlap, lower, fetched, load, speed, pace)` returns the
        sum of the terms, where the table `request` has the values that are the same for all candidates.
        """
        request = [f"request[{number + 1}]" for number in range(len(_DEMAND))]
        return "\n".join(
            [
                lua("terms", [*_DEMAND, *_HELD, *_REPLICA], self._stated),
                f"local function cost(request, {', '.join([*_HELD, *_REPLICA])})",
                "  local sum = 0",
                f"  for _, term in ipairs({{terms({', '.join([*request, *_HELD, *_REPLICA])})}}) do sum = sum + term end",
                "  return sum",
                "end",
            ]
        )

    @staticmethod
    def request(demand: Demand, group: CostGroup, future: float, after: float) -> tuple[float, ...]:
        """Return the statement's arguments that are the same for all candidates of a group, in its order."""
        return (
            demand.tokens,
            demand.output,
            demand.residual,
            demand.now,
            future,
            after,
            *group.ttft.coefficients,
            *group.step.coefficients,
        )

    def held(self, candidate: Candidate) -> tuple[int, int, float]:
        """Return the statement's arguments `overlap`, `lower` and `fetched` of a candidate."""
        return candidate.overlap, *(self._lower(candidate) if candidate.lower else (0, 0.0))

    def _column(self, candidate: Candidate) -> tuple[float, ...]:
        return self._arrays.standing(candidate.load, candidate.costs.ttft.value, candidate.costs.step.value)


def _of_all(
    terms: Sequence[Expression],
    zeros: Sequence[Sequence[Expression]],
    lower_of: Callable[[Candidate], tuple[int, float]],
) -> Callable[..., list[tuple[float, ...]]]:
    """Return a function that evaluates the terms for each candidate."""
    text = Text(terms)
    return compiled(
        "of_all",
        [
            "def of_all(demand, candidates, future=0.0, after=1.0, held=0):",
            "    tokens, output, residual = demand.tokens, demand.output, demand.residual",
            "    now, group, found = demand.now, None, []",
            "    for candidate in candidates:",
            "        costs, load = candidate.costs, candidate.load",
            "        if costs.group is not group:",
            "            group = costs.group",
            f"            {', '.join(_TTFT)} = group.ttft.coefficients",
            f"            {', '.join(_STEP)} = group.step.coefficients",
            *[f"            {line}" for line in text.request_lines],
            "        overlap = candidate.overlap if candidate.overlap > held else held",
            "        lower, fetched = lower_of(candidate) if candidate.lower and overlap == candidate.overlap else (0, 0.0)",
            "        speed, pace = costs.ttft.value, costs.step.value",
            *[f"        {line}" for line in branches(terms, zeros, "found.append(({},))", text.request_names)],
            "    return found",
        ],
        lower_of=lower_of,
    )


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
