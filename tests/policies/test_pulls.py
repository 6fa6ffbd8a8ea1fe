"""Peer pulls: who fetches a prompt from whom, what that is taken to cost, and what it teaches."""

from types import SimpleNamespace

import pytest

from policies import CostGroup, Decision, Demand, Ledger, Load, Router, Targets, admit, make, two_legs
from policies.costs import PEER
from policies.decisions import ADMITTED, DEGRADED, SPILLED, AdmissionDecision
from policies.ledger import NOTHING
from policies.legs import FEW
from policies.pulls import offer
from policies.transfers import BANDWIDTH, LATENCY, TOKEN_BYTES

from .test_router import Prefixes

SIZE = 16


class Shared(Prefixes):
    """A map in which one also says how many leading blocks each holds in its host memory."""

    def __init__(self, *held, memory=(), **more):
        super().__init__(*held, **more)
        self.memory = memory

    def leading(self, tier, hashes):
        assert tier == "cpu"
        return [min(blocks, len(hashes)) for blocks in self.memory]


def fleet(*held, memory, policy="least_time", **more):
    made = Router(make(policy), Shared(*held, memory=memory, **more), Ledger(), CostGroup())
    return made, [made.add(f"r{slot}", slot) for slot in range(len(held))]


def holder(**more):
    """A busy replica that holds a prompt, also in its host memory, and an idle one."""
    made, everybody = fleet(1000, 0, memory=(1000, 0), **more)
    busy(made, everybody[0])
    return made, everybody


def demand(blocks=1000, **more):
    return Demand(SIZE * blocks + 1, SIZE, 1, hashes=range(1, blocks + 1), now=1.0, **more)


def busy(made, candidate, count=60):
    for _ in range(count):
        two_legs.commit_decoder(made, Demand(4000), candidate, 1.0)
        made.ledger.reserve(candidate.replica, 4000, 4000)


def placed(made, everybody, asked=None, peers=None, now=1.0):
    asked = asked or demand()
    evaluation = made.evaluate(asked, made.targets(everybody), now, peers=everybody if peers is None else peers)
    return made.commit(evaluation, now)


def test_an_idle_replica_takes_the_prompt_from_the_memory_of_a_busy_one():
    made, everybody = holder()
    placement = placed(made, everybody)
    assert placement.candidate is everybody[1] and placement.pull.source == "r0"
    assert (placement.overlap, placement.pull.tokens, placement.cached) == (0, 16_000, 16_000)
    assert placement.lower == ((PEER, 16_000),)
    assert placement.pull.seconds == pytest.approx(LATENCY + 16_000 * TOKEN_BYTES / BANDWIDTH)
    assert placement.reservation.uncached == 1, "what is fetched is not computed"


def test_where_computing_costs_no_more_nothing_is_pulled():
    made, everybody = fleet(3, 0, memory=(3, 0))
    busy(made, everybody[0])
    assert placed(made, everybody, demand(3)).pull is None
    made, everybody = holder()
    for _ in range(30):
        made.pulls.observe("r0", "r1", 16_000, 60.0, 1.0)
    assert placed(made, everybody).pull is None


def test_a_pull_counts_behind_what_the_replica_has_itself():
    """In its GPU and in its own slower tiers, in that order."""
    made, everybody = fleet(1000, 100, memory=(900, 0), lower={1: [("cpu", 50), ("disk", 10)]})
    busy(made, everybody[0])
    placement = placed(made, everybody)
    assert placement.candidate is everybody[1]
    assert placement.lower == (("cpu", 800), ("disk", 160), (PEER, SIZE * (900 - 160)))
    assert placement.cached == 900 * SIZE and everybody[1].fetch_seconds > placement.pull.seconds > LATENCY


def test_only_what_lies_in_host_memory_can_be_pulled_and_only_by_those_who_can():
    made, everybody = fleet(1000, 0, memory=(0, 0))
    busy(made, everybody[0])
    assert placed(made, everybody).pull is None
    made, everybody = holder()
    for peers in ([], everybody[:1], everybody[1:]):
        assert placed(made, everybody, peers=peers).pull is None


@pytest.mark.parametrize("asked", [demand(reads_cache=False), Demand(16_001, SIZE, 1)])
def test_what_finds_nothing_in_a_cache_pulls_nothing(asked):
    made, everybody = holder()
    assert placed(made, everybody, asked).pull is None


def test_a_policy_that_does_not_count_in_seconds_has_no_price_for_it():
    made, everybody = holder(policy="least_load")
    assert placed(made, everybody).pull is None


