"""An engine that fails for a while, in virtual time: what premium keeps, and that all is given back."""

import pytest

from bench.chaos import SLOW_TO, chaos, is_normal
from bench.overload_load import CLASSES, turns
from loadgen.simulate import Fleet
from policies import Admission, Classes, Rules
from replicas.simulated.profile import StepDurations, load_profile

WINDOW, STALL = 15.0, 10.0
LIGHT = {"premium": 2.0, "standard": 2.0, "free": 4.0}  # requests a second, of 36 that two engines can answer


def test_premium_keeps_its_limits_while_an_engine_is_at_half_and_all_is_as_before_two_windows_later():
    found = chaos(73.4, 1, 15.0, free=0.75)
    assert found["premium_kept_while_slow"] >= 0.95
    assert found["windows_to_normal"] is not None and found["windows_to_normal"] <= 2
    assert all(one["premium_kept"] >= 0.95 for one in found["windows"][SLOW_TO:])
    assert ("halve", "free", False) in [change[1:] for change in found["steps"]], "it was taken"
    assert not any(one["slow"] for one in found["without_fault"]["windows"])
    assert ("halve", "free", True) not in [change[1:] for change in found["without_fault"]["steps"]]


def test_a_window_is_normal_if_service_and_steps_are_as_without_the_fault():
    without = {"premium_kept": 1.0, "free_good": 40.0, "held": 1}
    assert is_normal({"premium_kept": 0.95, "free_good": 36.0, "held": 1}, without)
    for worse in ({"premium_kept": 0.94}, {"free_good": 35.9}, {"held": 2}):
        assert not is_normal(without | worse, without), worse


class Stalled(StepDurations):
    """Of an engine whose next step takes so much longer."""

    __slots__ = ("_left",)

    def __init__(self, profile):
        super().__init__(profile)
        self._left = STALL

    def seconds(self, *step):
        left, self._left = self._left, 0.0
        return left + super().seconds(*step)


def refused_after_a_stall(until):
    """Seconds from the end of the stall to each request of free that was refused after it."""
    profile = load_profile("gpu-8b")
    rules = Rules(control_window=WINDOW)
    fleet = Fleet([profile] * 2, "least_time", 1, admission=lambda _: Admission(Classes(CLASSES), rules))
    for kind, one in enumerate(CLASSES):
        for when, turn in turns(LIGHT[one.name], 0.0, until + 4 * WINDOW, kind, 1, one.name):
            fleet.at(when, fleet.send, turn)
    engine = fleet.replicas[0].engine
    fleet.at(until - STALL, lambda: setattr(engine, "durations", Stalled(profile)))
    records = fleet.run().records
    return [r.sent - until for r in records if r.turn.qos == "free" and r.error is not None and r.sent > until]


@pytest.mark.parametrize("share", [0.3, 0.6], ids="{:.0%}".format)
def test_a_stall_that_was_over_before_the_last_third_of_a_window_takes_nothing(share):
    assert refused_after_a_stall((2.0 + share) * WINDOW) == []


def test_what_a_later_stall_took_is_given_back_two_windows_after_the_one_in_which_it_ended():
    refused = refused_after_a_stall(2.8 * WINDOW)
    assert refused and max(refused) <= 2.2 * WINDOW
