"""What `doctor` says of the Redis that gateways share: is it there, does it keep what it is given, is it near?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter

from gateway.trial import Finding

OLDEST = (6, 2)  # XTRIM MINID
PINGS = 20
NEAR_SECONDS = 0.002  # what a decision waits for Redis at most


async def redis_findings(url: str) -> AsyncIterator[Finding]:
    from cachemap.share.connect import FAILURES, connect, parse

    place = parse(url)
    shards = [place] if place.kind != "cluster" else [place._replace(kind="single", hosts=[host]) for host in place.hosts]
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
        except FAILURES as error:
            yield Finding("fail", subject, f"{shard} cannot be used: {error}",
                          "gateways go on alone until it answers; look at its address, password, TLS settings and its own log")  # fmt: skip
            continue
        finally:
            await client.aclose()
        yield _version(subject, f"{shard}", told)
        yield _eviction(subject, told)
        yield _latency(subject, sorted(pings)[PINGS // 2])


def _version(subject: str, place: str, told: dict) -> Finding:
    version = str(told.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return Finding("fail", subject, f"{place} is Redis {version}", "run Redis 6.2 or later")
    return Finding("ok", subject, f"{place} answers, Redis {version}")


def _eviction(subject: str, told: dict) -> Finding:
    policy = told.get("maxmemory_policy", "noeviction")
    if not int(told.get("maxmemory", 0)) or policy == "noeviction":
        return Finding("ok", subject, "drops nothing to save memory")
    if policy.startswith("volatile-"):
        return Finding("ok", subject, f"maxmemory-policy {policy}: what it drops is written anew within a second or two; noeviction is calmer")
    return Finding("fail", subject, f"maxmemory-policy {policy} drops leases and loads at random, which makes gateways write by turns and count wrong",
                   "set maxmemory-policy noeviction, and memory enough: 16 bytes a block and 1 kB a replica")  # fmt: skip


def _latency(subject: str, seconds: float) -> Finding:
    text = f"answers in {seconds * 1000:.2f} ms (median of {PINGS})"
    if seconds > NEAR_SECONDS:
        return Finding("warn", subject, text + ": decisions wait 2 ms for it at most, so most are made by the local view", "put Redis nearer to the gateways")
    return Finding("ok", subject, text)
