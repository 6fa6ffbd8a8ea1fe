"""Shadow mode: what other policies would have done with the requests that come, without doing it.

After each choice the shadows are asked about the same candidates, and what the request would have met where they say
is compared with what it meets where it went: prompt tokens to compute, and seconds to its first and to its last token,
by the learned costs (`least_time`'s terms `prefill` to `room`, then the steps of the answer's expected length). A
shadow has its own turns and memory, but the caches and the load are those that the acting policy made. So each figure
is about one request that goes another way while all others stay, which is not what the fleet would come to if they all
did: a policy that would pile requests up never meets its own pile.

Before the choice is sent, a copy of the candidates is made (1 us each); the rest waits for the next turn of the event
loop, when the request's bytes have left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from policies import Candidate, Demand, Evaluation, make
from policies.rules.least_time import COST, WAITS

if TYPE_CHECKING:
    from ..ops.metrics import Counter, Metrics


class Seen(NamedTuple):
    """What a decision was made from, as it was then."""

    demand: Demand
    candidates: list[Candidate]


class Shadows:
    def __init__(self, names: Sequence[str], metrics: Metrics):
        self._policies = {name: make(name) for name in names}
        self._metrics = metrics

    def see(self, asker: object, evaluation: Evaluation) -> Callable[[int | None], None]:
        """As `placing.Onlooker`."""
        return partial(self.acted, self.seen(evaluation.demand, evaluation.candidates))

    def seen(self, demand: Demand, candidates: Sequence[Candidate]) -> Seen:
        return Seen(
            demand, [Candidate(one.replica, one.overlap, one.load.copy(), one.costs, one.lower) for one in candidates]
        )

    def acted(self, seen: Seen, index: int | None) -> None:
        """The acting policy's choice is `index`; None: two replicas share the request, which no shadow is asked of."""
        if index is not None:
            asyncio.get_running_loop().call_soon(self.judge, seen, index)

    def judge(self, seen: Seen, index: int) -> None:
        demand, candidates = seen
        tokens, first, last = _price(demand, candidates[index])
        for name, policy in self._policies.items():
            choice = policy.choose(demand, candidates)
            if hasattr(policy, "placed"):
                policy.placed(demand, candidates, choice)  # as if it had acted: it has a memory of its own
            other = choice.index
            self._metrics.shadow_decisions.inc(name, "same" if other == index else "other")
            if other != index:
                its_tokens, its_first, its_last = _price(demand, candidates[other])
                _add(self._metrics.shadow_prefill_tokens, name, tokens - its_tokens)
                _add(self._metrics.shadow_ttft_seconds, name, first - its_first)
                _add(self._metrics.shadow_answer_seconds, name, last - its_last)


def _price(demand: Demand, candidate: Candidate) -> tuple[int, float, float]:
    """Prompt tokens it would compute, and predicted seconds to the first token and to the last."""
    first = sum(COST.of_all(demand, (candidate,))[0][:WAITS])
    last = first + candidate.costs.decode_seconds(candidate.load, demand.tokens, demand.output)
    return demand.tokens - candidate.cached, first, last


def _add(counter: Counter, name: str, less: float) -> None:
    if less:
        counter.inc(name, "saved" if less > 0 else "cost", by=abs(less))


def told(metrics: Metrics, names: Sequence[str]) -> list[dict[str, Any]]:
    """For people: of each policy how often it agreed, and what it would have saved on balance (negative: cost)."""

    def net(counter: Counter, name: str) -> float:
        return counter.total(policy=name, effect="saved") - counter.total(policy=name, effect="cost")

    return [
        {
            "policy": name,
            "decisions": metrics.shadow_decisions.total(policy=name),
            "same": metrics.shadow_decisions.total(policy=name, choice="same"),
            "saved_prefill_tokens": net(metrics.shadow_prefill_tokens, name),
            "saved_ttft_seconds": net(metrics.shadow_ttft_seconds, name),
            "saved_answer_seconds": net(metrics.shadow_answer_seconds, name),
        }
        for name in names
    ]
