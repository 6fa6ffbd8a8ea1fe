"""What is said of a decision: as data, and in one sentence."""

import json

import pytest

from gateway.ops.reasons import sentence, span
from policies import CostGroup, Load
from policies.rules import least_time

from .decided import BUSY, decided, replica


def test_terms_add_up_and_the_holder_is_chosen():
    told = decided("least_time", replica("a:1"), replica("b:1", 960, BUSY, lower=(("cpu", 32),)))
    json.dumps(told)
    assert told["choice"] == "b:1" and [one["chosen"] for one in told["replicas"]] == [False, True]
    assert (told["tokens"], told["blocks"], told["block_size"], told["rendered_chars"]) == (1000, 62, 16, 4321)
    for one in told["replicas"]:
        assert one["seconds"] == pytest.approx(sum(one["terms"].values())) and one["seconds"] > 0
        fetched = sum(run["tokens"] for run in one["lower_tiers"])
        assert one["overlap_tokens"] + fetched + one["uncached_tokens"] == 1000
    assert told["replicas"][1]["lower_tiers"] == [{"tier": "cpu", "tokens": 32}]
    assert told["replicas"][1]["load"]["requests"] == 2


def test_the_holder_is_named_with_what_it_holds_and_what_it_would_cost_elsewhere():
    told = decided("least_time", replica("a:1"), replica("b:1", 960), replica("c:1", 320))
    here, next_best = (one for one in told["replicas"] if one["id"] in ("b:1", "c:1"))
    assert sentence(told) == (
        f"b:1, because it holds 960 of the 1,000 prompt tokens: the request costs {span(here['seconds'])} there "
        f"(first token after {span(here['ttft_seconds'])}, the last after about {span(here['answer_seconds'])}), "
        f"and {span(next_best['seconds'])} on c:1, the next best."
    )


@pytest.mark.parametrize(
    "load,why",
    [
        (Load(requests=9, prefilling=9, prefill_tokens=60_000), "less is ahead of it there"),
        (Load(requests=90, decoding=90, context_tokens=90_000, output_tokens=90 * 200), "answer"),
    ],
)
def test_a_load_that_was_avoided_is_the_reason(load, why):
    told = decided("least_time", replica("a:1", 0, load), replica("b:1"))
    assert told["choice"] == "b:1"
    because = sentence(told).partition(":1, because ")[2].partition(":")[0]
    assert why in because and " hold" not in because


def test_a_queue_in_the_engine_is_named_whose_end_is_not_predicted():
    told = decided("least_time", replica("a:1", 960, Load(requests=30, decoding=30, waiting=28)), replica("b:1"))
    if told["choice"] != "a:1":
        told = decided("least_time", replica("a:1", 960, Load(waiting=28)), replica("b:1"))
    assert "By its own metrics 28 requests wait in the engine of a:1" in sentence(told)
    assert "wait in the engine" not in sentence(decided("least_time", replica("a:1", 0, Load(waiting=1))))


def test_ties_are_named_and_those_who_are_behind_too():
    told = decided("least_time", replica("a:1"), replica("b:1"), replica("c:1", 0, BUSY), draw=0.9)
    assert [one["tied"] for one in told["replicas"]] == [True, True, False]
    said = sentence(told)
    assert said.startswith("b:1, drawn from 2 that cost the same to within 0.1 ms (a:1, b:1): the request costs ")
    assert said.endswith(" on c:1, the next best.")


def test_where_all_are_equal_there_is_no_next_best():
    many = decided("least_time", *(replica(f"r{number}:1") for number in range(7)))
    assert sentence(many).startswith("r0:1, drawn from all 7, which cost the same to within 0.1 ms: the request costs ")
    some = decided("least_time", *(replica(f"r{number}:1") for number in range(5)), replica("z:1", 0, BUSY))
    assert "drawn from 5 that cost the same to within 0.1 ms (r0:1, r1:1, r2:1 and 2 more)" in sentence(some)


def test_a_next_best_that_looks_the_same_is_told_by_the_difference():
    told = decided("least_time", replica("a:1"), replica("b:1", 0, BUSY))
    first, second = told["replicas"]
    first["seconds"], second["seconds"] = 0.0747, 0.0751
    assert sentence(told).endswith(", and 0.4 ms more on b:1, the next best.")


