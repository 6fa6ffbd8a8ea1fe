"""A request is placed in one step, and however it ends nothing of it stays behind."""

from dataclasses import astuple
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import NAMES, Choice, CostGroup, Decision, Demand, Ledger, Router, Targets, hittable, make, router
from policies.ledger import NOTHING

SIZE = 16


class Prefixes:
    """A map in which one says who holds what; it notes what it is told."""

    def __init__(self, *held, lower=None, last=None):
        self.held, self.lower, self.last, self.told = list(held), lower or {}, last, []

    def match(self, hashes, now, most=None):
        return SimpleNamespace(held=[min(blocks, len(hashes)) for blocks in self.held], lower=self.lower)

    def last_below(self, slot, hashes, held):
        return self.last

    def expect(self, slot, hashes, now):
        self.told.append(("expect", slot, len(hashes), now))
        return len(self.told)

    def take_back(self, slot, hashes, held, number):
        self.told.append(("take back", slot, len(hashes), held, number))

    def learn(self, slot, hashes, predicted, reported):
        self.told.append(("learn", slot, predicted, reported))


class Told:
    """A policy that takes the candidate it is told to, and notes what it hears."""

    name = "told"

    def __init__(self, index=0):
        self.index, self.heard = index, []

    def choose(self, demand, candidates, explain=False):
        return Choice(self.index)

    def placed(self, demand, candidates, choice):
        self.heard.append(("placed", candidates[choice.index].replica))

    def first(self, replica, demand):
        self.heard.append(("first", replica))

    def ended(self, replica, demand):
        self.heard.append(("ended", replica))

    def gone(self, replica):
        self.heard.append(("gone", replica))


def routing(policy, *held, **options):
    made = Router(policy, Prefixes(*held, **options), Ledger(), CostGroup())
    return made, made.targets([made.add(f"r{slot}", slot) for slot in range(len(held))])


def prompt(blocks, extra=1, **more):
    return Demand(SIZE * blocks + extra, SIZE, 1, hashes=range(1, blocks + 1), now=1.0, **more)


def test_the_last_token_of_a_prompt_is_never_a_hit():
    made, targets = routing(Told(), 9, 9)
    assert made.place(prompt(4, extra=0), targets, 1.0).overlap == 3 * SIZE
    assert made.place(prompt(4, extra=1), targets, 1.0).overlap == 4 * SIZE
    assert [hittable(tokens, SIZE) for tokens in (1, 16, 17, 32, 33)] == [0, 0, 1, 1, 2]


def test_what_a_placement_leaves_until_its_end():
    made, targets = routing(policy := Told(1), 0, 2)
    placed = made.place(demand := prompt(4), targets, 5.0)
    assert (placed.candidate.replica, placed.overlap, placed.overlap_blocks) == ("r1", 2 * SIZE, 2)
    assert placed.at == 5.0 and placed.computing and made.map.told == [("expect", 1, 4, 5.0)]
    assert made.ledger.own("r1") == (1, 1, demand.tokens - 2 * SIZE, 0, 0, 200)
    made.first_token(placed, 6.0)
    assert made.ledger.own("r1") == (1, 0, 0, 1, demand.tokens, 200) and not placed.computing
    made.finish(placed, reported=3 * SIZE)
    assert made.ledger.own("r1") == NOTHING and made.map.told[1:] == [("learn", 1, 2, 3)]
    assert policy.heard == [("placed", "r1"), ("first", "r1"), ("ended", "r1")]


def test_what_was_not_computed_is_not_expected_any_more():
    made, targets = routing(Told(), 2)
    made.abandon(made.place(prompt(4), targets, 5.0))
    assert made.map.told == [("expect", 0, 4, 5.0)]
    placed = made.place(prompt(4), targets, 6.0)
    for _ in range(2):
        made.abandon(placed, computed=False)
    assert made.map.told[2:] == [("take back", 0, 4, 2, 2)]


def test_an_engine_that_chooses_the_rank_itself_promises_nothing():
    made = Router(Told(), Prefixes(0), Ledger(), CostGroup())
    targets = made.targets([made.add("r0", 0, rank_paths=("/v1/completions",))])
    made.abandon(made.place(prompt(4, path="/v1/responses"), targets, 1.0), computed=False)
    assert made.map.told == []
    made.place(prompt(4, path="/v1/completions"), targets, 2.0)
    assert made.map.told == [("expect", 0, 4, 2.0)]


def test_a_prompt_that_is_computed_whole_finds_nothing_but_leaves_its_blocks():
    made, targets = routing(Told(), 4)
    placed = made.place(prompt(4, reads_cache=False), targets, 1.0)
    assert placed.overlap == 0 and made.map.told == [("expect", 0, 4, 1.0)]


