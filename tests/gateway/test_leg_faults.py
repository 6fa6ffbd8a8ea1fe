"""The faults of two legs as a table, with processes: each part's engine is killed or stopped, and the client leaves, at
five moments of a request. What had not begun is answered all the same, and nothing stays reserved or computed.

Each moment has a pair of engines and a model of its own, so all five happen at a time in the one gateway that the tests
share. Each test leaves it idle, with all engines ready.
"""

import asyncio
import os
import signal
from contextlib import suppress
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio

from .running import Running, counted, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "Down the rabbit hole, and what Alice found there: a table, a key and a very small door. "
WORDS = 40
MOMENTS = (
    "before the request",
    "while the prompt is computed",
    "when it is handed over",
    "while the answer is written",
    "after the answer",
)
# Slow enough for each moment to last: a prompt of some 8,000 tokens takes two seconds, and so does its answer.
ENGINE = "engine: sim\nkv_connector: true\nspeedup: 0.1\n"


class Engine(NamedTuple):
    url: str
    pid: int

    async def figures(self, client: httpx.AsyncClient) -> dict[str, float]:
        page = (await client.get(f"{self.url}/metrics")).text
        names = ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "request_success_total")
        return {name: counted(page, f"vllm:{name}") for name in names}


@pytest.fixture(scope="module")
def alone(start_engine):
    return start_engine().wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pools")
    profile = folder / "slow.yaml"
    profile.write_text(ENGINE)
    pools = "".join(
        f"  {role[0]}{number}: {{profile: {profile}, launch: 1, role: {role}, served_model_name: m{number}}}\n"
        for number in range(len(MOMENTS))
        for role in ("prefill", "decode")
    )
    config = folder / "hitherto.yaml"
    config.write_text(f"policy: round_robin\npools:\n{pools}")
    async with running("--config", str(config)) as gateway:
        await gateway.ready_for_legs(2 * len(MOMENTS))
        yield gateway


async def pair(gateway: Running, number: int) -> dict[str, Engine]:
    """The engines of a model, by role."""
    replicas = (await gateway.status())["replicas"]
    return {one["role"]: Engine(one["url"], one["pid"]) for one in replicas if f"m{number}" in one["models"]}


def body(number: int, what: str, **fields) -> dict:
    content = f"{what}, {number}. " + TEXT * 400
    return {"model": f"m{number}", "messages": [{"role": "user", "content": content}], "max_tokens": WORDS, **fields}


async def until(true) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.02)


async def at_moment(moment: str, engines: dict[str, Engine], ask) -> asyncio.Task:
    """A request of `ask(text)` that is at that moment now. One that was past it when it was looked at is let go, and
    there is another: the machine may be busy with other things."""
    role, figure = {
        "while the prompt is computed": ("prefill", "num_requests_running"),
        "when it is handed over": ("prefill", "request_success_total"),
        "while the answer is written": ("decode", "generation_tokens_total"),
    }[moment]
    async with httpx.AsyncClient(timeout=60) as client:
        for attempt in range(10):
            before = (await engines[role].figures(client))[figure]
            task = asyncio.create_task(ask(f"{moment}, {attempt}"))

            async def is_there(before=before, task=task) -> bool:
                return task.done() or (await engines[role].figures(client))[figure] > before

            await until(is_there)
            if not task.done():
                return task
            await task
    raise AssertionError(f"{moment}: ten requests were over before")


async def is_idle(gateway: Running) -> bool:
    if await gateway.counted("hitherto_reservations"):
        return False
    for one in (await gateway.status())["replicas"]:
        figures = await Engine(one["url"], one["pid"]).figures(gateway.client)
        if figures["num_requests_running"] or figures["num_requests_waiting"]:
            return False
    return True


async def words(client: httpx.AsyncClient, asked: dict) -> str:
    answer = await client.post("/v1/chat/completions", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_no_request_is_lost_with_an_engine_of_either_part_at_any_moment(gateway, alone, role, number):
    struck: list[int] = []

    async def cell(at: int, moment: str) -> None:
        engines = await pair(gateway, at)

        def strike() -> None:
            os.kill(engines[role].pid, number)
            struck.append(engines[role].pid)

        async def ask(text: str) -> None:
            asked = body(at, f"{role} {number.name}: {text}")  # no other test's prompt is in the engines' caches
            async with httpx.AsyncClient(base_url=alone.url) as single:
                expected = await words(single, {**asked, "model": "sim"})
            assert await words(gateway.client, asked) == expected, moment

        if moment == "before the request":
            strike()
            await ask(moment)
        elif moment == "after the answer":
            await ask(moment)
            strike()
        else:
            task = await at_moment(moment, engines, ask)
            strike()
            await task
        await words(gateway.client, body(at, "and again, " + moment, max_tokens=2))

    try:
        async with asyncio.TaskGroup() as group:
            for at, moment in enumerate(MOMENTS):
                group.create_task(cell(at, moment), name=moment)
    finally:
        for pid in struck:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert len(struck) == len(MOMENTS)
    if number == signal.SIGKILL:  # that they are gone may not have been noticed yet
        await gateway.until(lambda status: not {one["pid"] for one in status["replicas"]} & {*struck})
    await gateway.ready_for_legs(2 * len(MOMENTS))
    await until(lambda: is_idle(gateway))


LEAVING = ("as soon as it was sent", *MOMENTS[1:4], "while it is streamed")


async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(gateway):
    before = await gateway.counted("hitherto_client_aborts_total")

    async def cell(at: int, moment: str) -> None:
        engines, begun = await pair(gateway, at), asyncio.Event()

        async def ask(text: str, streamed: bool = False) -> None:
            begun.clear()
            async with gateway.client.stream(
                "POST", "/v1/chat/completions", json=body(at, f"leaving: {text}", stream=streamed), timeout=120
            ) as answer:
                async for _ in answer.aiter_raw():
                    begun.set()

        if moment == "as soon as it was sent":
            task = asyncio.create_task(ask(moment))
            # Of its own pair: requests of the others are on their way as well.
            ids = [engine.url.partition("//")[2] for engine in engines.values()]
            await until(lambda: gateway.any_counted("hitherto_inflight_requests", "replica", ids))
        elif moment == "while it is streamed":
            task = asyncio.create_task(ask(moment, True))
            await begun.wait()
        elif moment == "when it is handed over":  # the decoder is to wait for the cache
            os.kill(engines["decode"].pid, signal.SIGSTOP)
            task = await at_moment(moment, engines, ask)
        else:
            task = await at_moment(moment, engines, ask)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with suppress(ProcessLookupError):
            os.kill(engines["decode"].pid, signal.SIGCONT)

    async with asyncio.TaskGroup() as group:
        for at, moment in enumerate(LEAVING):
            group.create_task(cell(at, moment), name=moment)
    await until(lambda: is_idle(gateway))
    assert await gateway.counted("hitherto_client_aborts_total") == before + len(LEAVING)
    for at, moment in enumerate(LEAVING):
        await words(gateway.client, body(at, "after that, " + moment, max_tokens=2))
