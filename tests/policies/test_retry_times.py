"""Times that refused requests are told to come back after."""

from collections import Counter

import pytest

from policies import Classes, QosClass
from policies.fair_share import FairShare

FREE, PREMIUM = QosClass("free"), QosClass("premium")


def test_who_is_refused_comes_back_behind_those_refused_before_it_in_its_class():
    """At half the pace: of 2 s of prefill that are taken in a second, 1 s is theirs."""
    fair_share = FairShare(Classes((FREE, PREMIUM)))
    assert [fair_share.book_retry(FREE, 0.5, 3.0, 2.0, 10.0) for _ in range(3)] == pytest.approx([0.5, 3.5, 6.5])
    assert fair_share.book_retry(PREMIUM, 0.5, 3.0, 2.0, 10.0) == pytest.approx(0.5)
    assert fair_share.book_retry(FREE, 0.5, 3.0, 2.0, 14.0) == pytest.approx(5.5), "time passes"
    assert fair_share.book_retry(FREE, -0.5, 3.0, 2.0, 100.0) == 0.0, "and is over"


@pytest.mark.parametrize("pace", [0.0, 4.0])
def test_however_many_are_refused_nobody_is_told_to_wait_for_a_minute_nor_with_all_others(pace):
    fair_share = FairShare(Classes((FREE, PREMIUM)))
    told = [fair_share.book_retry(FREE, 2.0, 1.0, pace, 0.0) for _ in range(1000)]
    assert 50.0 < max(told) < 60.0
    assert max(Counter(int(one) for one in told).values()) < 0.15 * len(told)


def test_who_has_to_wait_for_a_window_by_itself_is_told_no_more_than_clients_follow_either():
    """As those of a class that the control of overload refuses."""
    fair_share = FairShare(Classes((FREE, PREMIUM)))
    told = [fair_share.book_retry(FREE, 30.0, 1.0, 1.0, 0.0) for _ in range(1000)]
    assert min(told) == 30.0 and 55.0 < max(told) <= 60.0
    assert max(Counter(int(one) for one in told).values()) < 0.15 * len(told)
    assert [fair_share.book_retry(PREMIUM, 90.0, 6.0, 1.0, 0.0) for _ in range(3)] == [90.0, 97.0, 99.0], (
        "longer than that"
    )
