"""The engine model, case by case against what vLLM v1 does, where `test_engine_against_rules` does not look."""

import pytest

from replicas.simulated.engine import Cleared, Engine, EngineRequest, Stored
from replicas.simulated.profile import Profile, StepTime


def make(**changes) -> Engine:
    every_token = changes.pop("every_token", True)
    limits = {"num_blocks": 101, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 400}
    return Engine(Profile("test", StepTime(prefill=1, decode=1), **{**limits, **changes}), every_token)


def request(id: str, tokens: int, out: int = 1, text: str = "a", size: int = 4, **more) -> EngineRequest:
    """Keys are (text, block index): equal texts share their prefix, output included."""
    keys, more = [(text, i) for i in range(tokens // size)], {"output_blocks": lambda i: (text, i), **more}
    return EngineRequest(id, keys, tokens, out, **more)


def stored(step) -> list[Stored]:
    return [event for event in step.events if type(event) is Stored]


def ended(steps: list) -> list[str]:
    return [output.id for step in steps for output in step.outputs if output.finished]


def finish(engine: Engine) -> list:
    steps = []
    while (step := engine.step()) is not None:
        steps.append(step)
        assert len(steps) < 10_000
    return steps


def test_output_without_keys_is_never_a_hit():
    engine = make()
    engine.add(request("turn1", 10, 7, output_blocks=None))
    finish(engine)
    engine.add(request("turn2", 30))
    assert finish(engine)[0].outputs[0].cached_tokens == 8


@pytest.mark.parametrize("policy, ends", [("fcfs", ["a", "b"]), ("priority", ["b", "a"])])
def test_the_last_in_order_gives_way_when_blocks_run_out_and_loses_nothing(policy, ends):
    engine = make(num_blocks=7, max_model_len=24, scheduling_policy=policy)
    engine.add(request("a", 11, 12, text="a", priority=5))
    engine.add(request("b", 11, 12, text="b", priority=-5))
    steps = finish(engine)
    assert sum(step.preempted for step in steps) == engine.counters.preemptions == 1
    outputs = [output for step in steps for output in step.outputs]
    assert [sum(output.tokens for output in outputs if output.id == name) for name in "ab"] == [12, 12]
    assert ended(steps) == ends
    assert engine.counters.prefix_queries == 22  # a preempted request's second look is not counted again


@pytest.mark.parametrize("policy, order", [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])])
def test_who_waits_goes_by_priority_the_lower_first_then_as_it_came(policy, order):
    engine = make(scheduling_policy=policy, max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -5)):
        engine.add(request(name, 8, 4, text=name, priority=priority))
    assert ended(finish(engine)) == order


def test_who_runs_is_not_stopped_for_a_higher_one_that_comes():
    engine = make(scheduling_policy="priority", max_num_seqs=1)
    engine.add(request("a", 8, 4, priority=5))
    engine.step()
    engine.add(request("b", 8, 4, text="b", priority=-5))
    assert ended(finish(engine)) == ["a", "b"]


@pytest.mark.parametrize(
    "stop, out, expected",
    [
        *((None, 5, (5, "length")), (9, 5, (5, "length")), (None, 500, (30, "length"))),
        *((3, 5, (3, "stop")), (5, 5, (5, "stop"))),
    ],
)
def test_how_a_request_ends(stop, out, expected):
    engine = make(max_model_len=40)
    engine.add(request("r", 10, out, stop_tokens=stop))
    outputs = [output for step in finish(engine) for output in step.outputs]
    assert (sum(output.tokens for output in outputs), outputs[-1].finished) == expected


def test_abort_frees_waiting_partial_and_decoding_requests():
    engine = make(max_num_seqs=3, max_num_batched_tokens=16)
    engine.add(request("decoding", 4, 9, text="d"))
    engine.step()
    engine.add(request("partial", 40, text="p"))
    engine.add(request("waiting", 40, text="w"))
    engine.step()
    assert engine.kv_usage > 0
    assert [engine.abort(name) for name in ("waiting", "partial", "decoding", "unknown")] == [True, True, True, False]
    assert engine.kv_usage == 0 and engine.running == engine.waiting == 0 and engine.step() is None


def test_what_can_never_run_is_refused():
    engine = make(num_blocks=11, max_model_len=400)
    with pytest.raises(ValueError, match="40"):
        engine.add(request("big", 40))
    with pytest.raises(ValueError, match="keys"):
        engine.add(EngineRequest("r", [], 10, 1))
    engine.add(request("r", 39))
    with pytest.raises(ValueError, match="in use"):
        engine.add(request("r", 3))
    assert len(finish(engine)) == 1


def test_reset_waits_for_idle_and_is_told_with_the_next_step():
    engine = make()
    engine.add(request("r", 10, 2))
    engine.step()
    assert engine.reset_prefix_cache() is False
    finish(engine)
    assert engine.reset_prefix_cache() is True and engine.step() is None
    engine.add(request("again", 10))
    (step,) = finish(engine)
    assert type(step.events[0]) is Cleared and step.outputs[0].cached_tokens == 0


@pytest.mark.parametrize("received, computed", [(0, 21), (20, 1), (21, 1), (7, 14)])
def test_what_another_engine_computed_is_there_and_is_no_hit(received, computed):
    engine = make()
    engine.add(request("a", 21, out=2, received=received))
    step = engine.step()
    assert step.prefill_tokens == computed
    assert [key for event in stored(step) for key in event.keys] == request("b", 21).blocks
    assert step.outputs[0].cached_tokens == 0 and engine.counters.prefix_hits == 0
    finish(engine)
    engine.add(request("b", 21))
    assert engine.step().outputs[0].cached_tokens == 20
    assert engine.kv_usage == 0


def test_what_was_received_may_be_less_than_is_held():
    engine = make()
    engine.add(request("a", 21))
    finish(engine)
    engine.add(request("b", 21, received=9))
    assert engine.step().outputs[0].cached_tokens == 20


def test_what_a_request_keeps_is_in_use_until_it_is_let_go():
    engine = make(num_blocks=11)
    engine.add(request("p", 32, 1, keeps=True))
    finish(engine)
    assert engine.kv_usage == 0.8 and engine.step() is None
    engine.add(request("q", 16, 1, text="b"))
    assert engine.step() is None and engine.waiting == 1  # it needs four blocks of the two that are free
    assert engine.let_go("p") and not engine.let_go("p")
    assert [step.prefill_tokens for step in finish(engine)] == [16] and engine.kv_usage == 0
    assert engine.cached([("a", i) for i in range(4)], 17) == 4  # they stay in the prefix cache as any
