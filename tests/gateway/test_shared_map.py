"""Real gateways on one real Redis: a writer that is killed or frozen, and requests that never notice."""

import asyncio
import os
import signal

import pytest

from tests.redis_server import wait

from .running import running


def roles(status):
    return [one["map_role"] for one in status["replicas"]]


def chat(text):
    return [{"role": "user", "content": text * 400}]


@pytest.fixture
def two(start_engine, redis_server):
    engines = [start_engine(), start_engine()]
    urls = [engine.wait().url for engine in engines]
    return ["--redis-url", redis_server.url, "--deployment", "test", *(part for url in urls for part in ("--replica-url", url))]


async def test_a_second_gateway_knows_what_the_first_one_learned(two):
    async with running(*two) as one:
        await one.ready(2)
        await one.until(lambda status: status["ready"] and roles(status) == ["writer", "writer"])
        assert (await one.chat(chat("a story "))).status_code == 200
        status = await one.until(lambda status: status["map"]["blocks"] > 10)
        assert status["map"]["redis"]["leases"] == 2
        async with running(*two) as other:
            await other.ready(2)
            await other.until(lambda status: status["ready"] and roles(status) == ["mirror", "mirror"])
            await other.until(lambda after: after["map"]["blocks"] == status["map"]["blocks"])
            request = {"model": "sim", "messages": chat("a story "), "max_tokens": 4}
            told = (await other.admin.post("/explain?path=/v1/chat/completions", json=request)).json()
            assert max(one["overlap_tokens"] for one in told["replicas"]) > 100, told
            told = (await other.admin.get("/metrics")).text
            assert 'hitherto_map_role{replica="' in told and "hitherto_map_redis_up 1" in told


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_another_takes_over_from_a_gateway_that_is(two, how):
    async with running(*two) as one:
        await one.ready(2)
        await one.until(lambda status: roles(status) == ["writer", "writer"])
        async with running(*two) as other:
            await other.ready(2)
            await other.until(lambda status: roles(status) == ["mirror", "mirror"])
            os.kill(one.process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            began = asyncio.get_running_loop().time()
            while roles(await other.status()) != ["writer", "writer"]:
                assert (await other.chat(chat("meanwhile "))).status_code == 200
                assert asyncio.get_running_loop().time() - began < 8
            if how == "frozen":
                os.kill(one.process.pid, signal.SIGCONT)
                await one.until(lambda status: roles(status) == ["mirror", "mirror"])  # it writes no more
                assert (await other.chat(chat("afterwards "))).status_code == 200
                after = await other.until(lambda status: status["map"]["blocks"] > 0)
                await one.until(lambda status: status["map"]["blocks"] == after["map"]["blocks"])
                assert (await one.chat(chat("afterwards "))).status_code == 200


async def test_redis_dies_and_no_request_notices(two, redis_server):
    async with running(*two) as one:
        await one.ready(2)
        await one.until(lambda status: roles(status) == ["writer", "writer"])
        redis_server.freeze()
        for _ in range(20):
            assert (await one.chat(chat("frozen "))).status_code == 200
        redis_server.kill()
        for _ in range(20):
            assert (await one.chat(chat("dead "))).status_code == 200
        await one.until(lambda status: not status["map"]["redis"]["reachable"])
        await one.until(lambda status: status["ready"] and status["map"]["blocks"] > 10)
        redis_server.start()
        await one.until(lambda status: status["map"]["redis"]["reachable"] and roles(status) == ["writer", "writer"])
        with redis_server.client() as client:
            wait(lambda: len(client.keys("hitherto:1:test:*:snapshot")) == 2, what="the map is in Redis again")


async def test_each_may_follow_the_events_itself(two):
    async with running(*two, "--event-intake", "each") as one:
        await one.ready(2)
        status = await one.until(lambda status: all(replica["events"] == "live" for replica in status["replicas"]))
        assert roles(status) == [None, None] and "leases" not in status["map"]["redis"]