def test_what_ends_on_a_removed_replica_leaves_no_trace_in_the_map():
    made, targets = routing(policy := Told(), 2, 2)
    refused, complete = (made.place(prompt(4), targets, 1.0) for _ in range(2))
    made.remove("r0")
    made.map.told.clear()
    made.abandon(refused, computed=False)
    made.finish(complete, reported=16)
    assert made.map.told == [] and not made.ledger.total().requests and "r0" not in made.candidates
    assert ("gone", "r0") in policy.heard


def test_the_decision_of_a_shared_ledger_is_counted_as_it_was_made():
    made, targets = routing(policy := Told(0), 2, 2)
    evaluation = made.evaluate(prompt(4), targets, 1.0)
    placed = made.commit(evaluation, 1.0, Decision(1, "r1", SIZE, (7, 0, 0, 7, 70, 500), True))
    assert (placed.candidate.replica, placed.overlap) == ("r1", SIZE) and policy.heard == [("placed", "r1")]
    assert made.ledger.load("r1").requests == 8 and made.ledger.own("r1")[0] == 1
    tiers = Decision(0, "r0", SIZE, NOTHING, True, (("cpu", SIZE),))
    assert made.commit(evaluation, 1.0, tiers).cached == 2 * SIZE


def test_blocks_in_lower_tiers_are_those_of_one_request():
    made, targets = routing(Told(), 1, 1, lower={1: [("cpu", 2)]})
    assert [one.lower for one in made.evaluate(prompt(4), targets, 1.0).candidates] == [(), (("cpu", 2 * SIZE),)]
    assert [one.lower for one in made.evaluate(Demand(9), targets, 1.0).candidates] == [(), ()]


def test_a_prediction_is_what_all_tiers_deliver():
    made, targets = routing(Told(), 1, lower={0: [("cpu", 1), ("disk", 9)]})
    placed = made.place(prompt(4, extra=0), targets, 1.0)
    assert (placed.overlap, placed.lower) == (SIZE, (("cpu", SIZE), ("disk", SIZE))), "the last token is never a hit"
    assert (placed.cached, placed.fetched, placed.reservation.uncached) == (3 * SIZE, 2 * SIZE, SIZE)
    assert made.ledger.own("r0") == (1, 1, SIZE, 0, 0, 200), "what is fetched is not computed"
    made.finish(placed, reported=3 * SIZE)
    assert made.map.told[1:] == [("learn", 0, 3, 3)]
    refused = made.place(prompt(4), targets, 2.0)
    made.abandon(refused, computed=False)
    assert made.map.told[-1] == ("take back", 0, 4, 1, 3), "what was to be fetched will not be in the first tier"


@pytest.mark.parametrize(
    "held, slow, extra, last, predicted",
    [
        (4, (), 0, None, 3 * SIZE),
        (4, (), 0, 0, 4 * SIZE),  # vLLM's own tiers are asked for the block that the first tier has as well
        (4, (), 0, 1, 4 * SIZE - 1),
        (4, (), 1, 0, 4 * SIZE),  # and there the last token is in no full block
        (1, [("cpu", 3)], 0, 0, 4 * SIZE),
        (1, [("cpu", 1)], 0, 0, 2 * SIZE),
    ],
)
def test_of_a_last_block_that_a_slower_tier_has_the_engine_counts_what_it_computes(held, slow, extra, last, predicted):
    made, targets = routing(Told(), held, lower={0: slow} if slow else {}, last=last)
    placed = made.place(prompt(4, extra=extra), targets, 1.0)
    assert placed.predicted == predicted and placed.cached == min(held + (slow[0][1] if slow else 0), 3 + extra) * SIZE
    assert placed.reservation.uncached == 4 * SIZE + extra - placed.cached
    assert made.place(prompt(4, extra, reads_cache=False), targets, 2.0).predicted == 0


