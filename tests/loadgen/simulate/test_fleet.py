"""The virtual fleet: deterministic, complete, and true to what its parts say."""

import itertools
import random
from dataclasses import replace

import pytest

from bench.play import backlog, ideal_hit_rate, pace, play
from loadgen.simulate import Fleet, Setting, Turn, simulate
from loadgen.workload import generators
from loadgen.workload.conversations import Workload
from loadgen.workload.limits import set_limits
from policies import Choice
from replicas.simulated.profile import StepDurations, load_profile

PROFILE = load_profile("gpu-8b", num_blocks=4096)


def turn(hashes, tail=8, output=24, think=0.0):
    """A prompt of these blocks and `tail` tokens; the reply's blocks are its own."""
    tokens = 16 * len(hashes) + tail
    full = (tokens + output) // 16
    reply = [(hashes[-1] * 31 + i) % 2**62 + 1 for i in range(full - len(hashes))]
    return Turn(hashes, tokens, output, hashes + reply, think)


def conversations(count, seed=0, turns=4, shared=40):
    """Conversations behind one common beginning; each turn extends the one before it."""
    rng, result = random.Random(seed), []
    for _number in range(count):
        hashes, talk = [1 + i for i in range(shared)], []
        for _ in range(turns):
            hashes = hashes + [rng.getrandbits(62) + 1 for _ in range(rng.randrange(4, 30))]
            talk.append(turn(hashes, think=0.2))
            hashes = list(talk[-1].all_hashes)
        result.append(talk)
    return result


def run(policy, work, rate=40.0, replicas=4, seed=1, profiles=None):
    fleet = Fleet(profiles or [PROFILE] * replicas, policy, seed)
    pace(fleet, work, rate, 20, seed)
    return fleet


def mean_ttft(fleet):
    records = fleet.result.records
    return sum(r.first - r.sent for r in records) / len(records)


def hit_rate(fleet):
    records = fleet.result.records
    return sum(r.cached for r in records) / sum(r.tokens for r in records)


def test_gateways_know_how_far_streams_have_come():
    fleet = Fleet([PROFILE], "round_robin", timed=True)
    (load,) = (one.load for one in fleet.gateways[0].candidates)
    first = fleet.send(turn([1, 2, 3], output=400))
    seen = []
    for at in (0.5, 1.0, 1.5):
        fleet.at(at, lambda: (fleet.send(turn([9], output=1)), seen.append(load.context_tokens)))
    fleet.run()
    for at, context in zip((0.5, 1.0, 1.5), seen, strict=True):
        ends = itertools.accumulate(first.gaps, initial=first.first)
        assert context == first.tokens + sum(end <= at for end in ends) - 1, "those after the first"
    assert load.context_tokens == 0


@pytest.mark.parametrize("policy", ["round_robin", "least_time"])
def test_every_request_ends_and_the_ledger_reads_zero(policy):
    work = conversations(40)
    fleet = run(policy, work)
    records = fleet.result.records
    assert len(records) == sum(map(len, work))
    assert all(r.sent < r.first < r.end <= fleet.result.seconds for r in records)
    total = fleet.gateways[0].router.ledger.total()
    assert (total.requests, total.prefill_tokens, total.context_tokens) == (0, 0, 0)


def test_a_prompt_that_an_engine_refuses_while_it_computes_holds_up_nobody_else():
    small = replace(PROFILE, max_model_len=3072)
    long = turn([10_000 + i for i in range(200)])
    work = conversations(40, turns=2, shared=4)
    mixed = [part for pair in zip(work, [[long]] * len(work)) for part in pair]
    fleet = run("round_robin", mixed, profiles=[small] * 2)
    refused = [r for r in fleet.result.records if r.turn is long]
    answered = [r for r in fleet.result.records if r.turn is not long]
    assert [r.error for r in refused] == ["http_400"] * 40
    assert len(answered) == 80 and all(r.error is None and r.first < r.end for r in answered)
    assert fleet.gateways[0].router.ledger.total().requests == 0


def test_turns_follow_their_replies_and_think():
    work = conversations(6)
    fleet = Fleet([PROFILE] * 2, "least_load", 1)
    play(fleet, work, [0.1 * i for i in range(6)])
    by_turn = {id(r.turn): r for r in fleet.result.records}
    for talk in work:
        for before, after in itertools.pairwise(talk):
            assert by_turn[id(after)].sent == pytest.approx(by_turn[id(before)].end + 0.2)


def test_predictions_are_what_the_engine_delivers_once_events_arrived():
    fleet = run("least_time", conversations(40), rate=10.0)
    records = fleet.result.records
    exact = sum(r.predicted == r.cached for r in records) / len(records)
    assert exact > 0.95 and hit_rate(fleet) > 0.5


