"""A bid says in one linear form what its policy computes: the shared decision is the local one, made elsewhere."""
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from policies import Candidate, CostGroup, Demand, Load, make
from policies.least_load import busy
from policies.least_time import bid as price, lost_seconds, streams_later

LOADS = st.builds(
    lambda prefilling, decoding, prefill, context, waiting, usage, capacity: Load(
        prefilling + decoding, prefilling, prefill * (prefilling > 0), decoding, context * (decoding > 0), waiting, usage, capacity),
    st.integers(0, 40), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 10**6),
    st.none() | st.integers(0, 50), st.none() | st.floats(0, 1), st.none() | st.floats(1e3, 1e7))


def candidate(load, overlap, lower=()):
    group = CostGroup()
    costs = group.add("r")
    for seconds, uncached in ((0.4, 3000), (0.05, 100), (0.9, 5000)):
        costs.observe_ttft(seconds, uncached, 40, load)
        costs.observe_itl(0.02, 3, 900)
    return Candidate("r", overlap, load, costs, lower)
@given(LOADS, st.integers(0, 999), st.sampled_from(((), (("cpu", 1),), (("disk", 1),))))
def test_least_time_bids_the_seconds_it_chooses_by(load, overlap, lower):
    one = candidate(load, overlap if not lower else max(0, overlap - 1), lower)
    [bid] = make("least_time").bids(Demand(1000), [one])
    assert bid.cost(load, bid.own) == pytest.approx(sum(lost_seconds(1000, one)))
@given(LOADS, LOADS, st.integers(0, 9), st.integers(0, 9))
def test_a_price_has_what_the_requests_that_follow_will_meet(load, other, recent, more):
    load.recent, other.recent = recent, more
    both = [candidate(load, 480), candidate(other, 480)]
    for one, later in zip(both, streams_later(both, 1.5)):
        made = price(1000, one, later)
        assert made.cost(one.load, made.own) == pytest.approx(sum(lost_seconds(1000, one, None, later)))
@given(LOADS, st.integers(0, 999), st.integers(0, 999))
def test_what_a_deeper_overlap_saves_is_told_by_pace(load, overlap, deeper):
    """The one who decides may know of an overlap that the bidder does not."""
    policy, demand = make("least_time"), Demand(1000)
    shallow, deep = candidate(load, overlap), candidate(load, deeper)
    bid = policy.bids(demand, [shallow])[0]
    own = bid.pace * policy.own_after(demand, deeper, [shallow])
    assert bid.cost(load, own) == pytest.approx(sum(lost_seconds(1000, deep)))


@given(LOADS, st.integers(0, 999))
def test_others_bid_what_they_count(load, overlap):
    one = candidate(load, overlap)
    [bid] = make("least_load").bids(Demand(1000), [one])
    assert bid.cost(load, bid.own) == busy(load)
    [bid] = make("overlap_cost").bids(Demand(1000), [one])
    assert bid.cost(load, bid.own) == load.prefill_tokens + 1000 - overlap + load.context_tokens
    assert bid.pace * make("overlap_cost").own_after(Demand(1000), overlap, [one]) == bid.own


def test_power_of_two_bids_for_the_two_it_drew():
    candidates = [replace(candidate(Load(requests=i), 0), replica=f"r{i}") for i in range(5)]
    for seed in range(30):
        bids = make("power_of_two", seed).bids(Demand(10), candidates)
        drawn = [index for index, bid in enumerate(bids) if bid]
        assert len(drawn) == 2
        best = min(drawn, key=lambda index: bids[index].cost(candidates[index].load, 0.0))
        assert best == make("power_of_two", seed).choose(Demand(10), candidates).index
