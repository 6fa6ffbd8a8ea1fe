"""Two legs or one: what each way is priced at, who gets the legs, and what transfers teach."""

import math
from dataclasses import replace
from random import Random

import pytest

from policies import CostGroup, Decision, Demand, Ledger, Router, make, two_legs
from policies.ledger import NOTHING
from policies.legs import of_policy, price
from policies.rules.least_time import COST
from policies.transfers import BANDWIDTH, LATENCY, TOKEN_BYTES, Transfers

from .test_router import Prefixes

SIZE = 16


def fleet(policy="least_time", held=(0, 0, 0)):
    """A router, and three candidates: a prefiller and two decoders."""
    made = Router(make(policy), Prefixes(*held), Ledger(), CostGroup())
    return made, [made.add(name, slot) for slot, name in enumerate(("p", "d", "e"))]


def demand(blocks=1000, **more):
    return Demand(SIZE * blocks + 1, SIZE, 1, hashes=range(1, blocks + 1), now=1.0, **more)


def stream_on(made, candidate, count=40, tokens=4000):
    """So many streams decode there."""
    return [two_legs.commit_decoder(made, Demand(tokens), candidate, 1.0) for _ in range(count)]


def crowded(**given):
    """A fleet whose decoders have many streams."""
    made, everybody = fleet(**given)
    for one in everybody[1:]:
        stream_on(made, one)
    return made, everybody


def chosen(made, asked, everybody, now=1.0):
    prefiller, *decoders = everybody
    whole = made.evaluate(asked, made.targets(decoders), now)
    return whole, two_legs.choose(made, whole, [prefiller], decoders, now)


def test_a_long_prompt_leaves_decoders_that_are_full_of_streams():
    made, everybody = crowded()
    _, apart = chosen(made, demand(), everybody)
    assert apart is not None and (apart.prefiller.replica, apart.moved) == ("p", demand().tokens)
    assert apart.seconds < apart.whole_seconds


