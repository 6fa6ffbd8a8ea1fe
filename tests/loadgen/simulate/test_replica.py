"""An engine that leaps over what changes nothing is the same engine: output for output, time for time."""

import heapq
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulate.replica import Replica
from replicas.simulated.engine import Engine, EngineRequest
from replicas.simulated.profile import Profile, StepTime

step_times = st.builds(
    StepTime,
    base=st.sampled_from([0.0, 0.3]),
    prefill=st.just(2.0),
    prefill_token=st.just(0.11),
    attention=st.sampled_from([0.0, 1e-3]),
    decode=st.just(1.7),
    decode_least=st.sampled_from([0.0, 2.5]),
    decode_sequence=st.just(0.2),
    decode_context_token=st.sampled_from([0.0, 0.013]),
    decode_usage=st.sampled_from([0.0, 3.1]),
    spread=st.sampled_from([0.0, 0.2]),
)
profiles = st.builds(
    Profile,
    name=st.just("test"),
    step=step_times,
    num_blocks=st.integers(9, 60),
    block_size=st.integers(1, 16),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    max_model_len=st.just(10_000),
    speedup=st.sampled_from([1.0, 3.0]),
)
# (seconds after the one before, which text, where it turns into its own, prompt tokens, output tokens, does its output
# have keys)
requests = st.lists(
    st.tuples(
        st.floats(0, 0.3), st.integers(0, 2), st.integers(0, 9), st.integers(1, 60), st.integers(1, 90), st.booleans()
    ),
    min_size=1,
    max_size=25,
)


def arrivals(profile: Profile, script):
    """What is asked, and when; two never at the same moment, nor at one that a step could end at."""
    at = 0.0
    for number, (gap, text, turn, prompt, output, keyed) in enumerate(script):
        at += gap + 1.2345e-7
        prompt = min(prompt, profile.context_length - 1)
        keys = [
            (text, index) if index < turn else (text, turn, number, index)
            for index in range((prompt + output) // profile.block_size + 1)
        ]
        yield (
            at,
            EngineRequest(
                number, keys[: prompt // profile.block_size], prompt, output, keys.__getitem__ if keyed else None
            ),
        )


def told(step, end):
    return (
        [(end, output) for output in step.outputs],
        [(end, type(event).__name__, event.keys) for event in step.events],
    )


def stepped(profile, script):
    """One step after the other."""
    engine, coming, now, outputs, events = Engine(profile), list(arrivals(profile, script)), 0.0, [], []
    while True:
        while coming and coming[0][0] <= now:
            engine.add(coming.pop(0)[1])
        step = engine.step()
        if step is None:
            if not coming:
                return outputs, events, engine
            now = coming[0][0]
            continue
        now += step.seconds
        for kept, new in zip((outputs, events), told(step, now)):
            kept += new


def leapt(profile, script):
    """As a fleet does it; also how often the engine was looked at."""
    replica, order, outputs, events, looks = Replica(profile), count(), [], [], 0
    heap = [(at, next(order), asked, 0) for at, asked in arrivals(profile, script)]

    def go_on(now):
        step = replica.go_on(now)
        if step is not None:
            events.extend(told(step, now + step.seconds)[1])

    while heap:
        now, _, asked, turn = heapq.heappop(heap)
        before = replica.turn
        if asked is not None:
            if replica.add(asked, now):
                go_on(now)
        elif turn == before:
            looks += 1
            if (step := replica.wake()) is not None:
                outputs += told(step, now)[0]
            go_on(now)
        if replica.turn != before and replica.wakes is not None:
            heapq.heappush(heap, (replica.wakes, next(order), None, replica.turn))
    return outputs, events, replica.engine, looks


@settings(max_examples=300)
@given(profiles, requests)
def test_a_leaping_engine_is_a_stepping_engine(profile, script):
    one_by_one, at_once = stepped(profile, script), leapt(profile, script)
    assert at_once[0] == one_by_one[0] and at_once[1] == one_by_one[1]
    assert at_once[2].counters == one_by_one[2].counters
    assert at_once[2].kv_usage == one_by_one[2].kv_usage == 0


def test_a_single_stream_is_looked_at_when_its_blocks_begin_and_fill():
    profile = Profile("test", StepTime(decode=6.0, prefill=10.0), num_blocks=100)
    _, _, engine, looks = leapt(profile, [(0.0, 0, 0, 40, 160, True)])
    assert engine.counters.steps == 160 and looks < 160 / 3
