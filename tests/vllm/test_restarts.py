"""Engines and gateways that die, and an engine whose record of events is too short: nobody is taken for a holder who is
none, and what comes after is exact."""

import asyncio
import itertools

import pytest

from cachemap.map import PREDICTED_SECONDS

from ..redis_server import Proxy
from .engines import block_size, gateway, heard
from .traffic import LATE_SECONDS, caught_up, drive, exactly

pytestmark = pytest.mark.exact

KEPT = 20  # batches that the lone engine can replay
LOST = b"was lost and cannot be made again"


@pytest.fixture(scope="module")
def lone(start_engine):
    """An engine that tests may kill, with a small cache and a short record."""
    return start_engine(blocks=2048 // block_size(), buffer_steps=KEPT).wait()


async def test_a_gateway_that_was_killed_comes_back_warm(engine, witness_of):
    async with gateway(engine) as process:
        await drive(process, 40, seed=21)
        process.process.kill()
        await process.process.wait()
    witness = witness_of(engine)
    async with gateway(engine) as process:
        await caught_up(process, witness)
        outcomes = await exactly(process, 40, seed=22, witnesses=[witness])
    assert any(one.cached for one in outcomes[:3]), outcomes[:3]


async def test_a_gap_that_cannot_be_replayed_empties_the_replica(lone, witness_of):
    witness = witness_of(lone)
    async with Proxy(int(lone.events.rpartition(":")[2])) as proxy:
        url = f"{lone.url}#events=tcp://127.0.0.1:{proxy.port},replay={lone.replay}"
        async with gateway(url, model=lone.model) as process:
            await drive(process, 20, talks=4, seed=31)
            await caught_up(process, witness)
            proxy.cut()
            for i in range(2):  # each block that is generated is a batch
                body = {"prompt": f"{i} and on", "max_tokens": KEPT * lone.block_size, "ignore_eos": True}
                (await process.client.post("/v1/completions", json={"model": "tiny", **body})).raise_for_status()
            proxy.mend()
            async with asyncio.timeout(30):
                while not proxy.in_use:
                    await asyncio.sleep(0.05)
                for seed in itertools.count(100):
                    await drive(process, 1, talks=1, seed=seed)
                    # An engine that takes longer than LINK_LOST_SECONDS for them is no longer believed to be known.
                    if await process.counted("hitherto_event_gaps_total") or LOST in b"".join(process.log):
                        break
            await process.until(lambda status: status["replicas"][0]["events"] == "live")
            # What it kept from before the gap is not known, neither that it has it nor, when it goes, what it was. So
            # for the time that a prompt just sent there is predicted to stay, a block may be taken for held.
            after, seeds = [], itertools.count(34)
            async with asyncio.timeout(60):
                # Once the cache has turned over, all has been told anew. How many requests that takes, the model says.
                while not after or (await process.status())["replicas"][0]["map_blocks"] != witness.held:
                    after += await drive(process, 50, talks=4, seed=next(seeds))
                    await asyncio.to_thread(witness.settled, 0.03)
            exact = await exactly(process, 30, talks=4, seed=35, witnesses=[witness])
    assert b"cannot be replayed: cleared" in b"".join(process.log) or LOST in b"".join(process.log)
    for one in after:
        assert one.predicted <= max(one.held(witness, early=PREDICTED_SECONDS + LATE_SECONDS)), one
    assert sum(one.cached > 0 for one in exact) > 10


async def test_an_engine_that_was_killed_holds_nothing(lone, witness_of):
    async with gateway(lone) as process:
        await drive(process, 20, talks=4, seed=41)
        await process.until(lambda status: status["replicas"][0]["map_blocks"] > lone.blocks // 4)
        lone.kill()
        await process.until(lambda status: status["replicas"][0]["state"] != "ready")
        lone.start().wait()
        status = await process.until(lambda status: heard(status, 1), 60)
        witness = witness_of(lone)
        assert status["replicas"][0]["map_blocks"] == 0
        # the same talks: nothing of them is left
        again = await exactly(process, 40, talks=4, seed=41, witnesses=[witness])
    assert (again[0].predicted, again[0].cached) == (0, 0) and sum(one.cached > 0 for one in again) > 10
