"""The shared map on a real Redis: bytes a block, time to warm, traffic, lag.

    python -m bench.share [--replicas 64] [--blocks 40000] [--redis BINARY] [--json FILE]

One process leads for all replicas, another one follows; both run the real code of a gateway's map, and the replicas'
events are made up: conversations of 64 blocks, each appearing in steps of 8, and as many blocks
going. The replicas have no sockets, so what is measured is the map, Redis, and the way between them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import redis

from cachemap import CacheMap
from cachemap.cluster import SharedIntake, SharedMap, parse
from cachemap.cluster.codec import Position

BUDGET = 1 << 30
CHAIN, STEP = 64, 8


class Silent:
    """In place of an engine's events: what `SharedIntake` asks of an EventIntake, without sockets."""

    def __init__(self, *_, **__):
        self.position, self.state, self.reason = Position(), "live", ""
        self.blocks_stored = self.blocks_removed = 0

    def resume(self, *_) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()


def gateway(url: str, replicas: int, blocks: int) -> tuple[CacheMap, SharedMap, list]:
    import cachemap.cluster.intake

    cachemap.cluster.intake.EventIntake = Silent
    table = CacheMap(BUDGET)
    shared = SharedMap(parse(url), "bench", table)
    intakes = []
    for i in range(replicas):
        slot = table.attach(f"10.0.0.{i}:8000", blocks, True)
        intakes.append(shared.intake(slot, f"10.0.0.{i}:8000", "1.00", model="m", block_size=16))
    return table, shared, intakes


class Engine:
    """A replica's cache that is full and turns over: the oldest conversation goes for a new one."""

    def __init__(self, table: CacheMap, slot: int, blocks: int):
        self._table, self._slot, self._blocks = table, slot, blocks
        self._rng = np.random.default_rng(slot)
        self._held: list[list[int]] = []
        self._count = 0

    async def fill(self) -> None:
        while self._count + CHAIN <= self._blocks:
            self.step(CHAIN, CHAIN)
            await asyncio.sleep(0)

    def step(self, blocks: int = STEP, chain: int = CHAIN) -> None:
        """A few blocks come, as many go."""
        if not self._held or len(self._held[-1]) + blocks > chain:
            self._held.append([])
        head = self._held[-1]
        new = self._rng.integers(1, 1 << 63, blocks).tolist()
        parent = head[-1] if head else 0
        if self._count + blocks > self._blocks:
            self._table.remove(self._slot, self._held.pop(0))
            self._count = sum(map(len, self._held))
        self._table.store(self._slot, new, new, "gpu", [(0, parent)])
        head += new
        self._count += blocks


