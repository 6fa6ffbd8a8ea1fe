"""A request's way to the scheduler takes as long as the profile says, neither more nor less; and so do steps."""

import asyncio
import math
import time
from statistics import median, stdev

import pytest

from replicas.simulated.alarm import Alarm
from replicas.simulated.engine import Engine, EngineRequest
from replicas.simulated.profile import FrontEnd, Profile, RequestTime, StepTime, load_profile


def front(speedup=1.0, **ms) -> FrontEnd:
    return FrontEnd(Profile("p", StepTime(), RequestTime(**ms), speedup=speedup))


def test_latency_is_everybodys_own_and_work_is_done_in_turn():
    end = front(latency=10, work=2, token=0.01, text_token=0.02)
    assert end.reaches_engine(1.0, 100) == pytest.approx(1.0 + 0.010 + 0.002 + 0.001)
    assert end.reaches_engine(1.0, 100, text=True) == pytest.approx(1.0 + 0.010 + 2 * 0.002 + 2 * 0.001 + 0.002)
    assert end.reaches_engine(2.0, 0) == pytest.approx(2.012)  # nobody before it any more
    texts = front(work=2, text=3, text_token=0.01, busy_token=0.02)
    assert [texts.reaches_engine(at, 100, text, busy) - at for at, text, busy in (
        (1, False, True), (2, True, False), (3, True, True))] == pytest.approx([0.002, 0.006, 0.008])  # fmt: skip
    assert front(speedup=4, latency=10, work=2).reaches_engine(0.0, 5) == pytest.approx(0.003)


def test_a_profile_that_knows_of_steps_only_delays_nothing():
    assert FrontEnd(load_profile("gpu-8b")).reaches_engine(3.5, 1000, text=True) == 3.5


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_steps_differ_by_the_spread_and_are_the_same_again(spread):
    def steps() -> list[float]:
        engine = Engine(Profile("p", StepTime(base=2, spread=spread)))
        engine.add(EngineRequest("one", [], 1, 2000))
        return [engine.step().seconds for _ in range(2000)]

    seen = steps()
    assert seen == steps()
    assert median(seen) == pytest.approx(0.002, rel=0.05 * bool(spread))
    assert stdev(map(math.log, seen)) == pytest.approx(spread, rel=0.1, abs=1e-12)


async def test_an_alarm_rings_at_its_time():
    alarm, late = Alarm(), []
    for _ in range(50):
        when = time.monotonic() + 0.0023
        await alarm.until(when)
        late.append(time.monotonic() - when)
    alarm.close()
    assert min(late) >= 0 and sorted(late)[5] < 0.005  # the machine may hold up most of them


async def test_only_sleeps_that_may_be_are_disturbed_and_what_they_left_rings_nowhere_else():
    alarm, loop = Alarm(), asyncio.get_running_loop()
    begun = time.monotonic()
    loop.call_later(0.01, alarm.wake)
    await alarm.until(begun + 60, disturbed=True)
    assert time.monotonic() - begun < 30
    begun = time.monotonic()
    loop.call_later(0.01, alarm.wake)
    await alarm.until(begun + 0.1)
    assert time.monotonic() - begun >= 0.1
    loop.call_later(0.02, alarm.wake)
    await alarm.until(time.monotonic() + 0.05, disturbed=True)  # leaves a timer that would still ring
    begun = time.monotonic()
    loop.call_later(0.2, alarm.wake)
    await alarm.until(None, disturbed=True)
    assert time.monotonic() - begun >= 0.19
    alarm.close()


async def test_the_servers_own_time_is_part_of_a_requests(run_stack):
    """200 ms of latency are 200 ms, tokenizing and HTTP included; text takes longer than ids."""
    step = StepTime(base=2)
    profile_request = RequestTime(latency=200, text_token=1.0)
    async with run_stack(step=step, request=profile_request) as stack:

        async def seconds(prompt) -> float:
            begun = time.monotonic()
            await stack.post("/v1/completions", model="sim", prompt=prompt, max_tokens=1)
            return time.monotonic() - begun

        ids = min([await seconds([5] * 100) for _ in range(3)])
        text = min([await seconds("word " * 100) for _ in range(3)])
    assert 0.2 <= ids < 0.29 and text >= ids + 0.05


async def test_a_client_that_leaves_before_the_scheduler_has_its_request(run_stack):
    async with run_stack(request=RequestTime(latency=300)) as stack:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stack.post("/v1/completions", model="sim", prompt=[5] * 100, max_tokens=1)
        answer = await stack.post("/v1/completions", model="sim", prompt=[6] * 100, max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2
        await stack.idle()
        assert stack.server.runner.live == 0 and stack.engine.counters.prompt_tokens == 100
