"""An engine with LMCache behind it, behind a gateway: what is predicted is what its usage tells, while host memory has
no room for all of it."""

import random
import re

import httpx
import pytest
import zmq
import zmq.asyncio

from .running import counted, running, until
from .test_copies import compared

REQUESTS = 120


class Published:
    """How many batches of events an engine has published, by its replay."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str):
        self.count = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    async def look(self) -> int:
        await self._socket.send_multipart([b"", self.count.to_bytes(8, "big")])
        while (number := int.from_bytes((await self._socket.recv_multipart())[-2], "big", signed=True)) >= 0:
            self.count = number + 1
        return self.count


async def read(gateway, batches: int) -> None:
    """Until the gateway has taken so many in: an answer may overtake the events of the step that made it."""

    async def has_read() -> bool:
        page = (await gateway.admin.get("/metrics")).text  # 120 times: `counted` reads all of it
        return sum(map(float, re.findall(r"^hitherto_event_batches_total{.*} (\S+)$", page, re.M))) >= batches

    await until(has_read)


@pytest.mark.parametrize("chunks", [(), ("--chunk-blocks", "1")])
async def test_predictions_are_what_lmcache_delivers(start_engine, chunks):
    """In chunks of its size, or of the engine's blocks'; some prompts end with a block."""
    rng = random.Random(1)
    # Prompts of up to eleven chunks. The engine itself has room for one of them, host memory for three or four.
    talks = [[rng.randrange(1000, 9000) for _ in range(2900)] for _ in range(5)]
    flags = ("--num-blocks", "200", "--cpu-blocks", "640", "--lmcache", *chunks)
    engine = start_engine(*flags).wait()
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        with zmq.asyncio.Context() as context:
            context.setsockopt(zmq.LINGER, 0)
            published = Published(context, (await gateway.status())["replicas"][0]["event_source"]["replay"])
            for _ in range(REQUESTS):
                prompt = rng.choice(talks)[: rng.choice((2570, rng.randrange(1, 181) * 16 + rng.choice((0, 5))))]
                body = {"model": "sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                assert (await gateway.client.post("/v1/completions", json=body)).status_code == 200
                await read(gateway, await published.look())
            published._socket.close()
        assert await compared(gateway) == {"equal": REQUESTS, "over": 0, "under": 0}
    page = httpx.get(f"{engine.url}/metrics").text
    assert counted(page, "vllm:external_prefix_cache_hits_total") > 20_000
