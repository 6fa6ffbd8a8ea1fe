"""What the oracle is told is what comes to pass, where nothing comes after it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rules.truth import LATER
from loadgen.simulate import Fleet, Turn
from policies import Demand
from replicas.simulated.profile import load_profile

PROFILE = load_profile("gpu-8b", num_blocks=4096)


def turn(rng, blocks, output):
    hashes = [rng.getrandbits(60) + 1 for _ in range(blocks)]
    return Turn(hashes, 16 * blocks + 3, output, hashes + [rng.getrandbits(60) + 1 for _ in range(output // 16 + 2)])


@settings(max_examples=40)
@given(st.integers(0, 1000), st.lists(st.integers(1, 300), max_size=12), st.integers(1, 400), st.booleans())
def test_the_time_to_the_first_token_is_as_told(seed, busy, blocks, again):
    rng = random.Random(seed)
    fleet = Fleet([PROFILE], "round_robin")
    for size in busy:
        fleet.at(rng.random() * 0.3, lambda size=size: fleet.send(turn(rng, size, 60)))
    asked = turn(rng, blocks, 4)
    if again:  # its prompt is cached
        fleet.at(0.0, lambda: fleet.send(Turn(asked.hashes, asked.tokens, 2, asked.all_hashes)))
    told, truth = [], fleet.gateways[0].truth

    def ask():
        told.append(truth.seconds(0, Demand(asked.tokens, 16, asked.hashes[0], None, 4, fleet.now, asked.hashes)))
        told.append(fleet.send(asked))

    fleet.at(0.35, ask)
    fleet.run()
    seconds, record = told
    # beside the delay to others: at most a step more or less, as prompts are cut at the steps' budget
    own = record.first - record.sent
    assert own - 0.06 <= seconds <= 1.25 * own + 0.2


def test_an_idle_engine_is_told_to_the_microsecond():
    fleet, asked = Fleet([PROFILE] * 2, "round_robin"), turn(random.Random(2), 100, 4)
    seconds = fleet.gateways[0].truth.seconds(0, Demand(asked.tokens, 16, asked.hashes[0], None, 4, 0.0, asked.hashes))
    record = fleet.send(asked)
    fleet.run()
    assert seconds == pytest.approx(record.first - record.sent, rel=1e-9)


def answered(seconds):
    """A fleet in which each of two replicas has a stream, of that many tokens, and a request's seconds on each."""
    fleet, rng = Fleet([PROFILE] * 2, "round_robin"), random.Random(3)
    for output in seconds:
        fleet.send(turn(rng, 200, output))
    asked = turn(rng, 20, 300)
    told, truth = [], fleet.gateways[0].truth

    def ask():
        truth.output = asked.output
        demand = Demand(asked.tokens, 16, asked.hashes[0], None, None, fleet.now, asked.hashes)
        told.extend(truth.answer_seconds(index, demand) for index in range(2))

    fleet.at(0.3, ask)
    fleet.run()
    return told


def test_an_answer_beside_a_short_one_takes_less_than_beside_a_long_one():
    short, long = answered((40, 2000))
    assert short < long
    assert answered((2000, 2000))[0] == pytest.approx(long)


@pytest.mark.parametrize("output", [1, 2, 500])
def test_on_an_idle_engine_the_whole_answer_takes_what_is_told(output):
    fleet, asked = Fleet([PROFILE] * 2, "round_robin"), turn(random.Random(2), 100, output)
    truth = fleet.gateways[0].truth
    truth.output = output
    seconds = truth.answer_seconds(0, Demand(asked.tokens, 16, asked.hashes[0], None, None, 0.0, asked.hashes))
    record = fleet.send(asked)
    fleet.run()
    prefill = record.first - record.sent  # which counts for those who come later, too
    assert seconds == pytest.approx(record.end - record.sent + LATER * prefill, rel=0.01)
