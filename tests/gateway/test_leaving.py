"""A real gateway before engines that end gracefully, each a process of its own: what they have is theirs to finish."""

import asyncio
import itertools
import json
import re
from contextlib import AsyncExitStack

import httpx
import pytest

from .conftest import Engine
from .running import running

CLIENTS, TOKENS = 6, 3
SLOW = 150  # times: .6 s until the first token and .3 s between two, where what is lost is given .2 s
RUNNING = re.compile(r"^(?:vllm:num_requests_running|sglang:num_running_reqs)\S* (\S+)$", re.M)


async def started(*flags: str) -> Engine:
    engine = Engine("--speedup", "1", *flags[1:], program=("tests.gateway.ending", flags[0]))
    await asyncio.to_thread(engine.wait)
    return engine


async def ask(client, number: int) -> tuple[int, object]:
    """Its status and how many tokens came: streams, answers in one piece, and those of another API."""
    body = {"model": "sim", "max_tokens": TOKENS, "ignore_eos": True}
    text = f"{number} says what nobody else does. " * 8
    if number % 3 == 0:
        answer = await client.post("/v1/completions", json={**body, "prompt": text, "stream": True})
        if answer.status_code == 200:
            *events, last = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
            ends = json.loads(events[-1])["choices"][0]["finish_reason"]
            return 200, len(events) if (ends, last) == ("length", "[DONE]") else answer.text
    elif number % 3 == 1:
        answer = await client.post("/v1/completions", json={**body, "prompt": text})
        if answer.status_code == 200:
            return 200, answer.json()["usage"]["completion_tokens"]
    else:
        answer = await client.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": text}]})
        if answer.status_code == 200:
            return 200, answer.json()["usage"]["output_tokens"]
    return answer.status_code, answer.text


def replica(status: dict, engine: Engine) -> dict:
    return next(one for one in status["replicas"] if one["url"] == engine.url)


async def slow_down(engine: Engine) -> None:
    async with httpx.AsyncClient(base_url=engine.url) as client:
        (await client.post("/faults", json={"slow": SLOW})).raise_for_status()


async def has_two(engine: Engine) -> None:
    async with httpx.AsyncClient(base_url=engine.url) as client, asyncio.timeout(20):
        while float(RUNNING.search((await client.get("/metrics")).text)[1]) < 2:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("flags", [("closes",), ("sick",)], ids=["uvicorn's", "SGLang's"])
async def test_engines_that_are_replaced_in_turn_under_load_lose_no_answer(flags):
    answers, numbers, over = [], itertools.count(), asyncio.Event()

    async def load() -> None:
        while not over.is_set():
            answers.append(await ask(gateway.client, next(numbers)))
            await asyncio.sleep(0.05)  # the other processes need the cores as well

    async with AsyncExitStack() as stack:
        engines = [await started(*flags) for _ in range(3)]
        for number in range(3):
            stack.callback(lambda number=number: engines[number].stop())
        urls = ("--replica-url", *(engine.url for engine in engines))
        gateway = await stack.enter_async_context(
            running(*urls, "--model", "sim", "--policy", "round_robin", module="tests.gateway.ending")
        )
        await gateway.ready(3)
        clients = [asyncio.create_task(load()) for _ in range(CLIENTS)]
        stack.callback(over.set)
        for number, engine in enumerate(engines):
            await slow_down(engine)
            await has_two(engine)
            engine.process.terminate()
            await gateway.until(lambda status: replica(status, engine)["state"] == "leaving", 20)
            await asyncio.to_thread(engine.stop)
            engines[number] = await started(*flags, "--port", str(engine.port))
            await gateway.ready(3)
        over.set()
        await asyncio.gather(*clients)
        torn = await gateway.any_counted("hitherto_retries_total", "reason", ("hung", "left", "closed"))
    assert [one for one in answers if one != (200, TOKENS)] == [] and torn == 0
