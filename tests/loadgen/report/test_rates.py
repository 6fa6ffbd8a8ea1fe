"""Offered against answered, and why they differ."""

import pytest

from loadgen.report.rates import rates
from loadgen.workload.conversations import Conversation, Turn, offer


def report(answered: float, rate: float | None = 10.0, **fields) -> dict:
    return {
        "request_throughput": answered,
        "requests": 100,
        "not_sent": 0,
        "failed": 0,
        "interrupted": False,
        "duration_s": 12.0,
        "offered": {"rate": rate, "seconds": 10.0, "later_turns": 0, "think_s": 0.0, **fields.pop("offered", {})},
        "generator": {"users": None, "max_concurrency": None, "was_the_limit": False, **fields.pop("generator", {})},
        **fields,
    }


LATER, LAST = {"later_turns": 60}, "the last answer came 0.22 s after the last conversation had begun"


@pytest.mark.parametrize("made, said", [
    (report(10.2), "10.00 requests/s offered, 10.20 answered"),
    (report(9.78, duration_s=10.22), f"10.00 requests/s offered, 9.78 answered: {LAST}"),
    (report(5, offered=LATER | {"think_s": 1.5}), "are later turns, which wait for a reply and 1.5 s to think"),
    (report(5, offered=LATER), "60 of 100 requests are later turns, which wait for a reply;"),
    (report(5, generator={"max_concurrency": 3, "was_the_limit": True}), "at most 3 were in flight"),
    (report(5, generator={"was_the_limit": True}), "the generator was late"),
    (report(5, failed=7), "10.00 requests/s offered, 5.00 answered: 7 failed; "),
    (report(5, failed=7, not_sent=3), "answered: 7 failed and 3 not sent; "),
    (report(5, not_sent=3), "answered: 3 not sent; "),
    (report(5, interrupted=True), "the run was stopped early"),
    (report(11.9, interrupted=True), "the run was stopped early; what is offered is the whole load's rate"),
    (report(5, None, generator={"users": 4}), "none offered, since each of 4 users sends when the last"),
    (report(5, None), "5.00 requests/s answered; all conversations began at once, so no rate was offered"),
])  # fmt: skip
def test_why_fewer_are_answered_than_offered(made, said):
    assert said in rates(made)


def test_a_rate_that_was_drawn_stands_beside_the_one_that_was_asked_for():
    asked = {"asked": {"rate": 8.0, "arrivals": "Poisson"}, "conversations": 46}
    assert rates(report(10.2, **asked)) == (
        "10.00 requests/s offered (drawn for 8: Poisson, 46 conversations), 10.20 answered"
    )
    exact = {**asked, "asked": {"rate": 10.0, "arrivals": "constant"}}
    assert rates(report(10.2, **exact)) == "10.00 requests/s offered, 10.20 answered"


def test_a_rate_counts_every_turn_and_the_gaps_between_starts():
    talks = [Conversation(str(one), [Turn([], 1), Turn([], 1, think=3.0)]) for one in range(5)]
    asked = offer(talks, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert (asked.rate, asked.seconds, asked.later, asked.think) == (2.0, 4.0, 5, 3.0)
    assert offer(talks[:1], [0.0]).rate is None and offer([], []).rate is None


def test_forks_wait_for_a_reply_too():
    fork = Conversation("f", [Turn([], 1, think=2.0), Turn([], 1, think=4.0)])
    asked = offer([Conversation("a", [Turn([], 1, forks=(fork,))])], [0.0])
    assert (asked.later, asked.think) == (2, 3.0)
