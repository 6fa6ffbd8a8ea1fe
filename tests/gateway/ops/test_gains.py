"""What metrics that only grow gained between two looks."""

import pytest

from gateway.ops.gains import Gains
from gateway.ops.metrics import FIGURE_BUCKETS, Counter, Histogram


def histogram():
    return Histogram("x", FIGURE_BUCKETS, **{"class": (), "model": ()})


def test_only_what_came_since_the_last_look_is_told():
    metric, gains = histogram(), Gains()
    metric.observe(("a", "m"), 100.0)
    metric.observe(("b", "m"), 100.0)
    assert {key for key, _ in gains.look(metric)} == {("a", "m"), ("b", "m")}
    metric.observe(("a", "m"), 2.0)
    metric.observe(("a", "m"), 3.0)
    ((key, gain),) = gains.look(metric)
    assert key == ("a", "m") and sum(gain[:-1]) == 2 and gain[-1] == pytest.approx(5.0)
    assert not [*gains.look(metric)]


def test_of_a_counter_each_series_is_told_by_how_much_it_grew():
    metric, gains = Counter("x", path=("chat", "other")), Gains()
    metric.inc("chat", by=2)
    assert [*gains.look(metric)] == [(("chat",), 2)]
    metric.inc("other")
    metric.inc("chat", by=3)
    assert dict(gains.look(metric)) == {("chat",): 3, ("other",): 1}
    assert not [*gains.look(metric)]


def test_a_series_that_was_removed_and_came_back_begins_at_zero():
    metric, gains, counter, counted = histogram(), Gains(), Counter("x", replica=()), Gains()
    for _ in range(2):
        metric.observe(("a", "m"), 1.0)
        counter.inc("r1", by=7)
    assert [*gains.look(metric)] and [*counted.look(counter)]
    metric.forget("model", "m")
    metric.observe(("a", "m"), 3.0)
    counter.forget("replica", "r1")
    counter.inc("r1")
    ((_, gain),) = gains.look(metric)
    assert sum(gain[:-1]) == 1 and gain[-1] == pytest.approx(3.0)
    assert [*counted.look(counter)] == [(("r1",), 1)]
