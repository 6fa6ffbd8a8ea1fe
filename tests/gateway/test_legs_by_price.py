"""A gateway process by its own policy, `least_time`, on engines with roles: two legs where they cost less, and else
one.

The engines compute 1,000 prompt tokens a second and write ten tokens a second in each of their streams, so that seconds
which a busy machine adds decide nothing.
"""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from .conftest import Engine
from .running import Running, counted, running

SLOW = """
max_num_batched_tokens: 8192
step:
  prefill: 10
  prefill_token: 1.0
  decode: 100
"""
STREAMS, PROMPTS = 24, 4
PATIENCE = 120.0


@pytest.fixture(scope="module")
def engines(start_engine, tmp_path_factory) -> list[Engine]:
    """A prefiller and a decoder."""
    profile = tmp_path_factory.mktemp("profiles") / "slow.yaml"
    profile.write_text(SLOW)
    flags = ("--kv-connector", "--profile", str(profile), "--speedup", "1")
    return [one.wait() for one in [start_engine(*flags) for _ in range(2)]]


@asynccontextmanager
async def apart(prefiller: Engine, decoder: Engine):
    urls = f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode"
    async with running("--replica-url", *urls, "--model", "sim") as gateway:
        gateway.client.timeout = httpx.Timeout(PATIENCE)
        await gateway.ready_for_legs(2)
        yield gateway


async def choices(gateway: Running) -> tuple[float, float]:
    """How many requests had two legs so far, and how many one."""
    apart, whole = [await gateway.counted("hitherto_leg_choices_total", choice=one) for one in ("apart", "whole")]
    return apart, whole


async def ask(gateway: Running, text: str) -> None:
    """For two tokens, so that what is no transfer is a small part of its second leg."""
    answer = await gateway.chat([{"role": "user", "content": text}], max_tokens=2)
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def streams_at(gateway: Running, count: int):
    """So many streams that are written all the while."""

    async def stream(number: int) -> None:
        said = [{"role": "user", "content": f"{number}"}]
        body = {"model": "sim", "messages": said, "max_tokens": 10_000, "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                begun.add(number)

    begun: set[int] = set()
    tasks = [asyncio.create_task(stream(number)) for number in range(count)]
    try:
        async with asyncio.timeout(PATIENCE):
            while len(begun) < count:
                await asyncio.sleep(0.05)
        yield
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def long(number: int) -> str:
    return f"{number}. " + " ".join(f"word{at * number % 997}" for at in range(600))


async def test_two_legs_are_taken_where_a_prompt_would_hold_up_many_streams_and_there_alone(engines):
    async with apart(*engines) as gateway:
        await ask(gateway, long(1))
        assert await choices(gateway) == (0, 1), "nobody is held up"
        async with streams_at(gateway, STREAMS):
            assert await choices(gateway) == (0, 1 + STREAMS), "chats are soon computed"
            for number in range(PROMPTS):
                await ask(gateway, long(2 + number))
                assert await choices(gateway) == (1 + number, 1 + STREAMS)
            # by what was learned meanwhile, and not by what was assumed
            await ask(gateway, "A chat.")
            assert await choices(gateway) == (PROMPTS, 2 + STREAMS)
        page = (await gateway.admin.get("/metrics")).text
        for leg in ("prefill", "decode"):
            assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == PROMPTS
        assert counted(page, "hitherto_transfer_seconds_count") >= 1
        await gateway.until(lambda status: all(not one["inflight"] for one in status["replicas"]))
