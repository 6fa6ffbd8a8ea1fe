import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.health import FAULTS, Health, Limits, Verdict

GOOD, TROUBLE, LEAVING, LOST = Verdict.GOOD, Verdict.TROUBLE, Verdict.LEAVING, Verdict.LOST


def verdict(health: Health, now: float = 0.0) -> Verdict:
    return health.opinion(now).verdict


@pytest.mark.parametrize("kind", ["closed", "timeout", "5xx"])
def test_three_failed_requests_in_a_row_are_trouble(kind):
    health = Health()
    for now in (1.0, 2.0):
        health.failed(now, kind)
        assert verdict(health, now) is GOOD
    health.failed(3.0, kind)
    assert verdict(health, 3.0) is TROUBLE
    assert kind in health.opinion(3.0).reason
    with pytest.raises(ValueError, match="not a fault of the engine"):
        Health().failed(0.0, "4xx")


@pytest.mark.parametrize("seen", ["tt", "pp", "tp", "pt"])
def test_two_refusals_mean_nobody_is_there(seen):
    health = Health()
    for who in seen:
        assert verdict(health) is GOOD
        health.failed(0.0, "connect") if who == "t" else health.probed(0.0, "connect", "nothing listens")
    assert verdict(health) is LOST


def test_each_failed_try_after_a_hold_doubles_it_up_to_half_a_minute():
    health, now, holds = Health(), 0.0, []
    for _ in range(3):
        health.failed(now, "5xx")
    for _ in range(7):
        began = now
        while verdict(health, now) is TROUBLE:
            now += 0.5
            health.probed(now)
        holds.append(now - began)
        health.failed(now, "5xx")  # one is enough now
        assert verdict(health, now) is TROUBLE
    assert holds == [2, 4, 8, 16, 30, 30, 30]
    health.succeeded(now)
    assert verdict(health, now) is GOOD
    health.failed(now, "5xx")
    assert verdict(health, now) is GOOD


def test_errors_that_nobody_confirms_count_for_nothing_until_the_engine_was_asked():
    health, now = Health(), 0.0
    for _ in range(2):
        health.unconfirmed()
        assert not health.in_question(now)
    health.unconfirmed()
    assert health.in_question(now) and verdict(health, now) is GOOD
    health.asked(now, None)  # it was too busy to say
    assert not health.in_question(1.9) and health.in_question(2.0), "not more often than that"
    health.asked(2.0, False)
    assert not health.in_question(100.0) and verdict(health, 100.0) is GOOD
    for _ in range(10):
        health.unconfirmed()
        health.succeeded(101.0)
    assert not health.in_question(101.0), "whoever answers other requests is not asked"


def test_failed_probes_alone_are_trouble_until_two_succeed():
    health = Health()
    for now in (1.0, 2.0, 3.0):
        health.probed(now, "timeout", "/health did not answer within 1 s")
    assert health.opinion(3.0) == (TROUBLE, "/health did not answer within 1 s")
    health.probed(4.0)
    assert verdict(health, 4.0) is TROUBLE
    health.probed(5.0)
    assert verdict(health, 5.0) is GOOD


def test_silence_for_long_is_lost_and_says_for_how_long():
    health = Health(Limits(lost_after=15.0))
    for now in range(15):
        health.probed(float(now), "timeout", "no answer")
        assert verdict(health, float(now)) is not LOST
    assert health.opinion(15.0) == (LOST, "no answer for 15 s: no answer") and health.hung(15.0)


WORD = st.sampled_from(["ok", "probe ok", *FAULTS, *(f"probe {fault}" for fault in FAULTS)])


@given(st.lists(st.tuples(WORD, st.floats(0, 5)), max_size=60))
def test_an_answered_request_always_makes_it_good_and_enough_good_probes_too(history):
    health, now = Health(), 0.0
    for word, wait in history:
        now += wait
        if word == "ok":
            health.succeeded(now)
            assert verdict(health, now) is GOOD
        elif word.startswith("probe "):
            health.probed(now, word[6:].removesuffix("ok"), "error")
        else:
            health.failed(now, word)
    for _ in range(2):
        now += 31
        health.probed(now)
    assert verdict(health, now) is GOOD


