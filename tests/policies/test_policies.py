"""Each policy's own rule, and what every sensible one must hold."""

import copy
import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import NAMES, Candidate, CostGroup, Demand, Ledger, Load, make
from policies.rules import least_time
from policies.rules.least_time import TERMS


def fleet(count, **loads):
    """`count` candidates; loads={"requests": [..]} sets that field of each."""
    group = CostGroup()
    return [
        Candidate(f"r{i}", 0, Load(**{name: values[i] for name, values in loads.items()}), group.add(f"r{i}"))
        for i in range(count)
    ]


def place(policy, demand, candidates, explain=False):
    """Choose, and tell the policy that its choice was made."""
    choice = policy.choose(demand, candidates, explain)
    if hasattr(policy, "placed"):
        policy.placed(demand, candidates, choice)
    return choice


def spread(policy, candidates, demands, seed=1):
    rng = random.Random(seed)
    return Counter(place(policy, replace(demand, draw=rng.random()), candidates).index for demand in demands)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 900), st.floats(0, 1)
        ),
        min_size=1,
        max_size=70,
    ),
    st.booleans(),
    st.integers(0, 9),
)
def test_any_fleet_gets_one_of_its_candidates_and_the_same_one_again(name, replicas, explain, seed):
    """Choosing is pure: asked again, explained or not, in shadow or for a retry, a policy says the same and has learned
    nothing."""
    group = CostGroup()
    candidates = []
    for i, (prefilling, decoding, tokens, overlap, usage) in enumerate(replicas):
        load = Load(
            prefilling + decoding, prefilling, tokens * bool(prefilling), decoding, tokens * bool(decoding), 0, usage
        )
        candidates.append(Candidate(f"r{i}", overlap, load, group.add(f"r{i}"), (("cpu", 16),) if i % 3 else ()))
    demand = Demand(1000, 16, root=7, session=None if seed % 2 else "s", hashes=range(7, 69), draw=seed / 10)
    policy, before = make(name), copy.deepcopy(candidates)
    for _ in range(seed):
        place(policy, demand, candidates)
    known = copy.deepcopy(vars(policy))
    choice = policy.choose(demand, candidates, explain)
    assert 0 <= choice.index < len(candidates) and (choice.reason or not explain)
    assert choice == policy.choose(demand, candidates, explain)
    assert choice.index == policy.choose(demand, candidates, not explain).index
    assert vars(policy) == known and [one.load for one in candidates] == [one.load for one in before]


def test_equal_candidates_are_told_apart_by_the_draw_alone():
    candidates = fleet(4)
    for name in ("least_time", "least_load", "overlap_cost", "random"):
        chosen = [make(name).choose(Demand(10, draw=draw), candidates) for draw in (0.0, 0.26, 0.5, 0.99)]
        assert [choice.index for choice in chosen] == [0, 1, 2, 3]


def test_unknown_name_says_what_there_is():
    with pytest.raises(ValueError, match="least_time"):
        make("fastest")


def test_round_robin_takes_turns_in_each_set_of_candidates():
    """Models that are asked in turn, and some of one's replicas: each set gets all its replicas evenly."""
    policy, sets = make("round_robin"), [fleet(2), fleet(4), fleet(3)]
    for number, one in enumerate(sets[2]):
        one.replica = f"other-{number}"
    chosen = Counter((len(among), place(policy, Demand(10), among).index) for _ in range(12) for among in sets)
    assert chosen == {(size, index): 12 // size for size in (2, 3, 4) for index in range(size)}


def test_random_spreads_evenly():
    counts = spread(make("random"), fleet(4), [Demand(10)] * 4000)
    assert all(850 < counts[i] < 1150 for i in range(4))


def test_least_load_takes_the_fewest_and_counts_strangers():
    candidates = fleet(3, requests=[4, 2, 3])
    assert make("least_load").choose(Demand(10), candidates).index == 1
    candidates[1].load.waiting = 9
    assert make("least_load").choose(Demand(10), candidates).index == 2


def test_power_of_two_never_takes_the_busiest_and_needs_no_third():
    counts = spread(make("power_of_two"), fleet(3, requests=[0, 1, 9]), [Demand(10)] * 900)
    assert counts[2] == 0 and counts[0] > counts[1] > 200
    assert make("power_of_two").choose(Demand(10), fleet(1)).index == 0


def homes(policy, candidates, keys):
    return {key: candidates[policy.choose(Demand(10, session=key), candidates).index].replica for key in keys}


def test_consistent_hash_moves_only_the_keys_of_a_replica_that_left():
    policy, candidates, keys = make("consistent_hash"), fleet(8), [f"s{i}" for i in range(800)]
    before = homes(policy, candidates, keys)
    assert all(60 < n < 140 for n in Counter(before.values()).values())
    after = homes(policy, candidates[:3] + candidates[4:], keys)
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == "r3"}


