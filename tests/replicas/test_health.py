import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.health import FAULTS, Health, Limits, Verdict

GOOD, TROUBLE, LEAVING, LOST = Verdict.GOOD, Verdict.TROUBLE, Verdict.LEAVING, Verdict.LOST


def verdict(health: Health, now: float = 0.0) -> Verdict:
    return health.opinion(now).verdict


# What requests and probes ("/...") show at which second, and the verdict after that.
STORIES = {
    "three failed requests": [(1, "closed", GOOD), (2, "timeout", GOOD), (3, "5xx", TROUBLE)],
    "two failed requests with an answered one between": [(1, "5xx", GOOD), (1, "ok", GOOD), (2, "5xx", GOOD)],
    "two refused requests": [(0, "connect", GOOD), (0, "connect", LOST)],
    "two refused probes": [(0, "/connect", GOOD), (0, "/connect", LOST)],
    "a refused request, then a probe": [(0, "connect", GOOD), (0, "/connect", LOST)],
    "a refused probe, then a request": [(0, "/connect", GOOD), (0, "connect", LOST)],
    "three failed probes, until two succeed":
        [(1, "/timeout", GOOD), (2, "/timeout", GOOD), (3, "/timeout", TROUBLE), (4, "/", TROUBLE), (5, "/", GOOD)],
    "two late probes, between which nobody asked": [(0, "/timeout", GOOD), (100, "/timeout", GOOD), (101, "/timeout", LOST)],
    "good probes before the hold of failed requests ends":
        [(10, "5xx", GOOD), (10, "5xx", GOOD), (10, "5xx", TROUBLE), (11, "/", TROUBLE), (11.9, "/", TROUBLE), (12.1, "/", GOOD)],
    "late probes of an engine that answers requests":
        [(now, what, GOOD) for now in range(60) for what in ("/timeout", "ok")],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_requests_and_probes_show(story):
    health = Health()
    for now, what, wanted in story:
        happens(health, now, what)
        assert verdict(health, now) is wanted, (now, what)
        assert wanted is not TROUBLE or health.opinion(now).reason in ("requests fail (5xx)", "what /timeout says")


def happens(health: Health, now: float, what: str) -> None:
    if what == "ok":
        health.succeeded(now)
    elif what.startswith("/"):
        health.probed(now, what[1:], f"what {what} says")
    else:
        health.failed(now, what)


def test_what_is_no_fault_of_the_engine_is_not_counted():
    with pytest.raises(ValueError, match="not a fault of the engine"):
        Health().failed(0.0, "4xx")


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


def test_silence_for_long_is_lost_and_says_for_how_long():
    health = Health(Limits(lost_after=15.0))
    for now in range(15):
        health.probed(float(now), "timeout", "no answer")
        assert verdict(health, float(now)) is not LOST
    assert health.opinion(15.0) == (LOST, "no answer for 15 s: no answer") and health.hung(15.0)


WORD = st.sampled_from(["ok", "/", *FAULTS, *(f"/{fault}" for fault in FAULTS)])


@given(st.lists(st.tuples(WORD, st.floats(0, 5)), max_size=60))
def test_an_answered_request_always_makes_it_good_and_enough_good_probes_too(history):
    health, now = Health(), 0.0
    for word, wait in history:
        now += wait
        happens(health, now, word)
        assert word != "ok" or verdict(health, now) is GOOD
    for _ in range(2):
        now += 31
        health.probed(now)
    assert verdict(health, now) is GOOD


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
