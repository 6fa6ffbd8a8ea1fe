"""Replicas that go and come back, gateways in the plural, and events that come late, twice as late, or never."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulate import Fleet, Outage, Setting, Turn, simulate
from loadgen.simulate.prompts import Prompts, Said
from loadgen.workload import generators
from loadgen.workload.conversations import Workload
from replicas.simulated.profile import load_profile

PROFILE = load_profile("gpu-8b", num_blocks=1024)


def work(requests=120, rate=30.0, seed=1, think=0.3) -> Workload:
    rng, at, starts = random.Random(seed), 0.0, []
    asked = generators.chat(rng, requests, num_prefixes=3, prefix_len=500, turns=3, think_time=think, output_len=40)
    for _ in asked:
        starts.append(at)
        at += rng.expovariate(rate * len(asked) / requests)
    return Workload(asked, starts)


def play(policy="least_time", load=None, replicas=4, profile=PROFILE, **setting):
    return simulate(load or work(), Setting(policy, [profile] * replicas, 1, **setting))


def hit_rate(outcome):
    good = [record for record in outcome.done if record.error is None]
    return sum(record.cached_tokens for record in good) / sum(record.prompt_tokens for record in good)


def wrong(outcome):
    """Share of prompt tokens about which gateway and engine did not agree whether they are cached."""
    off = sum(abs(record.predicted_tokens - record.cached_tokens) for record in outcome.done)
    return off / sum(record.prompt_tokens for record in outcome.done)


@settings(max_examples=25)
@given(
    st.sampled_from(["round_robin", "least_time", "prefix_affinity", "consistent_hash"]),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 4), st.one_of(st.none(), st.floats(0.1, 3))), max_size=4),
    st.sampled_from([None, 0.0, 0.05]),
    st.sampled_from([0.0, 0.3]),
)
def test_every_request_ends_once_and_every_ledger_reads_zero(policy, gateways, shared, lost, delay, loss):
    fleet = Fleet([PROFILE] * 3, policy, 1, delay, event_loss=loss, gateways=gateways, shared_ledger=shared)
    for replica, at, away in lost:
        fleet.at(at, fleet.lose, replica)
        if away is not None:
            fleet.at(at + away, fleet.restore, replica)
    load, prompts, ended = work(40), Prompts(16, 0, 32_000), []
    for conversation, start in zip(load.conversations, load.starts):
        turn = prompts.ask(Said(), conversation.turns[0], {})[1]
        fleet.at(start, lambda turn=turn: fleet.send(turn, None, lambda: ended.append(turn)))
    fleet.run()
    records = fleet.result.records
    assert len(ended) == len(records) == len(load.conversations)
    assert {id(turn) for turn in ended} == {id(record.turn) for record in records}
    for gateway in fleet.gateways:
        load = gateway.router.ledger.total()
        assert (load.requests, load.prefill_tokens, load.context_tokens) == (0, 0, 0)
    for record in records:
        assert record.error or record.sent < record.first <= record.end
        assert record.error or record.replica not in record.tried
    assert lost or not any(record.error for record in records)


def test_what_a_lost_replica_had_not_answered_is_asked_elsewhere_and_what_it_had_begun_is_cut():
    slow = replace(PROFILE, speedup=0.02)  # seconds to the first token
    fleet = Fleet([slow] * 2, "round_robin", 1)
    turns = [
        Turn([n * 100 + i + 1 for i in range(4)], 70, 40, list(range(10_000 * n + 1, 10_000 * n + 20)))
        for n in range(1, 5)
    ]
    early = [fleet.send(turn) for turn in turns[:2]]
    fleet.run(1.5)
    assert all(record.first for record in early)
    late = [fleet.send(turn) for turn in turns[2:]]
    fleet.at(1.6, fleet.lose, early[0].replica)
    fleet.run()
    assert [record.error for record in early] == ["stream_error", None]
    assert [record.error for record in late] == [None, None]
    assert sorted(record.tried for record in late) == [(), (early[0].replica,)]
    assert {record.replica for record in late} == {early[1].replica}


def test_a_replica_that_comes_back_is_empty_and_gets_requests_again():
    outcome = play(load=work(300), outages=[Outage(1, 2.0, 4.0)])
    mine = [record for record in outcome.done if record.replica == "r1"]
    away = [record for record in mine if 2.0 < record.sent < 4.0]
    back = [record for record in mine if record.sent >= 4.0]
    assert not away and back
    assert min(back, key=lambda record: record.sent).cached_tokens == 0
    assert sum(record.error is not None for record in outcome.done) <= 20


def test_with_no_replica_left_requests_are_refused():
    outcome = play(replicas=1, outages=[Outage(0, 1.0)])
    late = [record for record in outcome.done if record.sent > 1.0]
    assert late and all(record.error == "http_503" and record.replica is None for record in late)
    assert outcome.not_sent + len(outcome.done) == outcome.total


def test_a_prompt_that_no_engine_can_hold_is_an_error_and_no_more():
    outcome = play(
        load=Workload(generators.random_tokens(random.Random(1), 2, suffix_len=20_000, range_ratio=0.0), [0.0, 0.1])
    )
    assert [record.error for record in outcome.done] == ["http_400"] * 2 and "20000 tokens" in outcome.done[0].detail


def test_gateways_that_know_each_others_load_spread_a_burst_evenly_and_others_do_not():
    def counts(seed, shared):
        fleet = Fleet([PROFILE] * 4, "least_load", seed, gateways=4, shared_ledger=shared)
        burst = [fleet.send(Turn([n + 1], 20, 4, [n + 1, n + 100])).replica for n in range(12)]
        return [burst.count(replica) for replica in range(4)]

    assert all(counts(seed, True) == [3, 3, 3, 3] for seed in range(10))
    assert sum(counts(seed, False) == [3, 3, 3, 3] for seed in range(10)) < 5


def test_lost_events_that_are_replayed_cost_little():
    load = work(200, 20.0, think=7.0)  # by when what was only predicted has expired
    exact, replayed = (play(load=load, event_loss=loss) for loss in (0.0, 0.9))
    assert wrong(exact) < 0.001 and wrong(replayed) < 0.01


def test_a_gateway_without_events_models_the_caches():
    load = work(200, 20.0, think=7.0)
    modelled = play(load=load, event_delay=None)
    assert hit_rate(modelled) > hit_rate(play("round_robin", load)) and wrong(modelled) < 0.05