def test_consistent_hash_spills_at_its_bound_and_without_a_key_takes_the_fewest():
    policy, candidates = make("consistent_hash"), fleet(4)
    home = policy.choose(Demand(10, root=99), candidates).index
    for candidate in candidates:
        candidate.load.requests = 4
    candidates[home].load.requests = 6  # the bound is ceil(1.25 x 19 / 4) = 6
    assert policy.choose(Demand(10, root=99), candidates).index != home
    candidates[(home + 1) % 4].load.requests = 1
    assert policy.choose(Demand(10), candidates).index == (home + 1) % 4


def test_prefix_affinity_follows_long_matches_only_and_only_in_balance():
    policy, candidates = make("prefix_affinity"), fleet(3, requests=[69, 5, 5])
    candidates[0].overlap = 310
    assert policy.choose(Demand(1000), candidates).index == 0
    candidates[0].load.requests = 70  # 70 - 5 > 64 and 70 > 1.5 x 5
    assert policy.choose(Demand(1000), candidates).index != 0
    candidates[0].load.requests, candidates[0].overlap = 69, 300
    assert policy.choose(Demand(1000), candidates).index != 0


def test_overlap_cost_weighs_tiers_and_decoding():
    policy, candidates = make("overlap_cost"), fleet(3)
    candidates[0].overlap, candidates[1].lower = 400, (("cpu", 600),)
    assert policy.choose(Demand(1000), candidates).index == 1  # 0.75 x 600 > 400
    candidates[1].load.context_tokens = 100
    assert policy.choose(Demand(1000), candidates).index == 0


def test_least_time_explains_its_terms_in_seconds():
    candidates = fleet(2, prefilling=[1, 0], prefill_tokens=[5000, 0], decoding=[0, 3], context_tokens=[0, 900])
    choice = make("least_time").choose(Demand(1000), candidates, explain=True)
    assert [tuple(terms) for terms in choice.terms] == [TERMS, TERMS]
    totals = [sum(terms.values()) for terms in choice.terms]
    assert choice.index == totals.index(min(totals)) == 1
    for terms, candidate in zip(choice.terms, candidates):
        ttft = candidate.costs.ttft_seconds(candidate.load, 1000, 0)
        assert terms["prefill"] + terms["queue"] + terms["crowd"] == pytest.approx(ttft)
    assert make("least_time").choose(Demand(1000), candidates).terms is None


def test_least_time_follows_the_prefix_until_its_queue_costs_more_than_computing_it():
    candidates = fleet(2)
    candidates[0].overlap = 3984
    policy = make("least_time")
    assert policy.choose(Demand(4000), candidates).index == 0
    candidates[0].load.prefilling, candidates[0].load.prefill_tokens = 4, 20_000
    assert policy.choose(Demand(4000), candidates).index == 1


@pytest.mark.parametrize("tokens, index", [(4000, 0), (60_000, 1)])
def test_least_time_computes_a_long_prompt_where_its_many_steps_are_short(tokens, index):
    """100 streams make a step 17 ms longer, where one holds 1,600 tokens of it: 30 ms. A prompt of eight steps shares
    eight with them."""
    candidates = fleet(2, requests=[100, 0], decoding=[100, 0], context_tokens=[60_000, 0])
    candidates[0].overlap = 1600
    policy = make("least_time")
    terms = policy.choose(Demand(tokens), candidates, explain=True).terms
    own = [sum(one[term] for term in ("prefill", "queue", "crowd")) for one in terms]
    assert own.index(min(own)) == index
    assert terms[0]["crowd"] == pytest.approx(0.017 * max(1, (tokens - 1600) / 8192))


