"""Priority scheduling of the simulated engine, as vLLM's: who waits, and who gives up blocks."""

import pytest

from replicas.simulated.engine import Engine, EngineRequest
from replicas.simulated.profile import load_profile


def engine(policy, **fields):
    return Engine(load_profile("cpu-tiny", scheduling_policy=policy, **fields))


def request(name, priority, tokens=32, output=4):
    return EngineRequest(name, [(name, block) for block in range(tokens // 16)], tokens, output, priority=priority)


def finished(one):
    order = []
    while (step := one.step()) is not None:
        order += [output.id for output in step.outputs if output.finished]
    return order


@pytest.mark.parametrize("policy, order", [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])])
def test_who_waits_goes_by_priority_the_lower_first_then_as_it_came(policy, order):
    one = engine(policy, max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -5)):
        one.add(request(name, priority))
    assert finished(one) == order


def test_who_runs_is_not_stopped_for_a_higher_one_that_comes():
    one = engine("priority", max_num_seqs=1)
    one.add(request("a", 5))
    one.step()
    one.add(request("b", -5))
    assert finished(one) == ["a", "b"]


@pytest.mark.parametrize("policy, victim", [("fcfs", "b"), ("priority", "a")])
def test_the_lowest_gives_up_its_blocks_where_they_run_out(policy, victim):
    one = engine(policy, num_blocks=6, block_size=16, max_model_len=96)
    one.add(request("a", 5, 32, 40))
    one.add(request("b", -5, 32, 40))
    order = finished(one)
    assert one.counters.preemptions > 0 and order[-1] == victim and sorted(order) == ["a", "b"]
