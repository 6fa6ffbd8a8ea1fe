"""Two prefillers and two decoders behind a gateway that launched them, and an engine whose answers are the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from replicas.launch.profile import SHIPPED

from ..gateway.collector import Collector, collecting
from ..gateway.running import Running, counted
from .engines import Engine, folder, gateway
from .pd import EXACTLY, PATIENCE, alone, needs_nixl, page_of, said, spread

# The lease of what a prefiller keeps is 30 s; a decoder that waits in its queue extends it.
FREED_SECONDS = 300.0
READY_SECONDS = 900.0  # four engines start in 40 s, and in 300 s were seen not to on a machine with 20 other processes


class Fleet:
    def __init__(self, process: Running, collector: Collector):
        self.process, self.client, self.collector = process, process.client, collector
        self.counted, self.status = process.counted, process.status

    async def page(self) -> str:
        return (await self.process.admin.get("/metrics")).text

    async def explained(self, path: str, body: dict) -> dict | None:
        """The legs that this request would have now."""
        return (await self.process.admin.post("/explain", params={"path": path}, json=body)).json()["legs"]

    async def roles(self) -> dict[str, list[dict]]:
        """The replicas of each role."""
        replicas = (await self.status())["replicas"]
        return {role: [one for one in replicas if one["role"] == role] for role in ("prefill", "decode")}

    async def ready(self, killed: Collection[int] = ()) -> None:
        """All four are, those that were killed as new processes, and run on any CPU: vLLM binds the core of each engine
        to the same one."""

        def are_there(status: dict) -> bool:
            return all(one["state"] == "ready" and one["pid"] not in killed for one in status["replicas"])

        for one in (await self.process.until(are_there, READY_SECONDS))["replicas"]:
            spread(one["pid"])


@pytest.fixture(scope="session")
def single(start_engine) -> Engine:
    """An engine without a connector, whose answers are the truth."""
    needs_nixl()
    return start_engine(*EXACTLY)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(single, model, tmp_path_factory) -> AsyncIterator[Fleet]:
    profile = tmp_path_factory.mktemp("pd") / "pd.yaml"
    shipped = (SHIPPED / "pd-cpu.yaml").read_text()
    # As between machines: within one UCX may read the memory of another process, and of one that is stopped.
    over_tcp = shipped.replace("env:\n", "env:\n  UCX_TLS: tcp,self\n").replace("bfloat16", EXACTLY[-1])
    over_tcp = over_tcp.replace("start_timeout_s: 300", f"start_timeout_s: {READY_SECONDS:g}")
    assert "UCX_TLS" in over_tcp and EXACTLY[-1] in over_tcp and f"{READY_SECONDS:g}" in over_tcp
    profile.write_text(over_tcp + f"executable: {folder()}/bin/vllm\n")
    pools = ", ".join(f"{role}: {{profile: {profile}, launch: 2, role: {role}}}" for role in ("prefill", "decode"))
    # By turns there is no cost to compare: whatever has a block to compute goes in two legs.
    settings = {"pools": f"{{{pools}}}", "model": model, "served_model_name": "tiny", "policy": "round_robin"}
    async with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100",
                   "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}  # fmt: skip
        async with gateway(ready=False, env=environ, **settings) as process:
            process.client.timeout = process.admin.timeout = httpx.Timeout(PATIENCE)
            found = Fleet(process, collector)
            await found.ready()
            await asyncio.to_thread(single.wait)
            yield found


async def both(fleet: Fleet, single: Engine, path: str, body: dict) -> httpx.Response:
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


async def nothing_left(fleet: Fleet) -> None:
    """No reservation, no request on any engine, and no block of its cache in use. A client may be gone before the
    gateway has read what it asked, so that an idle moment can come before the last request."""

    def idle(status: dict) -> bool:
        return all(not one["running"] and not one["waiting"] and not one["inflight"] for one in status["replicas"])

    async with asyncio.timeout(FREED_SECONDS):
        await fleet.process.until(idle, FREED_SECONDS)
        while await fleet.counted("hitherto_reservations"):
            await asyncio.sleep(0.1)
            await fleet.process.until(idle, FREED_SECONDS)
        for one in (await fleet.status())["replicas"]:
            while await in_use(one["url"]):
                await asyncio.sleep(0.5)


async def in_use(url: str) -> float:
    """The share of its blocks that requests have, or other engines; 1 of an engine that is not there."""
    try:
        return counted(await page_of(url), "vllm:kv_cache_usage_perc")
    except httpx.TransportError:
        return 1.0
