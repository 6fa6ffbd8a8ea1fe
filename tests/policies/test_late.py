"""A replica from which nothing comes that was expected is late, and costs as much more as it is late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import UNTIMED, Choice, CostGroup, Demand, Ledger, Load, Router, make, two_legs
from policies.estimates import estimate
from policies.ledger import FAR, Reservation, Unanswered
from policies.legs import LegChoice

from .test_router import SIZE, Prefixes, Told

START = 1000.0


def routing(*held, policy=None):
    router = Router(policy or make("least_time"), Prefixes(*held), Ledger(), CostGroup())
    return router, router.targets([router.add(f"r{slot}", slot) for slot in range(len(held))])


def prompt(prefix, now=START, **more):
    """`prefix` tokens that others have as well, and 50 of its own."""
    blocks = prefix // SIZE
    return Demand(SIZE * blocks + 50, SIZE, 1, hashes=range(1, blocks + 1), now=now, max_tokens=100, **more)


@pytest.mark.parametrize("rate", (2, 20))
@pytest.mark.parametrize("prefix", (2000, 8000, 30_000))
@pytest.mark.parametrize("count", (2, 20), ids=("one by one", "as arrays"))
def test_nobody_waits_longer_for_a_holder_that_hangs_than_computing_takes_elsewhere(count, prefix, rate):
    """The first request finds out. Whoever comes once it is later than computing takes goes elsewhere: how many came
    meanwhile does not matter."""
    router, targets = routing(prefix // SIZE, *[0] * (count - 1))
    first = router.place(prompt(prefix), targets, START)
    elsewhere = router.candidates["r1"].costs.ttft_seconds(Load(), prefix + 50, 0)
    expected, now, there = first.reservation.due - START, START, 0
    while router.place(prompt(prefix, now := now + 1 / rate), targets, now).candidate is first.candidate:
        there += 1
    assert now - START <= max(1.5 * (elsewhere + expected), 1 / rate) + 1 / rate
    assert first.candidate.replica == "r0" and there <= max(0, 1.5 * (elsewhere + expected) * rate)


def test_a_replica_that_is_as_quick_as_expected_keeps_its_prefix():
    router, targets = routing(500, 0)
    now = START
    for _ in range(50):
        placed = router.place(prompt(8000, now), targets, now)
        assert placed.candidate.replica == "r0"
        now = placed.reservation.due
        router.first_token(placed, now, now - placed.at)
        router.finish(placed, per_token=0.006, output=20)
        now += 0.01


def test_one_that_goes_on_is_as_good_as_before():
    router, targets = routing(500, 0)
    waiting = [router.place(prompt(8000, START + n / 1000), targets, START) for n in range(2)]
    load = waiting[0].candidate.load
    assert router.place(prompt(8000, START + 3), targets, START + 3).candidate.replica == "r1"
    router.first_token(waiting[0], START + 3.1)
    assert load.due == START + 3.1, "the other one is expected from now on"
    router.first_token(waiting[1], START + 3.2)
    assert load.due == FAR
    assert router.place(prompt(8000, START + 3.3), targets, START + 3.3).candidate.replica == "r0"


def test_a_request_that_was_overtaken_says_nothing_of_its_replica():
    """An engine that puts others first, or has lost it, computes all the same."""
    router, targets = routing(500, policy=Told())
    lost = router.place(prompt(8000), targets, START)
    later = router.place(prompt(8000, START + 1), targets, START + 1)
    load = lost.candidate.load
    assert load.due == lost.reservation.due
    router.first_token(later, START + 9)
    assert load.due == FAR
    router.abandon(lost)
    assert load.due == FAR


def test_a_short_request_that_is_given_up_leaves_the_watch_on_longer_ones():
    router, targets = routing(0, policy=Told())
    long = router.place(prompt(8000), targets, START)
    short = router.place(prompt(SIZE, START - 1), targets, START)
    load = long.candidate.load
    router.ledger.expect(short.reservation, START)
    assert load.due == START < long.reservation.due
    router.abandon(short)
    assert load.due == long.reservation.due


@given(
    st.lists(st.tuples(st.sampled_from(["add", "answered", "leave", "expect"]), st.integers(0, 9), st.integers(0, 99)))
)
def test_what_is_due_is_what_the_rule_says(steps):
    """Held to a list: the least `due` of those that wait and were not overtaken, though not before the last answer."""
    load, all_, waiting, answered_at = Load(), [], [], UNTIMED
    unanswered = Unanswered(load)
    for now, (what, which, due) in enumerate(steps):
        if what == "add":
            all_.append(one := Reservation("r", load, (), 0, 0, due=float(due)))
            unanswered.add(one)
            waiting.append(one)
        elif all_:
            one = all_[which % len(all_)]
            if what == "answered":
                unanswered.answered(one, now)
                answered_at = now
                if one in waiting:
                    del waiting[: waiting.index(one) + 1]
            else:
                waited = one in waiting
                unanswered.leave(one)
                if waited:
                    waiting.remove(one)
                if what == "expect" and waited:
                    one.due = float(due)
                    unanswered.add(one)
                    waiting.append(one)
        assert load.due == (max(min(one.due for one in waiting), answered_at) if waiting else FAR)
        assert len(unanswered._heap) <= 2 * len(waiting) + 66


def test_a_request_that_nothing_more_is_expected_of_says_nothing():
    router, targets = routing(500, policy=Told())
    one = router.place(prompt(8000), targets, START)
    router.disregard(one)
    assert one.candidate.load.due == FAR
    router.first_token(one, START + 100)
    router.finish(one)
    assert one.candidate.load.due == FAR and one.candidate.load.requests == 0


def test_an_answer_in_one_piece_is_expected_with_its_last_token():
    """Until then it decodes, also where its prompt is taken for computed."""
    router, targets = routing(500, 0)
    for _ in range(200):
        router.outputs.learn(prompt(8000), 100)
    for _ in range(50):
        targets.candidates[0].costs.observe_itl(0.006, 1, 0)
    one = router.place(prompt(8000, streams=False), targets, START)
    router.first_token(one, None)  # assumed
    decodes = 100 * router.candidates["r0"].costs.stream_step(1, 8000)
    seen = START + decodes
    assert router.place(prompt(8000, seen, streams=False), targets, seen).candidate.replica == "r0"
    assert seen < one.reservation.due < START + 5 * decodes
    hung = START + 5 * decodes
    assert router.place(prompt(8000, hung, streams=False), targets, hung).candidate.replica == "r1"


def test_of_steps_that_nobody_has_seen_the_slowest_are_expected():
    """An engine's answers in one piece do not tell how long its steps are."""
    router, targets = routing(500, 0)
    one = router.place(prompt(8000, streams=False), targets, START)
    assert one.reservation.due > START + 100 * 0.1
    assert router.place(prompt(8000, START + 10, streams=False), targets, START + 10).candidate is one.candidate