def test_least_time_prefers_room_for_a_prompt_that_does_not_fit():
    candidates = fleet(2, decoding=[10, 10], context_tokens=[20_000, 20_000])
    candidates[0].overlap = 512
    for candidate, usage in zip(candidates, (0.95, 0.6)):
        candidate.load.scraped(0, usage)
    assert make("least_time").choose(Demand(4000), candidates).index == 1
    candidates[0].load.scraped(None, None)  # not known: no reason to avoid it
    assert make("least_time").choose(Demand(4000), candidates).index == 0


def test_least_time_goes_where_fewer_prompts_would_wait_for_its_batch():
    group = CostGroup()
    alike = [Load(requests=count, prefilling=count, prefill_tokens=3000) for count in (6, 1, 3)]
    candidates = [Candidate(f"r{i}", 0, load, group.add(f"r{i}")) for i, load in enumerate(alike)]
    assert make("least_time").choose(Demand(3000), candidates).index == 1


def test_least_time_goes_where_the_prompt_under_way_is_nearly_done():
    ones, tokens = {key: [1, 1] for key in ("requests", "prefilling", "begun")}, [2000, 2000]
    candidates = fleet(2, **ones, prefill_tokens=tokens, begun_tokens=tokens, since=[5.0, 5.03])
    assert spread(make("least_time"), candidates, [Demand(500, now=5.04)] * 20) == {0: 20}
    without_time = spread(make("least_time"), candidates, [Demand(500)] * 40)
    assert set(without_time) == {0, 1}, "both are as they were when they began"


def test_least_time_begins_conversations_where_fewer_went_lately_and_leaves_others_where_they_are():
    """One stream here or there just now; by the choices of late, four in five streams are on the first two."""
    ones = dict.fromkeys(("requests", "decoding"), [1] * 4)
    candidates = fleet(4, **ones, context_tokens=[4000] * 4, recent=[4.0, 4.0, 1.0, 1.0])
    for one in candidates[:3]:
        one.overlap = 3008
    assert spread(make("least_time"), candidates, [Demand(3300)] * 20) == {2: 20}, "of three that hold the instructions"
    candidates[0].overlap = 3200
    assert spread(make("least_time"), candidates, [Demand(3300)] * 20) == {0: 20}, "it holds what was said so far"


def test_least_time_tells_a_conversation_that_begins_from_one_that_goes_on_where_one_replica_alone_holds_its_instructions():
    """The holder has been chosen four times as often as the other; moving the instructions takes less than what many
    requests would wait."""

    def crowding(overlap, tokens):
        candidates = fleet(2, requests=[9, 9], decoding=[9, 9], context_tokens=[4000] * 2, recent=[4.0, 1.0])
        candidates[0].overlap = overlap
        holder, other = place(policy, Demand(tokens, root=7), candidates, explain=True).terms
        return holder["crowding"] / other["crowding"]

    policy = make("least_time")
    crowding(0, 3200)
    for tokens in range(3360, 6400, 160):
        assert crowding(tokens - 160, tokens) == pytest.approx(1), "it goes on, and is not made to pay"
    assert crowding(3008, 3300) > 1.5, "another one with the same instructions begins"
    assert crowding(3296, 3500) == pytest.approx(1), "and goes on"


def busy_holder():
    """One replica with 20 streams holds 4,000 tokens, another is idle and holds none."""
    candidates = fleet(2, requests=[20, 0], decoding=[20, 0], context_tokens=[40_000, 0])
    candidates[0].overlap = 4000
    return candidates


