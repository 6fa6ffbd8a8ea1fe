"""Requests that one replica computes and another answers: what is predicted of a pair, and who is admitted to which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    Admission,
    Classes,
    CostGroup,
    Demand,
    Estimate,
    Ledger,
    QosClass,
    QueuedRequest,
    Router,
    Rules,
    Slo,
    Targets,
    admit,
    make,
    two_legs,
)
from policies.estimates import estimate
from policies.leg_rules import make_leg_rule
from policies.legs import FEW
from policies.options import estimated, pairs

from .test_router import Prefixes

SIZE = 16
SLO = Slo(2.0, 0.05)
PREMIUM, FREE = QosClass("premium", 0.5, 100, SLO), QosClass("free", 0.5, 10, SLO)
ROOM = Estimate(0.05, 0.0, 0.02, 1.0, there=2)
FULL = Estimate(0.45, 0.4, 0.02, 1.0, there=9, computing=2)


def demand(blocks=100, **more):
    return Demand(SIZE * blocks + 1, SIZE, 1, hashes=range(1, blocks + 1), now=1.0, output=100.0, **more)


class Fleet:
    """So many prefillers and decoders, of one class."""

    def __init__(self, prefillers=1, decoders=1, policy="least_time", rules=Rules(), classes=(FREE,), rule="seconds"):
        names = [f"p{n}" for n in range(prefillers)] + [f"d{n}" for n in range(decoders)]
        self.router = Router(make(policy), Prefixes(*[0] * len(names)), Ledger(), CostGroup(), make_leg_rule(rule))
        everybody = [self.router.add(name, slot) for slot, name in enumerate(names)]
        self.prefillers, self.decoders = everybody[:prefillers], everybody[prefillers:]
        self.pairings = [(self.prefillers, self.decoders)]
        self.admission = Admission(Classes(classes), rules)

    def compute(self, candidate, count=1, tokens=8000):
        """It computes so many prompts that nobody decodes."""
        return [self.router.ledger.reserve(candidate.replica, tokens, tokens, False, 1.0) for _ in range(count)]

    def stream(self, candidate, count=40, tokens=4000, left=400):
        return [self.router.ledger.reserve_decode(candidate.replica, tokens, left) for _ in range(count)]

    def evaluate(self, asked, now=1.0):
        return self.router.evaluate(asked, Targets(self.decoders), now)

    def pairs(self, asked, now=1.0):
        evaluation = self.evaluate(asked, now)
        asked.output = 100.0
        return pairs(self.router, evaluation, self.pairings, now)

    def ask(self, qos=FREE, now=1.0, asked=None, one=None, **given):
        """The decision, and by which replicas it goes."""
        one = one or QueuedRequest(qos, qos.slo, now)
        evaluation = self.evaluate(asked or demand(), now)
        verdict, evaluation = admit(
            self.router, self.admission, one, evaluation, now, pairings=self.pairings, may_cap=True, **given
        )
        if verdict.decision in ("queued", "refused"):
            return verdict.decision, ()
        assert evaluation.settled
        if evaluation.legs is None:
            return verdict.decision, (evaluation.candidates[evaluation.choice.index].replica,)
        return verdict.decision, (evaluation.legs.prefiller.replica, evaluation.legs.decoder.replica)


# --- what is predicted


def test_a_first_token_takes_the_prefillers_queue_the_prompt_its_transfer_and_a_step_of_the_decoder():
    made = Fleet()
    (prefiller,), (decoder,) = made.prefillers, made.decoders
    made.compute(prefiller, 2)
    made.stream(decoder, 10)
    (pair,) = made.pairs(asked := demand())
    first = prefiller.costs.ttft_seconds(prefiller.load, asked.tokens, 0, asked.now)
    first += prefiller.costs.backlog_seconds(prefiller.load, asked.now)
    moving = made.router.transfers.seconds("p0", "d0", asked.tokens, 1.0)
    last = decoder.costs.ttft_seconds(decoder.load, 1, asked.tokens - 1, asked.now)
    assert pair.estimate.ttft == pytest.approx(first + moving + last)
    assert 0.0 < pair.estimate.wait < first and pair.estimate.computing == 2 and pair.estimate.there == 12


def test_what_the_decoder_computes_itself_holds_up_only_who_is_there_before_it_is_done():
    made = Fleet()
    made.compute(made.decoders[0], 1, 4000)
    (short,), (long,) = made.pairs(demand(1)), made.pairs(demand(2000))
    assert short.estimate.wait > 0.0 and long.estimate.wait == 0.0


def test_tokens_come_as_fast_as_the_decoder_makes_them_once_the_prompt_is_computed():
    made, ending = Fleet(), Fleet()
    for one, left in ((made, 4000), (ending, 4)):
        one.stream(one.decoders[0], 40, left=left)
    (pair,), (quick,) = made.pairs(demand()), ending.pairs(demand())
    assert quick.estimate.tpot < pair.estimate.tpot, "its streams end meanwhile"
    made.stream(made.prefillers[0], 40)
    assert made.pairs(demand())[0].estimate.streams < 42, "the prefiller's are not among them"


def test_blocks_must_be_free_on_the_decoder():
    made = Fleet()
    made.stream(made.decoders[0], 10)
    made.decoders[0].load.capacity_tokens = 40_000
    (pair,) = made.pairs(demand())
    assert pair.estimate.full > 1.0 and pair.estimate.wait > 0.0
    made.decoders[0].load.capacity_tokens = 400_000
    assert made.pairs(demand())[0].estimate.wait == 0.0


def test_blocks_must_be_free_on_the_prefiller_as_well():
    made = Fleet()
    made.stream(made.prefillers[0], 10)
    made.prefillers[0].load.capacity_tokens = 400_000
    (roomy,) = made.pairs(demand())
    made.prefillers[0].load.capacity_tokens = 40_000
    (full,) = made.pairs(demand())
    assert roomy.estimate.wait == 0.0 < full.estimate.wait == pytest.approx(full.estimate.ttft - roomy.estimate.ttft)


def test_the_same_replica_computes_and_answers_as_quoted_for_the_whole():
    """A decoder that has nothing else to do takes as long for a prompt as it would alone, less what the pair adds."""
    made = Fleet()
    asked = demand()
    made.evaluate(asked)
    whole, apart = estimate(made.decoders[0], asked), estimated(made.router, *made.prefillers, *made.decoders, asked)
    moving = made.router.transfers.seconds("p0", "d0", asked.tokens, 1.0)
    assert whole.ttft + moving < apart.ttft < 2 * whole.ttft + moving and whole.tpot == pytest.approx(apart.tpot, 0.01)


@pytest.mark.parametrize("prefillers, decoders", [(1, 3), (3, 40), (40, 3), (40, 40)])
def test_every_replica_is_in_some_pair_and_they_are_not_too_many(prefillers, decoders):
    made = Fleet(prefillers, decoders)
    found = made.pairs(demand())
    assert {one.prefiller.replica for one in found} == {one.replica for one in made.prefillers}
    assert {one.decoder.replica for one in found} == {one.replica for one in made.decoders}
    assert len({one.place for one in found}) == len(found) <= FEW * FEW + prefillers + decoders


def test_a_pair_that_failed_is_none_for_a_while():
    made = Fleet(1, 2)
    made.router.transfers.failed("p0", "d0", 1.0)
    assert [one.place for one in made.pairs(demand())] == [("p0", "d1")]
    assert len(made.pairs(demand(), now=1e6)) == 2


# --- who goes where


def test_who_finds_room_on_one_pair_alone_takes_that():
    made = Fleet(2, 2, policy="round_robin")
    made.compute(made.prefillers[0], 4)
    made.compute(made.decoders[1], 4)
    assert {made.ask(one=QueuedRequest(FREE, SLO, 1.0)) for _ in range(4)} <= {
        ("admitted", ("p1", "d0")),
        ("admitted", ("d0",)),
    }


def test_a_ledger_of_several_gateways_chooses_among_prefillers_with_room_alone():
    made = Fleet(4, 1, rule="always")
    for one in made.prefillers[:2]:
        made.compute(one, 4)
    evaluation = made.evaluate(demand())
    _, evaluation = admit(
        made.router, made.admission, QueuedRequest(FREE, SLO, 1.0), evaluation, 1.0, pairings=made.pairings
    )
    assert [one.replica for one in evaluation.legs.near] == ["p2", "p3"]


def test_who_finds_room_nowhere_waits_and_goes_by_the_way_that_has_some_then():
    made = Fleet(1, 1, policy="round_robin")
    on_prefiller, on_decoder = made.compute(made.prefillers[0], 4), made.compute(made.decoders[0], 4)
    waits = QueuedRequest(FREE, SLO, 1.0)
    assert made.ask(one=waits) == ("queued", ())
    assert made.admission.head(1.1) is waits and made.ask(one=waits, now=1.1) == ("queued", ())
    for one in on_decoder:
        made.router.ledger.release(one)
    assert made.ask(one=waits, now=1.2) == ("admitted", ("d0",)), "the prefiller still has prompts to compute"
    other = QueuedRequest(FREE, SLO, 1.3)
    made.compute(made.decoders[0], 4)
    assert made.ask(one=other, now=1.3) == ("queued", ())
    for one in on_prefiller:
        made.router.ledger.release(one)
    assert made.admission.head(1.4) is other and made.ask(one=other, now=1.4)[0] == "queued", "the decoder has, now"


@pytest.mark.parametrize(
    "steps, decision", [(("reject",), "refused"), (("observe",), "observed"), (("wait",), "refused")]
)
def test_what_no_way_answers_in_time_is_refused_or_observed(steps, decision):
    made = Fleet(1, 1, rules=Rules(steps))
    for one in (*made.prefillers, *made.decoders):
        made.compute(one, 400)
    assert made.ask()[0] == decision


def test_an_answer_is_capped_where_the_decoder_keeps_its_limits_so():
    made = Fleet(1, 1, rules=Rules(("degrade",)), policy="round_robin")
    for one in (*made.prefillers, *made.decoders):
        made.compute(one, 2)
    assert made.ask(asked=demand(max_tokens=4000)) == ("degraded", ("p0", "d0"))


def test_the_slow_pool_answers_whole():
    made = Fleet(1, 1, rules=Rules(("spill",)))
    slow = made.router.add("slow", 0)
    for one in (*made.prefillers, *made.decoders):
        made.compute(one, 400)
    assert made.ask(spill=lambda: Targets([slow])) == ("spilled", ("slow",))


def test_who_waits_for_a_decoder_keeps_it_from_pairs_as_well():
    gate = Admission(Classes((FREE,)), Rules())
    alone = QueuedRequest(FREE, SLO, 0.0)
    assert gate.ask(alone, 1000, [FULL], 0.0, [("d0",)]).decision == "queued"
    places = [("d0",), ("d1",), ("p0", "d0"), ("p0", "d1")]
    assert gate.ask(QueuedRequest(FREE, SLO, 0.1), 1000, [ROOM] * 4, 0.1, places).among == [1, 3]
    assert gate.ask(QueuedRequest(FREE, SLO, 0.1), 1000, [ROOM, FULL, ROOM, FULL], 0.1, places).decision == "queued"


def test_a_reserve_keeps_prefillers_clear_of_lower_classes_however_many_decoders_there_are():
    gate = Admission(Classes((PREMIUM, FREE)), Rules())
    busy, places = ROOM._replace(computing=1), [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
    assert gate.ask(QueuedRequest(PREMIUM, SLO, 0.0), 1000, [ROOM] * 4, 0.0, places).decision == "admitted"
    assert gate.ask(QueuedRequest(FREE, SLO, 0.1), 1000, [busy, busy, ROOM, ROOM], 0.1, places).among == [0, 1]
    assert gate.ask(QueuedRequest(PREMIUM, SLO, 0.2), 1000, [busy, busy, ROOM, ROOM], 0.2, places).among == [2, 3]


loads = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), min_size=5, max_size=5)


@given(loads, st.sampled_from(["least_time", "round_robin", "least_load"]), st.integers(1, 2000))
def test_who_is_sent_goes_by_a_way_that_was_found_to_have_room(loads, policy, blocks):
    made = Fleet(2, 3, policy=policy)
    for one, (computing, streams) in zip((*made.prefillers, *made.decoders), loads, strict=True):
        made.compute(one, computing)
        made.stream(one, streams if one in made.decoders else 0)
    asked = demand(blocks)
    evaluation = made.evaluate(asked)
    ways = {
        (one.replica,): estimate for one, estimate in zip(made.decoders, made.router.estimates(evaluation), strict=True)
    }
    ways |= {one.place: one.estimate for one in pairs(made.router, evaluation, made.pairings, 1.0)}
    decision, place = made.ask(asked=asked)
    room = [way for way, one in ways.items() if made.admission.fit.has_room(one, 1.0, 1.0)]
    assert (decision, place in room) in {("admitted", True), ("queued", False), ("refused", False)}
    assert bool(room) is (decision == "admitted")


# --- limits, and the price


@pytest.mark.parametrize("step, way", [("reject", ("p1", "d0")), ("observe", ("d0",))])
def test_what_two_replicas_alone_answer_in_time_goes_by_those_that_cost_least_but_whole_where_all_is_sent(step, way):
    made = Fleet(2, 1, rules=Rules((step,)), rule="never")
    made.compute(made.decoders[0], 8)
    made.stream(made.prefillers[0], tokens=400)  # which it would hold up
    made.compute(made.prefillers[1], 1)  # which it waits for
    asked = demand(2500)
    ways = {one.place: one.estimate for one in made.pairs(asked)}
    assert ways["p0", "d0"] < ways["p1", "d0"] and ways["p1", "d0"].ttft < SLO.ttft
    assert estimate(made.decoders[0], asked).ttft > SLO.ttft
    assert made.ask(asked=asked) == ("admitted", way)


def test_limits_do_not_make_a_request_two_legs_that_it_would_not_have_without():
    """The decoder that has its prompt writes too slowly, and on the other it would hold up streams."""
    made = Fleet(1, 2, rules=Rules(("reject",)))
    made.router.map = Prefixes(0, 2000, 0)
    made.stream(made.decoders[0], 110)
    made.stream(made.decoders[1])
    asked = demand(2000)
    evaluation = made.evaluate(asked)
    assert evaluation.candidates[evaluation.choice.index].replica == "d0"
    assert two_legs.choose(made.router, evaluation, made.prefillers, made.decoders, 1.0) is None
    slow, other = made.router.estimates(evaluation)
    assert slow.tpot > SLO.tpot > other.tpot and other.ttft < SLO.ttft
    on_the_other = made.router.evaluate(asked, Targets(made.decoders[1:]), 1.0)
    assert two_legs.choose(made.router, on_the_other, made.prefillers, made.decoders, 1.0) is not None
    assert made.ask(asked=asked) == ("admitted", ("d1",))
