"""The fleet with the simulated engine it ships a profile for."""

import os
import signal

import aiohttp

from replicas import State
from replicas.launch import profile as profiles

BODY = {"model": "sim", "prompt": "What the standard library says about it. " * 40, "max_tokens": 4}


async def complete(session: aiohttp.ClientSession, url: str) -> dict:
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_launched_asked_killed_and_asked_again(fleet, session, until):
    profile = profiles.load("sim").model_copy(update={"speedup": 20.0})
    (replica,) = await fleet.launch(1, profile, served_name="sim")
    fleet.inflight = lambda id: 1  # busy: read the metrics at every look

    async def ready():
        await until(lambda: replica.state is State.READY, lambda: f"{replica.reason}\n{fleet.logs(replica.id)}", 40)

    await ready()
    assert replica.models == {"sim": None} and replica.block_size == 16 and replica.max_model_len
    assert replica.num_blocks and replica.version and replica.takes_priority and replica.problems == ()
    first, incarnation = await complete(session, replica.url), replica.incarnation
    again = await complete(session, replica.url)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    await until(lambda: (replica.scrape.prefix_hits or 0) > 0, lambda: str(replica.scrape))
    assert replica.scrape.prefix_queries >= 2 * first["usage"]["prompt_tokens"] - 2

    os.kill(replica.pid, signal.SIGKILL)
    await until(lambda: replica.state is State.FAILED)
    await ready()
    assert replica.incarnation != incarnation
    after = await complete(session, replica.url)
    assert not (after["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")  # a new, empty cache