def test_least_time_copies_a_prefix_once_its_not_being_elsewhere_has_cost_what_computing_it_does():
    """Where it is held, streams make each first token come 11 ms later than it would elsewhere; that they stand still
    is worth 1.8 more, and what the request adds to their time 9.2; 4,000 tokens take 67 ms. So the fourth that waits
    goes elsewhere, and the rest have a choice."""
    policy, hashes, candidates = make("least_time"), range(1, 251), busy_holder()
    chosen = [place(policy, Demand(4100, hashes=hashes), candidates, explain=True) for _ in range(30)]
    elsewhere = [number for number, choice in enumerate(chosen) if choice.index == 1]
    assert elsewhere[0] == 4, "the first is nobody's follower yet"
    assert "a copy for those that follow, of what r0 holds" in chosen[4].reason and "copy" not in chosen[3].reason
    assert elsewhere[1] - elsewhere[0] == 4, "and from the start again, should it not stay there"


def test_least_time_makes_no_copy_that_would_not_pay_soon(monkeypatch):
    """With streams elsewhere, too, waiting costs 3 ms: more than twenty would have to for a copy, and it may be gone by
    then."""
    candidates = busy_holder()
    candidates[1].load = Load(requests=15, decoding=15, context_tokens=20_000)
    demands = [Demand(4100, hashes=range(1, 251))] * 300
    assert spread(make("least_time"), candidates, demands) == {0: 300}
    monkeypatch.setattr(least_time, "_KEEP", 1.0)
    assert spread(make("least_time"), candidates, demands)[1] > 3


def test_least_time_copies_nobody_s_history():
    """Prompts that go on are no reason to compute what they have in common with themselves: each prefix is asked for
    once."""
    policy, candidates = make("least_time"), busy_holder()
    for turn in range(30):
        candidates[0].overlap = 4000 + 16 * turn
        assert place(policy, Demand(4100 + 16 * turn, hashes=range(1, 257 + turn)), candidates).index == 0


def test_a_copy_stays_due_until_it_is_made():
    """Whoever knows a later load may choose among all but where a copy is due: that is decided. Asked without being
    placed, or placed elsewhere, it stays due."""
    policy, candidates, demand = make("least_time"), busy_holder(), Demand(4100, hashes=range(1, 251))
    while (choice := policy.choose(demand, candidates)).among is not None:
        assert list(choice.among) == [0, 1]
        policy.placed(demand, candidates, choice)
    assert choice.index == 1 and policy.choose(demand, candidates) == choice
    policy.placed(demand, candidates, choice._replace(index=0))
    assert policy.choose(demand, candidates).index == 1, "it was not made"
    policy.placed(demand, candidates, policy.choose(demand, candidates))
    assert policy.choose(demand, candidates).index == 0, "it was made"


def test_least_time_forgets_first_blocks_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(least_time, "_ROOTS", 10)
    policy, candidates = make("least_time"), fleet(2)
    for root in range(100):
        place(policy, Demand(1000, root=root), candidates)
    assert len(policy._habits[0].shortest) == 10


def test_a_scrape_tells_capacity_only_where_it_may_be_short():
    load = Load(decoding=4, context_tokens=8000, prefill_tokens=1000)
    load.scraped(3, 0.9)
    assert load.waiting == 3 and load.capacity_tokens == pytest.approx(10_000)
    load.scraped(0, 0.2)
    assert load.capacity_tokens == inf and load.kv_usage == 0.2
    load.scraped(None, None)
    assert (load.capacity_tokens, load.kv_usage, load.waiting) == (inf, 0.0, 0)


def test_least_time_fetches_from_a_slower_tier_rather_than_computing():
    candidates = fleet(2)
    candidates[1].lower = (("cpu", 2000),)
    assert make("least_time").choose(Demand(4000), candidates).index == 1


@given(st.integers(2, 16), st.integers(0, 15), st.integers(16, 20_000), st.integers(1, 200_000))
def test_an_idle_replica_is_never_starved_while_others_queue(count, idle, tokens, queued):
    """Without sharing: whatever the others queue, the one that has nothing to do is taken."""
    idle %= count
    ahead = [0 if i == idle else queued + 16 for i in range(count)]
    candidates = fleet(count, prefilling=[int(a > 0) for a in ahead], prefill_tokens=ahead)
    assert make("least_time").choose(Demand(tokens), candidates).index == idle


