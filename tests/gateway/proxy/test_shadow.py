"""Shadow mode: other policies see what the acting one saw, change nothing, and are held against it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ops.metrics import Metrics
from gateway.proxy.observers import shadow
from gateway.proxy.observers.shadow import Shadows, told
from gateway.proxy.states import AttemptState
from policies import NAMES, Candidate, Choice, CostGroup, Demand, Ledger, Load, Router, make, two_legs

from ...policies.test_router import Prefixes
from ..http.talk import eventually
from .legs import HANDED, asks, disaggregated
from .replies import BODY, answers, post
from .stack import stack

LOADS = st.builds(
    lambda prefilling, decoding, tokens: Load(prefilling + decoding, prefilling, prefilling * tokens, decoding, decoding * tokens),
    st.integers(0, 5), st.integers(0, 20), st.integers(1, 5000),
)  # fmt: skip


@st.composite
def decisions(draw):
    """A demand, and what some replicas hold and have to do."""
    demand, group = (
        Demand(draw(st.integers(1, 8000)), 16, draw(st.integers(1, 9)), draw(st.sampled_from([None, "a", "b"]))),
        CostGroup(),
    )
    held = st.integers(0, (demand.tokens - 1) // 16).map(lambda blocks: 16 * blocks)
    return demand, [
        Candidate(f"r{n}", draw(held), draw(LOADS), group.add(f"r{n}")) for n in range(draw(st.integers(1, 5)))
    ]


def counts(metrics: Metrics) -> dict[str, dict]:
    return {one.name: one.values for one in metrics.all() if one.name.startswith("shadow_")}


def two(held: int, busy: int) -> tuple[Demand, list[Candidate]]:
    """A prompt of 1,600 tokens, a replica that holds some of it and has some to compute first, and an idle one."""
    group = CostGroup()
    return Demand(1600, 16, 1), [
        Candidate("r0", held, Load(1, 1, busy), group.add("r0")),
        Candidate("r1", 0, Load(), group.add("r1")),
    ]


def test_what_another_choice_would_have_saved_and_cost():
    demand, candidates = two(held=800, busy=5000)
    demand.output, candidates[0].load.decoding, metrics = 100.0, 4, Metrics()
    Shadows(["least_load"], metrics).judge(shadow.Seen(demand, candidates), 0)
    here, there = (one.costs.ttft_seconds(one.load, 1600 - one.overlap, one.overlap) for one in candidates)
    last_here, last_there = (
        one.costs.answer_seconds(one.load, 1600 - one.overlap, one.overlap, 100.0) for one in candidates
    )
    assert last_here - last_there > here - there > 0, "a queue, and a batch that slows each step"
    assert counts(metrics) == {
        "shadow_decisions": {("least_load", "other"): 1},
        "shadow_legs": {},
        "shadow_prefill_tokens": {("least_load", "cost"): 800},
        "shadow_ttft_seconds": {("least_load", "saved"): pytest.approx(here - there)},
        "shadow_answer_seconds": {("least_load", "saved"): pytest.approx(last_here - last_there)},
    }
    assert told(metrics, ["least_load"]) == [
        {
            "policy": "least_load",
            "decisions": 1,
            "same": 0,
            "saved_prefill_tokens": -800,
            "saved_ttft_seconds": pytest.approx(here - there),
            "saved_answer_seconds": pytest.approx(last_here - last_there),
            "two_legs": 0,
        }
    ]


@given(st.lists(decisions(), min_size=1, max_size=5), st.sampled_from(NAMES))
def test_the_same_policy_in_shadow_agrees(made, name):
    """Asked the same: neither saves nor costs anything, whatever it is."""
    acting, metrics = make(name), Metrics()
    shadows = Shadows([name], metrics)
    for demand, candidates in made:
        choice = acting.choose(demand, candidates)
        if hasattr(acting, "placed"):
            acting.placed(demand, candidates, choice)
        shadows.judge(shadows.seen(demand, candidates), choice.index)
    assert counts(metrics) == {
        "shadow_decisions": {(name, "same"): len(made)},
        "shadow_legs": {},
        "shadow_prefill_tokens": {},
        "shadow_ttft_seconds": {},
        "shadow_answer_seconds": {},
    }


@given(decisions(), st.data())
def test_what_is_exchanged_is_what_the_two_replicas_differ_by(made, data):
    demand, candidates = made
    index = data.draw(st.integers(0, len(candidates) - 1))
    before, metrics = copy.deepcopy([(one.overlap, one.lower, one.load) for one in candidates]), Metrics()
    shadows = Shadows(NAMES, metrics)
    shadows.judge(shadows.seen(demand, candidates), index)
    assert [(one.overlap, one.lower, one.load) for one in candidates] == before
    for row in told(metrics, NAMES):
        other = make(row["policy"]).choose(demand, candidates).index
        assert (row["decisions"], row["same"]) == (1, other == index)
        assert row["saved_prefill_tokens"] == candidates[other].overlap - candidates[index].overlap


def test_what_was_seen_stays_as_it_was():
    demand, candidates = two(held=800, busy=5000)
    seen = Shadows(["random"], Metrics()).seen(demand, candidates)
    candidates[0].load.requests, candidates[0].overlap, candidates[0].lower = 9, 16, (("cpu", 16),)
    first = seen.candidates[0]
    assert (first.overlap, first.lower, first.load) == (800, (), Load(1, 1, 5000))


def in_roles(streams=40, tokens=16_001, policy="least_time"):
    """A router whose decoder writes so many answers beside an idle prefiller, and a prompt as evaluated whole."""
    router = Router(make(policy), Prefixes(0, 0), Ledger(), CostGroup())
    prefiller, decoder = [router.add(name, slot) for slot, name in enumerate(("p", "d"))]
    for _ in range(streams):
        two_legs.commit_decoder(router, Demand(4000), decoder, 1.0)
    asked = Demand(tokens, 16, 1, hashes=range(1, tokens // 16 + 1), now=1.0)
    whole = router.evaluate(asked, router.targets([decoder]), 1.0)
    return router, whole, lambda: two_legs.ways(router, whole, [([prefiller], [decoder])], 1.0)


def judged(names, made, acting="least_time"):
    """What shadows say of where the gateway's own rule has it go, and where that is."""
    router, whole, ways = made
    metrics = Metrics()
    shadows = Shadows(names, metrics, acting)
    seen = shadows.see(None, whole, ways).args[0]
    went = two_legs.choose_among(router, ways())
    shadows.judge(seen, whole.choice.index if went is None else went)
    return {one["policy"]: one for one in told(metrics, names)}, went


