"""Simulated engines as processes, several at a time: what gateways are put in front of where no model is needed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.stack import die_with_parent, free_ports
from replicas.simulated.model import sim_model_dir

NAME = "sim"


@dataclass(frozen=True, slots=True)
class Simulated:
    """One engine that runs; named as `tests.vllm.engines.Engine` names the same things."""

    url: str
    events: str
    replay: str
    pid: int
    name: str = NAME

    @property
    def replica_url(self) -> str:
        return self.url  # the gateway asks it where its events are

    @property
    def model(self) -> Path:
        return sim_model_dir()


@asynccontextmanager
async def engines(count: int, profile: str, folder: Path, *flags: str):
    """So many simulated engines that answer. `profile` is what its YAML file says; flags come after it, so they win."""
    (folder / "profile.yaml").write_text(profile)
    found, processes = [], []
    ports = free_ports(3 * count)
    try:
        for port, events, replay in zip(ports[::3], ports[1::3], ports[2::3]):
            with (folder / f"engine-{port}.log").open("wb") as log:
                processes.append(await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "replicas.simulated", "--port", str(port), "--events-port", str(events),
                    "--replay-port", str(replay), "--profile", str(folder / "profile.yaml"), *flags,
                    stdout=log, stderr=log, preexec_fn=die_with_parent))  # fmt: skip
            found.append(Simulated(*(f"{scheme}://127.0.0.1:{number}" for scheme, number in (("http", port), ("tcp", events), ("tcp", replay))),
                                   processes[-1].pid))  # fmt: skip
        for one in found:
            await until_answers(one.url)
        yield found
    finally:
        for one in processes:
            if one.returncode is None:
                one.kill()
            await one.wait()


async def until_answers(url: str) -> None:
    client, deadline = Client(url, timeout=5), perf_counter() + 60
    while (await client.get("/health"))[0] != 200:
        if perf_counter() > deadline:
            raise RuntimeError(f"{url} does not answer")
        await asyncio.sleep(0.1)
    client.close()


async def empty(urls: Sequence[str]) -> None:
    """Engines forget all prefixes."""
    for url in urls:
        client, record = Client(url, timeout=10), Record("", 0, 0.0)
        await client.ask("/reset_prefix_cache", b"{}", record)
        client.close()
        if record.status != 200:
            raise RuntimeError(f"the cache of {url} was not emptied: {record.status}")
