"""The control of overload: what is taken from lower classes, when, in which order, and that all of it is given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Admission, Classes, Control, QosClass, Quote, Rules, Slo, Ticket
from policies.control import SLACK, Rung, Seen, pressure

SLO = Slo(2.0, 0.05)
PREMIUM, STANDARD, FREE = (
    QosClass(name, fraction, priority, SLO)
    for name, fraction, priority in (("premium", 0.1, 100), ("standard", 0.3, 50), ("free", 0.6, 10))
)
CLASSES = (PREMIUM, STANDARD, FREE)
ROOM = Quote(0.05, 0.0, 0.02, 1.0, there=2)
FULL = Quote(0.45, 0.4, 0.02, 1.0, there=9, computing=2)


def after(control, *windows, name="premium"):
    """What changed in the last of these windows, of which each has the pressure of one class."""
    changes = []
    for value in windows:
        changes = control.ended({name: value}, control.until)
    return [(one.rung.step, one.rung.qos, one.taken) for one in changes]


# --- pressure


def test_pressure_is_the_share_of_the_limit_that_the_slowest_take():
    assert pressure(SLO, Seen(100, 1.6, 1.9), None) == pytest.approx(0.8)
    assert pressure(SLO, Seen(100, 1.6, 1.9), Seen(100, 0.049, 0.06)) == pytest.approx(0.98)
    assert pressure(SLO, Seen(5000, 1.6, 1.9), None) == pytest.approx(0.95), "p99.9, where it is known"


def test_a_few_answers_say_nothing():
    assert pressure(SLO, Seen(5, 9.0, 9.0), None) == 0.0
    assert pressure(Slo(), Seen(500, 9.0, 9.0), Seen(500, 9.0, 9.0)) == 0.0


# --- steps


@pytest.mark.parametrize(
    "value, steps", [(0.79, []), (0.8, ["tighten"]), (0.9, ["tighten", "cap"]), (1.0, ["tighten", "cap", "shed"])]
)
def test_the_lowest_class_gives_what_the_pressure_demands(value, steps):
    assert after(Control(CLASSES, 30.0, 0.0), value) == [(step, "free", True) for step in steps]


def test_the_next_class_gives_only_what_a_window_later_is_still_lacking():
    control = Control(CLASSES, 30.0, 0.0)
    assert len(after(control, 1.5)) == 3
    assert after(control, 0.99) == []
    for step in ("tighten", "cap", "shed"):
        assert after(control, 1.5) == [(step, "standard", True)]
    assert after(control, 1.5) == [], "premium has nobody above it"


def test_a_class_takes_nothing_from_its_like_nor_from_those_above():
    control = Control(CLASSES, 30.0, 0.0)
    assert after(control, 9.0, name="free") == []
    after(control, 9.0, name="standard")
    assert after(control, 9.0, name="standard") == [] and control.level == 3, "free's three"


def test_steps_are_undone_in_reverse_order_one_a_window_below_where_they_were_taken():
    control = Control(CLASSES, 30.0, 0.0)
    assert after(control, 1.0, 0.95) == [], "within the slack"
    assert after(control, 0.89) == [("shed", "free", False)]
    assert after(control, 0.5) == [("cap", "free", False)]
    assert after(control, 0.5) == [("tighten", "free", False)]
    assert after(control, 0.5) == []


def test_more_replicas_are_wanted_while_limits_are_missed_whatever_else_there_is_to_take():
    alone = Control((FREE,), 30.0, 0.0)
    assert alone.rungs == [] and after(alone, 1.1, name="free") == [] and alone.wants_more
    after(alone, 0.95, name="free")
    assert alone.wants_more
    after(alone, 0.89, name="free")
    assert not alone.wants_more


figures = st.dictionaries(st.sampled_from(["premium", "standard", "free"]), st.floats(0.0, 3.0), max_size=3)


@given(st.lists(figures, max_size=40))
def test_whatever_comes_windows_only_climb_or_descend_lower_classes_first_and_all_is_undone(windows):
    control, held = Control(CLASSES, 30.0, 0.0), []
    for number, pressures in enumerate(windows):
        changes = control.ended(pressures, 30.0 * (number + 1))
        assert len({one.taken for one in changes}) <= 1, "one direction a window"
        for one in changes:
            above = max(
                pressures.get(name, 0.0) for name in ("premium", "standard")[: 2 - (one.rung.qos == "standard")]
            )
            if one.taken:
                assert above >= one.rung.at
                held.append(one.rung)
            else:
                assert above < one.rung.at - SLACK
                assert held.pop() == one.rung, "in reverse order"
        assert held == control.rungs[: control.level]
        assert [one.qos for one in held] == sorted([one.qos for one in held]), "free before standard"
        assert "premium" not in {one.qos for one in held}
    for number in range(len(control.rungs)):
        control.ended({}, 1e6 + number)
    assert control.level == 0 and not control.wants_more


@given(st.floats(0.0, 2.0), st.lists(st.floats(0.0, 0.099), max_size=9))
def test_a_pressure_that_trembles_by_less_than_the_slack_takes_nothing_back_and_forth(value, trembles):
    control = Control(CLASSES, 30.0, 0.0)
    directions = [
        change.taken
        for tremble in [0.0, *trembles]
        for change in control.ended({"premium": value - tremble}, control.until)
    ]
    assert set(directions) <= {True}


# --- what admission makes of it


def gate(value, *steps):
    admission, control = Admission(Classes(CLASSES), Rules(steps or ("wait",))), Control(CLASSES, 30.0, 0.0)
    control.ended({"premium": value}, 30.0)
    admission.obey(control, 30.0)
    return admission, control


class Any:
    def may_cap(self, most):
        return True


def ask(admission, qos, quote, offers=None):
    return admission.ask(Ticket(qos, qos.slo, 30.0), 1000, [quote], 30.0, (), *([offers] if offers else []))


def test_a_tightened_class_finds_less_room_and_others_as_much_as_before():
    nearly = ROOM._replace(wait=0.09)
    assert ask(gate(0.5)[0], FREE, nearly).decision == "admitted"
    assert ask(gate(0.85)[0], FREE, nearly).decision == "queued"
    assert ask(gate(0.85)[0], PREMIUM, nearly).decision == "admitted"


def test_a_capped_class_gets_short_answers_where_there_is_room_too():
    assert ask(gate(0.95)[0], FREE, ROOM, Any())[:2] == ("degraded", "control")
    assert ask(gate(0.95)[0], FREE, ROOM, Any()).cap == 128
    assert ask(gate(0.95)[0], STANDARD, ROOM, Any())[:2] == ("admitted", "room")


def test_a_shed_class_is_refused_until_the_next_window_and_so_are_those_that_wait():
    admission, control = gate(0.5)
    waits, stays = Ticket(FREE, SLO, 30.0), Ticket(STANDARD, SLO, 30.0)
    for one in (waits, stays):
        assert admission.ask(one, 1000, [FULL], 30.0).decision == "queued"
    control.ended({"premium": 1.0}, 60.0)
    admission.obey(control, 60.0)
    assert [(one, verdict[:2]) for one, verdict in admission.turned_out(30.1)] == [(waits, ("refused", "control"))]
    verdict = ask(admission, FREE, ROOM)
    assert verdict[:2] == ("refused", "control") and verdict.retry_after == 30.0
    assert stays.waits and ask(admission, PREMIUM, ROOM).decision in ("admitted", "queued")


def test_nothing_is_taken_in_shadow_mode():
    admission, _ = gate(1.0, "observe")
    assert ask(admission, FREE, ROOM, Any())[0] == "admitted"


def test_what_is_taken_is_named_by_step_and_class():
    assert gate(1.0)[1].rungs[:3] == [Rung("tighten", "free", 0.8), Rung("cap", "free", 0.9), Rung("shed", "free", 1.0)]
