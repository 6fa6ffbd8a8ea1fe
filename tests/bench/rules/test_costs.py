"""The rules that weigh what is cached against load by a formula: each term, by hand."""

import pytest

from bench.rules import make
from policies import Choice

from .fleets import asked, chain, fleet, picks, send


def test_vllm_multiplies_prefill_by_requests():
    """(1,000 - 600 + 0) x 4 = 1,600 against 1,000 x (1 + 1) = 2,000 against (1,000 + 500) x 1."""
    request = asked(tokens=1000)
    held = {"overlap": [600, 0, 0], "requests": [3, 1, 0], "prefill_tokens": [0, 0, 700]}
    assert picks("vllm_kv_aware", request, fleet(3, **held)) == {0}
    held["prefill_tokens"][2] = 500
    assert picks("vllm_kv_aware", request, fleet(3, **held)) == {2}


def test_lmetric_multiplies_prefill_by_the_batch_and_prefers_an_idle_replica_to_the_holder():
    """(1,000 - 600) x 3 = 1,200 against 1,000 x 1 against (1,000 + 500) x 1; 0 where nobody is."""
    request = asked(tokens=1000)
    held = {"overlap": [600, 0, 0], "requests": [3, 1, 1], "prefill_tokens": [0, 0, 500]}
    assert picks("lmetric", request, fleet(3, **held)) == {1}
    held["requests"] = [2, 1, 1]
    assert picks("lmetric", request, fleet(3, **held)) == {0}
    held["requests"] = [2, 0, 0]
    assert picks("lmetric", request, fleet(3, **held)) == {1, 2}


@pytest.mark.parametrize(
    "name, tier, credit",
    [
        ("vllm_kv_aware", "cpu", 0.8),
        ("vllm_kv_aware", "remote", 0.6),
        ("vllm_kv_aware", "disk", 0.3),
        ("dynamo", "cpu", 0.75),
        ("dynamo", "disk", 0.25),
    ],
)
def test_slower_tiers_count_less(name, tier, credit):
    for held, expected in ((credit * 1000 - 16, 0), (credit * 1000 + 16, 1)):
        candidates = fleet(2, overlap=[0, held])
        candidates[0].lower = ((tier, 1000),)
        assert picks(name, asked(tokens=2000), candidates) == {expected}


def test_dynamo_weighs_blocks_to_compute_and_active_blocks_alike():
    """20 blocks active on the holder of 19 of 40: 21 + 20 + 40 against 40 + 40; of 21, 19 + 20 + 40."""
    policy, active = make("dynamo"), chain(20)
    policy.placed(asked(active), fleet(2), Choice(0))
    request = asked(chain(40))
    assert policy.choose(request, fleet(2, overlap=[19 * 16, 0])).index == 1
    assert policy.choose(request, fleet(2, overlap=[21 * 16, 0])).index == 0
    assert policy.choose(request, fleet(2, overlap=[21 * 16, 0], prefill_tokens=[32, 0])).index == 1, (
        "queued prefill counts in blocks"
    )


def test_dynamo_counts_a_shared_active_block_once():
    policy, prompt = make("dynamo"), chain(40)
    for index in (0, 0, 1):
        policy.placed(asked(prompt), fleet(2), Choice(index))
    policy.placed(asked(chain(3)), fleet(2), Choice(1))
    assert policy.choose(asked(chain(9)), fleet(2)).index == 0, "40 blocks active against 43"
    assert policy.choose(asked(chain(9, after=prompt[:9])), fleet(2)).index == 0
    policy.ended("r1", asked(prompt))
    assert policy.choose(asked(chain(9)), fleet(2)).index == 1, "3 blocks left there"
    policy.ended("r0", asked(prompt))
    assert policy.choose(asked(chain(9)), fleet(2)).index == 1, "one of two that share is left"
    assert policy.choose(asked(prompt), fleet(2)).index == 0, "40 active in both cases, 40 + 3 there"


def test_dynamo_counts_a_block_that_is_not_full():
    policy = make("dynamo")
    policy.placed(asked(chain(2), 33), fleet(2), Choice(0))
    policy.placed(asked(chain(2), 32), fleet(2), Choice(1))
    assert {policy.choose(asked(chain(9)), fleet(2)).index for _ in range(20)} == {1}


def test_dynamos_prefill_cost_is_never_below_nothing():
    """Credit for tiers may be more than what there is to compute; it must not buy active blocks."""
    policy = make("dynamo")
    policy.placed(asked(chain(2)), fleet(2), Choice(0))
    candidates = fleet(2, overlap=[144, 144])
    candidates[0].lower = (("cpu", 1600),)
    candidates[1].lower = (("cpu", 16),)
    assert policy.choose(asked(chain(10)), candidates).index == 1


def test_llmd_adds_two_for_the_queue_two_for_kv_use_and_three_for_the_prefix():
    request = asked(chain(100))
    assert picks("llmd_weights", request, fleet(2, overlap=[66 * 16, 0], prefilling=[1, 0])) == {1}, "1.98 against 2"
    assert picks("llmd_weights", request, fleet(2, overlap=[67 * 16, 0], prefilling=[9, 0])) == {0}, (
        "2.01, however long the queue"
    )
    assert picks("llmd_weights", request, fleet(2, overlap=[32 * 16, 0], kv_usage=[0.5, 0.0])) == {1}
    assert picks("llmd_weights", request, fleet(2, overlap=[34 * 16, 0], kv_usage=[0.5, 0.0])) == {0}
    assert picks("llmd_weights", request, fleet(3, prefilling=[4, 4, 4])) == {0, 1, 2}, "equal queues are all free"
    assert picks("llmd_weights", request, fleet(3, prefilling=[4, 2, 0], kv_usage=[0.0, 0.2, 0.6])) == {2}, (
        "2.8 beats 2.6 and 2"
    )


