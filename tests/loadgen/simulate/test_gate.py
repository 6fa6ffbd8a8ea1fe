"""Admission in virtual time: the gateway's own queue, asked by simulated clients."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from loadgen.simulate import Fleet, Turn
from loadgen.simulate.gate import Gate
from policies import Admission, Classes, QosClass, QueuedRequest, Rules, Slo
from replicas.simulated.profile import RequestTime, StepDurations, load_profile

SLO = Slo(2.0, 0.05)
PREMIUM, FREE = QosClass("premium", 0.1, 100, SLO), QosClass("free", 0.6, 10, SLO)


def fleet(mode, replicas=2, seed=1, profiles=None, **given):
    def admission(gateway):
        return Admission(Classes((PREMIUM, FREE)), Rules((mode,)))

    return Fleet(profiles or [load_profile("gpu-8b")] * replicas, "least_time", seed, admission=admission, **given)


def load(fleet, rate, seconds, qos="free", begin=0.0, tokens=2000, output=150, send=None):
    chance, when = random.Random(f"{qos} {begin}"), begin
    for number in range(10**6):
        when += chance.expovariate(rate)
        if when > seconds:
            return
        first = (len(qos) << 40) + (int(begin) << 34) + (number << 12)
        blocks = list(range(first, first + (tokens + output) // 16))
        turn = Turn(blocks[: tokens // 16], tokens, output, blocks, qos=qos, tenant=f"t{number % 5}")
        fleet.at(when, send or fleet.send, turn)


def good(records, since=20.0):
    late = [one for one in records if one.sent >= since]
    kept = [
        one
        for one in late
        if not one.error and one.first - one.sent <= SLO.ttft and one.end - one.first <= SLO.tpot * (one.output - 1)
    ]
    return len(kept), len(late)


@pytest.mark.parametrize("mode", ["wait", "reject"])
def test_under_twice_what_it_can_do_a_fleet_still_does_what_it_can(mode):
    """Without admission nobody is answered in time then."""
    known = {}
    for rate in (20.0, 45.0):
        one = fleet(mode)
        load(one, 14.0, 15.0)  # costs are learned by then
        load(one, rate, 50.0, begin=15.0)
        known[rate] = good(one.run().records)
    assert known[45.0][0] >= 0.95 * known[20.0][0]
    assert known[20.0][0] >= 0.8 * known[20.0][1]


def test_engines_that_run_few_at_once_are_sent_no_more_than_they_seat():
    """Their steps and their cache would have room for five times as many."""
    one = fleet("reject", profiles=[replace(load_profile("gpu-8b"), max_num_seqs=8)] * 2)
    load(one, 2.5, 200.0, tokens=200, output=1000)  # they answer 2 requests a second
    records = one.run().records
    kept, asked = good(records)
    admitted = sum(record.sent >= 20 and not record.error for record in records)
    assert kept >= 0.85 * admitted and kept >= 0.7 * asked


@pytest.mark.parametrize("mode, share", [("wait", 0.9), ("reject", 0.6)])
def test_a_fleet_with_roles_does_what_it_can_under_three_times_that(mode, share):
    """Without admission nobody is answered in time then. Whoever has two legs is judged by both engines."""
    known, roles = {}, ["prefill", "decode", "decode"]
    for rate in (24.0, 80.0):
        one = fleet(mode, replicas=3, roles=roles, legs="always")
        load(one, 14.0, 15.0)
        load(one, rate, 50.0, begin=15.0)
        records = one.run().records
        known[rate] = good(records)
        answered = [record for record in records if not record.error]
        assert sum(record.prefilled_by == 0 for record in answered) > 0.5 * len(answered)
    assert known[80.0][0] >= share * known[24.0][0]
    assert known[24.0][0] >= 0.9 * known[24.0][1]
    if mode == "reject":  # it answers fewer in time than "wait"
        plain = Fleet([load_profile("gpu-8b")] * 3, "least_time", 1, roles=roles, legs="always")
        load(plain, 14.0, 15.0)
        load(plain, 80.0, 50.0, begin=15.0)
        assert good(plain.run().records)[0] < 0.2 * known[80.0][0]


@pytest.mark.parametrize("roles", [None, ["prefill", "decode", "both"]])
def test_every_request_ends_and_nothing_is_left(roles):
    one = fleet("wait", replicas=3 if roles else 2, gateways=2, roles=roles)
    load(one, 45.0, 20.0)
    one.at(8.0, one.lose, 0)
    one.at(14.0, one.restore, 0)
    records = one.run().records
    assert all(record.end for record in records)
    assert {record.error for record in records} <= {None, "http_429", "http_502", "stream_error"}
    assert {record.error for record in records if not record.first} <= {"http_429"}
    for gate in one.gates:
        assert not gate.admission.waiting and gate.admission.space.requests == 0
    assert one.gateways[0].router.ledger.total().requests == 0


def test_who_waits_goes_on_when_the_engine_refuses_who_was_before_it():
    """The long one is refused 50 ms after it was sent, and nothing else ends."""
    profile = replace(load_profile("gpu-8b"), max_model_len=3072, request=RequestTime(latency=50.0))
    one = fleet("wait", profiles=[profile])
    long, short = (
        Turn([*range(1875)], 30_000, 20, [*range(1876)]),
        Turn([*range(5000, 5031)], 500, 20, [*range(5000, 5032)]),
    )
    refused, waiting = [], []
    one.at(0.0, lambda: refused.append(one.send(long)))
    one.at(0.01, lambda: waiting.append((one.send(short), one.gates[0].admission.waiting)))
    one.run()
    assert refused[0].error == "http_400"
    ((record, waited),) = waiting
    assert waited and record.error is None and record.first < 0.5


@pytest.mark.parametrize("roles", [None, ["prefill", "prefill", "decode", "decode"]])
def test_a_flood_of_the_lowest_class_does_not_reach_the_highest(roles):
    """Premium, which asks for less than it has reserved, is answered, all of it, and quickly."""
    seconds = {}
    for flood in (12.0, 200.0):
        one = fleet("wait", replicas=4, roles=roles, legs="always")
        load(one, 2.0, 45.0, "premium")
        load(one, 12.0, 15.0, "free")
        load(one, flood, 45.0, "free", begin=15.0)
        mine = [record for record in one.run().records if record.turn.qos == "premium" and record.sent > 20]
        assert not [record for record in mine if record.error]
        seconds[flood] = sum(record.first - record.sent for record in mine) / len(mine)
    assert seconds[200.0] < 2 * seconds[12.0]


def test_who_waits_for_nobody_is_answered_as_without_a_queue():
    """While there is room the queue is not there."""
    plain = Fleet([load_profile("gpu-8b")] * 2, "least_time", 1)
    asked = fleet("wait")
    for one in (plain, asked):
        load(one, 4.0, 20.0)
        one.run()
    assert [record.first for record in plain.result.records] == [record.first for record in asked.result.records]


def test_capped_answers_teach_no_length():
    """All others have 400 tokens, and that is what is expected. There is room for whole answers before the flood, and
    in it for the first few alone: from then on an engine is late with first tokens, so nobody finds room there."""
    one = fleet("degrade", replicas=1)
    load(one, 2.0, 10.0, tokens=4000, output=400)
    load(one, 60.0, 20.0, tokens=4000, output=400, begin=10.0)
    lengths = [record.output for record in one.run().records if not record.error]
    assert lengths.count(400) > 15 and lengths.count(128) > 40
    (kind,) = one.gateways[0].router.outputs._spaces.values()
    assert kind.mean == 400.0


@pytest.mark.parametrize(
    "mode, over, share, kept", [("wait", 2, 0.7, 0.8), ("wait", 4, 0.6, 0.6), ("reject", 2, 0.6, 0.7)]
)
def test_most_who_come_back_when_they_are_told_to_are_taken_once_load_has_fallen(mode, over, share, kept):
    """A burst of more than an engine can answer, of clients that follow `Retry-After` as it is sent, in whole seconds;
    then half of what it can. Nobody is told to come back with all the others."""
    one, full, end, asked = fleet(mode, replicas=1), 12.0, 25.0, []

    def send(turn, first=True):
        def ended():
            if record[0].error == "http_429":
                one.at(one.now + min(600, max(1, math.ceil(record[0].retry_after))), send, turn, False)

        record = []
        record.append(one.send(turn, None, ended))
        asked.append((first, record[0]))

    load(one, 0.5 * full, 15.0, send=send)
    load(one, over * full, end, begin=15.0, send=send)
    load(one, 0.5 * full, 80.0, begin=end, send=send)
    one.run()
    back = [record for first, record in asked if not first and record.sent >= end]
    assert len(back) > 50
    assert sum(record.error is None for record in back) >= share * len(back)
    assert max(Counter(int(record.sent) for record in back).values()) <= 2 * full
    new = [record for first, record in asked if first and end + 5.0 <= record.sent < 80.0]
    assert good(new)[0] >= kept * len(new), "nor do they take the place of those that come for the first time"
    assert all(record.retry_after <= 60.0 for _, record in asked)


@pytest.mark.parametrize("mode", ["degrade", "reject"])
def test_of_a_crowd_no_more_are_admitted_than_are_answered_within_the_limit(mode):
    """On an engine that has had only single requests, so that nothing was learned behind a crowd. A step computes four
    of these prompts, which come out together: some are a step late."""
    one = fleet(mode, replicas=1)
    load(one, 0.5, 20.0, qos="premium")
    crowd = []
    for number in range(100):
        blocks = [(number + 1) << 30 | index for index in range(134)]
        turn = Turn(blocks[:125], 2000, 150, blocks, qos="premium", tenant="t")
        one.at(40.0, lambda turn=turn: crowd.append(one.send(turn)))
    one.run()
    admitted = [record.first - record.sent for record in crowd if not record.error]
    assert max(admitted) <= 1.25 * SLO.ttft
    assert sum(seconds <= SLO.ttft for seconds in admitted) >= 35, "of 44 that the engine computes in that time"


@pytest.mark.parametrize("ends, steps", [(29.9, ["tighten", "cap", "halve", "shed"]), (30.1, [])])
def test_an_answer_that_ends_after_a_window_is_none_of_its_last_third(ends, steps):
    """Of the window's answers all before its last third were slow, and all in that were quick."""
    admission = Admission(Classes((PREMIUM, FREE)), Rules(control_window=30.0))
    gate = Gate(None, admission, print, print, at=lambda *call: None)
    slow, quick = 0.1, 0.01  # seconds a token; a limit of 0.05
    for tpot, end, answers in ((slow, 5.0, 20), (quick, 25.0, 7), (slow, ends, 7)):
        for _ in range(answers):
            gate.complete(QueuedRequest(PREMIUM, SLO, 0.0), end - 40 * tpot, end, 41)
    gate.first(QueuedRequest(PREMIUM, SLO, 31.0), 31.1)
    assert [change.step for _, change in gate.changes] == steps


