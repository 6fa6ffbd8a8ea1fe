"""Two prefill and two decode engines that the gateway launches from the shipped profile, beside one engine whose
answers are the truth: 200 requests of all formats, then engines that are killed and stopped, and clients that leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest

from replicas.launch.profile import SHIPPED

from ..gateway.running import Running, counted
from .engines import Engine, folder, gateway, version
from .pd import WAYS, alone, asked, prompts, said, spread

pytestmark = pytest.mark.pd
AT_ONCE = 4


@pytest.fixture(scope="module")
def truth(start_engine) -> Engine:
    if version()[:2] != (0, 32) or not list(folder().glob("lib/python3*/site-packages/nixl")):
        pytest.skip("needs vLLM 0.32 with nixl in its environment: tests/vllm/install.sh")
    return start_engine().wait()


@pytest.fixture
async def fleet(truth, model, tmp_path) -> AsyncIterator[Running]:
    profile = tmp_path / "pd.yaml"
    profile.write_text((SHIPPED / "pd-cpu.yaml").read_text() + f"executable: {folder()}/bin/vllm\n")
    pools = ", ".join(f"{role}: {{profile: {profile}, launch: 2, role: {role}}}" for role in ("prefill", "decode"))
    # round robin has no costs to compare: whatever has a block to compute goes in two legs
    settings = {"pools": f"{{{pools}}}", "model": model, "served_model_name": "tiny", "policy": "round_robin"}
    async with gateway(ready=False, **settings) as process:
        await ready(process, 4)
        yield process


async def ready(fleet: Running, count: int) -> None:
    """All are, and run on any CPU: NIXL binds each engine on CPUs to the same core."""
    status = await fleet.until(lambda status: [one["state"] for one in status["replicas"]].count("ready") == count, 240)
    for one in status["replicas"]:
        spread(one["pid"])


async def pid_of(fleet: Running, role: str) -> int | None:
    """None where both are being started again."""
    found = (one["pid"] for one in (await fleet.status())["replicas"] if one["role"] == role and one["pid"])
    return next(found, None)


def sent(pid: int, number: int) -> bool:
    """Whether there was still a process to send the signal to: a list of processes may be older than the last death."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


async def both(fleet: Running, truth: Engine, way: str, text: str, stream: bool) -> None:
    """Ask both, and compare."""
    path, body = asked(way, text, stream)
    answer, expected = await asyncio.gather(fleet.client.post(path, json=body, timeout=120), alone(truth, path, body))
    assert said(answer, stream) == said(expected, stream), body


async def in_turns(work: list) -> None:
    """AT_ONCE of them at a time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(coroutine) -> None:
        async with turns:
            await coroutine

    async with asyncio.TaskGroup() as group:
        for coroutine in work:
            group.create_task(one(coroutine))


async def nothing_left(fleet: Running) -> None:
    """No reservation, and no request on any engine. A client may be gone before the gateway has read what it asked, so
    that an idle moment can come before the last request."""

    def idle(status: dict) -> bool:
        return all(not one["running"] and not one["waiting"] and not one["inflight"] for one in status["replicas"])

    async with asyncio.timeout(60):
        await fleet.until(idle, 60)
        while await fleet.counted("hitherto_reservations"):
            await fleet.until(idle, 60)


async def test_two_hundred_answers_are_those_of_one_engine(fleet, truth):
    texts = prompts(200, 31)
    work = [both(fleet, truth, WAYS[at % 4], text, at % 8 > 3) for at, text in enumerate(texts)]
    await in_turns(work)
    page = (await fleet.admin.get("/metrics")).text
    assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == 200
    assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 200
    assert counted(page, "hitherto_predictions_total", outcome="equal") == 200
    answered = {
        one["id"]: counted(page, "hitherto_replica_requests_total", replica=one["id"], status="2xx")
        for one in (await fleet.status())["replicas"]
    }
    assert min(answered.values()) > 50, "each engine had its part"
    await nothing_left(fleet)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_no_request_is_lost_with_an_engine(fleet, truth, role, number):
    """At five moments of one run; one that is stopped goes on after the last request. Answers in one piece have not
    begun until they are complete."""
    stopped: list[int] = []
    left = sorted(random.Random(role).sample(range(4, 36), 5 if number == signal.SIGKILL else 1))
    done = 0

    async def one(at: int, text: str) -> None:
        nonlocal done
        await both(fleet, truth, WAYS[at % 4], text, False)
        done += 1
        if left and done >= left[0]:
            moment = left.pop(0)
            pid = await pid_of(fleet, role)
            if pid is not None and sent(pid, number):
                stopped.append(pid)
            else:
                left.insert(0, moment)  # the next answer is the moment

    try:
        await in_turns([one(at, text) for at, text in enumerate(prompts(40, 55))])
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert stopped
    await ready(fleet, 4)
    await nothing_left(fleet)


async def test_clients_that_leave_leave_nothing_behind(fleet, truth):
    chance = random.Random(9)

    async def one(at: int, text: str) -> None:
        path, body = asked(WAYS[at % 4], text, at % 2 == 0)
        with suppress(httpx.TimeoutException):
            await fleet.client.post(path, json=body, timeout=chance.choice([0.005, 0.05, 0.1, 0.3, 1.0]))

    await in_turns([one(at, text) for at, text in enumerate(prompts(60, 91))])
    await nothing_left(fleet)
    await in_turns([both(fleet, truth, way, text, False) for way, text in zip(WAYS, prompts(4, 92), strict=True)])
