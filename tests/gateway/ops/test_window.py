"""What was counted lately: windows over metrics that only grow."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ops.metrics import FIGURE_BUCKETS, Counter, Histogram
from gateway.ops.window import Window


def test_only_what_is_recent_counts():
    histogram = Histogram("x", ("class", "model"), FIGURE_BUCKETS)
    histogram.observe(("a", "m"), 100.0)  # before anybody looked
    window = Window(histogram, 0.0, step=1.0, span=10.0)
    assert window.quantile(0.5, 10.0) is None and window.count(10.0) == 0 and window.rate(10.0) == 0.0
    for second in range(1, 21):
        histogram.observe(("a", "m"), float(second))
        window.look(float(second))
    assert window.count(5.0) == 5 and window.mean(5.0) == pytest.approx(18.0)
    assert window.count(1000.0) == 10, "of more than its span it keeps nothing"
    assert window.rate(5.0) == pytest.approx(1.0)
    assert window.quantile(1.0, 5.0) == pytest.approx(20.0, rel=0.13)
    for second in range(21, 40):
        window.look(float(second))
    assert window.count(10.0) == 0 and window.quantile(0.99, 10.0) is None


def test_looks_closer_than_a_step_lose_nothing():
    counter = Counter("x", path=("chat",))
    window = Window(counter, 0.0, step=1.0, span=60.0)
    for quarter in range(1, 41):
        counter.inc("chat", by=2)
        window.look(quarter / 4)
    assert window.count(60.0) == 80 and window.rate(60.0) == pytest.approx(8.0)


def test_labels_are_told_apart_and_put_together():
    histogram = Histogram("x", ("class", "model"), FIGURE_BUCKETS)
    window = Window(histogram, 0.0)
    for qos, model, seconds in (("premium", "m", 0.1), ("premium", "n", 0.2), ("free", "m", 5.0)):
        histogram.observe((qos, model), seconds)
    window.look(1.0)
    assert window.count(30.0) == 3 and window.count(30.0, model="m") == 2
    assert window.count(30.0, **{"class": "premium", "model": "n"}) == 1
    assert window.quantile(0.999, 30.0, **{"class": "premium"}) == pytest.approx(0.2, rel=0.13)
    assert window.values("class") == ["free", "premium"] and window.values("model") == ["m", "n"]


def test_a_replica_that_was_removed_and_came_back_begins_at_zero():
    histogram = Histogram("x", "replica", FIGURE_BUCKETS)
    histogram.observe("r1", 1.0)
    histogram.observe("r1", 2.0)
    window = Window(histogram, 0.0)
    histogram.forget("replica", "r1")
    histogram.observe("r1", 3.0)
    window.look(1.0)
    assert window.count(30.0, replica="r1") == 1 and window.mean(30.0) == pytest.approx(3.0)


@given(st.integers(0, 2**32))
def test_the_last_of_a_thousand_is_known_within_a_bucket(seed):
    """And a bucket is 13 % wide at most."""
    numbers = [random.Random(seed).lognormvariate(-1, 1) for _ in range(2000)]
    histogram = Histogram("x", ("class", "model"), FIGURE_BUCKETS)
    window = Window(histogram, 0.0)
    for number in numbers:
        histogram.observe(("a", "m"), number)
    window.look(1.0)
    true = sorted(numbers)[1997]
    assert window.quantile(0.999, 30.0) == pytest.approx(true, rel=0.13)
    assert max(upper / lower for lower, upper in pairwise(FIGURE_BUCKETS)) < 1.13
