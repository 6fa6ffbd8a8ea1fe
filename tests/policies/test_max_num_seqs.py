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


TAKEN, ELSEWHERE = [FULL] * ENOUGH, replace(FULL, kv_usage=0.95)
WHOLE = replace(FULL, requests=12, prefilling=12, decoding=0, waiting=4)
OTHERS = replace(FULL, requests=1, prefilling=0, decoding=1, waiting=40)


@pytest.mark.parametrize(
    ("scrapes", "count"),
    [
        (TAKEN, 8),
        ([WHOLE] * ENOUGH, 8),  # answers in one piece count as well
        ([OTHERS] * ENOUGH, 8),  # and so does what other clients sent
        ([CALMLY] * 20, inf),
        ([ELSEWHERE] * 20, inf),  # they may wait for cache
        ([replace(FULL, decoding=9)] * 20, inf),  # one that is taken to decode waits for a cache that is fetched
        ([(replace(FULL, requests=3, decoding=0), 0)] * 20, inf),  # nothing runs yet
        ([*TAKEN[1:], (FULL, 7)] * 5, inf),  # looks have to agree in a row
        ([*TAKEN[1:], CALMLY] * 5, inf),
        ([*TAKEN[1:], ELSEWHERE] * 5, inf),
        ([*TAKEN, (replace(FULL, decoding=9, waiting=0), 9)], inf),  # more run than were thought to fit
        ([*TAKEN, *[CALMLY] * (CALM - 1)], 8),
        ([*TAKEN, *[CALMLY] * CALM], 9),  # where nobody waits for long, one more is tried
        ([*TAKEN, *[*[CALMLY] * (CALM - 1), ELSEWHERE] * 5], 8),
        ([*TAKEN, *[(replace(CALMLY, requests=3, decoding=3), 3)] * 10 * CALM], 8),
    ],
)
def test_as_many_run_as_ran_at_each_look_while_others_waited(scrapes, count):
    """Scrapes are loads, of which 8 run unless another number is given."""
    learned = MaxNumSeqs()
    for scrape in scrapes:
        learned.scraped(*(scrape if isinstance(scrape, tuple) else (scrape, 8)))
    assert learned.count == count


def test_an_estimate_counts_the_wait_for_others_to_end():
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
