"""Two legs in the place of one: which ways there are, whom the rule takes, and the load that both make, in one step.

`choose` follows `Router.evaluate`, and `commit` follows `choose`: what the candidates are weighed for is this request.
Each leg is a placement, of which the Router is told what becomes as of any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import legs
from .costs import Lower
from .ledger import FAR, UNTIMED
from .outputs import due
from .placement import Decision, Evaluation, Move, Pairing
from .router import Placement, Router, Targets, in_space
from .vocabulary import Candidate, Demand


def choose(
    router: Router, whole: Evaluation, prefillers: Sequence[Candidate], decoders: Sequence[Candidate], now: float
) -> legs.LegChoice | None:
    """Return who computes its prompt and who writes its answer, if the rule has two do it rather than the one where
    the `whole` request would go; else None. Nothing is done yet."""
    return choose_among(router, ways(router, whole, ((prefillers, decoders),), now))


def choose_among(router: Router, ways: Iterable[legs.Ways], must: bool = False) -> legs.LegChoice | None:
    """Choose among the pairs that `ways` has returned, as `choose` does. With `must`, return the cheapest pair even
    where the rule would keep the request whole."""
    if legs.of_policy(router.policy) is None:
        ways = legs.preferred(router.policy, [*ways])
    rule = legs.cheapest_of if must else router.leg_rule
    return legs.best(one.taken(rule(router.policy, one)) for one in ways)


def ways(router: Router, whole: Evaluation, pairings: Sequence[Pairing], now: float) -> list[legs.Ways]:
    """Return what a rule of legs chooses by, for each of the `pairings` that has replicas for both legs of a
    request that would go `whole` as evaluated. All of them are weighed for it, in its demand's tokens. Both legs
    are at replicas of one space, of those that the request was prepared for: others would have other tokens."""
    demand = whole.demand
    if not demand.reads_cache or not demand.tokens:
        return []
    known = [one.space for one in (demand, demand.also) if one is not None]
    sides = [side for pairing in pairings for side in _of_one_space(pairing, known)]
    if not sides:
        return []
    best = whole.candidates[whole.choice.index]
    all_ = [best, *(one for first, second in sides for one in (*first, *second))]
    if any(one.space != demand.space for one in all_):
        router.weigh_spaces(demand, Targets(all_), now)
    else:
        router.weighed(demand, Targets(all_), now)
    if not any(one is best for first, _ in sides for one in first):  # no first leg is told to pull
        router.offer_again(whole)
    return [legs.Ways(demand, best, whole.choice, first, second, router.transfers, now) for first, second in sides]


def commit(
    router: Router,
    whole: Evaluation,
    chosen: legs.LegChoice,
    now: float,
    decided: tuple[Decision, Decision] | None = None,
) -> tuple[Placement, Placement, Move]:
    """Count both legs' load and the transfer between them in one step, right after `choose`. The policy is
    told of what it chose, or of one request as it would have gone whole. `decided`: what a shared ledger said of
    each; else both are those that this one chose, weighed for this demand just now."""
    demand, first, second = whole.demand, chosen.prefiller, chosen.decoder
    overlap, lower, counted = first.overlap, first.lower, False
    if decided is not None:
        prefill, _ = decided
        for one in decided:
            router.ledger.others(one.replica, one.others)
        overlap, lower, counted = prefill.overlap, prefill.lower, prefill.counted
    if (own := demand.also) is not None and own.space == first.space:  # in tokens of its own
        spaces = {own.space: router.held(own, now)}
        told = overlap if decided is not None else 0
        demand, overlap, lower = in_space(first, spaces, whole.demand, told)
        _, second.overlap, _ = in_space(second, spaces, whole.demand)
        counted = False
    move = begin_transfer(router, first, second, demand, now)
    # What is seen of a first leg that the gateway does not send itself is the second one's first byte.
    placements = [_commit_prefill(router, demand, first, overlap, lower, now, counted, whole.demand.now, move.seconds)]
    try:
        placements.append(commit_decoder(router, demand, second, now))
        if router.placed is not None:
            for candidates, choice in chosen.preferred or ((whole.candidates, whole.choice),):
                router.placed(whole.demand, candidates, choice)
    except BaseException:  # nobody could release what nobody has
        for placement in placements:
            router.abandon(placement, computed=False)
        raise
    return placements[0], placements[1], move


def begin_transfer(router: Router, prefiller: Candidate, decoder: Candidate, demand: Demand, now: float) -> Move:
    """Count a transfer of what the decoder, as weighed for this demand just now, lacks of its prompt."""
    tokens = demand.tokens - decoder.overlap
    seconds = router.transfers.seconds(prefiller.replica, decoder.replica, tokens, now)
    router.transfers.begin(prefiller.replica, decoder.replica, now)
    return Move(tokens, seconds)


def move_prefill(router: Router, first: Placement, replica: str, now: float) -> Placement:
    """Have another replica compute the prompt of a first leg that was not sent yet."""
    candidate, demand = router.candidates[replica], first.demand
    router.abandon(first, computed=False)
    router.weighed(demand, Targets([candidate]), now)
    return _commit_prefill(router, demand, candidate, candidate.overlap, candidate.lower, now)


def _commit_prefill(
    router: Router,
    demand: Demand,
    candidate: Candidate,
    overlap: int,
    lower: Lower,
    now: float,
    counted: bool = False,
    begins: float = UNTIMED,
    moving: float = 0.0,
) -> Placement:
    """Count a leg that computes a prompt and writes nothing. `begins`: UNTIMED where it is not as of `demand.now`.
    `moving`: seconds that its end may take to be seen besides."""
    uncached = demand.tokens - overlap - sum([tokens for _, tokens in lower])
    expected = due(candidate, demand, uncached, lower) + moving if begins != UNTIMED else FAR
    reservation = router.ledger.reserve(
        candidate.replica, uncached, demand.tokens, counted, begins if begins != UNTIMED else None, due=expected
    )
    beyond = 0 if demand.tokens % demand.block_size else router.beyond(candidate, demand, overlap, lower)
    placement = Placement(candidate, demand, overlap, reservation, now, lower=lower, beyond=beyond)
    try:
        router.expect(placement)
    except BaseException:
        router.abandon(placement, computed=False)
        raise
    return placement


def weigh_decoder(router: Router, demand: Demand, decoders: Sequence[Candidate], now: float) -> Candidate | None:
    """Return who else could write the answer to a prompt that is computed already; None: nobody."""
    decoders = [one for one in decoders if one.space == demand.space]
    if not decoders:
        return None
    router.weighed(demand, Targets(decoders), now)
    return legs.decoder(router.policy, demand, decoders)


def commit_decoder(router: Router, demand: Demand, candidate: Candidate, now: float) -> Placement:
    """Count a leg that begins in decode. The whole prompt is going to be there."""
    reservation = router.ledger.reserve_decode(candidate.replica, demand.tokens, demand.residual)
    placement = Placement(candidate, demand, candidate.overlap, reservation, now)
    try:
        router.expect(placement)
    except BaseException:
        router.abandon(placement)
        raise
    return placement


def moving_seconds(second: Placement, seconds: float) -> float:
    """Return what the transfer took of the `seconds` from sending the second leg to its first token: what its
    decoder does not take itself."""
    costs, tokens = second.candidate.costs, second.demand.tokens
    return seconds - costs.punctual_seconds(second.reservation.before, 1, tokens - 1)


def writing_seconds(second: Placement, tokens: int) -> float:
    """Return what its decoder was to take from the first to the last of so many tokens, by the load that it met."""
    return second.candidate.costs.decode_seconds(second.reservation.before, second.demand.tokens, tokens)


def _of_one_space(pairing: Pairing, known: Sequence[int]) -> list[Pairing]:
    """The replicas of each known space that has both sides."""
    first, second = pairing
    sides = [([p for p in first if p.space == space], [d for d in second if d.space == space]) for space in known]
    return [side for side in sides if all(side)]