def test_candidates_of_several_spaces_are_predicted_by_all_their_tiers():
    made, _ = routing(Told(1), 1, 1, lower={1: [("cpu", 9)]})
    here, there = made.candidates.values()
    there.space = 1
    twice = Demand(2 * (4 * SIZE + 1), SIZE, 1, hashes=range(1, 9), space=1)
    placed = made.place(prompt(4, also=twice), Targets([here, there]), 1.0)
    assert (placed.demand.space, placed.overlap, placed.lower) == (1, SIZE, (("cpu", 7 * SIZE),))
    assert there.overlap + there.lower[0][1] <= 4 * SIZE, "in the tokens that all are weighed by"
    there.space = 0
    made.evaluate(Demand(9), Targets([here, there]), 2.0)
    assert there.lower == ()


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 9),
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 2),
    st.one_of(st.none(), st.integers(0, 199)),
)
def test_what_is_reserved_is_what_the_chosen_engine_is_predicted_to_compute(held, slow, tokens, others, space, sent):
    """Two tokenizers, blocks of 16 and of 32: a prompt is so long here and so long there. `sent`: tokens that the
    ledger of all gateways knows to be there, counted as the request was when it was decided."""
    made, _ = routing(Told(1), *held, lower={1: [("cpu", slow)]})
    here, there = made.candidates.values()
    there.space = space
    also = Demand(others, 32, 1, hashes=range(1, others // 32 + 1), space=1)
    demand = Demand(tokens, SIZE, 1, hashes=range(1, tokens // SIZE + 1), now=1.0, also=also)
    evaluation = made.evaluate(demand, made.targets([here, there]), 1.0)
    assert evaluation.overlap < tokens
    decision = sent and Decision(1, "r1", max(evaluation.overlap, min(sent, tokens - 1)), NOTHING, True)
    told = []
    made.ledger.moved = told.append
    placed = made.commit(evaluation, 2.0, decision or None)
    own, reserved = placed.demand, placed.reservation
    assert (own.tokens, own.space) == ((tokens, others, tokens)[space], 1 if space == 1 else 0)
    assert (reserved.tokens, reserved.uncached) == (own.tokens, own.tokens - placed.cached)
    assert reserved.uncached > 0 and not (sent is None and placed.overlap % own.block_size)
    assert own.output == demand.output and made.ledger.own("r1")[5] == demand.residual
    assert told == ["r1"] * (not decision or space > 0), "counted otherwise than it was decided, all gateways are told"
    made.finish(placed)
    assert not any(made.ledger.own("r1"))


def test_what_another_gateway_sent_to_a_replica_of_another_space_is_predicted_there():
    made, _ = routing(Told(1), 0, 0)
    here, there = made.candidates.values()
    there.space = 1
    also = Demand(130, 32, 1, hashes=range(1, 5), space=1)
    demand = Demand(65, SIZE, 1, hashes=range(1, 5), now=1.0, also=also)
    evaluation = made.evaluate(demand, made.targets([here, there]), 1.0)
    placed = made.commit(evaluation, 1.0, Decision(1, "r1", 3 * SIZE, NOTHING, True))
    assert (placed.overlap, placed.reservation.uncached) == (96 - 96 % 32, 34)


def test_the_time_a_fetch_takes_is_predicted_and_learned_apart():
    made, targets = routing(Told(), 0, lower={0: [("cpu", 100)]})
    each, before = 40e-6, made.costs.ttft.coefficients  # eight times the prior
    for now in range(1, 40):
        placed = made.place(prompt(100), targets, now)
        without = placed.ttft - made.costs.fetch.seconds(placed.lower)
        made.first_token(placed, now + 0.5, without + placed.fetched * each)
        made.finish(placed)
    assert made.costs.ttft.coefficients == before and made.candidates["r0"].costs.ttft.value == 1.0
    assert placed.ttft == pytest.approx(without + placed.fetched * each, rel=0.1)
    assert made.costs.fetch.seconds((("disk", 1),)) == CostGroup().fetch.seconds((("disk", 1),))
    again = CostGroup(made.costs.state())
    assert again.fetch.seconds((("cpu", 1),)) == made.costs.fetch.seconds((("cpu", 1),))


def test_a_fetch_that_is_hardly_seen_leaves_the_rest_to_learn_from():
    made, targets = routing(Told(), 0, lower={0: [("cpu", 1)]})
    for now in range(1, 40):
        placed = made.place(prompt(100), targets, now)
        made.first_token(placed, now + 0.5, 3 * placed.ttft)
        made.finish(placed)
    assert made.costs.fetch.seconds((("cpu", 1),)) == CostGroup().fetch.seconds((("cpu", 1),))
    assert made.costs.ttft.coefficients != CostGroup().ttft.coefficients


def test_those_left_out_are_not_chosen():
    made, targets = routing(make("round_robin"), 0, 0, 0)
    others = Targets([one for one in targets.candidates if one.replica != "r1"])
    assert {made.place(prompt(2), others, 1.0).candidate.replica for _ in range(9)} == {"r0", "r2"}
    assert made.place(prompt(2), targets.only("r1"), 1.0).candidate.replica == "r1"
    assert sorted(made.ranking(prompt(2), targets, 1.0, 9)) == ["r0", "r1", "r2"]
    assert len(made.ranking(prompt(2), targets, 1.0, 2)) == 2


@pytest.mark.parametrize("name", NAMES)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.floats(0, 0.99)), min_size=1, max_size=20),
    st.integers(0, 19),
)
def test_asking_leaves_no_trace(name, script, at):
    """Whoever is evaluation in between, and how often, what is placed goes where it goes otherwise."""

    def lived(asks):
        made, targets = routing(make(name), 0, 3, 1)
        went = []
        for number, (blocks, slot, draw) in enumerate(script):
            made.map.held[slot % 3] = blocks
            demand = prompt(blocks, draw=draw, session=str(slot))
            for _ in range(asks if number >= at else 0):
                again = made.evaluate(demand, targets, float(number), explain=True)
                made.ranking(demand, targets, float(number), 3)
            evaluation = made.evaluate(demand, targets, float(number))
            assert not asks or number < at or again.choice.index == evaluation.choice.index
            placed = made.commit(evaluation, float(number))
            went.append(placed.candidate.replica)
            (made.first_token, made.abandon, made.finish)[slot % 3](placed, *[float(number)] * (slot % 3 == 0))
        return went

    assert lived(0) == lived(2)


@given(st.lists(st.sampled_from(["first_token", "finish", "abandon"]), max_size=6))
def test_told_again_or_out_of_order_it_is_counted_once(ends):
    made, targets = routing(policy := Told(), 0)
    placed = made.place(prompt(3), targets, 1.0)
    for end in [*ends, "abandon"]:
        getattr(made, end)(placed, *[2.0] * (end == "first_token"))
    total = made.ledger.total()
    assert astuple(total)[: len(NOTHING)] == NOTHING
    assert policy.heard.count(("ended", "r0")) == 1 and policy.heard.count(("first", "r0")) <= 1


def test_costs_learn_what_they_are_told_and_nothing_else():
    made, targets = routing(Told(), 0)
    placed = made.place(prompt(3), targets, 1.0)
    costs = placed.candidate.costs
    made.first_token(placed, 2.0)
    made.finish(placed)
    assert costs.count == 0 and costs.group.step.count == 0
    placed = made.place(prompt(3), targets, 3.0)
    made.first_token(placed, 4.0, seconds=1.0)
    made.finish(placed, per_token=0.01)
    assert costs.count == 1 and costs.group.step.count == 1


def test_many_are_weighed_as_arrays():
    made, targets = routing(Told(), *[1] * router.MANY)
    assert targets.roster is not None and routing(Told(), *[1] * (router.MANY - 1))[1].roster is None
    assert {one.overlap for one in made.evaluate(prompt(4), targets, 1.0).candidates} == {SIZE}
    assert Targets(targets.candidates).roster is None


@pytest.mark.parametrize("breaks", ["expect", "placed", "ended"])
def test_a_bug_in_what_is_told_of_a_placement_leaves_no_load_behind(breaks, monkeypatch):
    made, targets = routing(Told(), 0)
    owner = made.map if breaks == "expect" else made
    monkeypatch.setattr(owner, "_ended" if breaks == "ended" else breaks, lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.finish(made.place(prompt(3), targets, 1.0))
    assert not made.ledger.total().requests


def test_what_lies_in_slower_tiers_is_forgotten_with_the_prompt_also_of_other_models_replicas():
    """A request for one model, one for another, and a new prompt for the first: nobody holds anything of that."""
    made, _ = routing(make("least_time"), 0, 0, 0, 0)
    ours, theirs = made.targets([*made.candidates.values()][:2]), made.targets([*made.candidates.values()][2:])
    made.map.lower = {0: [("cpu", 100)]}
    assert made.evaluate(prompt(101), ours, 0.0).lower == (("cpu", 1600),)
    made.map.lower = {}
    made.evaluate(prompt(10), theirs, 0.0)
    assert [one.lower for one in made.candidates.values()] == [(), (), (), ()]
    assert made.evaluate(prompt(10), ours, 0.0).lower == ()


def test_a_list_of_prompts_has_fewer_hashes_than_another_space_may_hold_of_it():
    """The hashes are those of the longest, while what is held elsewhere is scaled to the tokens of all."""
    made, targets = routing(make("least_time"), 0, 8)
    made.candidates["r1"].space = 1
    targets = made.targets([*made.candidates.values()])
    hashes = list(range(1, 9))
    for now in range(4):
        several = Demand(518, hashes=hashes, root=1, now=float(now), also=Demand(130, hashes=hashes, root=1, space=1))
        made.place(several, targets, float(now))
