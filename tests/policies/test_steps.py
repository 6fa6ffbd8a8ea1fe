"""What is tried for a request that finds no room, and in which order: capped answers, the slow pool, the queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Admission, Classes, CostGroup, Estimate, QosClass, QueuedRequest, Rules, Slo

SLO = Slo(2.0, 0.05)
PREMIUM, FREE = QosClass("premium", 0.1, 100, SLO), QosClass("free", 0.6, 10, SLO)
ROOM = Estimate(0.05, 0.0, 0.02, 1.0, there=2)
FULL = Estimate(0.45, 0.4, 0.02, 1.0, there=9, computing=2)
LATE = Estimate(2.5, 2.4, 0.02, 1.0, there=9, computing=2)
IDLE = Estimate(9.0, 0.0, 0.5)
COSTS = CostGroup().add("r")


class Offered:
    """`capped`: the estimates for an answer capped at so many tokens; `slow`: those of the overflow pool."""

    def __init__(self, capped=(), slow=(), asks=10_000):
        self._capped, self._slow, self._asks = capped, slow, asks

    def capped(self, most):
        return self._capped if most < self._asks else ()

    def in_overflow_pool(self):
        return self._slow


def admission(*steps, **given):
    return Admission(Classes((PREMIUM, FREE)), Rules(steps, **given))


def ask(gate, offered, *estimates, qos=FREE, now=0.0, one=None):
    one = one or QueuedRequest(qos, qos.slo, now)
    return gate.ask(one, 1000, estimates, now, (), offered)


BOTH = Offered([FULL], [IDLE])


SLOW_POOL = Estimate(9.0, 0.3, 0.5, there=3, computing=1)


@pytest.mark.parametrize(
    ("steps", "offered", "estimate", "decision"),
    [
        (("degrade", "spill", "wait"), BOTH, LATE, ("degraded", "full")),
        (("spill", "degrade", "wait"), BOTH, LATE, ("spilled", "full")),
        (("degrade", "spill"), BOTH, LATE, ("degraded", "full")),
        (("reject",), BOTH, LATE, ("refused", "ttft")),
        (("observe",), BOTH, LATE, ("observed", "ttft")),
        # who may wait first waits if that is in time
        (("wait", "degrade", "spill"), BOTH, FULL, ("queued", "full")),
        (("wait", "degrade", "spill"), BOTH, LATE, ("degraded", "ttft")),
        # without waiting a short answer comes before a full engine, unless it is short already
        (("degrade",), BOTH, FULL, ("degraded", "full")),
        (("degrade",), Offered(), FULL, ("admitted", "met")),
        (("degrade",), Offered([FULL], asks=64), LATE, ("refused", "ttft")),
        (("degrade",), Offered([LATE]), LATE, ("refused", "ttft")),  # late all the same
        # the overflow pool gets nothing that somebody else answers in time, and is not filled without bound
        (("spill",), BOTH, FULL, ("admitted", "met")),
        (("spill",), Offered(slow=[SLOW_POOL]), LATE, ("refused", "ttft")),
        # nothing is taken from a request that finds room
        *[
            (steps, BOTH, ROOM, ("admitted", "room"))
            for steps in (("degrade", "wait"), ("spill", "wait"), ("degrade",))
        ],
        (("spill",), BOTH, ROOM, ("admitted", "met")),
    ],
)
def test_the_first_step_that_can_take_it_does(steps, offered, estimate, decision):
    found = ask(admission(*steps, max_tokens_floor=64), offered, estimate)
    assert found[:2] == decision and (found.cap > 0) == (decision[0] == "degraded")


def test_the_overflow_pools_replica_with_room_is_taken():
    assert ask(admission("spill"), Offered(slow=[SLOW_POOL, IDLE]), LATE).among == [1]


def test_a_capped_answer_is_as_long_as_its_class_may_have_it():
    own = QosClass("own", 0.1, 5, SLO, max_tokens_floor=32)
    gate = Admission(Classes((FREE, own)), Rules(("degrade",), max_tokens_floor=64))
    assert ask(gate, BOTH, LATE).cap == 64
    assert ask(gate, BOTH, LATE, qos=own).cap == 32


def test_a_degraded_request_does_not_overtake_a_higher_class():
    gate = Admission(Classes((QosClass("premium", 0.1, 100, SLO, ("wait",)), FREE)), Rules(("degrade", "wait")))
    assert ask(gate, BOTH, LATE, qos=gate.classes.all[0]).decision == "refused"
    waits = Estimate(1.0, 0.9, 0.02, 1.0, there=9, computing=2)
    assert ask(gate, BOTH, waits, qos=gate.classes.all[0]).decision == "queued"
    assert ask(gate, Offered([FULL]), waits).decision == "queued"


def test_who_would_wait_too_long_goes_to_the_slow_pool():
    gate, one = admission("wait", "spill"), QueuedRequest(FREE, SLO, 0.0)
    assert ask(gate, BOTH, FULL, one=one).decision == "queued"
    assert [*gate.turned_out(1.0)] == []
    late = one.deadline + 0.01
    assert [(ticket, verdict.decision) for ticket, verdict in gate.turned_out(late)] == [(one, "queued")]
    assert ask(gate, BOTH, FULL, one=one, now=late)[:2] == ("spilled", "deadline")
    assert not gate.waiting and gate.space.requests == 0


def test_who_would_wait_too_long_is_refused_where_the_slow_pool_is_full_too():
    gate, one = admission("wait", "spill"), QueuedRequest(FREE, SLO, 0.0)
    ask(gate, BOTH, FULL, one=one)
    late = one.deadline + 0.01
    assert [*gate.turned_out(late)]
    assert ask(gate, Offered(), FULL, one=one, now=late)[:2] == ("refused", "deadline")
    assert not gate.waiting


estimates = st.sampled_from([ROOM, FULL, LATE, IDLE])
orders = st.permutations(["wait", "degrade", "spill"]).flatmap(
    lambda steps: st.integers(1, 3).map(lambda count: tuple(steps[:count]))
)


@given(
    orders,
    st.lists(estimates, min_size=1, max_size=3),
    st.lists(estimates, max_size=3),
    st.lists(estimates, max_size=3),
)
def test_a_request_is_sent_to_somebody_or_waits_or_is_refused(steps, normal, capped, slow):
    gate, one = admission(*steps), QueuedRequest(FREE, SLO, 0.0)
    verdict = ask(gate, Offered(capped[: len(normal)], slow), *normal, one=one)
    sent = verdict.decision in ("admitted", "degraded", "spilled")
    assert sent == bool(verdict.among) and one.waits == (verdict.decision == "queued") == gate.waiting
    assert (verdict.cap > 0) == (verdict.decision == "degraded")
    pool = {"spilled": slow, "degraded": capped}.get(verdict.decision, normal)
    assert all(index < len(pool) for index in verdict.among)
    assert {"degraded": "degrade", "spilled": "spill"}.get(verdict.decision, steps[0]) in steps