def test_of_several_holders_the_one_from_which_it_costs_least():
    made, everybody = fleet(1000, 1000, 0, memory=(1000, 1000, 0))
    for one in everybody[:2]:
        busy(made, one)
    for _ in range(20):
        made.pulls.observe("r0", "r2", 16_000, 0.5, 1.0)
        made.pulls.observe("r1", "r2", 16_000, 0.05, 1.0)
    assert placed(made, everybody).pull.source == "r1"
    made.pulls.failed("r1", "r2", 1.0)
    assert placed(made, everybody).pull is None or placed(made, everybody).pull.source == "r0"


def test_what_a_first_token_took_beyond_its_own_computing_teaches_the_pair():
    made, everybody = holder()
    made.pulls.observe("r0", "r1", 16_000, 60.0, 1.0)  # they meet
    placement = placed(made, everybody)
    before = made.pulls.seconds("r0", "r1", 16_000, 1.0)
    rest = placement.ttft - placement.pull.seconds
    ttft = everybody[1].costs.ttft_seconds(Load(), 16_001, 0, 1.0)
    made.first_token(placement, 1.5, rest + 3 * before)
    assert made.pulls.seconds("r0", "r1", 16_000, 1.0) == before, "whether it came is not known yet"
    assert made.pulled(placement, 16_000, 2.0)
    assert made.pulls.seconds("r0", "r1", 16_000, 1.0) == pytest.approx(3 * before)
    assert everybody[1].costs.ttft_seconds(Load(), 16_001, 0, 1.0) == ttft, "computing is learned from others"


def test_a_pull_that_never_comes_is_tried_half_as_often_each_time_and_its_time_teaches_nobody():
    made, everybody = holder()
    before, now, pauses = made.pulls.seconds("r2", "r3", 16_000, 1.0), 1.0, []
    for _ in range(4):
        placement = placed(made, everybody, Demand(16_001, SIZE, 1, hashes=range(1, 1001), now=now), now=now)
        made.first_token(placement, now + 3.0, 3.0)
        assert not made.pulled(placement, 0, now)
        made.finish(placement)
        pauses.append(next(after for after in range(1, 1000) if not made.pulls.paused("r0", "r1", now + after)))
        now += pauses[-1]
    assert pauses == [10, 20, 40, 80]
    assert made.pulls.seconds("r2", "r3", 16_000, 1.0) == made.pulls.seconds("r0", "r1", 16_000, 1.0) == before


@pytest.mark.parametrize("before", [0, 500])
def test_what_is_not_pulled_after_all_is_computed(before):
    """Behind what is held in its own tiers, also where prompts wait there already."""
    made, everybody = fleet(1000, 100, memory=(1000, 0), lower={1: [("cpu", 50)]})
    busy(made, everybody[0])
    if before:
        made.ledger.reserve("r1", before, before, now=0.5)
    placement = placed(made, everybody)
    assert placement.candidate is everybody[1] and placement.pull is not None
    sooner = placement.ttft
    made.drop_pull(placement)
    assert (placement.pull, placement.lower, placement.cached) == (None, (("cpu", 800),), 150 * SIZE)
    load, uncached = everybody[1].load, 850 * SIZE + 1
    assert placement.reservation.uncached == uncached and load.prefill_tokens == before + uncached
    assert load.begun_tokens == (before or uncached) and placement.ttft > 1.5 * sooner
    made.first_token(placement, 3.0)
    made.finish(placement)
    assert load.prefill_tokens == before


def test_a_pull_of_which_a_part_came_is_neither_a_failure_nor_a_measurement():
    made, everybody = holder()
    placement = placed(made, everybody)
    before = made.pulls.seconds("r0", "r1", 16_000, 1.0)
    made.first_token(placement, 3.0, 3.0)
    assert not made.pulled(placement, 8_000, 3.0)
    assert made.pulls.seconds("r0", "r1", 16_000, 1.0) == before and not made.pulls.paused("r0", "r1", 3.0)


def test_an_answer_in_one_piece_shows_that_a_pair_works_again():
    made, everybody = holder()
    made.pulls.failed("r0", "r1", -100.0)
    placement = placed(made, everybody)
    made.first_token(placement, None)
    assert made.pulled(placement, 16_000, 3.0)
    made.pulls.failed("r0", "r1", 4.0)
    assert not made.pulls.paused("r0", "r1", 14.0), "as long as after a first failure"


def test_the_next_request_has_no_pull_left_over():
    made, everybody = holder()
    placed(made, everybody)
    made.evaluate(Demand(100, SIZE), made.targets(everybody), 2.0)
    assert [(one.lower, one.pull) for one in everybody] == [((), None)] * 2


