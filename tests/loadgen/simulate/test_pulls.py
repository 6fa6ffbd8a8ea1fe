"""Fleets whose engines fetch prompts from one another's memory: what is predicted is what they deliver."""

import random
from dataclasses import replace

import pytest

from loadgen.simulate import Fleet, Network, Setting, simulate
from loadgen.workload import generators
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Workload
from replicas.simulated.profile import load_profile

from .test_fleet_faults import hit_rate
from .test_legs import nothing_is_left, turn
from .test_tiers import right

PROFILE = load_profile("gpu-8b", num_blocks=4096, cpu_blocks=20_000)


def fleet(count=2, **more):
    return Fleet([PROFILE] * count, "least_time", 1, pulls=more.pop("pulls", True), **more)


def held_by_a_busy_one(made, blocks=400):
    """The first replica has a prompt, and much else to compute."""
    made.send(turn(blocks))
    made.run()
    holder = made.result.records[0].replica
    for number in range(12):  # only there is one to be had, for now
        for other in range(len(made.replicas)):
            if other != holder:
                made.lose(other)
        made.send(turn(1500, first=10**6 * (number + 1)))
    for other in range(len(made.replicas)):
        made.restore(other)
    return holder


def test_an_idle_engine_takes_the_prompt_and_says_that_it_was_cached():
    made = fleet(network=Network(gbit_per_s=100.0))
    holder = held_by_a_busy_one(made)
    at = made.now
    record = made.send(turn(400))
    made.run()
    assert record.replica == 1 - holder and record.error is None
    (pulled,) = made.links.transfers
    assert (pulled.prefiller, pulled.decoder, pulled.tokens) == (holder, record.replica, 400 * 16)
    assert record.cached == record.predicted == 400 * 16
    alone = PROFILE.step.seconds(6408, 0.0, 0, 0, 0.0)
    assert pulled.seconds < record.first - at < alone, "sooner than it could have been computed"
    # what it fetched it holds now, for others to be told of and for others to take
    again = made.send(turn(400))
    made.run()
    assert again.predicted == again.cached == 400 * 16
    assert min(made.gateways[0].holders.leading("cpu", turn(400).hashes)) == 400
    nothing_is_left(made)


def test_without_pulls_it_is_computed_again_or_waits():
    made = fleet(pulls=False)
    held_by_a_busy_one(made)
    made.send(turn(400))
    made.run()
    assert not made.links.transfers


@pytest.mark.parametrize("back", [None, 0.2])
def test_a_holder_that_is_lost_on_the_way_costs_a_computation_and_no_request(back):
    made = fleet(network=Network(gbit_per_s=20.0))
    holder = held_by_a_busy_one(made)
    record = made.send(turn(400))
    made.at(made.now + 0.05, made.lose, holder)
    if back is not None:
        made.at(made.now + back, made.restore, holder)
    made.run()
    assert record.replica == 1 - holder and record.error is None
    assert (record.predicted, record.cached) == (400 * 16, 0)
    made.restore(holder)
    nothing_is_left(made)


def test_the_one_that_fetches_is_lost_and_the_request_goes_elsewhere():
    made = fleet(3, network=Network(gbit_per_s=20.0))
    holder = held_by_a_busy_one(made)
    record = made.send(turn(400))
    first = record.replica
    assert first != holder
    made.at(made.now + 0.05, made.lose, first)
    made.run()
    assert record.error is None and record.tried == (first,)
    made.restore(first)
    nothing_is_left(made)


def test_a_load_is_predicted_to_the_token():
    rng, more = random.Random(1), {"engine_replies": True, "event_delay": 0.0}
    asked = generators.chat(rng, 400, num_prefixes=12, prefix_len=12_000, turns=3, think_time=1.0, output_len=60)
    load = Workload(asked, conversation_starts([one.requests for one in asked], 30.0, rng))
    small = replace(PROFILE, num_blocks=3000)
    without, with_ = (
        simulate(load, Setting("least_time", [small] * 4, 1, pulls=pulls, **more)) for pulls in (False, True)
    )
    assert with_.transfers and not without.transfers
    assert [one.error for one in with_.done] == [None] * len(with_.done)
    assert right(with_) >= 0.99 and hit_rate(with_) >= hit_rate(without)
