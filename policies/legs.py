"""Two legs: a prompt computed on one replica, its answer written by another, with the KV cache moved between them.

The replica of the first leg is the prefiller P, that of the second the decoder D. Both alternatives are priced in the
same seconds, by the policy's cost of legs, so no threshold has to be set:

    whole   cost of the replica that the policy chose for the whole request
    apart   cost of P, as for a request without an answer
            + the transfer of the tokens that D does not hold
            + cost of D as if it held the prompt: the answer, and the load that it meets and adds

Two legs are taken where they cost less. A policy that does not count in seconds has no price to compare: it takes two
legs wherever more than one block is to be computed. `transfers` predicts what a transfer takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

from .estimates import Place
from .rules.least_cost import Cost
from .transfers import Transfers
from .vocabulary import Candidate, Choice, Demand, Policy, pick

FEW = 8  # cheapest replicas of each side that are paired: with hundreds of replicas, all pairs would be too many
SLACK = (1.001, 1e-4)  # prices within 0.1 % or 0.1 ms are equal


class LegChoice(NamedTuple):
    """A prefiller and a decoder chosen for a request."""

    prefiller: Candidate
    decoder: Candidate
    moved: int  # prompt tokens whose cache the decoder lacks
    seconds: float | None  # the price of these legs; None if the policy does not count in seconds
    whole_seconds: float | None  # the price of the whole request, likewise
    # A policy without seconds: its choices of both, with their candidates, to be passed to its `placed`
    preferred: tuple[tuple[Sequence[Candidate], Choice], ...] = ()
    near: Sequence[Candidate] = ()  # prefillers as near to the decoder as the chosen one, which is included


class Ways(NamedTuple):
    """The input of a rule for legs; all candidates have been weighed for this demand."""

    demand: Demand
    whole: Candidate  # the replica to which the whole request would go
    choice: Choice  # by which the policy chose that replica
    prefillers: Sequence[Candidate]
    decoders: Sequence[Candidate]
    transfers: Transfers
    now: float
    among: Collection[Place] | None = None  # the pairs of replicas that may be taken; None: all
    preferred: tuple[Sequence[Candidate], Choice] | None = None  # a policy without seconds: its choice of decoder

    def near(self, prefiller: Candidate, decoder: Candidate) -> list[Candidate]:
        """Return the prefillers from which the cache reaches this decoder about as fast as from the given one."""
        moved = self.demand.tokens - decoder.overlap
        most = self.transfers.seconds(prefiller.replica, decoder.replica, moved, self.now) * SLACK[0] + SLACK[1]
        return [
            one
            for one in self.prefillers
            if one is not decoder
            and self.can_pair(one, decoder)
            and self.transfers.seconds(one.replica, decoder.replica, moved, self.now) <= most
        ]

    def can_pair(self, prefiller: Candidate, decoder: Candidate) -> bool:
        """Return whether these two may be taken, and no failed transfer between them is recent."""
        pair = prefiller.replica, decoder.replica
        return (self.among is None or pair in self.among) and not self.transfers.paused(*pair, self.now)

    def only(self, among: Collection[Place]) -> Ways | None:
        """Return the same input limited to these pairs; None if there are no prefillers or no decoders of them here."""
        first, second = [{place[at] for place in among} for at in (0, 1)]
        prefillers = [one for one in self.prefillers if one.replica in first]
        decoders = [one for one in self.decoders if one.replica in second]
        return self._replace(prefillers=prefillers, decoders=decoders, among=among) if prefillers and decoders else None


class LegRule(Protocol):
    """A pure choice of legs for a request; None: the request stays whole."""

    def __call__(self, policy: Policy, ways: Ways) -> LegChoice | None: ...


def best(found: Iterable[LegChoice | None]) -> LegChoice | None:
    """Return the cheapest of several choices of legs, or None."""
    chosen = [one for one in found if one is not None]
    return min(chosen, key=lambda one: one.seconds or 0.0, default=None)


def of_policy(policy: Policy) -> Cost | None:
    """Return the policy's cost of a candidate if it is in seconds, else None."""
    return cast("Cost", policy.cost) if getattr(policy, "in_seconds", False) else None  # type: ignore[attr-defined]


def price(policy: Policy) -> Cost | None:
    """Return the cost by which the policy weighs two legs against one replica, if it is in seconds, else None."""
    cost = of_policy(policy)
    return None if cost is None else cast("Cost", getattr(policy, "leg_cost", cost))


