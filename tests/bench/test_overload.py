"""What `bench.overload` tells of admission, in cells that are short enough for a test."""

from dataclasses import replace

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

    def p99(*besides):
        return overload.premium_p99([{"premium": {"alone": alone, "besides": [*besides]}}])

    quiet = p99(*[0.02] * 100)
    assert quiet == pytest.approx(0.148, abs=0.001)
    assert p99(*[0.06] * 100) > 1.2 * quiet
    assert p99(*[0.02] * 98, 0.2, 0.2) > 1.2 * quiet, "two requests of a hundred"


def test_a_class_that_is_refused_has_no_short_waits(monkeypatch):
    """By those alone that were admitted premium would seem as quick without any protection."""
    last = [replace(one, reserved_fraction=0.0, priority=10) for one in reversed(overload.CLASSES)]
    monkeypatch.setattr(overload, "CLASSES", tuple(last))
    premium = overload.classes("flood", SATURATION, 2.0, 1)
    assert premium["premium"]["refused"] > 0.5 and overload.premium_p99([premium]) > 2.0
