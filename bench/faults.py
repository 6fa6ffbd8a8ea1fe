"""What each fault of Redis or of a gateway costs, in seconds: until requests go on, until the map is whole, until the
ledger is zero.

    python -m bench.faults [--only WORDS] [--json FILE]

Two real gateway processes before two simulated engines, a real Redis, and eight clients that never pause; two seconds
of that, then the fault. One that can be undone lasts LASTS seconds, longer than a lease, and seconds are counted from
its end; one that can't (a process killed) from its beginning. Clients go on for one second after that, so no ledger is
empty before. Then every replica must have one leader and followers, no gateway be standalone, the ledger be joined by
all and empty, and what each gateway predicts must be what the engine reports.

  pause    the longest time in which nobody got an answer, from the fault on; `before`: without any fault
  map      seconds until every gateway's map is kept by the shared one again, for good
  ledger   seconds until the shared ledger is joined by all and holds no load, for good
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis

from bench.simulated import engines
from loadgen.report.summary import machine
from tests.gateway.test_gateways import LOAD, Clients, ahead, gateways, settled, together
from tests.redis_server import Cluster, Proxy, RedisServer, Sentinels
from tests.redis_server import running as redis_running

LASTS, STAYS = 5.0, 4.0
PROFILE = "step: {prefill: 4, prefill_token: 0.004, decode: 2}\n"


@dataclass
class Scene:
    """What a fault may break. `ledger` is the server where the load is counted."""

    folder: Path
    urls: Sequence[str]
    stack: AsyncExitStack
    fleet: list = field(default_factory=list)
    servers: Any = None
    proxy: Proxy | None = None
    shard: RedisServer | None = None
    ledger: redis.Redis | None = None
    clients: Clients | None = None

    async def start(self, servers: Any, *redis_urls: str, env: Sequence[dict] = ({}, {})) -> None:
        for url, surroundings in zip(redis_urls, env, strict=True):
            self.fleet += await self.stack.enter_async_context(gateways(1, url, self.urls, env=surroundings))
        self.servers = servers

    def serve(self, servers: Any) -> Any:
        return self.stack.enter_context(redis_running(servers))


async def plain(scene: Scene, **settings) -> None:
    server = scene.serve(RedisServer(scene.folder, **settings))
    scene.ledger = server.client()
    await scene.start(server, server.url, server.url)


async def behind_a_proxy(scene: Scene) -> None:
    server = scene.serve(RedisServer(scene.folder))
    scene.proxy = await scene.stack.enter_async_context(Proxy(server.port))
    scene.ledger = server.client()
    await scene.start(server, scene.proxy.url, server.url)


async def sentinels(scene: Scene) -> None:
    servers = scene.serve(Sentinels(scene.folder))
    scene.ledger = servers.replica.client()
    await scene.start(servers, servers.url, servers.url)


async def cluster(scene: Scene) -> None:
    servers = scene.serve(Cluster(scene.folder))
    scene.shard = servers.node_of(LOAD)
    scene.ledger = scene.shard.client()
    await scene.start(servers, servers.url, servers.url)


async def one_clock_ahead(scene: Scene) -> None:
    server = scene.serve(RedisServer(scene.folder))
    scene.ledger = server.client()
    await scene.start(server, server.url, server.url, env=(ahead(scene.folder), {}))


async def persistent(scene: Scene) -> None:
    await plain(scene, appendonly="yes", appendfsync="always")


def kill(scene: Scene) -> None:
    scene.servers.kill()


def kill_a_gateway(scene: Scene) -> None:
    """The one that holds the leases. What its own clients asked it fails with it; they ask the other one from here
    on."""
    dies = scene.fleet.pop(0)
    while len(busy := scene.ledger.keys("hitherto:1:default:{pool}:of:*")) < 2 or min(map(scene.ledger.hlen, busy)) < 2:
        pass  # in the middle of something, on each replica
    scene.clients.fleet.remove(dies)
    dies.process.send_signal(signal.SIGKILL)


def nothing(scene: Scene) -> None:
    """The fault was there from the start."""


@dataclass(frozen=True)
class Fault:
    name: str
    scene: Callable
    do: Callable[[Scene], Any]
    undo: Callable[[Scene], Any] | None = None


FAULTS = (
    Fault("Redis killed, back empty", plain, kill, lambda scene: scene.servers.restart(empty=True)),
    Fault("Redis killed, back with its data", persistent, kill, lambda scene: scene.servers.restart()),
    Fault("Redis frozen", plain, lambda scene: scene.servers.freeze(), lambda scene: scene.servers.thaw()),
    Fault("Redis slow: 20 ms each way, one gateway", behind_a_proxy,
          lambda scene: setattr(scene.proxy, "delay", 0.02), lambda scene: setattr(scene.proxy, "delay", 0.0)),
    Fault("Redis slow: 1 s each way, one gateway", behind_a_proxy,
          lambda scene: setattr(scene.proxy, "delay", 1.0), lambda scene: setattr(scene.proxy, "delay", 0.0)),
    Fault("Redis full", plain, lambda scene: scene.ledger.config_set("maxmemory", 1), lambda scene: scene.ledger.config_set("maxmemory", 0)),
    Fault("Sentinel fails over", sentinels, lambda scene: scene.servers.primary.kill()),
    Fault("Cluster: the ledger's shard gone", cluster, lambda scene: scene.shard.kill(), lambda scene: scene.shard.restart()),
    Fault("a gateway SIGKILLed mid-burst", plain, kill_a_gateway),
    Fault("a gateway cut off from Redis", behind_a_proxy, lambda scene: scene.proxy.cut(), lambda scene: scene.proxy.mend()),
    Fault("clocks 10 s apart", one_clock_ahead, nothing, nothing),
)  # fmt: skip


async def measure(fault: Fault, folder: Path, urls: Sequence[str]) -> dict:
    now = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        scene = Scene(folder, urls, stack)
        await fault.scene(scene)
        async with Clients(scene.fleet) as clients:
            await asyncio.sleep(2)
            began = since = now()
            scene.clients = clients
            await happen(fault.do, scene)
            if fault.undo:
                await asyncio.sleep(LASTS)
                await happen(fault.undo, scene)
                since = now()
            asyncio.get_running_loop().call_later(1.0, setattr, clients, "stopping", True)
            whole_at, zero_at = await asyncio.gather(when(whole, scene), when(zero, scene))
        await settled(scene.fleet, scene.ledger)
        log = b"".join(b"".join(one.log) for one in scene.fleet).decode()
    return {
        "fault": fault.name, "answers": clients.answers.total(), "failed": len(clients.failures), "failures": clients.failures[:2],
        "pause_before_s": pause(clients.times, began - 1.5, began), "pause_s": pause(clients.times, began - 0.5, now()),
        "map_s": round(whole_at - since, 2), "ledger_s": round(zero_at - since, 2), "cleared": log.count("cleared"),
    }  # fmt: skip


async def happen(what: Callable[[Scene], Any], scene: Scene) -> None:
    """Servers are waited for, which must not hold up the clients; a proxy is this loop's own."""
    if scene.proxy is None:
        await asyncio.to_thread(what, scene)
    else:
        what(scene)


