"""LMCache's server behind a real engine, both on the CPU: what is predicted is what the engine finds.

    pip install --no-deps --target DIR lmcache==0.5.6 sortedcontainers aiofile caio aiofiles nvtx py-cpuinfo awscrt \
        redis cachetools opentelemetry-exporter-prometheus grpcio-observability
    HITHERTO_LMCACHE=DIR make test-vllm VLLM=0.32.0 ARGS="-k lmcache"

On a CPU LMCache moves blocks through shared memory where it is told to (`lmcache_driven`); its server tells of what it
has only if it does so itself.
"""

import asyncio
import json
import os
import random
import subprocess

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from replicas.launch import ports

from ..gateway.running import counted
from ..gateway.test_copies import compared
from ..gateway.test_lmcache import Published, read
from .engines import folder, gateway, version
from .pd import page_of

LMCACHE = os.environ.get("HITHERTO_LMCACHE", "")
REQUESTS = 60
pytestmark = pytest.mark.skipif(
    not LMCACHE, reason="HITHERTO_LMCACHE names no folder with lmcache; the docstring has the pip command"
)


@pytest.fixture(params=[256, 32])
def engine(request, start_engine, tmp_path):
    """Behind it a server with chunks of so many tokens; the engine itself has room for 4,096 tokens."""
    if version() < (0, 32):
        pytest.skip("LMCache 0.5.6 was seen with vLLM 0.32")
    [port] = ports.pick(1, "127.0.0.1", set())
    env = {"PYTHONPATH": LMCACHE, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    flags = f"--host 127.0.0.1 --port {port} --chunk-size {request.param} --l1-size-gb 0.5 --eviction-policy LRU"
    command = [folder() / "bin" / "python", "-m", "lmcache.v1.multiprocess.server", *flags.split()]
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
                 "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}  # fmt: skip
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)
    try:
        env |= {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
        started = start_engine("--kv-transfer-config", json.dumps(connector), blocks=128, env=env).wait()
        started.chunk = request.param
        yield started
        started.stop()
    finally:
        server.kill()
        server.wait(20)


class Told(Published):
    """What the engine has published, with the chunks that LMCache was said to have."""

    def __init__(self, context, endpoint):
        super().__init__(context, endpoint)
        self.chunks = set()

    async def look(self):
        await self._socket.send_multipart([b"", self.count.to_bytes(8, "big")])
        while (number := int.from_bytes((frames := await self._socket.recv_multipart())[-2], "big", signed=True)) >= 0:
            self.count = number + 1
            _, events, *_ = msgspec.msgpack.decode(frames[-1])
            self.chunks |= {key for event in events if event.get("medium") == "CPU" for key in event["block_hashes"]}
        return self.count


@pytest.mark.timeout(600)
async def test_predictions_are_what_lmcache_delivers(engine):
    rng, stored = random.Random(1), set()
    texts = [[rng.randrange(300, 3000) for _ in range(2600)] for _ in range(6)]
    texts += [text[:700] + texts[0][700:] for text in texts[1:3]]  # which part within a chunk
    async with gateway(engine) as process, httpx.AsyncClient(base_url=engine.url) as direct:

        async def step():
            """What came of the requests before is told with the next one's steps."""
            body = {"model": engine.name, "prompt": [5], "max_tokens": 2}
            (await direct.post("/v1/completions", json=body)).raise_for_status()

        with zmq.asyncio.Context() as context:
            context.setsockopt(zmq.LINGER, 0)
            told = Told(context, engine.replay)
            for number in range(REQUESTS):
                if number % 20 == 1:  # all goes but what LMCache has
                    (await direct.post("/reset_prefix_cache")).raise_for_status()
                    await step()
                async with asyncio.timeout(60):
                    batches = await told.look()
                    while len(told.chunks) < len(stored):
                        await step()
                        batches = await told.look()
                await read(process, batches)
                length = rng.choice((rng.randrange(100, 2600), rng.randrange(1, 10) * 256))
                text = (texts[1], texts[6])[number] if number < 2 else rng.choice(texts)
                prompt = text[: max(length, 1536) if number < 2 else length]
                body = {"model": engine.name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                assert (await process.client.post("/v1/completions", json=body)).status_code == 200
                stored |= {hash((*prompt[:end],)) for end in range(engine.chunk, len(prompt) + 1, engine.chunk)}
            told._socket.close()
        outcomes = await compared(process)
        # A chunk that a later step stores may be told without the one before it (LMCache 0.5.6 ends the request's
        # session first): what is behind it is found and not predicted.
        assert outcomes["over"] == 0 and outcomes["equal"] >= 0.85 * REQUESTS, outcomes
        assert counted(await page_of(engine.url), "vllm:external_prefix_cache_hits_total") > 10_000
