"""Classes and the queue with real processes: gateways, simulated engines, and more clients than they can answer."""

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

from .conftest import Engine
from .running import running

SETTINGS = """
slo: {ttft: 2s}
scheduler:
  qos_classes:
    - {name: premium,  reserved_fraction: 0.10, priority: 100}
    - {name: standard, reserved_fraction: 0.30, priority: 50}
    - {name: free,     reserved_fraction: 0.60, priority: 10}
request_router:
  routes:
    - match: {header: "x-customer-tier: premium"}
      qos: premium
    - match:            # last, without a condition: the default
      qos: free
"""
UNLIMITED = "admission: {max_wait: 10m}\n"  # a queue, in which nobody is predicted to be late


@contextmanager
def engines(count, *flags):
    """So many simulated engines, each a process: an eighth as fast as a GPU, so that few clients are many."""
    made = []
    try:
        made += [Engine("--profile", "gpu-8b", "--speedup", "0.125", *flags) for _ in range(count)]
        yield [one.wait().url for one in made], [one.process for one in made]
    finally:
        for one in made:
            one.process.kill()
            one.process.wait()
            one.process.stderr.close()


@asynccontextmanager
async def gateway(tmp_path, urls, *flags, settings=SETTINGS):
    (tmp_path / "hitherto.yaml").write_text(settings)
    async with running("--config", str(tmp_path / "hitherto.yaml"), "--replica-url", *urls, *flags) as one:
        await one.ready(len(urls))
        one.client.timeout = 180  # a machine that is busy with other things answers a flood later than usual
        yield one


def body(words=200, tokens=16):
    """A prompt that nobody asked before, of some 300 tokens for 200 words."""
    words = " ".join(random.choices(["quality", "mercy", "strained", "droppeth", "gentle", "rain", "heaven"], k=words))
    return {"model": "sim", "messages": [{"role": "user", "content": words}], "max_tokens": tokens, "stream": True}


async def ask(one, tier="", leave_after=None, **size):
    """The status, the Retry-After that came with it, and whether a stream ended as it should."""
    headers = {"x-customer-tier": tier} if tier else {}
    try:
        async with asyncio.timeout(leave_after):
            async with one.client.stream("POST", "/v1/chat/completions", json=body(**size), headers=headers) as answer:
                data = await answer.aread()
    except TimeoutError:
        return "left", None, True
    whole = data.rstrip().endswith(b"[DONE]") if answer.status_code == 200 else json.loads(data)["error"]["code"]
    return answer.status_code, answer.headers.get("retry-after"), whole


@asynccontextmanager
async def flood(one, clients, **given):
    """Yields the list of answers to clients that ask again as soon as they are answered, while the block lasts and at
    least once; a refused one waits a little."""
    over, found = asyncio.Event(), []

    async def client():
        found.append(await ask(one, **given))
        while not over.is_set():
            if found[-1][0] != 200:
                await asyncio.sleep(0.1)
            found.append(await ask(one, **given))

    asking = asyncio.gather(*[client() for _ in range(clients)])
    try:
        yield found
    finally:
        over.set()
        await asking


def some(found, *statuses):
    """Whether each of these statuses is among the answers that were found so far."""
    return set(statuses) <= {status for status, *_ in found}


def has_queued(status):
    """Whether any request has waited in the queue."""
    return any(each["queued"] for each in status["admission"])


async def nothing_left(one):
    await one.until(lambda status: status["totals"]["inflight"] == 0)
    assert await one.counted("hitherto_reservations") == 0
    assert await one.counted("hitherto_queued_requests") == 0
    assert await one.counted("hitherto_queued_bytes") == 0


