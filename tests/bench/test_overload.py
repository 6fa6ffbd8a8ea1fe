"""What `bench.overload` tells of admission, in cells that are short enough for a test."""

import pytest

from bench import overload

SATURATION = 73.4  # requests/s of the four engines, as `overload.saturation` measures it in a minute of virtual time


@pytest.fixture(scope="module")
def cells():
    jobs = (("wait", 0, 1.0), ("wait", 0, 2.0), ("early rejection", 0, 2.0), ("none", 0, 2.0))
    return {(name, load): overload.goodput((name, limit, load), SATURATION, 8.0, 1) for name, limit, load in jobs}


def test_goodput_at_twice_saturation_is_that_of_the_peak(cells):
    assert cells["wait", 2.0]["goodput"] >= 0.95 * max(one["goodput"] for one in cells.values())
    assert cells["wait", 2.0]["kept"] > 0.95, "of those that were admitted"
    assert cells["none", 2.0]["goodput"] < 0.2 * cells["wait", 2.0]["goodput"]


def test_early_rejection_by_the_present_load_swings(cells):
    assert cells["early rejection", 2.0]["uneven"] > 1.5 * cells["wait", 2.0]["uneven"]
    assert cells["early rejection", 2.0]["goodput"] < cells["wait", 2.0]["goodput"]


def test_free_has_everything_when_it_is_alone():
    alone = overload.classes("alone", SATURATION, 4.0, 1)
    assert alone["free"]["good"] > 0.7 * SATURATION
    assert alone["premium"]["asked"] == 0


def test_the_change_of_premiums_p99_is_that_of_its_waits():
    alone = [0.03 + 0.001 * number for number in range(100)]
    quiet, slow = [{"premium": {"alone": alone, "ttfts": [one + wait for one in alone]}} for wait in (0.02, 0.06)]
    tail = {"premium": {"alone": alone, "ttfts": [one + (0.2 if one > 0.127 else 0.02) for one in alone]}}
    assert overload.premium_p99([quiet]) == pytest.approx(0.148, abs=0.001)
    assert overload.premium_p99([slow]) / overload.premium_p99([quiet]) > 1.2
    assert overload.premium_p99([tail]) / overload.premium_p99([quiet]) > 1.2, "two requests of a hundred"
