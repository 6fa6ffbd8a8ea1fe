"""Requests whose two legs run at the same time, through a gateway process and simulated engines that wait for each
other: what they answer, and what becomes of the other engine's part when one is killed, refuses or is left."""

import asyncio

import httpx
import pytest

from .running import running
from .test_legs import TEXT, asked

LONG = "A long way down, with cupboards and maps on its walls. " * 400


def url_of(engine, role):
    return f"{engine.url}#role={role},transfer=mooncake,bootstrap={engine.port}"


class Engines:
    """A pair, a prefiller that takes seconds, and one that is killed."""

    def __init__(self, start_engine):
        wire, slow = ("--kv-connector", "mooncake"), ("--speedup", "0.2")
        self.all = [start_engine(*wire, *more) for more in ((), (), slow, slow)]
        self.prefiller, self.decoder, self.slow, self.prefiller_that_dies = self.all


@pytest.fixture(scope="module")
def engines(start_engine):
    started = Engines(start_engine)
    for engine in started.all:
        engine.wait()
    return started


def flags_of(prefillers, decoders):
    urls = [url_of(one, "prefill") for one in prefillers] + [url_of(one, "decode") for one in decoders]
    return "--replica-url", *urls, "--policy", "round_robin"


async def rooms_open(*engines):
    found = 0
    for engine in engines:
        async with httpx.AsyncClient(base_url=engine.url) as client:
            found += (await client.get("/kv")).json()["open"]
    return found


async def nothing_is_left(gateway, *engines):
    """No load is counted anywhere, and no engine waits for another one."""
    async with asyncio.timeout(10):
        while await gateway.counted("hitherto_reservations") or await rooms_open(*engines):
            await asyncio.sleep(0.02)


async def is_loaded(engine, requests):
    async with httpx.AsyncClient(base_url=engine.url) as client, asyncio.timeout(30):
        while (await client.get("/load")).json()["server_load"] != requests:
            await asyncio.sleep(0.01)


async def all_well(gateway, what):
    for number in range(4):
        path, body = asked("chat", f"{what} {number}. " + TEXT * 20, number % 2 == 0)
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200 and "broke off" not in answer.text, answer.text


async def test_a_prefiller_that_is_killed_while_it_computes_loses_no_request(engines):
    prefiller, decoder, dies = engines.prefiller, engines.decoder, engines.prefiller_that_dies
    async with running(*flags_of([dies, prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        asking = []
        for stream in (True, False):  # each prefiller gets one
            path, body = asked("chat", f"{stream}: killed. " + LONG, stream)
            asking.append(asyncio.ensure_future(gateway.client.post(path, json=body)))
        await is_loaded(dies, 1)
        dies.process.kill()
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
        await all_well(gateway, "after it")
        await nothing_is_left(gateway, prefiller)


async def test_a_client_that_leaves_is_left_by_both_engines(engines):
    slow, decoder = engines.slow, engines.decoder
    before = await rooms_open(slow)
    async with running(*flags_of([slow], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "left. " + LONG, True)
        asking = asyncio.ensure_future(gateway.client.post(path, json=body))
        await is_loaded(slow, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for engine in (slow, decoder):
            await is_loaded(engine, 0)
        await nothing_is_left(gateway)
        assert await rooms_open(slow) == before
        assert await gateway.counted("hitherto_legs_total", outcome="abandoned") == 2