def test_an_answer_in_one_piece_is_a_sign_of_life():
    router, targets = routing(500, policy=Told())
    one, other = [router.place(prompt(8000, START + n, streams=False), targets, START) for n in range(2)]
    router.answered(one, START + 50)
    assert one.candidate.load.due == START + 50
    router.answered(other, START + 51)
    assert one.candidate.load.due == FAR


def test_of_an_answer_whose_first_byte_nobody_may_tell_of_the_end_is_waited_for():
    router, targets = routing(500, policy=Told())
    one = router.place(prompt(8000), targets, START)
    first = one.reservation.due
    router.tells_end_alone(one)
    assert one.candidate.load.due > first + 0.5


def test_without_a_clock_nothing_is_late():
    router, targets = routing(500, 0)
    timed = router.place(prompt(8000), targets, START)
    assert router.place(prompt(8000, UNTIMED), targets, START + 99).reservation.due == FAR
    candidate = timed.candidate
    assert candidate.costs.ttft_seconds(candidate.load, 50, 8000) < 1


def test_with_other_gateways_it_is_late_by_its_own_requests():
    """Of those only the sums are known, and not when a step begins."""
    router, targets = routing(500, 0)
    router.ledger.share(True)
    one = router.place(prompt(8000), targets, START)
    assert (one.candidate.load.since, one.candidate.load.due) == (FAR, one.reservation.due)
    router.ledger.others("r0", (3, 2, 100, 1, 5000, 60), START + 1)
    assert router.place(prompt(8000, START + 3), targets, START + 3).candidate.replica == "r1"
    router.first_token(one, START + 4)
    assert one.candidate.load.since == FAR
    alone, targets = routing(500)
    alone.ledger.share(True)
    alone.ledger.share(False)
    assert alone.place(prompt(100), targets, START).candidate.load.since == START