def test_llmd_sticks_to_holders_of_four_fifths():
    request = asked(chain(100))
    assert picks("llmd_sticky", request, fleet(3, overlap=[80 * 16, 0, 0], prefill_tokens=[9000, 0, 0])) == {0}
    assert picks("llmd_sticky", request, fleet(3, overlap=[79 * 16, 0, 0], prefill_tokens=[9000, 0, 0])) == {1, 2}, (
        "below 0.8: load only"
    )
    both = fleet(3, overlap=[80 * 16, 90 * 16, 0], prefill_tokens=[100, 0, 0])
    assert picks("llmd_sticky", request, both) == {1}, "of two holders the one with fewer uncached tokens in flight"


def test_llmd_leaves_saturated_holders():
    request, candidates = asked(chain(100)), fleet(2, overlap=[99 * 16, 0])
    costs = candidates[0].costs
    per_token = (costs.group.ttft.coefficients[0] + costs.prefill_seconds(8192, 0)) / 8192
    at_the_edge = int(18 / per_token)
    for queued, expected in ((at_the_edge - 10, 0), (at_the_edge + 10, 1)):
        candidates[0].load.prefill_tokens = queued
        assert picks("llmd_sticky", request, candidates) == {expected}
    candidates[1].load.prefill_tokens = 20
    assert picks("llmd_sticky", request, candidates) == {0}, "the others' wait is taken off"
    alone = fleet(2, overlap=[99 * 16] * 2, prefill_tokens=[3 * at_the_edge, 2 * at_the_edge])
    assert picks("llmd_sticky", request, alone) == {1}, "no others to go to"


def test_mooncake_takes_the_least_seconds():
    request = asked(tokens=4000)
    group = fleet(2)[0].costs
    saved = group.prefill_seconds(4000, 0) - group.prefill_seconds(1000, 3000)
    for seconds, expected in ((0.9 * saved, 0), (1.1 * saved, 1)):
        tokens = next(t for t in range(1, 10**6, 50) if group.prefill_seconds(t, 0) > seconds)
        assert picks(
            "mooncake", request, fleet(2, overlap=[3000, 0], prefilling=[1, 0], prefill_tokens=[tokens, 0])
        ) == {expected}
    slow = fleet(2)
    slow[0].costs.ttft.value = 2.0
    assert picks("mooncake", request, slow) == {1}, "a replica learned to be slow"
    assert picks("mooncake", request, fleet(2, decoding=[50, 0], requests=[50, 0])) == {0, 1}, (
        "decoding is nothing to it"
    )


def test_mooncakes_queue_is_the_sum_of_its_prompts():
    """Two prompts of 4,000 take less than one of 8,000, whose second half attends to its first."""
    assert picks("mooncake", asked(tokens=10), fleet(2, prefilling=[2, 1], prefill_tokens=[8000, 8000])) == {0}


def preble(cached, work=()):
    """The rule after work of so many requests was sent to each replica, and candidates that hold `cached`."""
    policy, candidates = make("preble_e2"), fleet(len(cached))
    for index, number in enumerate(work):
        for _ in range(number):
            policy.placed(asked(chain(50), now=0.0), candidates, Choice(index))
    return policy, fleet(len(cached), overlap=cached)


def test_preble_exploits_more_than_half_and_explores_below():
    request = asked(tokens=1000, now=1.0)
    policy, candidates = preble([501, 0], work=(9, 0))
    assert policy.choose(request, candidates).reason.startswith("exploits")
    policy, candidates = preble([500, 0], work=(9, 0))
    assert policy.choose(request, candidates).index == 1


def test_preble_takes_the_holder_with_the_least_work_of_three_minutes():
    policy, candidates = preble([800, 800, 0], work=(2, 1, 0))
    assert policy.choose(asked(tokens=1000, now=180.0), candidates).index == 1
    policy.placed(asked(tokens=1000, now=181.0), candidates, Choice(1))
    assert policy.choose(asked(tokens=1000, now=182.0), candidates).index == 0, "what is older than the window is gone"


def test_preble_explores_by_work_and_own_prefill():
    policy, _ = preble([0, 0], work=(1, 0))
    assert policy.choose(asked(tokens=9000, now=1.0), fleet(2, overlap=[4000, 0])).index == 0, (
        "4,000 tokens are more than 800 and 45 steps"
    )
    assert policy.choose(asked(tokens=9000, now=1.0), fleet(2, overlap=[160, 0])).index == 1


def test_preble_gives_a_prefix_a_second_holder_when_it_becomes_twice_as_slow():
    def rule(later):
        """TTFTs of 1 s around t=20, of `later` around t=100."""
        policy, prompt = make("preble_e2"), chain(50)
        for start, ttft in ((20.0, 1.0), (100.0, later)):
            early = asked(prompt, now=start)
            policy.choose(early, fleet(2))
            policy.placed(early, fleet(2), Choice(0))
            policy.choose(asked(chain(3), now=start + ttft), fleet(2))
            policy.first("r0", early)
        return policy, asked(prompt, now=170.0)

    holding = fleet(2, overlap=[49 * 16, 0])
    policy, request = rule(1.9)
    assert policy.choose(request, holding).index == 0
    policy, request = rule(2.1)
    assert policy.choose(request, holding).index == 1
    send(policy, request, holding, 1)
    assert policy.choose(request, holding).index == 0, "one request at a time: its slowness starts to count anew"