def choose(policy: Policy, ways: Ways) -> LegChoice | None:
    """Return the cheapest legs if they cost less than the whole request, else None: the gateway's rule."""
    cost = price(policy)
    return by_preference(policy, ways) if cost is None else by_cost(cost, ways)


def by_cost(cost: Cost, ways: Ways) -> LegChoice | None:
    """Return the cheapest legs by this cost if they cost less than the whole request, else None."""
    apart = cheapest(cost, ways)
    if apart is None or apart.seconds is None or apart.whole_seconds is None:
        return None
    return apart if apart.seconds * SLACK[0] + SLACK[1] < apart.whole_seconds else None


def cheapest_of(policy: Policy, ways: Ways) -> LegChoice | None:
    """Return the policy's cheapest legs, or those that it prefers if it does not count in seconds."""
    cost = price(policy)
    return by_preference(policy, ways, least=-1) if cost is None else cheapest(cost, ways)


def cheapest(cost: Cost, ways: Ways) -> LegChoice | None:
    """Return the cheapest legs, whatever the whole request costs; None if no two replicas can be paired."""
    demand, whole, choice, prefillers, decoders, transfers, *_ = ways
    asked = replace(demand, output=0.0, residual=0)
    computed = [sum(terms) for terms in cost.of_all(asked, prefillers, choice.future, choice.after)]
    written = _written(cost, demand, decoders, choice.future, choice.after)
    priced: list[tuple[float, Candidate, Candidate]] = []
    for d in _cheapest(written):
        for p in _cheapest(computed):
            first, second = prefillers[p], decoders[d]
            if first is not second and ways.can_pair(first, second):
                moving = transfers.seconds(first.replica, second.replica, demand.tokens - second.overlap, ways.now)
                priced.append((computed[p] + moving + written[d], first, second))
    if not priced:
        return None
    least = min(price for price, _, _ in priced)
    equal = [number for number, (price, _, _) in enumerate(priced) if price <= least * SLACK[0] + SLACK[1]]
    _, first, second = priced[pick(equal, demand.draw)]
    [alone] = cost.of_all(demand, (whole,), choice.future, choice.after)
    return LegChoice(first, second, demand.tokens - second.overlap, least, sum(alone), near=ways.near(first, second))


def decoder(policy: Policy, demand: Demand, decoders: Sequence[Candidate]) -> Candidate:
    """Return the candidate that is to write the answer to a prompt that is computed already."""
    cost = price(policy)
    if cost is None:
        return decoders[policy.choose(demand, decoders).index]
    written = _written(cost, demand, decoders)
    return decoders[written.index(min(written))]


def _written(
    cost: Cost, demand: Demand, decoders: Sequence[Candidate], future: float = 0.0, after: float = 1.0
) -> list[float]:
    """Return the cost of each decoder if it held the prompt, of which it computes only the last token."""
    held = max(0, demand.tokens - 1)
    return [sum(terms) for terms in cost.of_all(demand, decoders, future, after, held)]


def preferred(policy: Policy, ways: Sequence[Ways]) -> list[Ways]:
    """Return those of the ways that contain the decoder which a policy without seconds prefers among all of them.

    Such a policy has no price to choose between ways; without this, the first one would always be taken.
    """
    if len(ways) < 2:
        return [*ways]
    decoders = [one for way in ways for one in way.decoders]
    choice = policy.choose(ways[0].demand, decoders)
    second = decoders[choice.index]
    return [way._replace(preferred=(decoders, choice)) for way in ways if any(one is second for one in way.decoders)]


def by_preference(policy: Policy, ways: Ways, least: int | None = None) -> LegChoice | None:
    """Return the legs that a policy without seconds prefers, or None.

    It is also None if the decoder lacks no more than `least` tokens of the prompt (default: one block).
    """
    demand = ways.demand
    least = demand.block_size if least is None else least
    decoders, written = ways.preferred or (ways.decoders, policy.choose(demand, ways.decoders))
    second = decoders[written.index]
    if demand.tokens - second.overlap <= least:
        return None
    left = [one for one in ways.prefillers if one is not second and ways.can_pair(one, second)]
    if not left:
        return None
    computed = policy.choose(demand, left)
    preferred = (left, computed), (decoders, written)
    return LegChoice(left[computed.index], second, demand.tokens - second.overlap, None, None, preferred)


def _cheapest(prices: Sequence[float]) -> list[int]:
    """Return the indices of the FEW lowest prices, the lowest first."""
    return sorted(range(len(prices)), key=prices.__getitem__)[:FEW]