async def when(true: Callable, scene: Scene) -> float:
    """The time from which on it was found true, for STAYS seconds: a fault may not be noticed at once."""
    now = asyncio.get_running_loop().time
    end, since = now() + 60, None
    while since is None or now() - since < STAYS:
        if now() > end:
            raise TimeoutError(f"{true.__name__}: not for good after a minute")
        if not await true(scene):
            since = None
        elif since is None:
            since = now()
        await asyncio.sleep(0.05)
    return since


async def whole(scene: Scene) -> bool:
    """Every gateway reaches Redis and leads or follows each replica, and one of them leads."""
    told = [await one.status() for one in scene.fleet]
    roles = [
        sorted(str(replica["map_role"]) for replica in of_one) for of_one in zip(*[one["replicas"] for one in told])
    ]
    return all(one["map"]["redis"]["reachable"] for one in told) and all(
        one == ["follower"] * (len(told) - 1) + ["leader"] for one in roles
    )


async def zero(scene: Scene) -> bool:
    """All count in the shared ledger, and it is empty."""
    try:
        left = await asyncio.to_thread(together, scene.ledger)
    except redis.RedisError:
        return False
    return not left and all([(await one.status())["map"]["redis"]["ledger_joined"] for one in scene.fleet])


def pause(times: Sequence[float], begin: float, end: float) -> float:
    """The longest time between two answers."""
    within = [begin, *(one for one in sorted(times) if begin < one < end)]
    return round(max((later - earlier for earlier, later in pairwise(within)), default=0.0), 3)


HEAD = f"{'fault':42} {'answers':>8} {'failed':>7} {'before s':>9} {'pause s':>8} {'map s':>6} {'ledger s':>9}"


def line(one: dict) -> str:
    return (f"{one['fault']:42} {one['answers']:8d} {one['failed']:7d} {one['pause_before_s']:9.3f} {one['pause_s']:8.3f} "
            f"{one['map_s']:6.2f} {one['ledger_s']:9.2f}")  # fmt: skip


async def run(args: argparse.Namespace, keep: list[dict]) -> list[dict]:
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        async with engines(2, PROFILE, Path(name)) as found:
            urls = [one.url for one in found]
            for number, fault in enumerate(FAULTS):
                if args.only in fault.name:
                    found = await measure(fault, Path(name, str(number)), urls)
                    keep[:] = [one for one in keep if one["fault"] != fault.name] + [found]
                    print(line(found), *found["failures"], sep="\n  ", flush=True)
    return keep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose names contain this")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there; those of other faults in it stay"
    )
    args = parser.parse_args()
    keep = json.loads(args.json.read_text())["faults"] if args.json and args.json.exists() else []
    found = asyncio.run(run(args, keep))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "lasts_s": LASTS, "faults": found}, indent=1) + "\n")
    return 0 if not any(one["failed"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
