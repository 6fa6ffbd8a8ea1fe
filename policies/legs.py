"""Two legs: a prompt computed on one replica, its answer written by another, with the KV cache moved between them.

Both ways are priced in the same seconds, by the policy's own cost, so there is no threshold to set:

    whole   cost of the replica that the policy chose for the whole request
    apart   cost of the prefiller P, as for a request without an answer
            + the transfer of what the decoder D does not hold
            + cost of D, as if it held the prompt: what is left is the answer, and the crowd that it meets and makes

The legs are taken where that is less. A policy that does not count in seconds has no price to compare: there the legs
are taken wherever more than one block is to be computed.

A transfer takes `LATENCY + tokens x TOKEN` seconds by a prior, times a factor that is learned: of each pair of
replicas, and of all pairs for those that have not met. A pair whose transfer failed is left out for a while, twice as
long each time in a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import NamedTuple, Protocol, cast

from .quotes import Place
from .rules.least_cost import Cost
from .vocabulary import Candidate, Choice, Demand, Policy, pick

# The prior: a model of 8 billion parameters has 128 KiB of KV a token (32 layers x 8 heads x 128 x 2 x 2 bytes), a
# network of 100 Gbit/s moves 12.5 GB a second; the second leg's way and the engines' handshake take 10 ms.
LATENCY, TOKEN = 0.010, 131_072 / 12.5e9
_BOUND = 1000.0  # the factor stays within this and its inverse
_GAIN = 0.1  # of one observation, once there are some
_PAUSE, _LONGEST_PAUSE = 10.0, 320.0  # seconds without a pair whose transfer failed
FEW = 8  # of each side, the cheapest are paired: with hundreds of replicas all pairs are too many
PAUSES = "stall"  # a cost's term for the streams that stand still while a prompt is computed
SLACK = (1.001, 1e-4)  # prices within 0.1 % or 0.1 ms are equal


@dataclass(slots=True)
class _Factor:
    """How many times longer transfers take than the prior says."""

    value: float = 1.0
    count: int = 0

    def observe(self, gap: float) -> None:
        self.count += 1
        self.value = min(max(self.value * exp(max(_GAIN, 1 / self.count) * gap), 1 / _BOUND), _BOUND)


class Transfers:
    """What was learned of transfers between replicas. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._all = _Factor()
        self._pairs: dict[tuple[str, str], _Factor] = {}
        self._paused: dict[tuple[str, str], tuple[float, float]] = {}  # until when, and how long that is

    def seconds(self, prefiller: str, decoder: str, tokens: int) -> float:
        """Return the predicted seconds of moving so many tokens' cache."""
        factor = self._pairs.get((prefiller, decoder), self._all)
        return factor.value * (LATENCY + tokens * TOKEN)

    def observe(self, prefiller: str, decoder: str, tokens: int, seconds: float) -> None:
        """A transfer of `tokens` took `seconds`; what is not positive counts as a tenth of a millisecond."""
        pair = (prefiller, decoder)
        self.came(*pair)
        prior = LATENCY + tokens * TOKEN
        seconds = max(seconds, 1e-4)
        own = self._pairs.get(pair)
        if own is None:
            own = self._pairs[pair] = _Factor(self._all.value)
        own.observe(log(seconds / (own.value * prior)))
        self._all.observe(log(seconds / (self._all.value * prior)))

    def came(self, prefiller: str, decoder: str) -> None:
        """A transfer came, whatever it took: the next failure is a first one."""
        self._paused.pop((prefiller, decoder), None)

    def failed(self, prefiller: str, decoder: str, now: float) -> None:
        """A transfer failed, or nobody knows what became of it."""
        _, before = self._paused.get((prefiller, decoder), (0.0, _PAUSE / 2))
        lasts = min(2 * before, _LONGEST_PAUSE)
        self._paused[prefiller, decoder] = now + lasts, lasts

    def paused(self, prefiller: str, decoder: str, now: float) -> bool:
        until, _ = self._paused.get((prefiller, decoder), (0.0, 0.0))
        return now < until

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for known in (self._pairs, self._paused):
            for pair in [pair for pair in known if replica in pair]:
                del known[pair]


class LegChoice(NamedTuple):
    """The two replicas. `moved`: prompt tokens whose cache the decoder lacks. Seconds are None where the policy does
    not count in them; what it chose and among whom is in `preferred` then, for it to be told."""

    prefiller: Candidate
    decoder: Candidate
    moved: int
    seconds: float | None
    whole_seconds: float | None
    preferred: tuple[tuple[Sequence[Candidate], Choice], ...] = ()
    near: Sequence[Candidate] = ()  # prefillers among which the load alone decides, this one included