async def until(true, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError
        await asyncio.sleep(0.01)


async def write(url: str, options: argparse.Namespace) -> dict:
    table, shared, intakes = gateway(url, options.replicas, options.blocks)
    shared.start()
    tasks = [asyncio.create_task(one.run()) for one in intakes]
    await until(lambda: all(one.role == "leader" for one in intakes))
    engines = [Engine(table, slot, options.blocks) for slot in range(options.replicas)]
    for engine in engines:
        await engine.fill()
    await until(
        lambda: (
            not any(
                one.journal.whole or one.journal.due(one.blocks) or one in shared._writing.snapshots for one in intakes
            )
        )
    )
    result = {"memory": await steady_memory(url, engines, intakes, shared, options)}
    result["warm"] = await warm(url, options, table)
    result["traffic"] = [
        await traffic(url, engines, intakes, shared, options, followers) for followers in options.followers
    ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await shared.stop()
    return result


async def steady_memory(
    url: str, engines: list[Engine], intakes: list, shared: SharedMap, options: argparse.Namespace
) -> dict:
    """MEMORY USAGE over all keys, looked at while the caches turn over once, tails at all lengths."""
    found = []
    for turn in range(12):
        for _step in range(options.blocks // 12 // STEP):
            for engine in engines:
                engine.step()
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        if turn >= 2:
            found.append(memory(url) / sum(one.blocks for one in intakes))
    return {"bytes_per_block_mean": round(float(np.mean(found)), 2), "bytes_per_block_max": round(max(found), 2),
            "blocks": sum(one.blocks for one in intakes)}  # fmt: skip


def memory(url: str) -> int:
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
        for key in client.scan_iter(count=1000):
            pipe.memory_usage(key, samples=0)
        return sum(size or 0 for size in pipe.execute())


async def warm(url: str, options: argparse.Namespace, table: CacheMap) -> dict:
    """A new gateway process: seconds from its first word to Redis until it holds what the leader does, which goes on
    meanwhile."""
    seconds = []
    for _ in range(options.runs):
        command = [
            sys.executable,
            "-m",
            "bench.share",
            "--warm",
            url,
            "--replicas",
            str(options.replicas),
            "--blocks",
            str(options.blocks),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        told = json.loads((await process.communicate())[0])
        if told["blocks"] != table.stats()["blocks"]:
            raise RuntimeError(f"the new gateway holds {told['blocks']} blocks, the leader {table.stats()['blocks']}")
        seconds.append(told["seconds"])
    return {"seconds": sorted(seconds), "blocks": table.stats()["blocks"]}


async def start_warm(url: str, options: argparse.Namespace) -> None:
    table, shared, intakes = gateway(url, options.replicas, options.blocks)
    began = time.monotonic()
    shared.start()
    tasks = [asyncio.create_task(one.run()) for one in intakes]
    await until(lambda: all(one.role == "follower" for one in intakes))
    seconds = time.monotonic() - began
    print(json.dumps({"seconds": round(seconds, 3), "blocks": table.stats()["blocks"]}))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await shared.stop()


async def traffic(
    url: str, engines: list[Engine], intakes: list, shared: SharedMap, options: argparse.Namespace, followers: int
) -> dict:
    """Steps at a given rate with some followers, each a process of its own: commands, bytes and CPU a second, and the
    lag."""
    command = [
        sys.executable,
        "-m",
        "bench.share",
        "--follower",
        url,
        "--replicas",
        str(options.replicas),
        "--blocks",
        str(options.blocks),
        "--seconds",
        str(options.seconds),
    ]
    running = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(followers)]
    for one in running:
        await one.stdout.readline()
    snapshots, before, cpu, began = shared.snapshots, counters(url), time.process_time(), time.monotonic()
    steps = 0
    while time.monotonic() - began < options.seconds:
        due = int((time.monotonic() - began) * options.rate)
        while steps < due:
            i = steps % len(engines)
            if not intakes[i].journal._pending:  # the oldest of those that will go together
                intakes[i].engine.position = Position(steps, time.time())
            engines[i].step()
            steps += 1
        await asyncio.sleep(0.001)
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    after = counters(url)
    told = [json.loads((await one.communicate())[0]) for one in running]
    return {
        "followers": followers,
        "events_per_s": round(steps / took), "blocks_stored_per_s": round(steps * STEP / took),
        "commands_per_s": round((after["commands"] - before["commands"]) / took),
        "bytes_in_per_s": round((after["in"] - before["in"]) / took), "bytes_out_per_s": round((after["out"] - before["out"]) / took),
        "redis_cpu": round((after["cpu"] - before["cpu"]) / took, 3), "leader_cpu": round(cpu / took, 3),
        "snapshots_per_s": round((shared.snapshots - snapshots) / took, 2), **{name: max(one[name] for one in told) for name in told[0]},
    }  # fmt: skip


def counters(url: str) -> dict:
    with redis.Redis.from_url(url) as client:
        told = client.info()
        commands = client.info("commandstats")
    calls = sum(
        one["calls"] for name, one in commands.items() if not name.startswith(("cmdstat_info", "cmdstat_client"))
    )
    return {"commands": calls, "in": told["total_net_input_bytes"], "out": told["total_net_output_bytes"],
            "cpu": told["used_cpu_user"] + told["used_cpu_sys"]}  # fmt: skip


async def follower(url: str, options: argparse.Namespace) -> None:
    """Prints a line when it holds all, and one at the end: from an event's coming to the leader to its being
    applied."""
    table, shared, intakes = gateway(url, options.replicas, options.blocks)
    lags: list[float] = []
    apply = SharedIntake._apply

    def timed(self, n, delta):
        apply(self, n, delta)
        lags.append(time.time() - delta.position.timestamp)

    SharedIntake._apply = timed
    shared.start()
    tasks = [asyncio.create_task(one.run()) for one in intakes]
    await until(lambda: all(one.role == "follower" for one in intakes))
    print("ready", flush=True)
    cpu = time.process_time()
    lags.clear()
    await asyncio.sleep(options.seconds)
    cpu = (time.process_time() - cpu) / options.seconds
    told = np.percentile(lags, (50, 99)) * 1000
    print(
        json.dumps(
            {
                "lag_ms_p50": round(told[0], 2),
                "lag_ms_p99": round(told[1], 2),
                "follower_cpu": round(cpu, 3),
                "reloads": shared.reloads,
            }
        ),
        flush=True,
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await shared.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=40_000, help="each replica holds")
    parser.add_argument("--rate", type=float, default=1000, help="events a second, of all replicas together")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--followers",
        type=int,
        nargs="+",
        default=[1, 3],
        help="gateways that follower while the traffic is measured; each number is a measurement",
    )
    parser.add_argument("--redis", default="redis-server", help="the server's binary")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--follower", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm or options.follower:
        asyncio.run(start_warm(options.warm, options) if options.warm else follower(options.follower, options))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = with_redis(options, Path(folder))
    print(json.dumps(result, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def with_redis(options: argparse.Namespace, folder: Path) -> dict:
    port = 16379
    url = f"redis://127.0.0.1:{port}/0"
    server = subprocess.Popen(
        [options.redis, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with redis.Redis.from_url(url) as client:
            end = time.monotonic() + 10
            while True:
                try:
                    version = client.info()["redis_version"]
                    break
                except redis.ConnectionError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, Redis {version}"
        about = {
            "machine": machine,
            "load_average": os.getloadavg()[0],
            "replicas": options.replicas,
            "blocks_each": options.blocks,
        }
        return about | asyncio.run(write(url, options))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
