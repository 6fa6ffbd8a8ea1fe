"""A global prefill queue in virtual time: whoever is free takes the next, and nobody is forgotten."""

from itertools import pairwise

import pytest

from bench.rules.prefill_queue import PrefillQueue, make_legs
from loadgen.simulate import Setting, simulate
from tests.loadgen.simulate.test_fleet_faults import work
from tests.loadgen.simulate.test_legs import PROFILE, fleet, nothing_is_left, turn


def test_the_free_take_those_who_wait_in_order_and_the_busy_none():
    queue = PrefillQueue(2)
    queue.add("a")
    assert not queue.is_full
    queue.add("b")
    queue.add("c")
    assert queue.is_full and [*queue.ready([4, 7])] == [(4, "a"), (7, "b")] and [*queue.ready([4, 7])] == []
    queue.freed(7)
    assert [*queue.ready([4, 7])] == [(7, "c")] and not queue.is_full


def test_a_prefiller_computes_one_prompt_after_the_other():
    made = fleet("queue:0", roles=["prefill", "decode"])
    records = [made.send(turn(400, first=1 + number * 10**6)) for number in range(3)]
    made.run()
    alone = PROFILE.step.seconds(6408, 0.0, 0, 0, 0.0)
    firsts = sorted(record.first for record in records if record.prefilled_by == 0)
    assert len(firsts) == 3 and all(after - before >= alone * 0.9 for before, after in pairwise(firsts))
    nothing_is_left(made)


def test_two_prefillers_share_the_queue_whatever_was_counted_on():
    made = fleet("queue:0", roles=["prefill", "prefill", "decode"])
    long = made.send(turn(2000))
    short = [made.send(turn(100, first=10**6 * number)) for number in range(1, 4)]
    made.run()
    assert {one.prefilled_by for one in short} == {1 - long.prefilled_by}, "the long prompt holds up nobody"
    nothing_is_left(made)


def test_where_two_wait_others_stay_whole():
    made = fleet("queue:0", roles=["prefill", "decode"])
    records = [made.send(turn(400, first=1 + number * 10**6)) for number in range(6)]
    made.run()
    assert [one.prefilled_by for one in records].count(0) == 3, "one is computed, two wait"
    nothing_is_left(made)


@pytest.mark.parametrize("legs", ["queue", "queue:100"])
def test_a_prefiller_that_is_lost_leaves_nothing_behind(legs):
    made = fleet(legs, roles=["prefill", "decode", "decode"])
    records = [made.send(turn(400, first=1 + number * 10**6)) for number in range(3)]
    made.at(0.05, made.lose, 0)
    made.at(3.0, made.restore, 0)
    made.at(4.0, lambda: records.append(made.send(turn(500, first=9 * 10**7))))
    made.run()
    assert [record.error for record in records] == [None] * 4
    nothing_is_left(made)


@pytest.mark.parametrize("legs", ["queue", "queue:200"])
def test_every_request_of_a_load_is_answered_and_twice_the_same(legs):
    def played():
        roles = ["prefill", "prefill", "decode", "decode"]
        return simulate(work(), Setting("least_time", [PROFILE] * 4, 1, roles=roles, legs=legs, gateways=2))

    one, other = played(), played()
    assert [record.error for record in one.done] == [None] * len(one.done)
    assert [record.last for record in one.done] == [record.last for record in other.done]


@pytest.mark.parametrize("text", ["queue:", "queue:-1", "queue:x", "line"])
def test_another_rule_is_refused(text):
    with pytest.raises(ValueError, match="no rule for legs; there are .*, queue, queue:N"):
        make_legs(text)