@pytest.mark.parametrize("prefillers, decoders", [(2, 2), (2, 3), (3, 2), (1, 4)])
def test_by_turns_each_prefiller_and_each_decoder_has_its_part(prefillers, decoders):
    made = Router(make("round_robin"), Prefixes(*[0] * (prefillers + decoders)), Ledger(), CostGroup())
    everybody = [made.add(f"{slot}", slot) for slot in range(prefillers + decoders)]
    first, second = everybody[:prefillers], everybody[prefillers:]
    counts = dict.fromkeys([one.replica for one in everybody], 0)
    for _ in range(60):
        whole = made.evaluate(demand(), made.targets(second), 1.0)
        apart = two_legs.choose(made, whole, first, second, 1.0)
        for placement in two_legs.commit(made, whole, apart, 1.0)[:2]:
            counts[placement.candidate.replica] += 1
            made.abandon(placement, computed=False)
    assert {counts[one.replica] for one in first} == {60 // prefillers}
    assert {counts[one.replica] for one in second} == {60 // decoders}


def test_without_streams_to_disturb_it_stays_whole():
    made, everybody = fleet()
    assert chosen(made, demand(), everybody)[1] is None


def test_a_prompt_that_the_decoder_holds_stays_whole():
    made, everybody = crowded(held=(0, 1000, 0))
    whole, apart = chosen(made, demand(), everybody)
    assert apart is None and whole.overlap == SIZE * 1000


def test_a_network_that_is_too_slow_keeps_it_whole():
    made, everybody = crowded()
    for _ in range(20):
        made.transfers.observe("p", "d", 16_000, 60.0, 1.0)
    assert chosen(made, demand(), everybody)[1] is None


def test_the_price_is_that_of_the_policys_cost_of_legs():
    made, everybody = crowded()
    asked = demand()
    whole, apart = chosen(made, asked, everybody)
    cost, rest = price(made.policy), (whole.choice.future, whole.choice.after)
    computed = sum(cost.of_all(replace(asked, output=0.0, residual=0), [everybody[0]], *rest)[0])
    written = min(sum(one) for one in cost.of_all(asked, everybody[1:], *rest, asked.tokens - 1))
    assert apart.seconds == pytest.approx(computed + LATENCY + asked.tokens * TOKEN_BYTES / BANDWIDTH + written)
    assert apart.whole_seconds == pytest.approx(min(map(sum, cost.of_all(asked, everybody[1:], *rest))))


def test_legs_count_a_pause_of_another_stream_as_a_second_between_the_tokens_of_the_requests_own_answer():
    made, [_, decoder, _] = fleet()
    stream_on(made, decoder, 10)
    asked = demand(output=200.0)
    alone, legs = (dict(zip(one.names, one.of_all(asked, [decoder])[0])) for one in (COST, price(made.policy)))
    [base] = CostGroup().step.coefficients[:1]
    own = legs["decode"] / (200 * base)  # what a second of its decode steps counts: nobody else's context is in them
    assert legs["stall"] == pytest.approx(own * decoder.costs.prefill_seconds(asked.tokens, 0) * 10)
    assert of_policy(made.policy) is COST and {name: alone[name] for name in COST.names if name != "stall"} == {
        name: legs[name] for name in COST.names if name != "stall"
    }


def test_what_the_decoder_holds_is_not_moved():
    made, everybody = crowded(held=(0, 300, 0))
    _, apart = chosen(made, demand(), everybody)
    assert (apart.decoder.replica, apart.moved) == ("d", demand().tokens - 300 * SIZE)


@pytest.mark.parametrize("first", [0, 1])
def test_a_prompt_in_host_memory_is_worth_as_much_beside_replicas_that_pass_caches_on_in_another_way(first):
    """`first`: which of the two ways is named first."""
    made = Router(make("least_time"), Prefixes(0, 0, 0, 0, lower={0: [("cpu", 1000)]}), Ledger(), CostGroup())
    p, d, q, e = [made.add(name, slot) for slot, name in enumerate("pdqe")]
    for one in (d, e):
        stream_on(made, one)
    whole = made.evaluate(demand(), made.targets([d, e]), 1.0)
    alone = two_legs.choose(made, whole, [p], [d], 1.0)
    pairings = [([p], [d]), ([q], [e])]
    apart = two_legs.choose_among(made, two_legs.ways(made, whole, [pairings[first], pairings[1 - first]], 1.0))
    assert apart.prefiller is p and apart.seconds == pytest.approx(alone.seconds)
    computing, *_ = two_legs.commit(made, whole, apart, 1.0)
    assert (computing.cached, computing.lower) == (16_000, (("cpu", 16_000),))


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_load", "power_of_two", "prefix_affinity"])
def test_rules_that_do_not_count_in_seconds_take_legs_wherever_there_is_more_than_a_block_to_compute(policy):
    made, everybody = fleet(policy)
    assert chosen(made, demand(), everybody)[1].seconds is None
    assert chosen(made, demand(1), everybody)[1] is not None
    assert chosen(made, Demand(SIZE, SIZE), everybody)[1] is None


@pytest.mark.parametrize("asked", [Demand(tokens=0), demand(reads_cache=False)])
def test_what_has_no_prompt_or_reads_no_cache_stays_whole(asked):
    made, everybody = fleet("round_robin")
    assert chosen(made, asked, everybody)[1] is None


def test_both_legs_are_counted_at_once_and_each_ends_by_itself():
    made, everybody = fleet("round_robin")
    asked = demand()
    whole, apart = chosen(made, asked, everybody)
    first, second, _ = two_legs.commit(made, whole, apart, 1.0)
    decoder = second.candidate.replica
    assert made.ledger.own("p") == (1, 1, asked.tokens, 0, 0, 0) and first.computing
    assert made.ledger.own(decoder) == (1, 0, 0, 1, asked.tokens, asked.residual) and not second.computing
    assert [told[:2] for told in made.map.told] == [("expect", first.candidate.slot), ("expect", second.candidate.slot)]
    made.first_token(first, 2.0)
    made.finish(first, reported=0)
    made.abandon(second, computed=False)
    assert made.ledger.own("p") == made.ledger.own(decoder) == NOTHING
    assert made.map.told[-1][:2] == ("take back", second.candidate.slot)


def test_a_bug_in_a_policy_leaves_neither_leg_reserved():
    made, everybody = fleet("round_robin")
    whole, apart = chosen(made, demand(), everybody)

    def placed(*_):
        raise ZeroDivisionError

    made.placed = placed
    with pytest.raises(ZeroDivisionError):
        two_legs.commit(made, whole, apart, 1.0)
    assert not made.ledger.total().requests


def test_a_stream_that_comes_computed_says_nothing_of_the_prompts_there():
    made, (_, decoder, _) = fleet()
    made.ledger.reserve("d", 500, 500, now=7.0)
    load = decoder.load
    before = load.since, load.begun, load.begun_tokens
    reservation = made.ledger.reserve_decode("d", 900)
    assert (load.since, load.begun, load.begun_tokens) == before == (7.0, 1, 500)
    assert (load.prefilling, load.decoding, load.context_tokens) == (1, 1, 900)
    made.ledger.release(reservation)
    assert (load.prefilling, load.decoding, load.context_tokens) == (1, 0, 0)


def test_by_turns_pairs_of_several_kinds_have_their_part():
    """Of two ways of moving caches, or two groups that cannot fetch from each other, the first had every request."""
    made = Router(make("round_robin"), Prefixes(0, 0, 0, 0, 0), Ledger(), CostGroup())
    p, d, q, e, f = [made.add(name, slot) for slot, name in enumerate("pdqef")]
    counts = dict.fromkeys("pdqef", 0)
    for _ in range(30):
        whole = made.evaluate(demand(), made.targets([d, e, f]), 1.0)
        apart = two_legs.choose_among(made, two_legs.ways(made, whole, [([p], [d]), ([q], [e, f])], 1.0))
        for placement in two_legs.commit(made, whole, apart, 1.0)[:2]:
            counts[placement.candidate.replica] += 1
            made.abandon(placement, computed=False)
    assert counts == {"p": 10, "d": 10, "q": 20, "e": 10, "f": 10}


@pytest.mark.parametrize("policy", ["round_robin", "least_time"])
def test_a_pair_of_the_requests_own_space_has_legs_beside_replicas_of_another(policy):
    """As in a fleet that is half updated: the pair of one version had none while the other one was there."""
    made, (p, d, other) = fleet(policy)
    other.space = 1
    stream_on(made, d, 100), stream_on(made, other, 100)
    asked = demand(also=Demand(8_001, 32, 1, hashes=range(1, 251), space=1))
    whole = made.evaluate(asked, made.targets([d, other]), 1.0)
    assert whole.spaces is not None
    [ways] = two_legs.ways(made, whole, [([p], [d, other])], 1.0)
    assert (ways.prefillers, ways.decoders) == ([p], [d])
    apart = two_legs.choose_among(made, [ways])
    assert apart is not None and (apart.prefiller, apart.decoder) == (p, d)
    for placement in two_legs.commit(made, whole, apart, 1.0)[:2]:
        made.abandon(placement, computed=False)


@pytest.mark.parametrize("policy", ["round_robin", "least_time"])
def test_each_space_that_has_both_sides_has_legs(policy):
    """Two pairs of one variant and two of another: each request goes to two of one, in tokens of its own."""
    made = Router(make(policy), Prefixes(*[0] * 8), Ledger(), CostGroup())
    everybody = [made.add(f"{side}{slot}", slot) for slot, side in enumerate("ppddppdd")]
    for one in everybody[4:]:
        one.space = 1
    first, second = [[one for one in everybody if one.replica[0] == side] for side in "pd"]
    for one in second:
        stream_on(made, one)
    seen = set()
    for _ in range(4):
        other = Demand(12_001, 32, 1, hashes=range(1, 376), space=1, now=1.0)
        whole = made.evaluate(demand(also=other), made.targets(second), 1.0)
        ways = two_legs.ways(made, whole, [(first, second)], 1.0)
        spaces = [[{one.space for one in side} for side in (way.prefillers, way.decoders)] for way in ways]
        assert spaces == [[{0}, {0}], [{1}, {1}]]
        apart = two_legs.choose_among(made, ways)
        *placements, move = two_legs.commit(made, whole, apart, 1.0)
        [space] = {one.candidate.space for one in placements}
        for placement in placements:
            assert placement.demand is (whole.demand, other)[space]
        tokens = (whole.demand, other)[space].tokens
        assert placements[0].reservation.uncached == tokens
        assert move == (tokens, made.transfers.seconds(*[one.candidate.replica for one in placements], tokens, 1.0))
        assert placements[0].reservation.due == pytest.approx(1.0 + placements[0].ttft + move.seconds)
        seen.add(space)
    assert seen == {0, 1}


@pytest.mark.parametrize("held, space, cached", [(0, 0, 8000), (0, 1, 187 * 32), (300, 1, 300 * 32)])
def test_what_other_gateways_sent_to_a_prefiller_counts_in_tokens_of_its_own_space(held, space, cached):
    """The shared ledger says it in those of the request as it was asked, 16,001 here and 12,001 in space 1. `held`:
    blocks that this gateway knows of there."""
    made = Router(make("least_time"), Prefixes(0, 0, held, 0), Ledger(), CostGroup())
    pairs = [[made.add(f"{side}{number}", 2 * number + at) for at, side in enumerate("pd")] for number in range(2)]
    for one in pairs[1]:
        one.space = 1
    first, second = pairs[space]
    other = Demand(12_001, 32, 1, hashes=range(1, 376), space=1, now=1.0)
    whole = made.evaluate(demand(also=other), made.targets([pairs[0][1], pairs[1][1]]), 1.0)
    apart = two_legs.choose_among(made, two_legs.ways(made, whole, [([first], [second])], 1.0), must=True)
    told = [Decision(0, one.replica, tokens, (0,) * 6, True) for one, tokens in ((first, 8000), (second, 16_000))]
    computing, _, move = two_legs.commit(made, whole, apart, 1.0, tuple(told))
    tokens = (whole.demand, other)[space].tokens
    assert (computing.overlap, computing.reservation.uncached) == (cached, tokens - cached)
    assert move.tokens == tokens, "what the decoder is going to hold is on its way"


def test_a_space_with_one_side_has_no_legs():
    made, (p, d, other) = fleet()
    other.space = 1
    stream_on(made, other)
    whole = made.evaluate(demand(also=Demand(8_001, 32, 1, hashes=range(1, 251), space=1)), made.targets([other]), 1.0)
    assert two_legs.ways(made, whole, [([p], [other])], 1.0) == []


def test_what_a_replica_of_another_space_holds_counts_in_the_price_of_the_whole():
    made, (p, d, other) = fleet(held=(0, 0, 249))
    other.space = 1
    stream_on(made, d, 100)
    asked = demand(also=Demand(8_001, 32, 1, hashes=range(1, 251), space=1))
    whole = made.evaluate(asked, made.targets([d, other]), 1.0)
    assert whole.candidates[whole.choice.index] is other and other.overlap > 15_000
    assert two_legs.choose_among(made, two_legs.ways(made, whole, [([p], [d])], 1.0)) is None and other.overlap > 15_000


def test_transfers_are_learned_of_each_pair_and_of_all_for_those_that_have_not_met():
    learned = Transfers()
    prior = LATENCY + 1000 * TOKEN_BYTES / BANDWIDTH
    assert learned.seconds("p", "d", 1000, 1.0) == pytest.approx(prior)
    for _ in range(50):
        learned.observe("p", "d", 1000, 10 * prior, 1.0)
    assert learned.seconds("p", "d", 1000, 1.0) == pytest.approx(10 * prior, rel=0.01)
    assert learned.seconds("p", "new", 1000, 1.0) == pytest.approx(10 * prior, rel=0.01)
    for _ in range(50):
        learned.observe("q", "d", 1000, prior, 1.0)
    assert learned.seconds("p", "d", 1000, 1.0) == pytest.approx(10 * prior, rel=0.01)
    learned.forget("p")
    assert learned.seconds("p", "d", 1000, 1.0) < 5 * prior


@pytest.mark.parametrize("seconds", [-3.0, 0.0, 1e-9, 1e9])
def test_no_observation_makes_a_price_that_is_none(seconds):
    learned = Transfers()
    for _ in range(100):
        learned.observe("p", "d", 100, seconds, 1.0)
    assert 0 < learned.seconds("p", "d", 100, 1.0) < math.inf


def test_a_pair_whose_transfer_failed_is_left_out_for_a_while_twice_as_long_each_time():
    made, everybody = fleet("round_robin")
    made.transfers.failed("p", "d", 0.0)
    assert made.transfers.paused("p", "d", 9.0) and not made.transfers.paused("p", "d", 11.0)
    assert not made.transfers.paused("p", "e", 1.0)
    made.transfers.failed("p", "d", 11.0)
    assert made.transfers.paused("p", "d", 30.0)
    made.transfers.observe("p", "d", 100, 0.1, 1.0)
    assert not made.transfers.paused("p", "d", 11.0)
    for decoder in ("d", "e"):
        made.transfers.failed("p", decoder, 1.0)
    assert chosen(made, demand(), everybody, 2.0)[1] is None


def test_a_pair_with_another_process_is_tried_at_once_and_left_out_for_longer_if_that_fails_too():
    made, _ = fleet("round_robin")
    for decoder in ("d", "e"):
        made.transfers.failed("p", decoder, 0.0)
    made.lost("d")
    assert not made.transfers.paused("p", "d", 1.0) and made.transfers.paused("p", "e", 1.0)
    made.transfers.failed("p", "d", 1.0)
    assert made.transfers.paused("p", "d", 20.0) and not made.transfers.paused("p", "d", 22.0)


def slow_network(seconds=60.0, observations=3, at=1.0):
    """A fleet whose decoders are full of streams, and whose transfers have taken so long."""
    made, everybody = crowded()
    for one in everybody[1:]:
        for _ in range(1 + observations):  # the first one is forgotten
            made.transfers.observe("p", one.replica, 16_000, seconds, at)
    return made, everybody


def first_taken(made, everybody, at, until):
    """When a prompt is in two legs again, asked for every second."""
    while at < until and chosen(made, demand(), everybody, at)[1] is None:
        at += 1.0
    return at


def test_one_transfer_that_took_too_long_does_not_end_all_legs_for_good():
    made, everybody = slow_network(observations=1)
    assert 10.0 < first_taken(made, everybody, 1.0, 10_000.0) < 300.0


def test_a_network_that_is_slow_is_tried_by_one_request_at_a_time_and_more_seldom_the_longer_it_is_known():
    made, everybody = slow_network(observations=1)
    at, waits = 1.0, []
    for _ in range(6):
        tried = first_taken(made, everybody, at, at + 10_000.0)
        whole, apart = chosen(made, demand(), everybody, tried)
        for placement in two_legs.commit(made, whole, apart, tried)[:2]:
            made.abandon(placement, computed=False)
        assert chosen(made, demand(), everybody, tried + 1.0)[1] is None, "the next one waits for what becomes of it"
        made.transfers.observe("p", apart.decoder.replica, 16_000, 60.0, tried + 60.0)
        waits.append(tried - at)
        at = tried + 60.0
    assert waits[-1] > 4 * waits[0] > 400.0 and waits == sorted(waits)


def test_a_network_that_is_quick_again_is_known_after_a_trial_or_two():
    made, everybody = slow_network(observations=20)
    at = 1.0
    for _ in range(3):
        at = first_taken(made, everybody, at, at + 10_000.0)
        apart = chosen(made, demand(), everybody, at)[1]
        made.transfers.observe("p", apart.decoder.replica, apart.moved, made.transfers.prior("p", apart.moved), at)
    assert at < 1800.0 and chosen(made, demand(), everybody, at + 1.0)[1] is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_trial_is_believed_by_what_was_left_when_it_began(seed):
    """The trial itself is a transfer that began: what it began with must not count as what was known."""
    learned, at, random = Transfers(), 0.0, Random(seed)
    prior = learned.prior("p", 16_000)
    for _ in range(600):
        at += 0.1
        learned.observe("p", "d", 16_000, 20 * prior, at)
    waits = []
    for _ in range(5):  # the network stays as slow as it was
        began = at
        while learned.seconds("p", "d", 16_000, at) > 3 * prior:
            at += 1.0
        waits.append(at - began)
        learned.begin("p", "d", at)
        learned.observe("p", "d", 16_000, 20 * prior * random.uniform(0.9, 1.1), at + 1.0)
    assert waits[-1] > 8 * waits[0]
    while learned.seconds("p", "d", 16_000, at) > 3 * prior:
        at += 1.0
    learned.begin("p", "d", at)
    learned.observe("p", "d", 16_000, prior, at + 1.0)  # and now it is quick
    assert learned.seconds("p", "d", 16_000, at + 2.0) < 3 * prior


def test_the_first_transfer_of_a_pair_teaches_nothing_since_engines_meet_in_it():
    learned = Transfers()
    before = learned.seconds("p", "d", 1000, 1.0)
    learned.observe("p", "d", 1000, 30.0, 1.0)
    assert learned.seconds("p", "d", 1000, 1.0) == learned.seconds("p", "e", 1000, 1.0) == before
    learned.observe("p", "d", 1000, 3 * before, 2.0)
    assert learned.seconds("p", "d", 1000, 2.0) == pytest.approx(3 * before)
    learned.restarted("d")
    learned.observe("p", "d", 1000, 30.0, 3.0)
    assert learned.seconds("p", "d", 1000, 3.0) == pytest.approx(3 * before, rel=0.1)