def test_many_replicas_pull_as_few_do():
    held = [1000] + [0] * 19
    made, everybody = fleet(*held, memory=held)
    busy(made, everybody[0])
    assert made.targets(everybody).roster is not None
    placement = placed(made, everybody)
    assert placement.pull is not None and placement.pull.source == "r0" and placement.candidate is not everybody[0]


def test_of_many_replicas_only_the_few_that_would_cost_least_are_priced_with_pulls():
    """Each price is some microseconds of the event loop, so their count does not grow with the replicas."""
    counts = []
    for count in (16, 32, 64):
        memory = [1000] * 8 + [0] * (count - 8)
        made, everybody = fleet(1000, *[0] * (count - 1), memory=memory)
        for one in everybody[: count // 2]:
            busy(made, one, 20)
        priced, of_all = [], made.policy.cost.of_all

        def counting(demand, candidates, *more, **held):
            if len(candidates) == 1:
                priced.append(candidates[0].replica)
            return of_all(demand, candidates, *more, **held)

        targets, asked = made.targets(everybody), demand()
        made.evaluate(asked, targets, 1.0)
        reach = {one.replica: SIZE * blocks for one, blocks in zip(everybody, memory)}
        given = offer(SimpleNamespace(of_all=counting), asked, targets.roster, reach, made.pulls, 1.0)
        assert 1 <= len(given) <= FEW
        assert not {one.replica for one in everybody[: count // 2]} & {*priced}, "those are busy"
        counts.append(len(priced))
    assert counts[0] == counts[1] == counts[2] <= 2 * FEW


def test_what_a_shared_ledger_knows_to_be_held_is_not_pulled():
    """Other gateways have sent the beginning there meanwhile."""
    made, everybody = holder()
    evaluation = made.evaluate(demand(), made.targets(everybody), 1.0, peers=everybody)
    decision = Decision(1, "r1", 400 * SIZE, NOTHING, True, ((PEER, 600 * SIZE),))
    placement = made.commit(evaluation, 1.0, decision)
    assert (placement.overlap, placement.pull.tokens) == (400 * SIZE, 600 * SIZE)
    assert placement.pull.seconds == pytest.approx(LATENCY + 600 * SIZE * TOKEN_BYTES / BANDWIDTH), "of what is left"
    whole = made.commit(evaluation, 1.0, Decision(1, "r1", 1000 * SIZE, NOTHING, True))
    assert whole.pull is None


class Admits:
    """Admits to the replica with this index, as an Admission does where the policy's choice has no room. `offer`: what
    is looked at before that; `more`: of the verdict."""

    def __init__(self, index, offer=None, **more):
        self.index, self.offer, self.more = index, offer, more

    def ask(self, ticket, tokens, estimates, now, places, offers):
        self.estimated = (estimates if self.offer is None else self.offer(offers))[self.index].ttft
        return AdmissionDecision(among=(self.index,), **{"decision": ADMITTED, "reason": "room"} | self.more)

    def sent(self, ticket, estimate, *more):
        self.sent_as = estimate.ttft


def spill_or_cap(step):
    if step == SPILLED:
        return Admits(0, lambda offers: offers.in_overflow_pool(), decision=SPILLED)
    if step == DEGRADED:
        return Admits(1, lambda offers: offers.capped(7), decision=DEGRADED, cap=7)
    return None


@pytest.mark.parametrize("step", [ADMITTED, DEGRADED, SPILLED])
@pytest.mark.parametrize("roles", [False, True])
def test_a_request_that_is_admitted_by_a_pull_makes_it(step, roles):
    """Also where it is not sent to the replica that the policy has chosen, or gets a short answer."""
    made, everybody = fleet(1000, 0, 0, memory=(1000, 0, 0))
    busy(made, everybody[0])
    slow = [everybody.pop()] if step == SPILLED else []
    evaluation = made.evaluate(demand(), made.targets(everybody), 1.0, peers=[*everybody, *slow])
    gate = spill_or_cap(step) or Admits(2 if evaluation.choice.index == 1 else 1)
    pairings = [(everybody[:1], everybody[1:])] if roles else ()
    _, evaluation = admit(made, gate, None, evaluation, 1.0, lambda: Targets(slow), True, pairings)
    placement = made.commit(evaluation, 1.0)
    assert placement.candidate is (slow or everybody)[gate.index]
    assert placement.pull is not None and placement.pull.source == "r0" and placement.reservation.uncached == 1
    assert gate.sent_as == pytest.approx(gate.estimated)
