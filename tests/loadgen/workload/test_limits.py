"""What clients say of a reply's length is a bound, and does not give the length away."""

import random

import pytest

from loadgen.workload import generators
from loadgen.workload.limits import set_limits


def load(requests=3000, **shape):
    return generators.agents(random.Random(1), requests, **shape)


def turns(conversations):
    for conversation in conversations:
        for turn in conversation.turns:
            yield turn
            yield from turns(turn.forks)


def test_a_third_of_the_clients_says_nothing_a_third_a_round_number_and_a_third_a_bound_of_its_own():
    made = load()
    set_limits(made, "mixed", 1)
    kinds = [{turn.limit for turn in turns([conversation])} for conversation in made]
    assert all(len(kind) == 1 for kind in kinds), "one client, one limit"
    limits = [kind.pop() for kind in kinds]
    assert limits.count(None) == pytest.approx(len(made) / 3, rel=0.2)
    assert limits.count(4096) == pytest.approx(len(made) / 3, rel=0.2)
    assert {limit for limit in limits if limit not in (None, 4096)} <= {64, 128}


def test_a_limit_is_never_below_a_reply_and_seldom_its_length():
    made = generators.rollouts(random.Random(1), 4000, output_len=400)
    set_limits(made, "mixed", 1)
    limited = [turn for turn in turns(made) if turn.limit is not None]
    assert all(turn.limit >= turn.max_tokens for turn in limited)
    assert sum(turn.limit == turn.max_tokens for turn in limited) < len(limited) / 100


def test_limits_are_the_seeds_and_change_nothing_else():
    one, other = load(), load()
    set_limits(one, "mixed", 1)
    set_limits(other, "mixed", 2)
    assert [turn.limit for turn in turns(one)] != [turn.limit for turn in turns(other)]
    set_limits(other, "mixed", 1)
    assert one == other
    set_limits(one, "exact", 1)
    assert all(turn.limit == turn.max_tokens for turn in turns(one))
    set_limits(one, "none", 1)
    assert one == load()