def test_rules_for_legs_are_held_against_the_one_that_acts():
    rules = ["legs:always", "legs:never", "legs:over:16001", "legs:over:16002", "legs:llmd:16", "legs:llmd:0"]
    busy, went = judged(rules, in_roles())
    assert went is not None
    assert [busy[name]["same"] for name in rules] == [1, 0, 1, 0, 1, 0] == [busy[name]["two_legs"] for name in rules]
    idle, went = judged(rules, in_roles(streams=0))
    assert went is None
    assert [idle[name]["same"] for name in rules] == [0, 1, 0, 1, 0, 1]
    assert [idle[name]["two_legs"] for name in rules] == [1, 0, 1, 0, 1, 0]


def test_what_legs_would_have_saved_is_what_both_replicas_and_the_transfer_take():
    router, whole, ways = in_roles(streams=0)
    rows, _ = judged(["legs:always"], (router, whole, ways))
    demand, (prefiller, decoder) = whole.demand, router.candidates.values()
    alone = decoder.costs.ttft_seconds(decoder.load, demand.tokens, 0, 1.0)
    apart = prefiller.costs.ttft_seconds(prefiller.load, demand.tokens, 0, 1.0)
    apart += router.transfers.seconds("p", "d", demand.tokens, 1.0) + decoder.costs.ttft_seconds(
        decoder.load, 1, demand.tokens - 1, 1.0
    )
    assert apart > alone
    assert rows["legs:always"]["saved_ttft_seconds"] == pytest.approx(alone - apart)
    assert rows["legs:always"]["saved_answer_seconds"] == pytest.approx(alone - apart), "the same decoder writes it"
    assert rows["legs:always"]["saved_prefill_tokens"] == 0


