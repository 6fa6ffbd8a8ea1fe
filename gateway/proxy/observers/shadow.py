"""Shadow mode: the choices of replicas that other policies would have made, which are compared but not acted on.

After each choice, every other policy (a shadow) chooses among the same candidates. If it chooses another replica, both
replicas are compared by predictions from the learned costs: prompt tokens to compute, and seconds to the first and the
last token. (The seconds are the terms `prefill` to `room` of `least_time`, then the decode steps of the expected
output.)

A shadow has its own state, but the caches and the load that it sees come from the acting policy's choices. So each
metric is about one request that goes elsewhere while all others stay, not about replicas that the shadow would govern:
a policy that would send too many requests to one replica never sees that load.

Where replicas have roles, a request is sent to one replica or, in two legs, to a prefiller and a decoder; the same
metrics compare both. The shadow `legs:RULE` is the acting policy with another rule for legs (`policies.leg_rules`).
Other shadows use the gateway's own rule.

The candidates are copied before the request is sent (1 us each). The rest runs in the next event-loop iteration, after
the request's bytes have left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from policies import Candidate, Demand, Evaluation, Policy, legs, make
from policies.leg_rules import make_leg_rule
from policies.rules.least_time import COST, WAITS

if TYPE_CHECKING:
    from ...ops.metrics import Counter, Metrics

LEGS = "legs:"  # before the name of a rule for legs

Went = int | legs.LegChoice  # a choice: the index of a candidate, or the replicas of two legs


class Seen(NamedTuple):
    """A copy of all that a choice of replicas depended on, at the time of the choice.

    `candidates`: copies of the replicas that could serve the whole request.
    `ways`: the groups of replicas for two legs (prefill and decode), with their costs, as copies. A replica that is
        also in `candidates` is copied only once.
    """

    demand: Demand
    candidates: list[Candidate]
    ways: Sequence[legs.Ways] = ()


class Shadows:
    """The shadow policies, whose choices of replicas are compared with the acting policy's but not acted on."""

    def __init__(self, names: Sequence[str], metrics: Metrics, acting: str = ""):
        """Create the policies.

        `names`: the shadows' names.
        `acting`: the name of the policy in the settings, which a shadow `legs:RULE` uses with another rule for legs.
        """
        self.policies = {name: make(acting if name.startswith(LEGS) else name) for name in names}
        self._leg_rules = {name: make_leg_rule(name.removeprefix(LEGS)) for name in names if name.startswith(LEGS)}
        self._metrics = metrics

    def see(
        self, asker: object, evaluation: Evaluation, ways: Callable[[], Sequence[legs.Ways]]
    ) -> Callable[[Went], None]:
        """Copy all that a choice depends on; return a callback that is to be called with the choice once it is made.

        `ways`: returns the replicas for two legs with their costs; none where no replica has a role.
        """
        seen = self.seen(evaluation.demand, evaluation.candidates)
        if found := ways():
            seen = _with_legs(seen, evaluation.candidates, found)
        return partial(self.acted, seen)

    def seen(self, demand: Demand, candidates: Sequence[Candidate]) -> Seen:
        return Seen(demand, [_copy(one) for one in candidates])

    def acted(self, seen: Seen, went: Went) -> None:
        """Have the acting policy's choice compared with the shadows', in the next event-loop iteration.

        `seen`: the copied state on which the choice was made. `went`: the choice.
        """
        asyncio.get_running_loop().call_soon(self.judge, seen, went)

    def judge(self, seen: Seen, went: Went) -> None:
        """Let every shadow policy choose, and count in metrics how its choice differs from the acting policy's.

        `seen`: the copied state on which the choice was made. `went`: the acting policy's choice.
        """
        metrics = self._metrics
        tokens, first, last = _price(seen, went)
        for name, policy in self.policies.items():
            other = self._choice(name, policy, seen)
            same = _replicas(seen, other) == _replicas(seen, went)
            metrics.shadow_decisions.inc(name, "same" if same else "other")
            if seen.ways:
                metrics.shadow_legs.inc(name, "whole" if isinstance(other, int) else "apart")
            if not same:
                its_tokens, its_first, its_last = _price(seen, other)
                _add(metrics.shadow_prefill_tokens, name, tokens - its_tokens)
                _add(metrics.shadow_ttft_seconds, name, first - its_first)
                _add(metrics.shadow_answer_seconds, name, last - its_last)

    def _choice(self, name: str, policy: Policy, seen: Seen) -> Went:
        """Return a shadow policy's choice, and let the shadow learn as if the request had been placed by it."""
        demand, candidates, ways = seen
        choice = policy.choose(demand, candidates)
        chosen = None
        if ways:
            rule, whole = self._leg_rules.get(name, legs.choose), candidates[choice.index]
            chosen = legs.best(rule(policy, one._replace(whole=whole, choice=choice)) for one in ways)
        if (placed := getattr(policy, "placed", None)) is not None:
            for among, one in chosen.preferred if chosen is not None and chosen.preferred else ((candidates, choice),):
                placed(demand, among, one)
        return choice.index if chosen is None else chosen