def test_a_replica_that_was_slow_is_said_to_take_what_it_took_then_also_when_it_is_tried_again():
    costs = CostGroup()
    slow, other = costs.add("slow:1"), costs.add("other:1")
    quick = decided("least_time", replica("slow:1"), costs=costs)
    for _ in range(40):
        slow.observe_itl(8 * other.stream_step(1, 1000), 1, 1000)
        other.observe_itl(other.stream_step(1, 1000), 1, 1000)
        costs.decay_idle([slow], [other], 10.0)  # it is passed over, and tried every ten seconds
    before = decided("least_time", replica("slow:1"), costs=costs)
    costs.decay_idle([slow], [other], 60.0)  # nothing was sent there for a minute
    told = decided("least_time", replica("slow:1"), costs=costs)
    said, took = sentence(told), [one["replicas"][0]["answer_seconds"] for one in (quick, before, told)]
    assert took[1] > 4 * took[0] and took[2] == took[1]
    assert said.endswith(
        " slow:1 was slower than the others when it last answered, and these times are what it took then."
    )
    assert "was slower" not in sentence(quick)


def test_one_replica_alone_is_compared_with_nobody():
    said = sentence(decided("least_time", replica("a:1")))
    assert said.startswith("a:1, the only replica that can take it: the request costs ") and "next best" not in said


@pytest.mark.parametrize(
    "narrowed,which",
    [
        ("admitted", "that admission allows to take it"),
        ("degraded", "that admission allows to take it"),
        ("spilled", "of the slow pool that admission allows to take it"),
    ],
)
def test_where_admission_left_others_out_it_says_so(narrowed, which):
    alone = decided("least_time", replica("a:1")) | {"narrowed": narrowed}
    assert sentence(alone).startswith(f"a:1, the only replica {which}: the request costs ")
    equal = decided("least_time", replica("a:1"), replica("b:1")) | {"narrowed": narrowed}
    assert sentence(equal).startswith(f"a:1, drawn from all 2 {which}, which cost the same to within 0.1 ms: ")


class Copies(least_time.LeastTime):
    """Makes a copy on the last candidate."""

    def choose(self, demand, candidates, explain=False):
        return super().choose(demand, candidates, explain)._replace(index=len(candidates) - 1)


def test_a_copy_says_for_what_the_dearer_replica_was_chosen():
    said = sentence(decided(Copies(), replica("a:1", 960), replica("b:1")))
    assert said.startswith("b:1, to make a copy of the prefix that a:1 holds: enough requests have waited")
    assert said.count(" ms") == 3 and said.endswith(" on a:1.")


def test_a_choice_by_the_load_of_all_gateways_says_so():
    told = decided(Copies(), replica("a:1", 960), replica("b:1")) | {"shared": True}
    assert "b:1, by the load of all gateways" in sentence(told) and "copy" not in sentence(told)


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_load", "overlap_cost", "prefix_affinity"])
def test_policies_that_weigh_no_seconds_give_their_own_reason_and_the_answers_times(policy):
    told = decided(policy, replica("a:1", 960), replica("b:1"))
    assert all(one["seconds"] is None and not one["tied"] for one in told["replicas"])
    said = sentence(told)
    assert said.startswith(f"{told['choice']}, by {policy} ({told['reason']}): its answer is predicted to take ")
    assert said.endswith("the quickest of the others.") and "as predicted" not in said


def test_two_legs_name_both_replicas_and_the_price_of_one_alone():
    told = decided("least_time", replica("p:1"), replica("d:1"))
    told["legs"] = {"prefill": "p:1", "decode": "d:1", "moved_tokens": 2048, "seconds": 0.3, "whole_seconds": 0.4}
    assert sentence(told) == (
        f"p:1 computes the prompt and d:1 writes the answer: the request costs 300 ms with 2,048 tokens moved, "
        f"and 400 ms on {told['choice']} alone."
    )
    told["legs"] |= {"seconds": None, "whole_seconds": None}
    assert sentence(told).endswith("writes the answer: the policy chose both, 2,048 tokens are moved.")


def test_legs_that_were_not_taken_are_named_with_their_price():
    told = decided("least_time", replica("d:1"))
    told |= {
        "legs": None,
        "other_legs": {"prefill": "p:1", "decode": "d:1", "moved_tokens": 2048, "seconds": 0.5, "whole_seconds": 0.4},
    }
    assert sentence(told).startswith("d:1, the only replica that can take it: ")
    assert sentence(told).endswith(
        " Apart, with the prompt on p:1 and the answer on d:1, it would cost 500 ms with 2,048 tokens moved."
    )