async def test_a_flood_waits_or_is_told_when_to_come_back_and_premium_passes_it(tmp_path):
    with engines(2) as (urls, _):
        async with gateway(tmp_path, urls) as one:
            async with flood(one, 60) as free:
                await one.until(has_queued)
                premium = [await ask(one, "premium") for _ in range(5)]
                leaving = await asyncio.gather(*[ask(one, leave_after=0.3) for _ in range(10)])
                await one.until(lambda _: some(free, 200, 429))
            assert {status for status, _, whole in premium if whole} == {200}
            assert {status for status, *_ in free} == {200, 429}
            assert all(
                retry and int(retry) >= 1 and code == "overloaded" for status, retry, code in free if status == 429
            )
            assert all(whole for status, _, whole in free if status == 200)
            assert {status for status, *_ in leaving} <= {"left", 429}
            await nothing_left(one)
            told = {each["class"]: each for each in (await one.status())["admission"]}
            refused = Counter(status for status, *_ in free + leaving)[429]
            assert told["premium"]["refused"] == 0 and refused <= told["free"]["refused"] <= refused + len(leaving)
            assert told["free"]["met"] > 0 and told["free"]["ttft_seconds"] > 0


async def test_two_gateways_on_one_redis_admit_by_the_load_of_both(tmp_path, redis_server):
    with engines(2) as (urls, _):
        async with AsyncExitStack() as stack:
            gateways = [
                await stack.enter_async_context(gateway(tmp_path, urls, "--redis-url", redis_server.url))
                for _ in range(2)
            ]
            for one in gateways:
                await one.until(lambda status: status["map"]["redis"]["ledger_joined"])
            async with flood(gateways[0], 25) as first, flood(gateways[1], 25) as second:
                # A request waits at one or the other: who comes first has the room.
                while not any([has_queued(await one.status()) for one in gateways]):
                    await asyncio.sleep(0.05)
                await gateways[0].until(lambda _: some(first, 200) and some(second, 200))
            assert {status for status, *_ in first + second} <= {200, 429}
            for one in gateways:
                await nothing_left(one)


@pytest.mark.parametrize("decision", ["queued", "admitted"])
async def test_a_gateway_that_sent_nothing_finds_engines_full_that_another_filled(tmp_path, redis_server, decision):
    """One gateway fills the caches of both engines, with two answers that take a quarter of an hour. What another one
    does with its first request is up to whether they share a Redis: without it, that is sent into the full engine."""
    flags, shared = ("--redis-url", redis_server.url), decision == "queued"
    with engines(2, "--speedup", "0.02", "--num-blocks", "125") as (urls, _):
        async with AsyncExitStack() as stack:
            busy, idle = [
                await stack.enter_async_context(gateway(tmp_path, urls, *flags[: 2 * shared], settings=UNLIMITED))
                for _ in range(2)
            ]
            for one in (busy, idle) if shared else ():
                await one.until(lambda status: status["map"]["redis"]["ledger_joined"])
            asked = []
            try:
                for count in (1, 2):  # one after the other: by a late answer of Redis both might go to one engine
                    asked.append(asyncio.create_task(ask(busy, words=800, tokens=600)))
                    while await decisions(busy) != {"admitted": count}:
                        await asyncio.sleep(0.05)
                for one in (busy, idle) if shared else (busy,):
                    while not await are_full(one):  # by a heartbeat and the engines' next metrics
                        await asyncio.sleep(0.05)
                for one, expected in ((busy, {"admitted": 2, "queued": 1}), (idle, {decision: 1})):
                    asked.append(asyncio.create_task(ask(one, words=800, tokens=600)))
                    while sum((decided := await decisions(one)).values()) < sum(expected.values()):
                        await asyncio.sleep(0.05)
                    assert decided == expected
            finally:
                for one in asked:
                    one.cancel()
                await asyncio.gather(*asked, return_exceptions=True)


async def are_full(one):
    """Whether this gateway knows that another such request would wait for blocks on every engine."""
    told = await one.admin.post("/explain", params={"path": "/v1/chat/completions"}, json=body(words=800, tokens=600))
    return all(each["terms"]["room"] > 0.1 for each in told.raise_for_status().json()["replicas"])


async def decisions(one):
    """What was decided of the requests that came, and of how many."""
    names = "admitted", "queued", "refused"
    found = [await one.counted("hitherto_admission_total", decision=name) for name in names]
    return {name: count for name, count in zip(names, found, strict=True) if count}
