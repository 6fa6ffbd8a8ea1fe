"""What a replica that stalls costs: who waits for it, and how long.

    python -m bench.stalls [--only WORDS] [--policies least_time,least_load,round_robin] [--json FILE]

A real gateway before simulated engines, requests at a steady rate. An engine is stopped with SIGSTOP, as a machine that
swaps, a compile at first use, or a long prefill that another gateway sent would stop it.

  holder     two engines, one prompt of 3,000 tokens that one of them holds, 20 requests/s for it; 1 s later the holder
             stops for 3 s. `sent there`: requests that went to it while it was stopped.
  cold       the same without KV events, from the first request on: the engine that gets it stops for 3 s at once.
  flapping   three engines, conversations of their own, 30 requests/s; one is stopped for 1 s in every 3.
  slower     two engines, 10 requests/s; one takes twice as long for each step from the beginning of the window on.
             `share`: of requests that it got in the window's last two thirds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.simulated import Simulated, engines
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from tests.gateway.running import running

PROFILE = "step: {prefill: 10, prefill_token: 0.05, decode: 6}\n"
SHARED, STOPPED = 3000, 3.0  # words of the prompt that all have; seconds for which its holder is stopped


@dataclass
class Scene:
    engines: list[Simulated]
    client: Client
    records: list[Record]

    async def ask(self, text: str) -> Record:
        body = {
            "model": "sim", "stream": True, "max_tokens": 8, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip
        record = Record("", 0, perf_counter())
        self.records.append(record)
        await self.client.ask("/v1/chat/completions", json.dumps(body).encode(), record)
        return record

    async def load(self, rate: float, seconds: float, text: Callable[[int], str]) -> list[Record]:
        """Requests at this rate; returns when all are answered."""
        begun, tasks = perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - perf_counter()))
            tasks.append(asyncio.create_task(self.ask(text(number))))
        return await asyncio.gather(*tasks)

    def holder(self, record: Record) -> Simulated:
        return next(one for one in self.engines if record.replica and record.replica in one.url)


@asynccontextmanager
async def stopped(engine: Simulated):
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGCONT)


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(str(draw.randrange(10**5)) for _ in range(count))


def told(records: Sequence[Record]) -> dict:
    ttft = np.array([one.ttft for one in records if one.ttft is not None]) * 1e3
    return {
        "requests": len(records),
        "failed": len(records) - len(ttft),
        "ttft_ms": {"p50": np.median(ttft), "p99": np.percentile(ttft, 99), "max": ttft.max()},
    }


async def holder(scene: Scene, *, warm: bool = True) -> dict:
    prompt = words(SHARED // 3, 1)
    first = asyncio.create_task(scene.ask(prompt))
    if warm:
        await first
        await scene.load(20, 1.0, lambda n: f"{prompt} {n}")
        held = scene.holder(await first)
    else:
        while not (busy := [one for one in scene.engines if await _running(one)]):
            await asyncio.sleep(0.002)
        held = busy[0]
    scene.records.clear()
    async with stopped(held):
        load = asyncio.create_task(scene.load(20, STOPPED, lambda n: f"{prompt} {n}"))
        await asyncio.sleep(STOPPED)
    records = await load
    await first
    return told(records) | {"sent there": sum(scene.holder(one) is held for one in records)}


async def _running(engine: Simulated) -> bool:
    client = Client(engine.url, timeout=5)
    _, page, _ = await client.get("/metrics")
    client.close()
    return any(
        line.startswith(b"vllm:num_requests_running") and not line.endswith(b" 0.0") for line in page.splitlines()
    )


async def cold(scene: Scene) -> dict:
    return await holder(scene, warm=False)


async def flapping(scene: Scene) -> dict:
    ill = scene.engines[0]

    async def flap() -> None:
        while True:
            await asyncio.sleep(2)
            async with stopped(ill):
                await asyncio.sleep(1)

    talks = [words(300, seed) for seed in range(40)]
    await scene.load(30, 4.0, lambda n: f"{talks[n % 40]} {n}")
    task = asyncio.create_task(flap())
    records = await scene.load(30, 30.0, lambda n: f"{talks[n % 40]} {n}")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return told(records) | {"share": sum(scene.holder(one) is ill for one in records) / len(records)}


async def slower(scene: Scene) -> dict:
    ill = scene.engines[0]
    await scene.load(10, 10.0, lambda n: words(200, n))
    client = Client(ill.url, timeout=5)
    await client.ask("/faults", b'{"slow": 2}', Record("", 0, 0.0))
    client.close()
    records = await scene.load(10, 30.0, lambda n: words(200, 1000 + n))
    late = records[len(records) // 3 :]
    return told(records) | {"share": sum(scene.holder(one) is ill for one in late) / len(late)}


SCENES: dict[str, tuple[Callable, int, tuple[str, ...]]] = {
    "holder": (holder, 2, ()),
    "cold": (cold, 2, ("--no-events",)),
    "flapping": (flapping, 3, ()),
    "slower": (slower, 2, ()),
}


async def measured(name: str, policy: str) -> dict:
    play, count, flags = SCENES[name]
    with tempfile.TemporaryDirectory() as folder:
        async with engines(count, PROFILE, Path(folder), *flags) as found:
            urls = [part for one in found for part in ("--replica-url", one.url)]
            async with running("--policy", policy, "--model", str(found[0].model), *urls) as gateway:
                await gateway.ready(count)
                scene = Scene(found, Client(gateway.url, timeout=60), [])
                try:
                    return await play(scene)
                finally:
                    scene.client.close()


def line(name: str, policy: str, one: dict) -> str:
    ttft = one["ttft_ms"]
    besides = f"{one['sent there']} sent there" if "sent there" in one else f"share {one['share']:.2f}"
    return (
        f"{name:10} {policy:14} {one['requests']:5} requests, {one['failed']} failed; TTFT p50 {ttft['p50']:6.0f} "
        f"p99 {ttft['p99']:6.0f} max {ttft['max']:6.0f} ms; {besides}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stalls", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(SCENES), help="scenes, by name")
    parser.add_argument("--policies", default="least_time,least_load,round_robin")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict] = {}
    for name in options.only.split(","):
        for policy in options.policies.split(","):
            results[f"{name} {policy}"] = one = asyncio.run(measured(name, policy))
            print(line(name, policy, one), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, default=float))


if __name__ == "__main__":
    main()
