"""What follows a failed attempt: the rules on their own, and that every kind of failure has one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.failures import retries as rules
from gateway.proxy.failures.blame import DOUBTFUL, REFUSED_ALIKE
from gateway.proxy.failures.retries import (
    CLOSED,
    CONNECT,
    ELSEWHERE,
    HUNG,
    IDS,
    KINDS,
    LEG_REFUSED,
    NO_CRASHES,
    NOT_KEPT,
    PREFILL_FAILED,
    REPLACED,
    RETRYABLE,
    Crashes,
    Failed,
    Next,
    is_crash,
    of_status,
)


def after(failed, used, before, retries):
    return rules.after(failed, used, before.after(failed), retries)


ONE = Crashes(1, 1)  # of a replica that had all of the request
crashes = st.builds(Crashes, st.integers(0, 5), st.integers(0, 5))
failures = st.builds(Failed, st.sampled_from([*KINDS, IDS]), st.booleans(), st.booleans(), st.booleans(), st.booleans())


@pytest.mark.parametrize("status", sorted(RETRYABLE | DOUBTFUL))
def test_every_status_after_which_another_replica_is_asked_has_a_rule(status):
    assert of_status(status) in KINDS


def test_what_engines_refuse_alike_computed_nothing_and_is_blamed_on_nobody_yet():
    assert all(not KINDS[kind].computed and not KINDS[kind].blamed for kind in REFUSED_ALIKE)


def test_a_kept_connection_that_died_of_old_age_is_repeated_once():
    assert after(Failed(CLOSED, stale=True), 0, NO_CRASHES, retries=0) is Next.SAME
    assert after(Failed(CLOSED, stale=True, repeated=True), 0, NO_CRASHES, retries=2) is Next.OTHER
    assert after(Failed(CLOSED), 0, NO_CRASHES, retries=2) is Next.OTHER


@pytest.mark.parametrize("kind", [CLOSED, CONNECT])
def test_the_last_replica_that_left_the_request_unread_is_asked_once_more_within_the_retries(kind):
    alone = Failed(kind, unread=True, alone=True)
    assert after(alone, 0, NO_CRASHES, retries=1) is Next.SAME
    assert after(alone, 1, NO_CRASHES, retries=1) is Next.EXHAUSTED
    for other in ({"alone": False}, {"unread": False}, {"repeated": True}, {"beside": True}):
        assert after(alone._replace(**other), 0, NO_CRASHES, retries=2) is Next.OTHER


def test_the_second_replica_that_goes_down_with_it_is_the_last():
    assert after(Failed(HUNG), 1, ONE, retries=5) is Next.LOST
    assert is_crash(Failed(CONNECT, repeated=True, had_whole=True))
    assert not is_crash(Failed(CONNECT)) and not is_crash(Failed(CONNECT, repeated=True))


def test_who_has_not_read_all_of_it_did_not_go_down_with_it():
    unread = Failed(CLOSED, unread=True)
    assert not is_crash(unread) and not is_crash(unread._replace(repeated=True))
    assert is_crash(unread._replace(repeated=True, had_whole=True)), "but on the connection before"
    assert after(unread, 1, ONE, retries=2) is Next.OTHER
    assert after(unread._replace(alone=True), 1, ONE, retries=2) is Next.SAME
    assert after(unread._replace(alone=True), 1, Crashes(2, 0), retries=2) is Next.LOST
    assert after(unread._replace(alone=True, repeated=True), 2, NO_CRASHES, retries=2) is Next.EXHAUSTED


def test_of_a_request_in_two_legs_two_engines_may_go_down_at_once():
    """They may be of one machine. Two that go down with the same work are too many, and so is one that had it whole."""
    first, second = Failed(HUNG, writes=False), Failed(CLOSED, second_leg=True, computes=False)
    assert after(first, 1, NO_CRASHES.after(second), retries=2) is Next.OTHER
    assert after(second, 1, NO_CRASHES.after(first), retries=2) is Next.OTHER
    for leg in (first, second):
        assert after(leg, 1, NO_CRASHES.after(leg), retries=2) is Next.LOST
        assert after(Failed(CLOSED), 1, NO_CRASHES.after(leg), retries=2) is Next.LOST
        assert after(leg, 1, NO_CRASHES.after(Failed(CLOSED)), retries=2) is Next.LOST


def test_who_is_asked_for_a_stored_response_is_asked_until_one_has_it():
    assert after(Failed(ELSEWHERE), 9, NO_CRASHES, retries=0) is Next.OTHER


@given(failures, st.integers(0, 5), crashes, st.integers(0, 5))
def test_no_replica_is_tried_beyond_what_is_allowed(failed, tried, crashes, retries):
    following = after(failed, tried, crashes, retries)
    if following is Next.OTHER:
        assert not crashes.after(failed).too_many and (tried < retries or failed.kind == ELSEWHERE)
    if following is Next.SAME:
        assert failed.kind == IDS or not failed.repeated


def test_who_was_replaced_has_not_been_tried_unless_the_one_before_died_with_the_request():
    assert after(Failed(REPLACED), 9, ONE, retries=0) is Next.ANEW
    assert after(Failed(REPLACED, repeated=True, had_whole=True), 0, ONE, retries=2) is Next.LOST


@pytest.mark.parametrize("kind", [NOT_KEPT, LEG_REFUSED, PREFILL_FAILED])
def test_what_can_have_no_legs_stays_whole_however_often_it_was_tried(kind):
    assert after(Failed(kind), 9, ONE, retries=0) is Next.WHOLE


@given(failures, st.integers(0, 5), crashes, st.integers(0, 5))
def test_parameters_are_used_again_only_where_nothing_of_them_was_sent(failed, tried, crashes, retries):
    if after(failed, tried, crashes, retries) is Next.DECODER:
        assert failed.still_kept and failed.kind in (CONNECT, "removed", REPLACED) and tried < retries


def test_what_a_failed_transfer_looks_like_ends_legs_and_another_failure_begins_again():
    second = {"second_leg": True, "still_kept": True}
    assert after(Failed(of_status(500), **second), 0, NO_CRASHES, retries=2) is Next.WHOLE
    assert after(Failed(of_status(503), **second), 0, NO_CRASHES, retries=2) is Next.OTHER
    assert after(Failed(CLOSED, **second), 0, NO_CRASHES, retries=2) is Next.OTHER
    assert after(Failed(CONNECT, **second), 0, NO_CRASHES, retries=2) is Next.DECODER
    assert after(Failed(CONNECT, second_leg=True), 0, NO_CRASHES, retries=2) is Next.OTHER
    assert after(Failed(of_status(500)), 0, NO_CRASHES, retries=2) is Next.OTHER
