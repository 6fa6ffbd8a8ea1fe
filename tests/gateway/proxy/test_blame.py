"""Whose fault an error is, told from what several engines answered to one request."""

import pytest

from gateway.proxy.failures.blame import UnattributedError, agree, request_at_fault


def said(*answers):
    """(replica, kind) or (replica, kind, witness); ranks are a-dp0, a-dp1."""
    return [
        UnattributedError(one[0], one[0].partition("-")[0], one[1], one[2] if len(one) > 2 else True) for one in answers
    ]


@pytest.mark.parametrize(("answers", "blamed"), [
    ([("a", "status 500")], False),
    ([("a", "status 500"), ("b", "status 500")], True),
    ([("a", "error answer"), ("b", "status 500")], True),  # a stream and its head fail alike
    ([("a-dp0", "status 500"), ("a-dp1", "status 500")], False),  # one engine, asked twice
    ([("a-dp0", "status 500"), ("a-dp1", "status 500"), ("b", "status 500")], True),
    ([("a", "status 502"), ("b", "status 502")], False),  # two proxies whose engines are gone
    ([("a", "status 500"), ("b", "status 504")], False),
    ([("a", "status 500"), ("b", "status 504"), ("c", "status 500")], True),
    ([("a", "status 401"), ("b", "status 401")], True),  # the client's key, then
    ([("a", "status 401"), ("b", "status 404")], False),
    ([("a", "status 429"), ("b", "status 429")], False),  # two that are full
    ([("a", "status 401"), ("b", "status 500")], False),
])  # fmt: skip
def test_two_engines_that_fail_a_request_alike_blame_the_request(answers, blamed):
    assert agree(said(*answers)) is blamed and request_at_fault(said(*answers)) is blamed


@pytest.mark.parametrize(
    ("first", "second", "enough"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_an_engine_that_only_fails_is_no_witness_so_a_third_is_asked(first, second, enough):
    answers = said(("a", "status 500", first), ("b", "status 500", second))
    assert request_at_fault(answers) is enough and agree(answers), (
        "if there is no third, it is the request all the same"
    )