class Slow(StepDurations):
    """Of an engine whose steps take forty times as long."""

    __slots__ = ()

    def seconds(self, *step):
        return 40.0 * super().seconds(*step)


def test_of_a_fault_in_which_nearly_all_are_refused_the_control_takes_its_steps_and_holds_them():
    """Premium asks for 30 % and gets next to nothing: few answers, all of them in time, as the rest is refused."""
    window, begin, end, profile = 6.0, 12.0, 42.0, load_profile("gpu-8b")
    classes = QosClass("premium", 0.2, 100, Slo(0.4, 0.06)), QosClass("free", 0.3, 10, Slo(3.0))
    rules = Rules(control_window=window)
    one = Fleet([profile] * 2, "least_time", 1, admission=lambda _: Admission(Classes(classes), rules))
    load(one, 12.0, 66.0, "premium", tokens=800, output=48)
    load(one, 28.0, 66.0, "free", tokens=800, output=48)
    for when, durations in ((begin, Slow), (end, StepDurations)):
        for each in one.replicas:
            one.at(when, setattr, each.engine, "durations", durations(profile))
    records = one.run().records
    slow = [record for record in records if record.turn.qos == "premium" and begin + window <= record.sent < end]
    assert sum(record.error is None for record in slow) < 0.1 * len(slow)
    steps = [(when, change.step, change.taken) for when, change in one.gates[0].changes]
    assert steps[:4] == [(begin + window, step, True) for step in ("tighten", "cap", "halve", "shed")]
    assert steps[4:] and all(when > end for when, *_ in steps[4:]), "none is undone as long as the fault lasts"
    assert [taken for *_, taken in steps[4:]] == [False] * 4, "and all afterwards"