def test_a_policy_in_shadow_chooses_legs_by_the_gateways_own_rule():
    """By seconds where it counts in them, else wherever there is more than a block to compute."""
    idle, _ = judged(["round_robin", "least_load"], in_roles(streams=0))
    assert [one["two_legs"] for one in idle.values()] == [1, 1]
    busy, _ = judged(["least_time"], in_roles(policy="round_robin"), acting="round_robin")
    quiet, went = judged(["least_time"], in_roles(streams=0, policy="round_robin"), acting="round_robin")
    assert went is not None and (busy["least_time"]["two_legs"], quiet["least_time"]["two_legs"]) == (1, 0)


def test_what_legs_were_chosen_by_stays_as_it_was():
    router, whole, ways = in_roles()
    seen = Shadows(["legs:always"], Metrics(), "least_time").see(None, whole, ways).args[0]
    before = copy.deepcopy([(one.load, one.overlap) for way in seen.ways for one in (*way.prefillers, *way.decoders)])
    two_legs.commit(router, whole, two_legs.choose_among(router, ways()), 1.0)
    assert before == [(one.load, one.overlap) for way in seen.ways for one in (*way.prefillers, *way.decoders)]
    assert seen.ways[0].decoders[0] is seen.candidates[0], "one copy of a replica, whatever it is a candidate for"


class Watched:
    """A policy that notes the state of the requests whose turn it is."""

    def __init__(self, proxy):
        self.proxy, self.states = proxy, []

    def choose(self, demand, candidates, explain=False):
        self.states += [x.attempt.state for x in self.proxy.exchanges]
        return Choice(0, "")


async def test_shadows_are_asked_when_the_request_is_on_its_way_and_act_on_nothing():
    async with stack(answers(), answers(), policy="round_robin", shadows=["least_time", "round_robin"]) as s:
        watched = s.proxy.placing.shadows.policies["least_time"] = Watched(s.proxy)
        await s.answered(6, post())
        # the first two open a connection to a replica of their own; the others find it open and are sent in the same
        # step
        assert len(watched.states) == 6 and set(watched.states[2:]) == {AttemptState.AWAITING}
        await eventually(s.idle)
        assert sorted(s.metrics.replica_requests.values.values()) == [3, 3]
        assert s.metrics.shadow_decisions.values == {
            ("least_time", "same"): 3,
            ("least_time", "other"): 3,
            ("round_robin", "same"): 6,
        }


async def test_shadows_judge_requests_in_two_legs():
    async with disaggregated(
        answers(HANDED), answers(), policy="round_robin", shadows=["legs:never", "least_load"]
    ) as s:
        assert (await asks(s))[0] == 200 and (await asks(s, BODY))[0] == 200
        await eventually(s.idle)
        assert s.metrics.legs.total(leg="decode") == 1
        assert s.metrics.shadow_decisions.values == {
            ("legs:never", "other"): 1,
            ("legs:never", "same"): 1,
            ("least_load", "same"): 2,
        }
        assert s.metrics.shadow_legs.values == {
            ("legs:never", "whole"): 2,
            ("least_load", "apart"): 1,
            ("least_load", "whole"): 1,
        }


async def test_without_shadows_nothing_is_counted():
    async with stack(answers()) as s:
        await s.ask(post())
        assert s.proxy.placing.shadows is None and not any(counts(s.metrics).values())
