"""Requests in two legs: which pairs of replicas there are, which pair the rule takes, and the counting of both loads.

The first *leg* computes the prompt on one replica, the *prefiller*; the second writes the answer on another, the
*decoder*. `choose` must directly follow `Router.evaluate`, and `commit` must directly follow `choose`, because what
candidates hold of a prompt is set on them for the last request only. Each leg is a placement, whose outcome is reported
to the Router like any other's.
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
    """Return a prefill and a decode replica for a request if the router's rule prefers two legs, else None.

    `whole`: the evaluation of the request on one replica. No load is counted.
    """
    return choose_among(router, ways(router, whole, ((prefillers, decoders),), now))


def choose_among(router: Router, ways: Iterable[legs.Ways], must: bool = False) -> legs.LegChoice | None:
    """Return the pair of prefill and decode replica that the router's rule takes among these, or None.

    With `must`, return the cheapest pair even where the rule would keep the request on one replica.
    """
    if legs.of_policy(router.policy) is None:
        ways = legs.preferred(router.policy, [*ways])
    rule = legs.cheapest_of if must else router.leg_rule
    return legs.best(rule(router.policy, one) for one in ways)


def ways(router: Router, whole: Evaluation, pairings: Sequence[Pairing], now: float) -> list[legs.Ways]:
    """Return what a rule for two legs chooses from: a group of replicas for each pairing and each space.

    Only groups with replicas for both legs are returned. Both legs are in one space (tokenizer, template and block
    size) for which the request was prepared, because in another space its tokens would differ. `whole`: the evaluation
    of the request on one replica. What candidates hold of the prompt is set on them, in the tokens of the demand of
    `whole`.
    """
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
    if not any(one is best for first, _ in sides for one in first):  # a first leg never pulls from another's memory
        router.offer_again(whole)
    return [legs.Ways(demand, best, whole.choice, first, second, router.transfers, now) for first, second in sides]


def commit(
    router: Router,
    whole: Evaluation,
    chosen: legs.LegChoice,
    now: float,
    decided: tuple[Decision, Decision] | None = None,
) -> tuple[Placement, Placement, Move]:
    """Count the load of a request on its prefill and its decode replica, and the transfer between the two.

    Call this right after `choose`.

    Returns the placements of the first and the second leg, and the transfer of the prompt's KV cache. The policy learns
    from its choice of legs or, if it made none, from its choice for the whole request. `decided`: a shared ledger's
    decision on each leg. Without it, what each replica holds of the prompt is taken from this gateway's own look-up.
    """
    demand, first, second = whole.demand, chosen.prefiller, chosen.decoder
    overlap, lower, counted = first.overlap, first.lower, False
    if decided is not None:
        prefill, _ = decided
        for one in decided:
            router.ledger.others(one.replica, one.others)
        overlap, lower, counted = prefill.overlap, prefill.lower, prefill.counted
    if (own := demand.also) is not None and own.space == first.space:  # both legs are in the other space
        spaces = {own.space: router.held(own, now)}
        told = overlap if decided is not None else 0
        demand, overlap, lower = in_space(first, spaces, whole.demand, told)
        _, second.overlap, _ = in_space(second, spaces, whole.demand)
        counted = False
    move = begin_transfer(router, first, second, demand, now)
    # If an engine sends the first leg itself, the gateway sees only the second leg's first byte.
    placements = [_commit_prefill(router, demand, first, overlap, lower, now, counted, whole.demand.now, move.seconds)]
    try:
        placements.append(commit_decoder(router, demand, second, now))
        if router.placed is not None:
            for candidates, choice in chosen.preferred or ((whole.candidates, whole.choice),):
                router.placed(whole.demand, candidates, choice)
    except BaseException:  # the caller never gets the placements, so it could not release them
        for placement in placements:
            router.abandon(placement, computed=False)
        raise
    return placements[0], placements[1], move


def begin_transfer(router: Router, prefiller: Candidate, decoder: Candidate, demand: Demand, now: float) -> Move:
    """Note that the prompt's KV cache which the decoder lacks is being sent to it, and return this transfer.

    Call this right after what the decoder holds of this prompt was set on it (`Router.weighed`).
    """
    tokens = demand.tokens - decoder.overlap
    seconds = router.transfers.seconds(prefiller.replica, decoder.replica, tokens, now)
    router.transfers.begin(prefiller.replica, decoder.replica, now)
    return Move(tokens, seconds)


def move_prefill(router: Router, first: Placement, replica: str, now: float) -> Placement:
    """Move the first leg (prefill) of a request, which was not sent yet, to another replica; return its placement."""
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
    """Count the first leg of a request in the load of the replica that computes the prompt; return the placement.

    `overlap`, `lower`: prompt tokens that the replica holds in its first tier and in slower ones. `counted`: whether a
    shared ledger has counted the leg already. `begins`: when the leg begins, UNTIMED if unknown. `moving`: seconds
    after the end of the prefill until the gateway sees that it has ended.
    """
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
    """Return the best of these replicas to write the answer to a prompt that is computed already.

    None if none is of the prompt's space (tokenizer, template and block size).
    """
    decoders = [one for one in decoders if one.space == demand.space]
    if not decoders:
        return None
    router.weighed(demand, Targets(decoders), now)
    return legs.decoder(router.policy, demand, decoders)


def commit_decoder(router: Router, demand: Demand, candidate: Candidate, now: float) -> Placement:
    """Add a request whose prompt another replica computes to the load of the replica that writes its answer.

    Returns the placement. The cache map expects the whole prompt in the replica's cache.
    """
    reservation = router.ledger.reserve_decode(candidate.replica, demand.tokens, demand.residual)
    placement = Placement(candidate, demand, candidate.overlap, reservation, now)
    try:
        router.expect(placement)
    except BaseException:
        router.abandon(placement)
        raise
    return placement


def moving_seconds(second: Placement, seconds: float) -> float:
    """Return how long the KV transfer of a request in two legs took.

    `second`: the placement of the second leg (decode). `seconds`: the measured time from sending that leg to its first
    token. The result is what this time exceeds the decoder's own predicted time by.
    """
    costs, tokens = second.candidate.costs, second.demand.tokens
    return seconds - costs.punctual_seconds(second.reservation.before, 1, tokens - 1)


def writing_seconds(second: Placement, tokens: int) -> float:
    """Return the predicted seconds from the first to the last of an answer's `tokens`.

    `second`: the placement of the decode leg; the prediction is by the load that it met.
    """
    return second.candidate.costs.decode_seconds(second.reservation.before, second.demand.tokens, tokens)


def _of_one_space(pairing: Pairing, known: Sequence[int]) -> list[Pairing]:
    """Return a pairing's prefill and decode replicas separately for each space that has both.

    `known`: the numbers of the spaces (tokenizer, template and block size) for which the request was prepared.
    """
    first, second = pairing
    sides = [([p for p in first if p.space == space], [d for d in second if d.space == space]) for space in known]
    return [side for side in sides if all(side)]
