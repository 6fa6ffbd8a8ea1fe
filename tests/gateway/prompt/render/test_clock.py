"""Which day engines print, by what they printed before."""

from datetime import date, timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.prompt.render.clock import ALL_ZONES, days_in, seconds_to_next_look, zones_left

NOON = 20_420 * 86_400.0 + 43_200  # of a day in UTC


def day_of(zone: int, now: float) -> date:
    """As the engine's own clock has it."""
    return date(1970, 1, 1) + timedelta(days=(now + 900 * zone) // 86_400)


zones, moments = st.sampled_from(sorted(ALL_ZONES)), st.floats(NOON, NOON + 1e6)


@given(zones, moments, st.floats(-5, 5), st.floats(0, 10))
@example(52, NOON - 1e-3, 5.0, 0.0)
def test_the_day_that_an_engine_prints_is_among_those_that_it_is_said_to_print(zone, since, skew, took):
    """With a clock that is 5 s from the gateway's, however long it takes to answer, and asked once or many times."""
    left = ALL_ZONES
    for _ in range(100):
        left = zones_left(left, [day_of(zone, since + took + skew)], since, since + took)
        assert zone in left
        now = since + took + seconds_to_next_look(since + took)
        for moment in (since + took, now - 1, now, now + 7):
            assert day_of(zone, moment + skew) in days_in(left, moment)
        since = now


@given(zones, moments)
def test_after_a_day_it_is_certain_but_for_5_seconds_around_midnight(zone, since):
    left, now = ALL_ZONES, since
    while now < since + 90_000:
        left = zones_left(left, [day_of(zone, now)], now, now)
        now += seconds_to_next_look(now)
    assert left == {zone}
    midnight = now - (now + 900 * zone) % 86_400
    assert [len(days_in(left, midnight + at)) for at in (-6, -4, 4, 6)] == [1, 2, 2, 1]


@given(zones, moments)
def test_it_is_certain_from_each_look_to_the_next_quarter_of_an_hour(zone, now):
    now += seconds_to_next_look(now)
    left = zones_left(ALL_ZONES, [day_of(zone, now)], now, now)
    assert len(days_in(left, now)) == len(days_in(left, now + 889)) == 1


def test_summer_time_begins_and_an_engine_that_prints_no_day_of_this_earth():
    night = NOON + 43_200 - 3600  # 23:00 UTC: midnight at +1:00, at +2:00 it was an hour ago
    left = zones_left(frozenset((4,)), [day_of(8, night - 1800)], night - 1800, night - 1800)
    assert 8 in left and 4 not in left
    assert zones_left(frozenset((4,)), [], night, night) == ALL_ZONES
    assert len(days_in(ALL_ZONES, night)) >= 2
