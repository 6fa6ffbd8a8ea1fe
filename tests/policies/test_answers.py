"""`least_time` weighs whole answers: what follows the first token, for a request and for those that it meets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Candidate, CostGroup, Demand, Load, make
from policies.rules.least_time import TERMS, WAITS

BUSY = st.tuples(st.integers(0, 60), st.integers(0, 8000), st.integers(0, 4), st.integers(0, 2000))


def candidates_of(*loads, overlaps=()):
    group = CostGroup()
    made = []
    for number, (decoding, context, prefilling, left) in enumerate(loads):
        both, ahead = decoding + prefilling, 500 * prefilling
        load = Load(both, prefilling, ahead, decoding, decoding * context, both * left)
        load.timed(None)
        made.append(Candidate(f"r{number}", 0, load, group.add(f"r{number}")))
    for one, overlap in zip(made, overlaps):
        one.overlap = overlap
    return made


def totals(demand, candidates):
    return [sum(terms.values()) for terms in make("least_time").choose(demand, candidates, explain=True).terms]


def asks(output, tokens=2000):
    return Demand(tokens, output=output, residual=max(1, output // 2))


@given(BUSY, st.integers(1, 4000), st.integers(1, 4000))
def test_a_longer_answer_costs_no_less(load, one, other):
    short, long = sorted((one, other))
    candidates = candidates_of(load)
    assert totals(asks(short), candidates)[0] <= totals(asks(long), candidates)[0] * (1 + 1e-9)


@given(BUSY, st.integers(1, 4000), st.integers(1, 60), st.integers(0, 2000))
def test_more_streams_or_more_that_is_to_come_of_them_cost_no_less(load, output, more, left):
    decoding, context, prefilling, before = load
    quiet, busy, longer = candidates_of(
        load, (decoding + more, context, prefilling, before), (decoding, context, prefilling, before + left)
    )
    one, streams, lasting = totals(asks(output), [quiet, busy, longer])
    assert one <= streams * (1 + 1e-9) and one <= lasting * (1 + 1e-9)


def test_long_answers_do_not_gather():
    """Both have as many streams with as much context; those of one are nearly done."""
    candidates = candidates_of((8, 3000, 0, 800), (8, 3000, 0, 20))
    assert make("least_time").choose(asks(1000), candidates).index == 1


def test_a_short_answer_stays_with_its_prefix_where_a_long_one_leaves():
    """1,200 tokens are held where more streams are: computing them again takes 18 ms."""
    candidates = candidates_of((6, 5000, 0, 400), (3, 5000, 0, 400), overlaps=(1200, 0))
    assert make("least_time").choose(asks(4), candidates).index == 0
    assert make("least_time").choose(asks(400), candidates).index == 1


def test_an_answer_is_generated_where_steps_are_quick():
    candidates = candidates_of((0, 0, 0, 0), (0, 0, 0, 0), overlaps=(1600, 0))
    candidates[0].costs.step.value = 2.0
    assert make("least_time").choose(asks(10), candidates).index == 0, "its prompt takes longer than its answer"
    assert make("least_time").choose(asks(400), candidates).index == 1


@given(st.integers(2, 16), st.integers(0, 15), st.integers(1, 4000), BUSY)
def test_an_idle_replica_is_taken_before_a_busy_one(count, idle, output, load):
    idle %= count
    decoding, context, prefilling, left = load
    busy = (decoding + 1, context, prefilling + 1, left)
    candidates = candidates_of(*[(0, 0, 0, 0) if index == idle else busy for index in range(count)])
    assert make("least_time").choose(asks(output), candidates).index == idle


def test_its_own_wait_is_told_apart_from_what_follows():
    [terms] = make("least_time").choose(asks(100), candidates_of((4, 2000, 0, 60)), explain=True).terms
    wait = sum(terms[name] for name in TERMS[:WAITS])
    [candidate] = candidates_of((4, 2000, 0, 60))
    assert wait == pytest.approx(candidate.costs.ttft_seconds(candidate.load, 2000, 0))
    assert terms["decode"] > 0 and terms["crowding"] > 0 and terms["stall"] > 0