def play(name, count, demands):
    """Reserve each choice without ever finishing: how a burst is placed."""
    ledger, group, policy, rng = Ledger(), CostGroup(), make(name), random.Random(1)
    candidates = [Candidate(f"r{i}", 0, ledger.add(f"r{i}"), group.add(f"r{i}")) for i in range(count)]
    held, counts = [set() for _ in candidates], Counter()
    for demand in demands:
        for candidate, roots in zip(candidates, held):
            candidate.overlap = demand.tokens - 200 if demand.root in roots else 0
        index = place(policy, replace(demand, draw=rng.random()), candidates).index
        held[index].add(demand.root)
        ledger.reserve(candidates[index].replica, demand.tokens - candidates[index].overlap, demand.tokens)
        counts[index] += 1
    return counts


@pytest.mark.parametrize("name", ["least_time", "overlap_cost"])
def test_one_hot_root_does_not_pin_one_replica(name):
    counts = play(name, 4, [Demand(4000, root=1)] * 200)
    assert len(counts) == 4 and max(counts.values()) < 100


def test_a_prefix_is_copied_where_its_answers_would_be_written_sooner():
    """The holder computes what is left of the prompt at once, and writes each answer beside twenty long ones."""
    policy, hashes = make("least_time"), list(range(1, 504))
    busy = {"decoding": [20, 8], "context_tokens": [160_000, 20_000], "output_tokens": [1500, 600]}
    candidates = fleet(2, **busy)
    candidates[0].overlap = 8000
    demand = Demand(8050, hashes=hashes, root=1, output=150, residual=75)
    assert [place(policy, demand, candidates).index for _ in range(3)] == [0, 0, 1]


def test_a_burst_of_equal_prompts_is_placed_as_evenly_as_least_load():
    demands = [Demand(1000, root=root) for root in range(1, 81)]
    assert set(play("least_time", 8, demands).values()) == {10} == set(play("least_load", 8, demands).values())


def test_a_new_replica_gets_traffic():
    rng, ledger, group, policy = random.Random(1), Ledger(), CostGroup(), make("least_time")
    candidates = [Candidate(f"r{i}", 2000, ledger.add(f"r{i}"), group.add(f"r{i}")) for i in range(3)]
    for candidate in candidates:  # known, warm, and with a little to do
        for _ in range(60):
            tokens = rng.randrange(100, 3000)
            candidate.costs.observe_ttft(0.01 + 2e-5 * tokens, tokens, 0, Load())
        for _ in range(3):
            ledger.reserve(candidate.replica, 2000, 2000)
    new = Candidate("new", 0, ledger.add("new"), group.add("new"))
    counts = Counter()
    for _ in range(12):
        choice = place(policy, Demand(2200, draw=rng.random()), [*candidates, new])
        chosen = [*candidates, new][choice.index]
        ledger.reserve(chosen.replica, 2200 - chosen.overlap, 2200)
        counts[chosen.replica] += 1
    assert counts["new"] >= 2


def test_least_time_learns_of_each_model_apart():
    """Two models of one tokenizer have the same hashes; what one's requests do says nothing of the other's."""
    policy, hashes = make("least_time"), list(range(1, 101))
    candidates = fleet(2)
    candidates[0].overlap = 1600
    for _ in range(3):
        place(policy, Demand(1601, hashes=hashes, root=1, space=1), candidates)
    first, again = (policy.choose(Demand(1601, hashes=hashes, root=1, space=n), candidates).lesson for n in (2, 1))
    assert (first.regret, first.copy) == (0.0, None) and first.prefix == again.prefix
    fresh = make("least_time").choose(Demand(1601, hashes=hashes, root=1), candidates)
    assert policy.choose(Demand(1601, hashes=hashes, root=1, space=2), candidates) == fresh
    assert policy._habits[1].regrets and 2 not in policy._habits
