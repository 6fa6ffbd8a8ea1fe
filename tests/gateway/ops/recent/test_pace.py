"""Which replicas are slow, by the tokens that they wrote."""

import pytest

from gateway.ops.recent.pace import LEAST_TOKENS, TIMES, Pace, status

NOW = 1_000_000_000.0


def pace(*windows, groups=(("a", "b", "c"),)):
    found = Pace()
    found.look(NOW, groups, windows)
    return found


def test_a_replica_at_an_eighth_of_its_speed_is_slow_and_the_others_are_not():
    found = pace({"a": (200, 2.0), "b": (5000, 55.0), "c": (80, 6.4)})
    assert {id: (one.times, one.each, one.others) for id, one in found.slow.items()} == {
        "c": (pytest.approx(8), pytest.approx(0.08), pytest.approx(0.01))
    }


@pytest.mark.parametrize("group", [("fast", "slow"), ("fast", "fast too", "slow", "slow too")])
def test_of_two_and_of_two_pairs_the_slower_ones_are_slow(group):
    written = {"fast": (100, 1.0), "fast too": (100, 1.1), "slow": (100, 9.0), "slow too": (100, 8.0)}
    assert set(pace(written, groups=[group]).slow) == {id for id in group if id.startswith("slow")}


def test_replicas_are_compared_with_those_of_their_own_model_only():
    written = {"small": (100, 1.0), "large": (100, 9.0), "large too": (100, 9.0)}
    assert pace(written, groups=[("small",), ("large", "large too")]).slow == {}


def test_what_wrote_too_little_in_the_last_minute_is_judged_by_five():
    last, before = {"a": (500, 5.0), "b": (LEAST_TOKENS - 1, 50.0)}, {"a": (900, 9.0), "b": (LEAST_TOKENS, 64.0)}
    assert pace(last, groups=[("a", "b")]).slow == {} and set(pace(last, before, groups=[("a", "b")]).slow) == {"b"}


def test_a_slow_replica_stays_slow_while_it_writes_nothing_and_is_quick_again_when_it_has_shown_so():
    found, quick = Pace(), {"a": (500, 5.0)}
    found.look(NOW, [("a", "b")], [{**quick, "b": (500, 40.0)}])
    found.look(NOW + 60, [("a", "b")], [quick])
    found.look(NOW + 180, [("a", "b")], [{**quick, "b": (500, 45.0)}])
    told = status(found.slow["b"], NOW + 181)
    assert told["text"].startswith("takes 9 x as long per token as the others for 3 min (90.0 ms, others 10.0 ms)")
    assert found.look(NOW + 240, [("a", "b")], [{**quick, "b": (500, 5.0 * TIMES - 0.1)}]) == ["b"]
    assert found.slow == {}


def test_what_a_replica_was_before_it_left_its_group_says_nothing_of_it_afterwards():
    found = pace({"a": (500, 5.0), "b": (500, 40.0)}, groups=[("a", "b")])
    gone = found.look(NOW + 1, [("a",)], [{"a": (500, 5.0), "b": (500, 40.0)}])
    assert gone == [], "a drained replica is not said to be quick again"
    found.look(NOW + 2, [("a", "b")], [{"a": (500, 5.0)}])
    assert found.slow == {} and status(found.slow.get("b"), NOW) is None
