"""Which candidates a request has after admission, and whether others were left out."""

import pytest

from policies import CostGroup, Demand, Ledger, Router, Targets, admit, make
from policies.decisions import ADMITTED, DEGRADED, OBSERVED, SPILLED, AdmissionDecision

from .test_router import Prefixes

SIZE, BLOCKS, CAP = 16, 100, 7


class Says:
    """An Admission that has looked at the slow pool and says this."""

    def __init__(self, verdict):
        self.verdict = verdict

    def ask(self, ticket, tokens, estimates, now, places, offers):
        assert len(offers.in_overflow_pool()) == 2
        return self.verdict

    def sent(self, *given):
        pass


def admitted(*verdict, **more):
    """Which of two replicas, and of two of a slow pool, are the candidates then; and `narrowed` of the evaluation."""
    names = ["a", "b", "slow", "slower"]
    router = Router(make("least_time"), Prefixes(*[0] * len(names)), Ledger(), CostGroup())
    everybody = [router.add(name, slot) for slot, name in enumerate(names)]
    asked = Demand(SIZE * BLOCKS + 1, SIZE, 1, hashes=range(1, BLOCKS + 1), now=1.0, output=100.0)
    evaluation = router.evaluate(asked, Targets(everybody[:2]), 1.0)
    gate = Says(AdmissionDecision(*verdict, **more))
    _, evaluation = admit(router, gate, None, evaluation, 1.0, lambda: Targets(everybody[2:]), True)
    assert asked.max_tokens == more.get("cap")
    return [one.replica for one in evaluation.candidates], evaluation.narrowed


@pytest.mark.parametrize(
    "verdict, cap, candidates",
    [
        ((ADMITTED, "room", [1]), None, ["b"]),
        ((ADMITTED, "met", [1]), None, ["b"]),
        ((ADMITTED, "turn", [0]), None, ["a"]),
        ((DEGRADED, "control", [1]), CAP, ["b"]),
        ((SPILLED, "tpot", [1]), None, ["slower"]),
        ((SPILLED, "control", [0, 1]), None, ["slow", "slower"]),
    ],
)
def test_the_decision_by_which_others_are_left_out_is_kept(verdict, cap, candidates):
    assert admitted(*verdict, **{"cap": cap} if cap else {}) == (candidates, verdict[0])


@pytest.mark.parametrize(
    "verdict, cap",
    [((ADMITTED, "room", [0, 1]), None), ((DEGRADED, "control", [0, 1]), CAP), ((OBSERVED, "full", ()), None)],
)
def test_nothing_is_said_where_nobody_is_left_out(verdict, cap):
    """Also where it is weighed again, as after the slow pool was looked at, or with a capped answer."""
    assert admitted(*verdict, **{"cap": cap} if cap else {}) == (["a", "b"], "")
