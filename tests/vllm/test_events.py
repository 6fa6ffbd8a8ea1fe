"""Events of real engines: what happens when some are lost, and when a cache is emptied."""

import asyncio
import itertools

import pytest

from ..redis_server import Proxy
from .engines import gateway
from .pd import alone
from .traffic import cached, caught_up, drive, exactly, mixed, predicted

pytestmark = pytest.mark.exact


@pytest.mark.parametrize(
    "noticed, found_by", [(False, b"and replayed"), (True, b"events come again")], ids=["short", "long"]
)
async def test_batches_lost_with_a_connection_are_replayed(engine, witness_of, noticed, found_by):
    """After a short time the next batch shows a gap. Before a long one is over the replica is known to be silent, and
    its cache is guessed until batches come again."""
    witness = witness_of(engine)
    async with Proxy(int(engine.events.rpartition(":")[2])) as proxy:
        url = f"{engine.url}#events=tcp://127.0.0.1:{proxy.port},replay={engine.replay}"
        async with gateway(url, model=engine.model) as process:
            await drive(process, 15, mixed, seed=11)
            await caught_up(process, witness)
            before = await process.counted("hitherto_event_batches_replayed_total")
            proxy.cut()
            await drive(process, 1, talks=1, seed=12)  # no more: after 5 s without a link all is asked for again
            async with asyncio.timeout(60):
                for seed in itertools.count(1000):
                    if not noticed or b"no block was reported" in b"".join(process.log):
                        break
                    await drive(process, 1, mixed, talks=1, seed=seed)
            proxy.mend()
            async with asyncio.timeout(30):
                for seed in itertools.count(100):
                    await drive(process, 1, talks=1, seed=seed)
                    (shown,) = (await process.status())["replicas"]
                    replayed = await process.counted("hitherto_event_batches_replayed_total")
                    if "replayed" in shown["events_reason"] and replayed > before:
                        break
            await caught_up(process, witness)
            await exactly(process, 30, mixed, seed=13, witnesses=[witness])
    assert found_by in b"".join(process.log)


async def test_a_cache_that_was_reset_holds_nothing(engine, witness_of):
    witness = witness_of(engine)
    bodies = [{"model": "tiny", "prompt": f"prompt {i} " * 120, "max_tokens": 1} for i in range(4)]
    async with gateway(engine) as process:

        async def ask(body) -> tuple[int, int]:
            answer = await process.client.post("/v1/completions", json=body)
            return predicted(answer), cached(answer)

        for body in bodies:
            await ask(body)
        expected, found = await ask(bodies[0])
        assert expected == found > 100
        (await alone(engine, "/reset_prefix_cache", {})).raise_for_status()
        # the engine tells with its next step, so the request that makes it is predicted from what was
        assert await ask(bodies[0]) == (found, 0)
        await caught_up(process, witness)
        assert [await ask(body) for body in bodies] == [(found, found), (0, 0), (0, 0), (0, 0)]
        assert [await ask(body) for body in bodies] == [(found, found)] * 4