def test_two_late_probes_with_a_long_time_between_them_in_which_nobody_asked_are_no_hang():
    health = Health()
    for now in (0.0, 100.0):
        health.probed(now, "timeout", "late")
        assert verdict(health, now) is GOOD
    health.probed(101.0, "timeout", "late")
    assert verdict(health, 101.0) is LOST


def test_two_looks_that_are_turned_away_while_requests_run_are_a_leave_and_no_silence():
    health = Health()
    for now in range(100):
        health.succeeded(now)  # what it has is answered
        health.probed(now, "connect", "nothing listens", turned_away=True)
        assert verdict(health, now) is (LEAVING if now else GOOD) and not health.answers
    health.probed(100.0, "timeout", "late")
    assert verdict(health, 100.0) is not LOST, "one late look after them"
    health.probed(101.0, "connect", "nothing listens", turned_away=False)
    health.probed(102.0, "connect", "nothing listens", turned_away=False)
    assert verdict(health, 102.0) is LOST, "nothing is left there"


def test_an_engine_that_fails_newcomers_is_asked_again_until_it_answers_one():
    health = Health()
    health.unconfirmed()
    assert not health.in_question(10.0) and health.in_question(10.0, computes=True)
    health.asked(10.0, fails=True, computes=True)
    assert verdict(health, 10.0) is LEAVING
    for now in (12.0, 14.0, 16.0):
        health.succeeded(now)
        health.probed(now)
        assert verdict(health, now) is LEAVING and health.in_question(now)
        health.asked(now, fails=True, computes=False)  # it has nothing left to compute
        assert not health.in_question(now + 1.0)
    health.asked(18.0, fails=None)
    assert verdict(health, 18.0) is LEAVING
    health.asked(20.0, fails=False)
    assert verdict(health, 20.0) is GOOD


def test_an_engine_that_fails_newcomers_and_does_not_end_gets_requests_again():
    """One that answers no completions of its own: decode-only, or audio."""
    health = Health(Limits(lost_after=15.0))
    health.asked(0.0, fails=True, computes=True)
    for now in range(2, 302, 2):
        health.asked(float(now), fails=True, computes=True)
        assert verdict(health, now) is LEAVING, "what it has may take long"
    for now in (302.0, 314.0):
        health.asked(now, fails=True)
        assert verdict(health, now) is LEAVING
    health.asked(316.0, fails=True)
    assert verdict(health, 316.0) is TROUBLE
    health.succeeded(317.0)
    health.unconfirmed()
    health.asked(318.0, fails=True, computes=True)
    assert verdict(health, 318.0) is TROUBLE, "it has shown that it does not end by that"
    health.asked(320.0, fails=False)
    health.succeeded(320.0)
    health.asked(322.0, fails=True, computes=True)
    assert verdict(health, 322.0) is LEAVING


def test_a_good_probe_does_not_excuse_failing_requests_before_the_hold_ends():
    health = Health()
    for _ in range(3):
        health.failed(10.0, "5xx")
    for now in (10.5, 11.0, 11.9):
        health.probed(now)
        assert verdict(health, now) is TROUBLE
    health.probed(12.1)
    assert verdict(health, 12.1) is GOOD


def test_a_busy_engine_may_answer_probes_late_while_it_answers_requests():
    health = Health()
    for now in range(60):
        health.probed(now, "timeout", "late")
        health.succeeded(now + 0.5)
        assert verdict(health, now + 0.5) is GOOD


def test_answers_that_are_told_of_together_count_each():
    """With --workers: failures come one by one, what was answered a few times a second."""
    health = Health()
    health.succeeded(0.0, 100)
    for _ in range(15):
        health.failed(0.0, "5xx")
    assert not health.compare(0.0, 100, 0)
    for _ in range(15):
        health.failed(0.0, "5xx")
    assert health.compare(0.0, 100, 0)
