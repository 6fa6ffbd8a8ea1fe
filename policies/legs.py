"""Two legs: a prompt computed on one replica, its answer written by another, with the KV cache moved between them.

The replica of the first leg is the prefiller P, that of the second the decoder D. Both alternatives are priced in
seconds, by the policy's cost of legs, so no threshold has to be set:

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

FEW = 8  # how many of the cheapest prefillers, and decoders, are paired: all pairs of hundreds would be too many
SLACK = (1.001, 1e-4)  # prices within 0.1 % or 0.1 ms are equal


class LegChoice(NamedTuple):
    """A choice of two replicas for a request: one that computes the prompt, and one that writes the answer."""

    prefiller: Candidate
    decoder: Candidate
    moved: int  # prompt tokens whose KV cache the decoder lacks
    seconds: float | None  # the price of these legs; None if the policy does not count in seconds
    whole_seconds: float | None  # the price of the request on one replica; None if the policy does not count in seconds
    # If the policy does not count in seconds: its choices of both replicas, each with the candidates that it had. They
    # are passed to the policy's `placed`.
    preferred: tuple[tuple[Sequence[Candidate], Choice], ...] = ()
    near: Sequence[Candidate] = ()  # prefillers from which the cache moves about as fast, the chosen one included


class Ways(NamedTuple):
    """A group of replicas that can serve a request in two legs: one computes the prompt, another writes the answer.

    It is what a `LegRule` chooses from. Each candidate already says how many tokens of the prompt it has cached.
    """

    demand: Demand
    whole: Candidate  # the replica to which the whole request would go
    choice: Choice  # the policy's choice of that replica
    prefillers: Sequence[Candidate]
    decoders: Sequence[Candidate]
    transfers: Transfers
    now: float
    among: Collection[Place] | None = None  # the pairs of replicas that may be taken; None: all
    # If the policy does not count in seconds: its choice of a decoder, with the candidates that it had.
    preferred: tuple[Sequence[Candidate], Choice] | None = None

    def near(self, prefiller: Candidate, decoder: Candidate) -> list[Candidate]:
        """Return the prefillers from which the KV cache reaches this decoder about as fast as from the given one."""
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
        """Return whether this pair of replicas may be taken, and had no failed transfer lately."""
        pair = prefiller.replica, decoder.replica
        return (self.among is None or pair in self.among) and not self.transfers.paused(*pair, self.now)

    def only(self, among: Collection[Place]) -> Ways | None:
        """Return this group limited to some pairs of replicas; None if that leaves no prefiller or no decoder.

        `among`: the names of the replicas in each allowed pair, the prefiller's first.
        """
        first, second = [{place[at] for place in among} for at in (0, 1)]
        prefillers = [one for one in self.prefillers if one.replica in first]
        decoders = [one for one in self.decoders if one.replica in second]
        return self._replace(prefillers=prefillers, decoders=decoders, among=among) if prefillers and decoders else None


class LegRule(Protocol):
    """A function that chooses two replicas for a request, or returns None: the request goes to one replica."""

    def __call__(self, policy: Policy, ways: Ways) -> LegChoice | None: ...


def best(found: Iterable[LegChoice | None]) -> LegChoice | None:
    """Return the cheapest of several choices of a prefill and a decode replica; None if all are None."""
    chosen = [one for one in found if one is not None]
    return min(chosen, key=lambda one: one.seconds or 0.0, default=None)


def of_policy(policy: Policy) -> Cost | None:
    """Return the cost by which a policy chooses among candidates, or None if it has no cost in seconds."""
    return cast("Cost", policy.cost) if getattr(policy, "in_seconds", False) else None  # type: ignore[attr-defined]


def price(policy: Policy) -> Cost | None:
    """Return the cost by which a policy compares two legs with one replica, or None if it has no cost in seconds.

    It is the policy's `leg_cost` if it has one, else the cost by which it chooses among candidates.
    """
    cost = of_policy(policy)
    return None if cost is None else cast("Cost", getattr(policy, "leg_cost", cost))


def choose(policy: Policy, ways: Ways) -> LegChoice | None:
    """Return the cheapest pair of prefill and decode replica if it costs less than one replica, else None.

    This is the gateway's own rule. A policy that does not count in seconds chooses the pair by its preference.
    """
    cost = price(policy)
    return by_preference(policy, ways) if cost is None else by_cost(cost, ways)


def by_cost(cost: Cost, ways: Ways) -> LegChoice | None:
    """Return the cheapest pair of prefill and decode replica if it costs less than one replica, else None.

    `cost`: the cost in seconds by which they are compared.
    """
    apart = cheapest(cost, ways)
    if apart is None or apart.seconds is None or apart.whole_seconds is None:
        return None
    return apart if apart.seconds * SLACK[0] + SLACK[1] < apart.whole_seconds else None


def cheapest_of(policy: Policy, ways: Ways) -> LegChoice | None:
    """Return the cheapest pair of prefill and decode replica by the policy, whatever one replica would cost.

    If the policy does not count in seconds, it is the pair that it prefers. None if no two replicas can be paired.
    """
    cost = price(policy)
    return by_preference(policy, ways, least=-1) if cost is None else cheapest(cost, ways)


def cheapest(cost: Cost, ways: Ways) -> LegChoice | None:
    """Return the cheapest pair of prefill and decode replica, whatever one replica would cost.

    None if no two replicas can be paired. Prices within 0.1 % or 0.1 ms count as equal, and one of them is drawn.
    """
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
    """Return the replica that should write the answer to a prompt that is computed already: the cheapest one.

    If the policy does not count in seconds, it is the one that the policy chooses.
    """
    cost = price(policy)
    if cost is None:
        return decoders[policy.choose(demand, decoders).index]
    written = _written(cost, demand, decoders)
    return decoders[written.index(min(written))]


def _written(
    cost: Cost, demand: Demand, decoders: Sequence[Candidate], future: float = 0.0, after: float = 1.0
) -> list[float]:
    """Return for each decoder the cost in seconds of writing the answer there, as if it held the prompt's KV cache.

    Only the prompt's last token would then be computed there. `future`, `after`: the arguments of `Cost.of_all` with
    these names.
    """
    held = max(0, demand.tokens - 1)
    return [sum(terms) for terms in cost.of_all(demand, decoders, future, after, held)]


def preferred(policy: Policy, ways: Sequence[Ways]) -> list[Ways]:
    """Return those groups of replicas that contain the decoder which the policy prefers among all groups' decoders.

    `ways`: all groups. This is for policies that do not predict seconds: they have no cost by which to choose between
    two groups, so the first one would always be taken.
    """
    if len(ways) < 2:
        return [*ways]
    decoders = [one for way in ways for one in way.decoders]
    choice = policy.choose(ways[0].demand, decoders)
    second = decoders[choice.index]
    return [way._replace(preferred=(decoders, choice)) for way in ways if any(one is second for one in way.decoders)]


def by_preference(policy: Policy, ways: Ways, least: int | None = None) -> LegChoice | None:
    """Return the pair of prefill and decode replica that a policy prefers, or None if no pair can be taken.

    This is for a policy that does not count in seconds. The result is also None if the preferred decoder lacks at most
    `least` tokens of the prompt (None: one block).
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
    """Return the indices of the lowest prices, the lowest first, but no more than FEW (8) of them."""
    return sorted(range(len(prices)), key=prices.__getitem__)[:FEW]
