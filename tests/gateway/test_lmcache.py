"""An engine with LMCache behind it, behind a gateway: what is predicted is what its usage tells, while host memory has
no room for all of it."""

import asyncio
import random
import re

import httpx
import pytest
import zmq
import zmq.asyncio

from .running import running
from .test_copies import compared
from .test_names import engine

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
    async with asyncio.timeout(60):
        while True:
            page = (await gateway.admin.get("/metrics")).text
            if sum(map(float, re.findall(r"^hitherto_event_batches_total{.*} (\S+)$", page, re.M))) >= batches:
                return
            await asyncio.sleep(0.01)


async def fetched(port: int) -> float:
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.4:{port}/metrics")).text
    return float(re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", page, re.M)[1])


@pytest.mark.parametrize("chunks", [(), ("--chunk-blocks", "1")])
async def test_predictions_are_what_lmcache_delivers(chunks):
    """In chunks of its size, or of the engine's blocks'; some prompts end with a block."""
    rng = random.Random(1)
    # Prompts of up to eleven chunks. The engine itself has room for one of them, host memory for three or four.
    talks = [[rng.randrange(1000, 9000) for _ in range(2900)] for _ in range(5)]
    flags = ("--num-blocks", "200", "--cpu-blocks", "640", "--lmcache", *chunks)
    async with (
        engine("127.0.0.4", (0, 0, 0), *flags) as process,
        running("--model", "sim", "--replica-url", f"http://127.0.0.4:{process.port}") as gateway,
    ):
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
        assert await fetched(process.port) > 20_000
