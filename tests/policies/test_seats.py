"""How many requests an engine runs at once, found by what waits in it, and what is made of that."""

from dataclasses import replace
from math import inf

import pytest

from policies import CostGroup, Demand, Ledger, Load, Router, make
from policies.quotes import quote
from policies.seats import CALM, ENOUGH, Seats

from .test_router import Prefixes

FULL = Load(
    requests=11, prefilling=3, prefill_tokens=300, decoding=8, context_tokens=8000, output_tokens=1100, waiting=3
)


def found(*loads) -> float:
    seats = Seats()
    for load in loads:
        seats.scraped(load)
    return seats.count


def test_some_wait_while_nobodys_prompt_is_computed():
    assert found(*[FULL] * ENOUGH) == 8


@pytest.mark.parametrize(
    "changed",
    [
        {"waiting": 2},  # a prompt is computed: they may wait for that step
        {"waiting": 0},
        {"kv_usage": 0.95},  # they may wait for cache
        {"decoding": 0},
    ],
    ids=str,
)
def test_what_waits_for_something_else_says_nothing(changed):
    assert found(*[replace(FULL, **changed)] * 20) == inf


def test_a_moment_between_two_steps_is_not_believed():
    others = [replace(FULL, decoding=count) for count in (7, 8, 6, 8, 7)]
    assert found(*others) == inf
    assert found(*[FULL] * (ENOUGH - 1), replace(FULL, waiting=0), FULL) == inf


def test_more_that_run_are_more_seats():
    assert found(*[FULL] * ENOUGH, replace(FULL, decoding=9, waiting=0)) == inf


def test_where_nobody_waits_for_long_one_more_is_tried():
    calm = replace(FULL, requests=8, prefilling=0, waiting=0)
    assert found(*[FULL] * ENOUGH, *[calm] * (CALM - 1)) == 8
    assert found(*[FULL] * ENOUGH, *[calm] * CALM) == 9
    idle = replace(calm, requests=3, decoding=3)
    assert found(*[FULL] * ENOUGH, *[idle] * 10 * CALM) == 8


def test_a_quote_counts_the_wait_for_a_seat():
    router = Router(make("least_time"), Prefixes(0), Ledger(), CostGroup())
    candidate = router.add("r0", 0)
    for begun in [True] * 8 + [False] * 3:
        reservation = router.ledger.reserve("r0", 100, 100, output=100)
        if begun:
            router.ledger.first_byte(reservation)
    demand = Demand(100, 16, 1, now=0.0, max_tokens=100)
    router.weighed(demand, router.targets([candidate]), 0.0)
    before = quote(candidate, demand)
    for _ in range(ENOUGH):
        router.ledger.scraped("r0", 3, 0.1)
        router.count_seats("r0")
    after = quote(candidate, demand)
    assert candidate.seats == 8
    assert after.wait - before.wait == pytest.approx(before.left * 4 / 8)  # four have to end, of eight
