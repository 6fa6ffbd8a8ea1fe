"""What a whole gateway tells of itself and of what it follows: its loop's delay, events' lag, models of replicas."""

import asyncio
import os
import signal

import httpx
import pytest

from .running import running
from .test_gateways import TEXT, ahead


async def test_the_lag_of_events_is_that_of_the_clocks_where_nothing_else_lags(start_engine, tmp_path):
    engine = start_engine().wait()
    messages = [{"role": "user", "content": TEXT}]
    surroundings = ahead(tmp_path, 10)
    async with (
        running("--replica-url", engine.url, "--model", "sim") as right,
        running("--replica-url", engine.url, "--model", "sim", env=surroundings) as fast,
    ):
        await asyncio.gather(right.ready(1), fast.ready(1))
        for gateway in (right, fast):
            await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        assert (await right.chat(messages)).status_code == 200
        async with asyncio.timeout(20):
            while "hitherto_event_lag_seconds{" not in (await fast.admin.get("/metrics")).text:
                await asyncio.sleep(0.05)
        await right.until(lambda status: status["replicas"][0]["map_blocks"] > 0)
        lags = [await gateway.counted("hitherto_event_lag_seconds") for gateway in (right, fast)]
        assert lags[0] < 5 < lags[1] < 25
        assert await right.counted("hitherto_replica_models", model="sim") == 1


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "two workers"])
async def test_what_an_engine_holds_is_compared_with_the_map_block_by_block(start_engine, flags):
    engine = start_engine().wait()
    async with running("--replica-url", engine.url, "--model", "sim", *flags) as gateway:
        await gateway.ready(1)
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        assert (await gateway.chat([{"role": "user", "content": TEXT}])).status_code == 200
        path = f"/replicas/{engine.url.removeprefix('http://')}/blocks"

        async def differs(keys: list) -> dict:
            return (await gateway.admin.post(path, json={"keys": keys})).json()

        held: list = []
        async with httpx.AsyncClient() as client, asyncio.timeout(20):
            while len(held) < 3 or await differs(held) != {"missing": [], "besides": []}:
                await asyncio.sleep(0.05)
                held = (await client.get(f"{engine.url}/held")).json()["keys"]
        other = held[0] ^ 1
        async with asyncio.timeout(20):  # another worker may answer, which hears of the blocks a moment later
            while (found := await differs([other, *held[1:]]))["missing"] != [other] or len(found["besides"]) != 1:
                await asyncio.sleep(0.05)
        assert len(found["besides"][0]) == 16
        for wrong in ({"keys": ["a"]}, {"keys": 1}, [], {"keys": [True]}):
            refused = await gateway.admin.post(path, json=wrong)
            assert refused.status_code == 400 and "64-bit integers" in refused.json()["error"]["message"]
        assert (await gateway.admin.post("/replicas/nobody/blocks", json={"keys": []})).status_code == 404


async def test_a_loop_that_stood_still_is_told_of(start_engine):
    engine = start_engine().wait()
    async with running("--replica-url", engine.url, "--model", "sim") as gateway:
        await gateway.ready(1)

        async def late() -> float:
            every = await gateway.counted("hitherto_loop_delay_seconds_count")
            return every - await gateway.counted("hitherto_loop_delay_seconds_bucket", le="0.5")

        before = await late()
        os.kill(gateway.process.pid, signal.SIGSTOP)
        await asyncio.sleep(1.2)
        os.kill(gateway.process.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while await late() == before:
                await asyncio.sleep(0.05)
