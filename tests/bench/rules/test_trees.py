"""The rules that keep a tree of what they sent: thresholds at their edges, and what each does past them."""

import pytest

from bench.rules import make
from policies import Choice

from .fleets import asked, chain, fleet, send

SGLANG = ("sglang_chars", "sglang_tokens")
THRESHOLDS = {"sglang_tokens": (64, 1.5), "sglang_32": (32, 1.5), "sglang_4": (4, 1.1)}


def taught(name, *homes, blocks=100):
    """A rule that sent the same prompt to each of `homes`, and the prompt."""
    policy, prompt = make(name), chain(blocks)
    for home in homes:
        policy.placed(asked(prompt), fleet(max(homes) + 1), Choice(home))
    return policy, prompt


@pytest.mark.parametrize("name", (*SGLANG, "smg_spill"))
def test_a_match_counts_above_three_tenths_of_the_prompt(name):
    policy, prompt = taught(name, 2)
    busy = fleet(3, requests=[3, 0, 5])
    assert policy.choose(asked(chain(100, after=prompt[:31])), busy).index == 2
    assert policy.choose(asked(chain(100, after=prompt[:30])), busy).index == 1, "0.3 is not above it"


@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize(
    "low, high, balanced", [(0, 64, True), (0, 65, False), (130, 195, True), (129, 194, False), (200, 265, True)]
)
def test_sglang_gives_up_affinity_when_the_fleet_is_out_of_balance(name, low, high, balanced):
    """More than 64 apart, and more than 1.5 times: both must hold; the busiest need not be the holder."""
    policy, prompt = taught(name, 1)
    assert policy.choose(asked(prompt), fleet(3, requests=[high, low + 1, low])).index == (1 if balanced else 2)


@pytest.mark.parametrize("name", THRESHOLDS)
def test_lower_thresholds_give_up_affinity_sooner(name):
    apart, times = THRESHOLDS[name]
    policy, prompt = taught(name, 1)

    def home(low, high):
        return policy.choose(asked(prompt), fleet(3, requests=[high, low + 1, low])).index

    assert (home(0, apart), home(0, apart + 1)) == (1, 2)
    low = 1000
    assert (home(low, round(times * low)), home(low, round(times * low) + 1)) == (1, 2)


def test_sglang_takes_the_first_of_equals():
    policy, prompt = taught("sglang_tokens", 2, 1)
    assert policy.choose(asked(prompt), fleet(3, requests=[0, 9, 0])).index == 1
    assert policy.choose(asked(chain(9)), fleet(3, requests=[4, 3, 3])).index == 1


def test_the_tree_of_characters_keeps_a_quarter_of_the_tokens():
    assert make("sglang_tokens")._tree._limit == 4 * make("sglang_chars")._tree._limit == 2**22


def test_smg_takes_the_least_loaded_of_eight_holders():
    policy, prompt = taught("smg_spill", 0, 1, 2)
    assert policy.choose(asked(prompt), fleet(4, requests=[9, 4, 8, 0])).index == 1
    policy, prompt = taught("smg_spill", *range(9))
    assert policy.choose(asked(prompt), fleet(9, requests=[5] * 8 + [0])).index != 8


@pytest.mark.parametrize(
    "requests, spills",
    [
        ([96, 0, 0], False),  # mean 32: 96 is over 1.5 x 32, not over 32 + 64
        ([97, 0, 0], True),  # mean 32.3, and 97 > 96.3
        ([400, 240, 250], False),  # mean 296.7: 400 > 360.7, not over 445
        ([480, 205, 215], True),  # mean 300: 480 > 364 and > 450
    ],
)
def test_smgs_gate_needs_both_margins_over_the_mean(requests, spills):
    policy, prompt = taught("smg_spill", 0)
    assert policy.choose(asked(prompt), fleet(3, requests=requests)).index == (1 if spills else 0)


def test_smg_makes_a_hot_prefix_a_second_holder_by_spilling():
    policy, prompt = taught("smg_spill", 0)
    full = fleet(3, requests=[200, 1, 0])
    send(policy, asked(prompt), full, policy.choose(asked(prompt), full).index)
    assert policy.choose(asked(prompt), fleet(3, requests=[9, 9, 1])).index == 2