def _copy(one: Candidate) -> Candidate:
    return Candidate(one.replica, one.overlap, one.load.copy(), one.costs, one.lower, pull=one.pull)


def _with_legs(seen: Seen, candidates: Sequence[Candidate], ways: Sequence[legs.Ways]) -> Seen:
    """Return the copied state `seen` with copies of the replicas for two legs (prefill and decode) added.

    `candidates`: the originals of `seen.candidates`. A replica that is among them too is copied only once. `ways`: the
    groups of replicas for two legs.
    """
    copies = {one.replica: copy for one, copy in zip(candidates, seen.candidates)}

    def of(side: Sequence[Candidate]) -> list[Candidate]:
        return [copies.get(one.replica) or copies.setdefault(one.replica, _copy(one)) for one in side]

    return seen._replace(ways=[one._replace(prefillers=of(one.prefillers), decoders=of(one.decoders)) for one in ways])


def _replicas(seen: Seen, went: Went) -> tuple[str, ...]:
    if isinstance(went, int):
        return (seen.candidates[went].replica,)
    return went.prefiller.replica, went.decoder.replica


def _price(seen: Seen, went: Went) -> tuple[int, float, float]:
    """Return three predictions for a choice of replicas: prompt tokens to compute, seconds to first and to last token.

    `seen`: the copied state on which the choice was made. `went`: the choice.
    """
    demand = seen.demand
    if isinstance(went, int):
        candidate = seen.candidates[went]
        first, moved = candidate, 0.0
    else:
        first, candidate = _seen_as(seen, went.prefiller), _seen_as(seen, went.decoder)
        moved = seen.ways[0].transfers.seconds(first.replica, candidate.replica, went.moved, seen.ways[0].now)
        moved += sum(COST.of_all(demand, (candidate,), held=max(0, demand.tokens - 1))[0][:WAITS])
    computed = sum(COST.of_all(demand, (first,))[0][:WAITS]) + moved
    written = candidate.costs.decode_seconds(candidate.load, demand.tokens, demand.output)
    return demand.tokens - first.cached, computed, computed + written


def _seen_as(seen: Seen, one: Candidate) -> Candidate:
    """Return the copy, in the state `seen`, of a prefill or decode replica that was chosen for a request in two legs.

    `one`: the chosen replica. Its load may have changed since the choice. That of the copy in `seen.ways` has not.
    """
    sides = (side for ways in seen.ways for side in (ways.prefillers, ways.decoders))
    return next(copy for side in sides for copy in side if copy.replica == one.replica)


def _add(counter: Counter, name: str, less: float) -> None:
    if less:
        counter.inc(name, "saved" if less > 0 else "cost", by=abs(less))


def told(metrics: Metrics, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return as JSON data, for each shadow, how often it agreed and what it would have saved (negative: cost more)."""

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
            "two_legs": metrics.shadow_legs.total(policy=name, choice="apart"),
        }
        for name in names
    ]