def test_what_is_learned_is_as_if_it_had_not_been_late():
    learned = []
    for late in (0.0, 5.0):
        costs, before = CostGroup().add("r"), Load(requests=1, prefilling=1, prefill_tokens=300, due=START - late)
        for _ in range(20):
            costs.observe_ttft(0.2, 1000, 500, before, START)
        learned.append((costs.group.ttft.coefficients, costs.ttft.value, costs.error))
    assert learned[0] == learned[1]


def test_it_is_predicted_with_what_it_is_late():
    router, _ = routing(500, policy=Told())
    candidate = router.candidates["r0"]
    demand = prompt(8000)
    router.evaluate(demand, router.targets([candidate]), START)
    on_time = estimate(candidate, demand)
    candidate.load.due = START - 2
    late = estimate(candidate, demand)
    assert (late.ttft - on_time.ttft, late.wait - on_time.wait) == pytest.approx((2, 2))
    placed = router.place(demand, router.targets([candidate]), START)
    assert placed.ttft == pytest.approx(late.ttft) and placed.reservation.due == pytest.approx(START + late.ttft)


def test_legs_are_computed_elsewhere_than_where_prompts_are_late():
    router, targets = routing(500, 0, 0)
    hung, other, decoder = targets.candidates
    hung.load.due = START - 30
    whole = router.evaluate(demand := prompt(8000), router.targets([decoder]), START)
    [ways] = two_legs.ways(router, whole, [([hung, other], [decoder])], START)
    chosen = two_legs.choose_among(router, [ways], must=True)
    assert chosen.prefiller is other
    first, second, move = two_legs.commit(router, whole, chosen, START)
    assert move == (chosen.moved, router.transfers.seconds("r1", "r2", chosen.moved, 1.0))
    assert other.load.due == pytest.approx(START + first.ttft + move.seconds)
    assert decoder.load.due == FAR, "its part begins when the other one is done"
    router.first_token(first, START + 1)
    assert other.load.due == FAR
    assert isinstance(chosen, LegChoice) and second.demand is demand


def test_one_is_not_late_for_the_time_in_which_the_gateway_did_not_look():
    router, targets = routing(500, 0)
    waits = router.place(prompt(8000), targets, START)
    told, back = router.ledger.follow(), START + 10
    router.ledger.held_up(back)
    assert waits.candidate.load.due == back and "r0" in set(told.since(0))
    assert router.place(prompt(8000, back), targets, back).candidate.replica == "r0"
    later = back + 10
    assert router.place(prompt(8000, later), targets, later).candidate.replica == "r1", "it is late from then on"


def test_a_rule_that_predicts_nothing_has_its_requests_expected_too():
    router, targets = routing(500, policy=make("round_robin"))
    one = router.place(prompt(8000), targets, START)
    assert one.reservation.due == pytest.approx(START + one.ttft)
    assert Choice(0).ttft is None
