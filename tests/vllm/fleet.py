"""Two prefillers and two decoders behind a gateway that launched them, and an engine whose answers are the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from replicas.launch.profile import SHIPPED

from ..gateway.collector import collecting
from ..gateway.running import Running, counted
from .engines import Engine, folder, gateway
from .pd import EXACTLY, PATIENCE, alone, needs_nixl, page_of, said, spread

# The lease of what a prefiller keeps is 30 s; a decoder that waits in its queue extends it.
FREED_SECONDS = 300.0
READY_SECONDS = 900.0  # four engines start in 40 s, and in 300 s were seen not to on a machine with 20 other processes


async def roles(fleet: Running) -> dict[str, list[dict]]:
    """The replicas of each role."""
    replicas = (await fleet.status())["replicas"]
    return {role: [one for one in replicas if one["role"] == role] for role in ("prefill", "decode")}


async def ready(fleet: Running, killed: Collection[int] = ()) -> None:
    """All are, those that were killed as new processes, and run on any CPU: vLLM binds the core of each engine to the
    same one."""

    def are_there(status: dict) -> bool:
        return all(one["state"] == "ready" and one["pid"] not in killed for one in status["replicas"])

    for one in (await fleet.until(are_there, READY_SECONDS))["replicas"]:
        spread(one["pid"])


def pools(store: Path, count: int, profile: str) -> dict[str, object]:
    """Settings of a gateway that launches so many prefillers and decoders from a profile's text. By turns there is no
    cost to compare: whatever has a block to compute goes in two legs."""
    file = store / "pd.yaml"
    file.write_text(profile + f"executable: {folder()}/bin/vllm\n")
    pools = ", ".join(f"{role}: {{profile: {file}, launch: {count}, role: {role}}}" for role in ("prefill", "decode"))
    return {"pools": f"{{{pools}}}", "served_model_name": "tiny", "policy": "round_robin", "ready": False}


@pytest.fixture(scope="session")
def single(start_shared) -> Engine:
    """An engine without a connector, whose answers are the truth."""
    needs_nixl()
    return start_shared(*EXACTLY)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(single, model, tmp_path_factory) -> AsyncIterator[Running]:
    """The gateway's process, `collector` of whose traces is here."""
    shipped = (SHIPPED / "pd-cpu.yaml").read_text()
    # As between machines: within one UCX may read the memory of another process, and of one that is stopped.
    over_tcp = shipped.replace("env:\n", "env:\n  UCX_TLS: tcp,self\n").replace("bfloat16", EXACTLY[-1])
    over_tcp = over_tcp.replace("start_timeout_s: 300", f"start_timeout_s: {READY_SECONDS:g}")
    assert "UCX_TLS" in over_tcp and EXACTLY[-1] in over_tcp and f"{READY_SECONDS:g}" in over_tcp
    async with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100",
                   "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}  # fmt: skip
        settings = pools(tmp_path_factory.mktemp("pd"), 2, over_tcp)
        async with gateway(env=environ, model=model, **settings) as process:
            process.client.timeout = process.admin.timeout = httpx.Timeout(PATIENCE)
            process.collector = collector
            await ready(process)
            await asyncio.to_thread(single.wait)
            yield process


async def both(fleet: Running, single: Engine, path: str, body: dict) -> httpx.Response:
    """Ask both, and compare; return the fleet's answer."""
    answer, expected = await asyncio.gather(fleet.client.post(path, json=body), alone(single, path, body))
    assert said(answer, body["stream"]) == said(expected, body["stream"]), f"asked {body}"
    return answer


async def in_turns(work: Sequence[Coroutine[Any, Any, None]], at_once: int = 4) -> None:
    """So many of them at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one(coroutine: Coroutine[Any, Any, None]) -> None:
        async with turns:
            await coroutine

    async with asyncio.TaskGroup() as group:
        for coroutine in work:
            group.create_task(one(coroutine))


async def nothing_left(fleet: Running) -> None:
    """No reservation, no request on any engine, and no block of its cache in use. A client may be gone before the
    gateway has read what it asked, so that an idle moment can come before the last request."""

    def idle(status: dict) -> bool:
        return all(not one["running"] and not one["waiting"] and not one["inflight"] for one in status["replicas"])

    async with asyncio.timeout(FREED_SECONDS):
        await fleet.until(idle, FREED_SECONDS)
        while await fleet.counted("hitherto_reservations"):
            await asyncio.sleep(0.1)
            await fleet.until(idle, FREED_SECONDS)
        for one in (await fleet.status())["replicas"]:
            while await in_use(one["url"]):
                await asyncio.sleep(0.5)


async def in_use(url: str) -> float:
    """The share of its blocks that requests have, or other engines; 1 of an engine that is not there."""
    try:
        return counted(await page_of(url), "vllm:kv_cache_usage_perc")
    except httpx.TransportError:
        return 1.0