def test_smg_gives_idle_replicas_turns():
    """Of equals the one that was sent the least so far, since requests that end at once leave no other trace."""
    policy, order = make("smg_spill"), []
    for _ in range(6):
        candidates, request = fleet(3), asked(chain(5))
        order.append(policy.choose(request, candidates).index)
        policy.placed(request, candidates, Choice(order[-1]))
    assert order == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "requests, gated",
    [
        ([8, 0, 0, 0], True),  # mean 2: 8 > 6, 8 apart
        ([7, 0, 0, 0], False),  # 7 > 5.5, but not 8 apart
        ([14, 4, 4, 4], False),  # mean 6.75, with the holder's: 14 is not above 15.5
        ([30, 4, 4, 4], True),  # mean 10.5: 30 > 23
    ],
)
def test_aibrixs_gate_leaves_only_the_least_busy(requests, gated):
    """The holder is not the busiest and within a deviation, so only the gate keeps a prompt from it."""
    policy, prompt = taught("aibrix", 1)
    requests = [requests[0], requests[1] + 1, *requests[2:]]
    index = policy.choose(asked(prompt), fleet(4, requests=requests)).index
    assert index in ((2, 3) if gated else (1,))


def test_aibrix_passes_over_a_holder_more_than_a_deviation_above_the_mean():
    policy, prompt = taught("aibrix", 0)
    policy.placed(asked(prompt[:20]), fleet(3), Choice(1))
    assert policy.choose(asked(prompt), fleet(3, requests=[5, 5, 5])).index == 0
    assert policy.choose(asked(prompt), fleet(3, requests=[7, 4, 4])).index == 1, "7 > 5 + 1.41: the next best match"
    assert policy.choose(asked(chain(8)), fleet(3, requests=[7, 4, 3])).index == 2, (
        "no match at all: the fewest requests"
    )


def test_aibrix_counts_whole_per_cents():
    """Equal per cents are equal matches, and then fewer requests decide; even one that rounds to none is a match."""
    policy, prompt = taught("aibrix", 0, blocks=1000)
    policy.placed(asked(prompt[:801]), fleet(3), Choice(1))
    request = asked(chain(1000, after=prompt[:805]))
    assert policy.choose(request, fleet(3, requests=[1, 0, 1])).index == 1, "80.5 and 80.1"
    assert policy.choose(asked(prompt), fleet(3, requests=[1, 0, 1])).index == 0, "100 and 80.1"
    assert policy.choose(asked(chain(1000, after=prompt[:1])), fleet(3, requests=[1, 1, 1])).index != 2
    assert policy.choose(asked(chain(1000, after=prompt[:1])), fleet(3, requests=[1, 2, 0])).index == 0


def test_ray_takes_the_shortest_queue_of_those_with_the_longest_match():
    policy, prompt = taught("ray_prefix", 0, 2)
    assert policy.choose(asked(chain(200, after=prompt)), fleet(3, requests=[500, 0, 499])).index == 2, (
        "however long it is"
    )
    barely, short = chain(200, after=prompt[:20]), chain(200, after=prompt[:19])
    assert policy.choose(asked(barely), fleet(3, requests=[1, 0, 2])).index == 0, "0.1 is enough"
    policy.placed(asked(chain(300)), fleet(3), Choice(1))
    assert policy.choose(asked(short), fleet(3, requests=[2, 0, 1])).index == 2, (
        "less: the smallest trees, not the fewest requests"
    )


@pytest.mark.parametrize("name", (*SGLANG, "smg_spill", "aibrix", "ray_prefix"))
def test_what_a_replica_held_is_forgotten_when_it_goes(name):
    policy, prompt = taught(name, 2)
    assert policy.choose(asked(prompt), fleet(3)).index == 2
    policy.gone("r2")
    assert policy.choose(asked(prompt), fleet(3, requests=[1, 0, 1])).index == 1
