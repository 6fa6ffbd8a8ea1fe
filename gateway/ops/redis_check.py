"""Checks of `hitherto doctor` on the Redis that gateways share: reachability, version, eviction, latency, permissions.

Permissions are tried: two maps and two ledgers, as of two gateways, work on it for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import zmq

from gateway.ops.trial import Finding

if TYPE_CHECKING:
    from cachemap.cluster import Place

PINGS = 20
NEAR_SECONDS = 0.002  # the longest time that a decision waits for Redis
TRIAL_SECONDS = 3.0  # a healthy Redis takes a lease and a snapshot within a second
ADVICE = "see the ACL that docs/scaling.md lists, and that the URL leads to a primary that takes writes"


async def redis_findings(url: str, deployment: str) -> AsyncIterator[Finding]:
    """Yield findings on each server of the Redis at `url`, then on a trial of map and ledger."""
    from cachemap.cluster.connect import FAILURES, connect, describe, parse
    from cachemap.cluster.replies import NONSENSE, strange

    place = parse(url)
    whole = True
    shards = (
        [place] if place.kind != "cluster" else [place._replace(kind="single", hosts=[host]) for host in place.hosts]
    )
    for shard in shards:
        client = connect(shard)
        subject = f"redis {shard.hosts[0][0]}:{shard.hosts[0][1]}" if len(shards) > 1 else "redis"
        try:
            told = await client.info()
            pings = []
            for _ in range(PINGS):
                began = perf_counter()
                await client.ping()
                pings.append(perf_counter() - began)
            of_server = _version(subject, f"{shard}", told), _eviction(subject, told)
        except (*FAILURES, *NONSENSE) as error:
            error = strange("INFO", error) if isinstance(error, NONSENSE) else error
            yield Finding("fail", subject, f"{shard} cannot be used: {describe(error)}",
                          "gateways go on alone until it answers; look at its address, password, TLS settings and its own log")  # fmt: skip
            whole = False
            continue
        finally:
            await client.aclose()
        for finding in of_server:
            yield finding
        yield _latency(subject, sorted(pings)[PINGS // 2])
    if whole:
        name = f"{deployment}:doctor-{secrets.token_hex(4)}"  # a separate deployment, which an ACL for this one covers
        for finding in await asyncio.gather(_try_map(place, name), _try_ledger(place, name)):
            yield finding


async def _try_map(place: Place, deployment: str) -> Finding:
    """Write the map of replicas as one gateway and read it as another; on a Cluster in every lane."""
    from cachemap.cluster.keys import LANES, Keys

    names: dict[int, str] = {}
    for number in range(1000):
        names.setdefault(Keys(deployment, f"doctor:{number}", "1").lane, f"doctor:{number}")
    replicas = [names[lane] for lane in range(LANES)] if place.kind == "cluster" else [names[0]]
    begun = perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        # an event publisher in place of the replicas', which publishes nothing
        events = stack.enter_context(zmq.Context.instance().socket(zmq.PUB))
        endpoint = f"tcp://127.0.0.1:{events.bind_to_random_port('tcp://127.0.0.1')}"
        writer = await stack.enter_async_context(_TrialMap(place, deployment, replicas, endpoint))
        if not await _soon(lambda: writer.shared.snapshots >= len(replicas)):
            return writer.refused("a replica's part of the map cannot be written")
        reader = await stack.enter_async_context(_TrialMap(place, deployment, replicas, endpoint))
        if not await _soon(lambda: all(one.role == "mirror" for one in reader.intakes)):
            return reader.refused("what one gateway wrote another cannot read")
        await _soon(lambda: all(writer.map.contents(slot).observed for slot in range(len(replicas))))
        for slot in range(len(replicas)):
            writer.map.store(slot, [slot + 1], [slot + 1])
        if not await _soon(lambda: all(reader.map.held(slot) for slot in range(len(replicas)))):
            return (reader if reader.shared.trouble else writer).refused("deltas do not arrive")
    return Finding(
        "ok", "redis: map", f"written as by one gateway and read as by another in {perf_counter() - begun:.1f} s"
    )


async def _try_ledger(place: Place, deployment: str) -> Finding:
    """Place and count a request as one gateway, and check that another one sees its load."""
    from cachemap.cluster import Ways
    from gateway.proxy.shared import SharedLedger
    from policies import Candidate, CostGroup, Demand, Evaluation, Ledger, make

    policy, ledgers = make("least_time"), [Ledger(), Ledger()]
    loads = [ledger.add("doctor:1") for ledger in ledgers]
    shared = [SharedLedger(Ways(place), deployment, ledger, policy.cost, deadline=TRIAL_SECONDS) for ledger in ledgers]
    try:
        for one in shared:
            one.start()
        if not await _soon(lambda: all(one.joined for one in shared)):
            return Finding(
                "fail",
                "redis: ledger",
                f"load cannot be counted: {'; '.join(dict.fromkeys(one.reason for one in shared))}",
                ADVICE,
            )
        candidate, answer = (
            Candidate("doctor:1", 0, loads[0], CostGroup().add("doctor:1")),
            asyncio.get_running_loop().create_future(),
        )

        def count(decision):
            if decision is not None:
                ledgers[0].reserve("doctor:1", 32 - decision.overlap, 32, decision.counted)
            answer.set_result(decision)

        demand = Demand(32, 16, hashes=[1, 2])
        shared[0].decide(Evaluation(demand, [candidate], policy.choose(demand, [candidate]), 0), count)
        if await answer is None:
            return Finding("fail", "redis: ledger", f"no decision is made there: {shared[0].reason}", ADVICE)
        if not await _soon(lambda: loads[1].requests == 1):
            return Finding(
                "fail", "redis: ledger", f"one gateway does not see what another counts: {shared[1].reason}", ADVICE
            )
        return Finding("ok", "redis: ledger", "a request was placed, counted, and seen as by another gateway")
    finally:
        for one in shared:
            await one.stop()


async def _soon(true: Callable[[], bool]) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TRIAL_SECONDS):
            while not true():
                await asyncio.sleep(0.01)
            return True
    return False


def _decode_nothing(payload: bytes) -> NoReturn:
    from cachemap.events.records import EventError

    raise EventError("nobody publishes anything in a trial")


class _TrialMap:
    """A gateway's part of the shared map, for made-up replicas without events. Leaves nothing in Redis."""

    def __init__(self, place: Place, deployment: str, replicas: list[str], endpoint: str):
        from cachemap import CacheMap
        from cachemap.cluster import SharedMap

        self.map = CacheMap(1 << 20)
        self.shared = SharedMap(place, deployment, self.map)
        self.intakes = [
            self.shared.intake(
                self.map.attach(name, None, True),
                name,
                "1",
                endpoint=endpoint,
                replay=None,
                decode=_decode_nothing,
                model="doctor",
                block_size=16,
            )
            for name in replicas
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _TrialMap:
        self.shared.start()
        self._tasks = [asyncio.create_task(one.run()) for one in self.intakes]
        return self

    async def __aexit__(self, *_) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        from cachemap.cluster.connect import FAILURES

        with contextlib.suppress(*FAILURES):
            for keys in (one.keys for one in self.intakes):
                await (await self.shared.ways.to(keys.life)).delete(
                    keys.life, keys.lease, keys.head, keys.deltas, keys.snapshot, keys.wish
                )
        await self.shared.stop()

    def refused(self, what: str) -> Finding:
        why = self.shared.trouble or "; ".join(dict.fromkeys(one.role_reason for one in self.intakes))
        return Finding("fail", "redis: map", f"{what}: {why}", ADVICE)


def _version(subject: str, place: str, told: dict) -> Finding:
    from cachemap.cluster.connect import OLDEST

    version = str(told.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return Finding("fail", subject, f"{place} is Redis {version}", "run Redis 6.2 or later")
    return Finding("ok", subject, f"{place} answers, Redis {version}")


def _eviction(subject: str, told: dict) -> Finding:
    policy = told.get("maxmemory_policy", "noeviction")
    if not int(told.get("maxmemory", 0)) or policy == "noeviction":
        return Finding("ok", subject, "drops nothing to save memory")
    if policy.startswith("volatile-"):
        return Finding(
            "ok",
            subject,
            f"maxmemory-policy {policy}: what it drops is written anew within a second or two; noeviction is calmer",
        )
    return Finding("fail", subject, f"maxmemory-policy {policy} drops leases and loads at random, which makes gateways write by turns and count wrong",
                   "set maxmemory-policy noeviction, and memory enough: 16 bytes a block and 1 kB a replica")  # fmt: skip


def _latency(subject: str, seconds: float) -> Finding:
    text = f"answers in {seconds * 1000:.2f} ms (median of {PINGS})"
    if seconds > NEAR_SECONDS:
        return Finding(
            "warn",
            subject,
            text + ": decisions wait 2 ms for it at most, so most are made by the local view",
            "put Redis nearer to the gateways",
        )
    return Finding("ok", subject, text)
