import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workload.arrivals import Ramp, conversation_starts


@given(st.floats(0.01, 1e6), st.integers(0, 2**32))
def test_times_begin_at_zero_and_never_go_back(rate, seed):
    times = conversation_starts([1] * 50, rate, random.Random(seed))
    assert times[0] == 0
    assert times == sorted(times)
    assert times == conversation_starts([1] * 50, rate, random.Random(seed))


def test_an_infinite_rate_is_all_at_once():
    assert conversation_starts([1] * 3, math.inf, random.Random(0)) == [0, 0, 0]


def test_the_rate_counts_requests_and_not_conversations():
    starts = conversation_starts([4] * 5000, 8, random.Random(1))
    assert len(starts) == 5000
    assert 5000 * 4 / starts[-1] == pytest.approx(8, rel=0.04)
    assert conversation_starts([], 8, random.Random(1)) == []


def gaps(starts):
    return [later - earlier for earlier, later in itertools.pairwise(starts)]


@pytest.mark.parametrize("burstiness, variation", [(0.25, 2.0), (1, 1.0), (4, 0.5)])
def test_burstiness_sets_how_much_gaps_vary_and_keeps_the_rate(burstiness, variation):
    made = gaps(conversation_starts([1] * 20_000, 10, random.Random(1), burstiness))
    mean = sum(made) / len(made)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in made) / len(made))
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05)


def test_infinite_burstiness_is_constant():
    assert gaps(conversation_starts([2, 4], 6, random.Random(1), math.inf)) == [0.5]


@pytest.mark.parametrize("exponential, halfway", [(False, 5.5), (True, math.sqrt(10))])
def test_a_ramp_goes_from_one_rate_to_the_other(exponential, halfway):
    ramp = Ramp(1, 10, exponential)
    assert (ramp.rate(0), ramp.rate(1)) == (1, pytest.approx(10)) and ramp.rate(0.5) == pytest.approx(halfway)
    made = gaps(conversation_starts([1] * 1001, 99, random.Random(0), math.inf, ramp))
    assert made == sorted(made, reverse=True)
    assert 1 / made[499] == pytest.approx(halfway, rel=0.01) and 1 / made[-1] == pytest.approx(10)
