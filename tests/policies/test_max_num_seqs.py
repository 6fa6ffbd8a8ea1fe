"""How many requests an engine runs at once, found by what waits in it, and what is made of that."""

from dataclasses import replace
from math import inf

import pytest

from policies import CostGroup, Demand, Ledger, Load, Router, make
from policies.estimates import estimate
from policies.max_num_seqs import CALM, ENOUGH, MaxNumSeqs

from .test_router import Prefixes

FULL = Load(
    requests=11, prefilling=3, prefill_tokens=300, decoding=8, context_tokens=8000, output_tokens=1100, waiting=3
)
CALMLY = replace(FULL, requests=8, prefilling=0, waiting=0)


def found(*scrapes) -> float:
    """Of loads, with 8 that run if nothing else is said."""
    seats = MaxNumSeqs()
    for scrape in scrapes:
        load, running = scrape if isinstance(scrape, tuple) else (scrape, 8)
        seats.scraped(load, running)
    return seats.count


def test_as_many_run_at_each_look_while_others_wait():
    assert found(*[FULL] * ENOUGH) == 8


def test_answers_in_one_piece_and_what_others_sent_count_as_well():
    whole = replace(FULL, requests=12, prefilling=12, decoding=0, waiting=4)
    others = replace(FULL, requests=1, prefilling=0, decoding=1, waiting=40)
    assert found(*[whole] * ENOUGH) == 8 == found(*[others] * ENOUGH)


@pytest.mark.parametrize(
    "changed",
    [
        {"waiting": 0},
        {"kv_usage": 0.95},  # they may wait for cache
        {"decoding": 9},  # one that is taken to decode waits for a cache that is fetched
    ],
    ids=str,
)
def test_what_waits_for_something_else_says_nothing(changed):
    assert found(*[replace(FULL, **changed)] * 20) == inf


def test_nothing_runs_yet():
    idle = replace(FULL, requests=3, decoding=0)
    assert found(*[(idle, 0)] * 20) == inf


@pytest.mark.parametrize(
    "other", [(FULL, 7), CALMLY, replace(FULL, kv_usage=0.95)], ids=["running", "waiting", "cache"]
)
def test_looks_have_to_agree_in_a_row(other):
    assert found(*[*[FULL] * (ENOUGH - 1), other] * 5) == inf


def test_more_that_run_are_more_seats():
    assert found(*[FULL] * ENOUGH, (replace(FULL, decoding=9, waiting=0), 9)) == inf


def test_where_nobody_waits_for_long_one_more_is_tried():
    taken = [FULL] * ENOUGH
    assert found(*taken, *[CALMLY] * (CALM - 1)) == 8
    assert found(*taken, *[CALMLY] * CALM) == 9
    assert found(*taken, *[*[CALMLY] * (CALM - 1), replace(FULL, kv_usage=0.95)] * 5) == 8
    idle = replace(CALMLY, requests=3, decoding=3)
    assert found(*taken, *[(idle, 3)] * 10 * CALM) == 8


def test_a_quote_counts_the_wait_for_a_seat():
    router = Router(make("least_time"), Prefixes(0), Ledger(), CostGroup())
    candidate = router.add("r0", 0)
    for begun in [True] * 8 + [False] * 3:
        reservation = router.ledger.reserve("r0", 100, 100, output=100)
        if begun:
            router.ledger.first_byte(reservation)
    demand = Demand(100, 16, 1, now=0.0, max_tokens=100)
    router.weighed(demand, router.targets([candidate]), 0.0)
    before = estimate(candidate, demand)
    for _ in range(ENOUGH):
        router.ledger.scraped("r0", 3, 0.1)
        router.learn_max_num_seqs("r0", 8)
    after = estimate(candidate, demand)
    assert candidate.max_num_seqs == 8
    assert after.wait - before.wait == pytest.approx(before.left * 4 / 8)  # four have to end, of eight
    assert after.streams == 8 and after.tpot < before.tpot

    router.regroup("r0", CostGroup())
    assert candidate.max_num_seqs == inf  # another kind of engine