def test_predicted_ttft_is_close_to_the_engines():
    records = run("least_time", conversations(150), rate=40.0).result.records[100:]
    errors = sorted(abs(r.expected_ttft / (r.first - r.sent) - 1) for r in records)
    assert errors[len(errors) // 2] < 0.15


def test_one_replica_with_room_reaches_the_ideal():
    fleet = run("round_robin", conversations(20), rate=5.0, replicas=1)
    assert hit_rate(fleet) == pytest.approx(ideal_hit_rate(fleet.result.records), abs=0.01)


def test_least_time_beats_blind_policies_where_prefixes_are_shared():
    work = conversations(120, shared=150)
    ours = run("least_time", work)
    assert hit_rate(ours) > 0.95 * ideal_hit_rate(ours.result.records)
    for other in ("round_robin", "least_load"):
        assert mean_ttft(ours) < mean_ttft(run(other, work))


def test_least_time_is_no_worse_than_least_load_where_nothing_is_shared():
    rng = random.Random(3)
    work = [[turn([rng.getrandbits(62) + 1 for _ in range(60)])] for _ in range(800)]
    for rate in (20.0, 80.0):
        assert mean_ttft(run("least_time", work, rate)) < 1.02 * mean_ttft(run("least_load", work, rate))


def test_slower_replicas_get_less_and_the_fleet_is_faster_for_it():
    work = conversations(150)
    mixed = [PROFILE] * 2 + [replace(PROFILE, speedup=0.33)] * 2
    ours, blind = run("least_time", work, profiles=mixed), run("least_load", work, profiles=mixed)
    slow = sum(r.replica >= 2 for r in ours.result.records) / len(ours.result.records)
    assert 0.02 < slow < 0.4
    assert mean_ttft(ours) < 0.8 * mean_ttft(blind)


def test_a_replica_that_turns_slow_is_noticed_and_used_less():
    work = conversations(300, turns=2, shared=2)
    fleet = Fleet([PROFILE] * 3, "least_time", 1)

    def turn_slow():
        fleet.replicas[0].engine.durations = StepDurations(replace(PROFILE, speedup=0.2))

    fleet.at(6.0, turn_slow)
    pace(fleet, work, 40.0, 20, 1)
    before = [r.replica for r in fleet.result.records if r.sent < 6.0]
    after = [r.replica for r in fleet.result.records if r.sent > 9.0]
    assert before.count(0) / len(before) > 0.2
    assert after.count(0) / len(after) < 0.15
    costs = [candidate.costs for candidate in fleet.gateways[0].candidates]
    assert costs[0].ttft.value > 1.5 * costs[1].ttft.value


def test_backlog_measures_a_rate_that_more_replicas_raise():
    work = conversations(200, turns=2, shared=4)
    one = backlog(Fleet([PROFILE], "round_robin", 1, event_delay=None), work, 32)
    two = backlog(Fleet([PROFILE] * 2, "round_robin", 1, event_delay=None), work, 64)
    assert one > 0 and 1.5 * one < two < 2.5 * one


class Noted:
    """A policy that keeps what it is told."""

    name = "noted"

    def __init__(self):
        self.seen, self.finished = [], []

    def choose(self, demand, candidates, explain=False):
        self.seen.append((demand.session, demand.max_tokens))
        return Choice(0)

    def session_finished(self, session):
        self.finished.append(session)


def test_a_rule_sees_what_the_client_sends_and_not_how_long_the_reply_is(monkeypatch):
    """Sessions and `max_tokens` as set by clients; that a session is over once its last answer, or error, is there."""
    noted = Noted()
    monkeypatch.setattr("loadgen.simulate.fleet.make", lambda *_: noted)
    asked = generators.rollouts(random.Random(1), 60, turns=10)
    set_limits(asked, "none", 1)
    asked[0].turns[0].limit = 4096
    simulate(Workload(asked, [0.0] * len(asked)), Setting("noted", [load_profile("gpu-8b")], users=2))
    names = [conversation.id for conversation in asked]
    assert noted.seen[0] == (names[0], 4096)
    assert {limit for _, limit in noted.seen[1:]} == {None} and {name for name, _ in noted.seen} == set(names)
    assert sorted(noted.finished) == sorted(names)


def test_a_user_asks_again_when_answered_and_a_tool_has_run():
    """Two users: never more than two requests at once, each after its pause, and the next task when one is over."""
    asked = generators.rollouts(random.Random(1), 120, turns=10)
    outcome = simulate(Workload(asked, [0.0] * len(asked)), Setting("round_robin", [load_profile("gpu-8b")], users=2))
    assert len(outcome.done) == 120 and not outcome.not_sent
    of = {conversation.id: conversation for conversation in asked}
    ended = {(record.conversation, record.turn): record.last for record in outcome.done}
    for record in outcome.done:
        if record.turn:
            pause = of[record.conversation].turns[record.turn].think
            assert record.sent == pytest.approx(ended[record.conversation, record.turn - 1] + pause)
    times = sorted((time, step) for record in outcome.done for time, step in ((record.sent, 1), (record.last, -1)))
    assert max(itertools.accumulate(step for _, step in times)) == 2
    begun = sorted(record.sent for record in outcome.done if not record.turn)
    over = sorted(ended[one.id, len(one.turns) - 1] for one in asked)
    assert begun[:2] == [0.0, 0.0] and begun[2:] == pytest.approx(over[: len(begun) - 2])
