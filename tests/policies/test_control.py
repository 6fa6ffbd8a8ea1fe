"""The control of overload: what is taken from lower classes, when, in which order, and that all of it is given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Admission, Classes, Control, Estimate, QosClass, QueuedRequest, Rules, Slo
from policies.control import HOLD, MOST_PATIENCE, PATIENCE, SLACK, Refused, Seen, SloRatio, slo_ratio

SLO = Slo(2.0, 0.05)
PREMIUM, STANDARD, FREE = (
    QosClass(name, fraction, priority, SLO)
    for name, fraction, priority in (("premium", 0.1, 100), ("standard", 0.3, 50), ("free", 0.6, 10))
)
CLASSES = (PREMIUM, STANDARD, FREE)
ROOM = Estimate(0.05, 0.0, 0.02, 1.0, there=2)
FULL = Estimate(0.45, 0.4, 0.02, 1.0, there=9, computing=2)


def whole(limits, *window):
    return slo_ratio(limits, window, (None, None)).whole


def lasting(*given):
    return slo_ratio(*given).lasting


def steady(value):
    """A pressure that the last third of the window shows as well, and more than one request."""
    return SloRatio(value, value, value)


def after(control, *windows, name="premium"):
    """What changed in the last of these windows, of which each has the pressure of one class."""
    changes = []
    for value in windows:
        changes = control.ended({name: steady(value)})
    return [(one.step, one.qos, one.taken) for one in changes]


# --- pressure


def test_pressure_is_the_share_of_the_limit_that_the_slowest_take():
    assert whole(SLO, Seen(100, 1.6, 1.9), None) == pytest.approx(0.8)
    assert whole(SLO, Seen(100, 1.6, 1.9), Seen(100, 0.049, 0.06)) == pytest.approx(0.98)
    assert whole(SLO, Seen(5000, 1.6, 1.9), None) == pytest.approx(0.95), "p99.9, where it is known"


def test_a_few_answers_say_nothing():
    assert whole(SLO, Seen(19, 9.0, 9.0), None) is None and whole(SLO, None, None) is None
    assert whole(Slo(), Seen(500, 9.0, 9.0), Seen(500, 9.0, 9.0)) is None


def test_what_the_last_third_of_a_window_shows_no_more_is_over():
    window, quick, slow = (Seen(100, 3.0, 3.0), None), (Seen(7, 0.2, 0.2), None), (Seen(7, 2.4, 2.4), None)
    assert lasting(SLO, window, quick) == pytest.approx(0.1) and lasting(SLO, window, slow) == pytest.approx(1.2)
    assert lasting(SLO, window, (Seen(6, 0.2, 0.2), None)) == lasting(SLO, window, (None, None)) == pytest.approx(1.5)
    tails = (Seen(3000, 1.0, 3.0), None), (Seen(900, 1.0, 2.6), None)
    assert lasting(SLO, *tails) == pytest.approx(1.3), "the p99.9 of both"


def refused(owed, answers, lately=None, beyond=0, owed_lately=None, beyond_lately=None):
    """Of a window with so many answers, all within half of the limits. Unless told otherwise all were refused in its
    last third."""
    window, last = [(Seen(count, 1.0, 1.0), None) if count else (None, None) for count in (answers, lately)]
    late = Refused(owed if owed_lately is None else owed_lately, beyond if beyond_lately is None else beyond_lately)
    return slo_ratio(SLO, window, last, Refused(owed, beyond), late)._replace(missed=0.0)


def test_who_was_refused_for_the_limits_has_missed_them():
    """9 answers beside 58 refusals, as a gateway had them whose engines were forty times slower."""
    assert refused(58, 9) == SloRatio(1.0, 1.0, 1.0)
    assert refused(20, 0) == SloRatio(1.0, 1.0, 1.0), "nobody is answered at all"
    assert refused(10, 9).whole is None, "few of both"
    assert refused(1, 100) == SloRatio(0.5, 0.5, 0.5), "one in a hundred may be"
    assert refused(1, 50) == SloRatio(1.0, 1.0, 0.5), "one says little"
    assert refused(2, 50) == SloRatio(1.0, 1.0, 1.0)
    late = slo_ratio(SLO, (Seen(100, 4.0, 4.0), None), (None, None), Refused(9))
    assert late.whole == late.lasting == pytest.approx(2.0), "nor are answers that are later than that forgotten"


def test_refusals_that_were_over_before_the_last_third_of_a_window_are_over():
    assert refused(20, 60, lately=20, owed_lately=0) == SloRatio(1.0, 0.5, 0.5)
    assert refused(20, 60, lately=3, owed_lately=0) == SloRatio(1.0, 1.0, 1.0), "too few to say that"
    assert refused(20, 60, lately=3, owed_lately=9) == SloRatio(1.0, 1.0, 1.0)
    assert not refused(0, 60, lately=20, beyond=20, beyond_lately=0).unsure
    assert refused(0, 60, lately=3, beyond=20, beyond_lately=0).unsure, "too few to say that"
    assert refused(0, 60, lately=20, beyond=20, beyond_lately=2).unsure


def test_what_a_class_is_refused_beyond_its_due_is_no_pressure_but_may_be_a_fault():
    assert refused(0, 60, beyond=60) == SloRatio(0.5, 0.5, 0.5, unsure=True)
    assert refused(0, 5, beyond=60) == SloRatio(None, unsure=True)
    assert not refused(0, 60).unsure


def test_answers_of_a_class_that_floods_demand_no_step():
    """As many are admitted as come just within the limit, or miss it by little."""
    window = Seen(70, 2.2, 2.2), None
    assert slo_ratio(SLO, window, (None, None), Refused(0, 0, 80)) == SloRatio(
        pytest.approx(1.1), unsure=True, missed=pytest.approx(80 / 150)
    )
    slower = Seen(70, 2.6, 2.6), None
    assert slo_ratio(SLO, slower, (None, None), Refused(0, 0, 80)).lasting == pytest.approx(1.3), "no flood does that"
    assert slo_ratio(SLO, window, (None, None), Refused(10, 0, 80)).lasting == pytest.approx(1.1), (
        "some were owed to it"
    )
    control = Control(CLASSES)
    for _ in range(9):
        assert control.ended({"premium": SloRatio(1.1, unsure=True)}) == [] and control.wants_more


def test_the_share_that_missed_limits_is_that_of_answers_and_refusals_together():
    window = Seen(60, 2.4, 2.4, late=12), Seen(50, 0.1, 0.1, late=20), Seen(80, 9.0, 9.0)
    assert slo_ratio(SLO, window, (None, None), Refused(15, 5)).missed == pytest.approx((20 + 20) / 100)
    assert slo_ratio(SLO, (None, None), (None, None)).missed == 0.0


def test_one_slow_answer_among_few_is_not_firm():
    window = Seen(40, 2.4, 2.4, 1.3), None
    assert slo_ratio(SLO, window, (None, None)) == SloRatio(*map(pytest.approx, (1.2, 1.2, 0.65)))


# --- steps


@pytest.mark.parametrize(
    "value, steps",
    [
        (0.79, []),
        (0.8, ["tighten"]),
        (0.9, ["tighten", "cap"]),
        (0.99, ["tighten", "cap"]),
        (1.0, ["tighten", "cap", "halve", "shed"]),
    ],
)
def test_the_lowest_class_gives_what_the_pressure_demands(value, steps):
    assert after(Control(CLASSES), value) == [(step, "free", True) for step in steps]


def test_the_next_class_gives_only_what_a_window_later_is_still_lacking():
    control = Control(CLASSES)
    assert len(after(control, 1.5)) == 4
    assert after(control, 0.99) == []
    for step in ("tighten", "cap", "halve", "shed"):
        assert after(control, 1.5) == [(step, "standard", True)]
    assert after(control, 1.5) == [], "premium has nobody above it"


def test_a_class_takes_nothing_from_its_like_nor_from_those_above():
    control = Control(CLASSES)
    assert after(control, 9.0, name="free") == []
    after(control, 9.0, name="standard")
    assert after(control, 9.0, name="standard") == [] and control.level == 4, "free's four"


def test_steps_are_undone_in_reverse_order_below_where_they_were_taken():
    control = Control(CLASSES)
    after(control, 0.95)
    assert after(control, 0.86) == [], "within the slack"
    assert after(control, 0.84) == [("cap", "free", False)], "what a tightened crowd makes"
    assert after(control, 0.71) == [], "within the slack"
    assert after(control, 0.69) == [("tighten", "free", False)]
    assert after(control, 0.5) == []
    after(control, 0.95)
    assert after(control, 0.69) == [("cap", "free", False), ("tighten", "free", False)]


def test_a_class_that_was_shed_comes_back_by_half_and_whole_a_window_later():
    control = Control(CLASSES)
    assert after(control, 1.0, 0.95) == [], "within the slack"
    assert after(control, 0.5) == [("shed", "free", False)]
    assert after(control, 0.5) == [(step, "free", False) for step in ("halve", "cap", "tighten")]
    assert control.level == 0


def test_of_two_classes_that_were_shed_the_higher_is_back_when_the_lower_is_by_half():
    control = Control(CLASSES)
    after(control, *[1.5] * 5)
    assert control.level == 8
    assert after(control, 0.5) == [("shed", "standard", False)]
    assert after(control, 0.5)[-2:] == [("tighten", "standard", False), ("shed", "free", False)]
    assert len(after(control, 0.5)) == 3 and control.level == 0


def test_for_what_is_over_nothing_is_taken_and_what_was_taken_comes_back():
    control = Control(CLASSES)
    assert control.ended({"premium": SloRatio(1.5, 0.1, 0.1)}) == [] and control.pressures["premium"] == 1.5
    taken = control.ended({"premium": SloRatio(1.5, 0.95, 0.95)})
    assert [one.step for one in taken] == ["tighten", "cap"] and taken[0].pressure == 0.95
    assert control.ended({"premium": SloRatio(1.5, 0.86)}) == [], "within the slack"
    undone = control.ended({"premium": SloRatio(1.5, 0.75)})
    assert [(one.step, one.taken, one.pressure) for one in undone] == [("cap", False, 0.75)]
    assert len(control.ended({"premium": SloRatio(1.5, 0.1)})) == 1 and control.level == 0


def test_a_class_that_was_shed_comes_back_only_after_a_whole_window_below():
    control = Control(CLASSES)
    after(control, 1.5)
    assert control.ended({"premium": SloRatio(0.9, 0.1)}) == [], "without its crowd the last third says little"
    assert after(control, 0.89) == [("shed", "free", False)]
    rest = control.ended({"premium": SloRatio(0.95, 0.1)})
    assert [one.step for one in rest] == ["halve", "cap", "tighten"], "by the last third, as it is back by half"


def test_for_one_slow_answer_there_is_one_step_a_window():
    control = Control(CLASSES)
    noise = SloRatio(1.21, 1.21, 0.66)
    assert [one.step for one in control.ended({"premium": noise})] == ["tighten"]
    assert [one.step for one in control.ended({"premium": noise})] == ["cap"]
    assert [one.step for one in control.ended({"premium": steady(1.21)})] == ["halve", "shed"]


@pytest.mark.parametrize("nothing", [SloRatio(), SloRatio(unsure=True), SloRatio(0.5, 0.5, 0.5, unsure=True)])
def test_what_was_taken_is_kept_for_a_while_where_nothing_says_whether_it_is_needed(nothing):
    control = Control(CLASSES)
    after(control, 1.5)
    for _ in range(HOLD):
        assert control.ended({"premium": nothing}) == [] and control.wants_more and control.level == 4
        assert control.pressures["premium"] == nothing.whole
    assert [one.step for one in control.ended({"premium": nothing})] == ["shed"] and not control.wants_more
    assert len(control.ended({"premium": nothing})) == 3 and control.level == 0
    after(control, 1.5)
    assert control.ended({"premium": nothing}) == [], "again, since it was known"


def test_the_silence_of_a_class_that_is_shed_keeps_nothing():
    control, quiet = Control(CLASSES), {"standard": steady(0.3), "free": steady(0.3)}
    control.ended(quiet | {"premium": steady(1.5)})
    assert control.taken_from("shed") == {"free"} and control.wants_more
    control.ended({"premium": steady(0.5), "standard": steady(0.3)})
    assert not control.wants_more and control.level == 3
    control = Control(CLASSES)
    for _ in range(5):
        control.ended(quiet | {"premium": steady(1.5)})
    assert control.taken_from("shed") == {"free", "standard"}
    levels = [control.ended({"premium": steady(0.5)}) and control.level]
    levels += [control.ended({"premium": steady(0.5), "standard": steady(0.3)}) and control.level for _ in range(2)]
    assert levels == [7, 3, 0], "it is asked for again once it is back by half"


def test_a_class_of_which_nothing_is_ever_known_keeps_no_step():
    control = Control(CLASSES)
    after(control, 1.5)
    crowd = {"standard": SloRatio(unsure=True)}
    for _ in range(HOLD):
        control.ended(crowd | {"premium": steady(1.5)})
    assert [one.step for one in control.ended(crowd | {"premium": steady(0.5)})] != []


def lasts(control, value, missed, windows):
    """In each of so many windows the pressure is this, and that many miss their limits: say by window what changes."""
    each = [control.ended({"premium": steady(value)._replace(missed=missed)}) for _ in range(windows)]
    return [[(one.step, one.qos, one.taken) for one in changes] for changes in each]


REFUSALS = [(step, "free", False) for step in ("shed", "halve")]


def test_a_class_that_was_shed_for_a_moment_is_not_refused_for_as_long_as_limits_are_kept_by_little():
    control = Control(CLASSES)
    after(control, 1.2)
    assert lasts(control, 0.95, 0.0, PATIENCE) == [[]] * (PATIENCE - 1) + [REFUSALS], "0.95 undoes nothing by itself"
    assert control.level == 2 and lasts(control, 0.95, 0.0, 50) == [[]] * 50
    lasts(control, 0.5, 0.0, 1)
    assert control.level == 0 and control.trial is None
    assert len(lasts(control, 1.2, 0.1, 1)[0]) == 4, "it is shed again"


def test_nobody_is_refused_for_a_limit_that_is_missed_all_the_same():
    control = Control(CLASSES)
    *_, last = lasts(control, 3.0, 1.0, 5)
    assert last == [("shed", "standard", True)] and control.level == 8
    *_, last = lasts(control, 3.0, 0.97, PATIENCE)
    steps = [(step, name, False) for name in ("standard", "free") for step in ("shed", "halve", "cap", "tighten")]
    assert last == steps[:6]
    assert lasts(control, 3.5, 1.0, 100) == [[]] * 100 and control.wants_more and control.level == 2


def test_what_helps_is_taken_again_after_a_window_and_kept_for_longer():
    control = Control(CLASSES[::2])
    lasts(control, 1.2, 0.02, 1)
    patience = PATIENCE
    for longer in (2, 4, 8, 8):
        assert lasts(control, 1.2, 0.02, patience) == [[]] * (patience - 1) + [REFUSALS]
        assert lasts(control, 2.0, 0.3, 1) == [[(step, "free", True) for step in ("halve", "shed")]]
        patience = longer * PATIENCE
    assert patience == MOST_PATIENCE
    lasts(control, 0.5, 0.0, 2)
    assert control.level == 0
    lasts(control, 1.2, 0.02, 1)
    assert lasts(control, 1.2, 0.02, PATIENCE)[-1] == REFUSALS, "as after a fault that is over"


def test_what_is_over_by_the_last_third_of_a_window_ends_no_trial_with_a_refusal():
    control = Control(CLASSES)
    lasts(control, 1.2, 0.02, 1)
    lasts(control, 0.95, 0.0, PATIENCE)
    undone = control.ended({"premium": SloRatio(2.0, 0.5, 0.5, missed=0.5)})
    assert [(one.step, one.taken) for one in undone] == [("cap", False), ("tighten", False)] and not control.trial


def test_a_trial_waits_while_nothing_is_known_and_is_over_once_nobody_asks():
    control = Control(CLASSES)
    lasts(control, 1.2, 0.02, 1)
    lasts(control, 0.95, 0.0, PATIENCE - 1)
    assert control.ended({}) == [] and control.level == 4
    lasts(control, 0.95, 0.0, 1)
    assert control.trial is not None
    for _ in range(HOLD):
        control.ended({})
        assert control.trial is not None
    control.ended({})
    assert control.trial is None and control.level == 0


def test_more_replicas_are_wanted_while_limits_are_missed_whatever_else_there_is_to_take():
    alone = Control((FREE,))
    assert alone.ladder == [] and after(alone, 1.1, name="free") == [] and alone.wants_more
    after(alone, 0.95, name="free")
    assert alone.wants_more
    after(alone, 0.89, name="free")
    assert not alone.wants_more


figures = st.dictionaries(st.sampled_from(["premium", "standard", "free"]), st.floats(0.0, 3.0).map(steady), max_size=3)


@given(st.lists(figures, max_size=40))
def test_whatever_comes_windows_only_climb_or_descend_lower_classes_first_and_all_is_undone(windows):
    control, held = Control(CLASSES), []
    for pressures in windows:
        before = [control.pressures[name] for name in ("premium", "standard")]
        changes = control.ended(pressures)
        if not pressures and None not in before:
            assert changes == [], "of nobody anything is known for the first time"
        assert len({one.taken for one in changes}) <= 1, "one direction a window"
        for one in changes:
            above = max(
                pressures.get(name, steady(0.0)).whole
                for name in ("premium", "standard")[: 2 - (one.qos == "standard")]
            )
            [step] = [step for step in control.ladder if (step.kind, step.qos) == (one.step, one.qos)]
            if one.taken:
                assert above >= step.at
                held.append(step)
            else:
                assert above < step.at - SLACK[step.kind] or control.trial
                assert held.pop() == step, "in reverse order"
        assert held == control.ladder[: control.level]
        assert [one.qos for one in held] == sorted([one.qos for one in held]), "free before standard"
        assert "premium" not in {one.qos for one in held}
    shed = len([one for one in held if one.kind == "shed"])
    for _ in range(HOLD + shed + 1):
        control.ended({})
    assert control.level == 0 and not control.wants_more, "where nobody asks any more"


@given(st.floats(0.0, 2.0), st.lists(st.floats(0.0, 0.049), max_size=PATIENCE - 1))
def test_a_pressure_that_trembles_by_less_than_the_slack_takes_nothing_back_and_forth(value, trembles):
    control = Control(CLASSES)
    directions = [
        change.taken for tremble in [0.0, *trembles] for change in control.ended({"premium": steady(value - tremble)})
    ]
    assert set(directions) <= {True}


any_of_it = st.builds(
    lambda value, unsure: SloRatio(value, value or 0.0, value or 0.0, unsure),
    st.none() | st.floats(0.0, 3.0),
    st.booleans(),
)


@given(st.lists(st.fixed_dictionaries({"premium": any_of_it, "standard": any_of_it}), max_size=40))
def test_whatever_is_not_known_nothing_is_taken_for_it_and_it_keeps_steps_for_no_more_than_its_windows(windows):
    control, unknown = Control(CLASSES), HOLD
    for pressures in windows:
        level = control.level
        control.ended(pressures)
        known = [one.whole for one in pressures.values() if one.whole is not None]
        assert control.level <= level or max(known, default=0.0) >= 0.8
        premium = pressures["premium"]
        unknown = unknown + 1 if premium.whole is None or premium.unsure else 0
        if 0 < unknown <= HOLD:
            assert control.level >= level
    for _ in range(HOLD):
        control.ended({})
    level = control.level
    control.ended({})
    assert control.level < level or not level


# --- whose refusals are counted


def had(admission, **shares):
    """Each class asks, and this is what it had lately."""
    for qos in CLASSES:
        if qos.name in shares:
            admission._fair_share.ask(qos, 29.0)
            admission._fair_share.take(qos, shares[qos.name], shares[qos.name], 29.0)


def refuse(admission, qos, slo=None):
    """It can be answered by nobody in time."""
    ticket = QueuedRequest(qos, slo or qos.slo, 30.0)
    assert admission.ask(ticket, 1000, [FULL._replace(wait=5.0, ttft=5.05)], 30.0).decision == "refused"
    return admission.refused[qos.name]


@pytest.mark.parametrize(
    "qos, shares, counted",
    [
        (PREMIUM, {"premium": 0.05, "free": 0.95}, "owed"),  # both by its own fraction and by free's
        (PREMIUM, {"premium": 0.05, "standard": 0.35, "free": 0.6}, "owed"),  # within its own
        (PREMIUM, {"premium": 0.11, "free": 0.89}, "owed"),  # beyond it, but free clearly beyond its own
        (PREMIUM, {"premium": 0.4, "free": 0.6}, "beyond"),
        (PREMIUM, {"premium": 0.09, "standard": 0.31, "free": 0.6}, "beyond"),  # where floods of all come to
        (PREMIUM, {"premium": 0.6, "free": 0.4}, "flood"),  # beside a class that has its due
        (PREMIUM, {"premium": 1.0}, "flood"),  # nobody else asks
        (STANDARD, {"standard": 0.7, "free": 0.3}, "flood"),
        (STANDARD, {"premium": 0.4, "standard": 0.35, "free": 0.25}, "beyond"),
        (FREE, {"premium": 0.3, "free": 0.7}, "beyond"),  # nobody is below it
    ],
)
def test_a_refusal_is_owed_where_lower_classes_had_what_should_have_been_its_own(qos, shares, counted):
    admission = Admission(Classes(CLASSES), Rules(("wait",)))
    had(admission, **shares)
    assert refuse(admission, qos) == Refused(**{counted: 1})


def test_who_is_refused_for_anything_but_a_limit_of_its_class_has_missed_none():
    admission = Admission(Classes(CLASSES), Rules(("wait",), max_requests=0))
    had(admission, free=1.0)
    assert refuse(admission, PREMIUM, Slo(0.5, 0.05)) == Refused(), "its own limit, that perhaps nobody meets"
    full = admission.ask(QueuedRequest(PREMIUM, SLO, 30.0), 1000, [FULL], 30.0)
    assert full[:2] == ("refused", "queue_full") and admission.refused["premium"] == Refused()
    unlimited = QosClass("batch", priority=200)
    admission = Admission(Classes((unlimited, FREE)), Rules(("reject",)))
    had(admission, free=1.0)
    assert refuse(admission, unlimited) == Refused()


def test_who_waited_in_vain_has_missed_its_limit():
    admission = Admission(Classes(CLASSES), Rules(("wait",)))
    had(admission, free=1.0)
    assert admission.ask(QueuedRequest(PREMIUM, SLO, 30.0), 1000, [FULL], 30.0).decision == "queued"
    assert [verdict[:2] for _, verdict in admission.turned_out(32.0)] == [("refused", "deadline")]
    assert admission.refused["premium"] == Refused(1, 0)


# --- what admission makes of it


def gate(value, *steps, classes=CLASSES):
    admission = Admission(Classes(classes), Rules(steps or ("wait",)))
    control = Control(classes, admission.observes)
    control.ended({"premium": steady(value)})
    admission.obey(control, 30.0)
    return admission, control


class Any:
    def may_cap(self, most):
        return True


def ask(admission, qos, estimate, offers=None):
    return admission.ask(QueuedRequest(qos, qos.slo, 30.0), 1000, [estimate], 30.0, (), *([offers] if offers else []))


def test_a_tightened_class_finds_less_room_and_others_as_much_as_before():
    nearly = ROOM._replace(wait=0.09)
    assert ask(gate(0.5)[0], FREE, nearly).decision == "admitted"
    assert ask(gate(0.85)[0], FREE, nearly).decision == "queued"
    assert ask(gate(0.85)[0], PREMIUM, nearly).decision == "admitted"


def test_a_capped_class_gets_short_answers_where_there_is_room_too():
    assert ask(gate(0.92)[0], FREE, ROOM, Any())[:2] == ("degraded", "control")
    assert ask(gate(0.92)[0], FREE, ROOM, Any()).cap == 128
    assert ask(gate(0.92)[0], STANDARD, ROOM, Any())[:2] == ("admitted", "room")


def test_a_shed_class_is_refused_until_the_next_window_and_so_are_those_that_wait():
    admission, control = gate(0.5)
    waits, stays = QueuedRequest(FREE, SLO, 30.0), QueuedRequest(STANDARD, SLO, 30.0)
    for one in (waits, stays):
        assert admission.ask(one, 1000, [FULL], 30.0).decision == "queued"
    control.ended({"premium": steady(1.0)})
    admission.obey(control, 60.0)
    assert [*admission.heads(60.0)] == [stays], "nobody of it is asked about, whatever becomes idle"
    ((one, verdict),) = admission.turned_out(30.1)
    assert one is waits and verdict[:2] == ("refused", "control") and verdict.retry_after == 30.0
    verdict = ask(admission, FREE, ROOM)
    assert verdict[:2] == ("refused", "control") and 30.0 < verdict.retry_after < 32.0, "behind who waited"
    assert stays.waits and ask(admission, PREMIUM, ROOM).decision in ("admitted", "queued")


def test_a_shed_class_gets_what_is_idle_and_nobody_before_it_waits_for():
    admission, _ = gate(1.0)
    idle = Estimate(0.05, 0.0, 0.02)
    asked = QueuedRequest(FREE, SLO, 30.0)
    verdict = admission.ask(asked, 1000, [ROOM, idle], 30.0)
    assert verdict[:3] == ("admitted", "room", [1])
    assert ask(admission, FREE, idle, Any())[:2] == ("degraded", "control"), "a short answer"
    assert admission.ask(QueuedRequest(STANDARD, SLO, 30.0), 1000, [FULL], 30.0).decision == "queued"
    assert ask(admission, FREE, idle)[:2] == ("refused", "control")


class Slow(Any):
    """The slow pool, of one replica."""

    def __init__(self, estimate):
        self._estimate = estimate

    def in_overflow_pool(self):
        return [self._estimate]

    def has_separate_overflow_pool(self):
        return True


@pytest.mark.parametrize(
    "steps, slow, decision",
    [
        (("wait", "spill"), ROOM, ("spilled", "control")),
        (("spill",), ROOM, ("spilled", "control")),
        (("wait", "spill"), FULL._replace(ttft=9.0, wait=9.0), ("refused", "control")),
        (("wait",), ROOM, ("refused", "control")),
    ],
)
def test_a_shed_class_goes_to_the_slow_pool_if_that_is_among_its_steps_and_can_take_it(steps, slow, decision):
    admission, _ = gate(1.0, *steps)
    assert ask(admission, FREE, ROOM, Slow(slow))[:2] == decision


def test_of_a_halved_class_every_other_newcomer_spills_where_it_may():
    admission, control = gate(1.0, "wait", "spill")
    control.ended({"premium": steady(0.5)})
    admission.obey(control, 60.0)
    assert [ask(admission, FREE, ROOM, Slow(ROOM)).decision for _ in range(4)] == ["spilled", "degraded"] * 2


def test_of_a_halved_class_every_other_newcomer_is_refused_and_nobody_who_waits():
    admission, control = gate(1.0)
    control.ended({"premium": steady(0.5)})
    admission.obey(control, 60.0)
    decisions = [ask(admission, FREE, ROOM).decision for _ in range(6)]
    assert decisions == ["refused", "admitted"] * 3 and ask(admission, STANDARD, ROOM).decision == "admitted"
    waits = QueuedRequest(FREE, SLO, 30.0)
    while admission.ask(waits, 1000, [FULL], 30.0).decision != "queued":
        pass
    for _ in range(3):
        assert admission.ask(waits, 1000, [FULL], 30.0).decision == "queued"


def test_nothing_is_taken_in_shadow_mode():
    admission, control = gate(1.0, "observe")
    assert ask(admission, FREE, ROOM, Any())[0] == "admitted" and control.ladder == [] and control.wants_more


def test_of_a_class_in_shadow_mode_nothing_is_taken_nor_said_to_be_but_of_the_next():
    watched = QosClass("free", 0.6, 10, SLO, when_full=("observe",))
    admission, control = gate(1.0, classes=(PREMIUM, STANDARD, watched))
    assert control.taken_from("shed") == {"standard"} and not control.taken_from("tighten") - {"standard"}
    assert ask(admission, watched, ROOM._replace(wait=0.09)).decision == "admitted", "nor is its room less"


@given(st.lists(figures, max_size=40))
def test_no_class_is_shed_or_halved_while_a_lower_one_is_not_shed(windows):
    control = Control(CLASSES)
    for ratios in windows:
        control.ended(ratios)
        halved, shed = control.taken_from("halve"), control.taken_from("shed")
        assert "premium" not in halved | shed and ("standard" not in halved or "free" in shed) and shed <= halved