class Ways(NamedTuple):
    """What a rule of legs chooses by. `whole` and `choice`: where the request would go in one piece, and the policy's
    choice of that. `among`: pairs that may be taken, None for all. `always`: it cannot go whole. All candidates have
    been weighed for this demand."""

    demand: Demand
    whole: Candidate
    choice: Choice
    prefillers: Sequence[Candidate]
    decoders: Sequence[Candidate]
    transfers: Transfers
    now: float
    among: Collection[Place] | None = None
    always: bool = False

    def near(self, prefiller: Candidate, decoder: Candidate) -> list[Candidate]:
        """Those to which it makes no difference for this decoder which of them computes: the cache takes as long."""
        moved = self.demand.tokens - decoder.overlap
        most = self.transfers.seconds(prefiller.replica, decoder.replica, moved) * SLACK[0] + SLACK[1]
        return [
            one
            for one in self.prefillers
            if one is not decoder
            and self.can_pair(one, decoder)
            and self.transfers.seconds(one.replica, decoder.replica, moved) <= most
        ]

    def can_pair(self, prefiller: Candidate, decoder: Candidate) -> bool:
        pair = prefiller.replica, decoder.replica
        return (self.among is None or pair in self.among) and not self.transfers.paused(*pair, self.now)

    def only(self, among: Collection[Place]) -> Ways | None:
        """Return the same for these pairs alone; None: none of them is of its replicas."""
        first, second = [{place[at] for place in among} for at in (0, 1)]
        prefillers = [one for one in self.prefillers if one.replica in first]
        decoders = [one for one in self.decoders if one.replica in second]
        return self._replace(prefillers=prefillers, decoders=decoders, among=among) if prefillers and decoders else None

    def taken(self, choice: LegChoice | None) -> LegChoice | None:
        """Return what a rule chose, unless those are no pair that may be taken."""
        if choice is None or self.among is None or (choice.prefiller.replica, choice.decoder.replica) in self.among:
            return choice
        return None


class LegRule(Protocol):
    """A pure choice of legs; None: the request stays whole."""

    def __call__(self, policy: Policy, ways: Ways) -> LegChoice | None: ...


def best(found: Iterable[LegChoice | None]) -> LegChoice | None:
    """Return the legs that cost least of those that a rule chose, each time among other replicas."""
    chosen = [one for one in found if one is not None]
    return min(chosen, key=lambda one: one.seconds or 0.0, default=None)


def of_policy(policy: Policy) -> Cost | None:
    """The policy's cost, if that is in seconds."""
    return cast("Cost", policy.cost) if getattr(policy, "in_seconds", False) else None  # type: ignore[attr-defined]


def choose(policy: Policy, ways: Ways, pauses: float = 1.0) -> LegChoice | None:
    """Return the legs that cost least, if they cost less than the whole request: the gateway's rule."""
    cost = of_policy(policy)
    if cost is None:
        return by_preference(policy, ways)
    apart = cheapest(cost, ways, pauses)
    if apart is None or apart.seconds is None or apart.whole_seconds is None:
        return None
    return apart if apart.seconds * SLACK[0] + SLACK[1] < apart.whole_seconds else None


def forced(policy: Policy, ways: Ways) -> LegChoice | None:
    """Return the legs that cost least, where no replica answers whole requests: if there is no other pair, those of one
    whose transfer failed."""
    cost = of_policy(policy)
    for one in (ways, ways._replace(now=inf)):
        if (found := cheapest(cost, one) if cost is not None else by_preference(policy, one, least=-1)) is not None:
            return found
    return None


def cheapest(cost: Cost, ways: Ways, pauses: float = 1.0) -> LegChoice | None:
    """Return the legs that cost least, whatever the whole request costs; None: no two replicas can be paired.

    `pauses`: how many times the cost's own weight the streams that a prompt holds up count.
    """
    demand, whole, choice, prefillers, decoders, transfers, *_ = ways
    asked = replace(demand, output=0.0, residual=0)
    computed = _totals(cost, cost.of_all(asked, prefillers, choice.future, choice.after), pauses)
    written = _written(cost, demand, decoders, choice.future, choice.after, pauses)
    priced: list[tuple[float, Candidate, Candidate]] = []
    for d in _cheapest(written):
        for p in _cheapest(computed):
            first, second = prefillers[p], decoders[d]
            if first is not second and ways.can_pair(first, second):
                moving = transfers.seconds(first.replica, second.replica, demand.tokens - second.overlap)
                priced.append((computed[p] + moving + written[d], first, second))
    if not priced:
        return None
    least = min(price for price, _, _ in priced)
    equal = [number for number, (price, _, _) in enumerate(priced) if price <= least * SLACK[0] + SLACK[1]]
    _, first, second = priced[pick(equal, demand.draw)]
    [alone] = _totals(cost, cost.of_all(demand, (whole,), choice.future, choice.after), pauses)
    return LegChoice(first, second, demand.tokens - second.overlap, least, alone, near=ways.near(first, second))


def decoder(policy: Policy, demand: Demand, decoders: Sequence[Candidate]) -> Candidate:
    """Return who writes the answer to a prompt that is computed already."""
    cost = of_policy(policy)
    if cost is None:
        return decoders[policy.choose(demand, decoders).index]
    written = _written(cost, demand, decoders)
    return decoders[written.index(min(written))]


def _written(
    cost: Cost,
    demand: Demand,
    decoders: Sequence[Candidate],
    future: float = 0.0,
    after: float = 1.0,
    pauses: float = 1.0,
) -> list[float]:
    """What each decoder costs once it holds the prompt, of which it computes the last token."""
    held = max(0, demand.tokens - 1)
    return _totals(cost, cost.of_all(demand, decoders, future, after, held), pauses)


def _totals(cost: Cost, found: Iterable[Sequence[float]], pauses: float) -> list[float]:
    if pauses == 1.0 or PAUSES not in cost.names:
        return [sum(terms) for terms in found]
    at = cost.names.index(PAUSES)
    return [sum(terms) + (pauses - 1.0) * terms[at] for terms in found]


def by_preference(policy: Policy, ways: Ways, least: int | None = None) -> LegChoice | None:
    """Return the legs that a policy without seconds prefers, if more than `least` tokens are to be computed, by default
    one block."""
    demand, decoders = ways.demand, ways.decoders
    least = demand.block_size if least is None else least
    written = policy.choose(demand, decoders)
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
    return sorted(range(len(prices)), key=prices.__getitem__)[:FEW]
