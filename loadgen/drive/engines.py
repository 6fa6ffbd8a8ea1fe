"""What the engines themselves say about their prefix caches: counters on /metrics, as vLLM names them.

Replicas are found through the gateway's admin side. Everything is optional: an engine that can't
be read or does not count is left out, and the report then has only what replies carried.
"""

from __future__ import annotations

import asyncio
import re

import orjson

from loadgen.drive.client import BadURL, Client

_COUNTER = re.compile(rb"^(?:\w+:)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)
Counts = dict[str, dict[str, float]]


async def replicas(admin: Client) -> list[dict[str, object]]:
    """What GET /replicas lists; empty when nobody answers."""
    status, body, _ = await admin.get("/replicas")
    if status != 200:
        return []
    try:
        return [item for item in orjson.loads(body)["replicas"] if "url" in item and "id" in item]
    except (ValueError, LookupError, TypeError):
        return []


async def cache_counts(admin: Client) -> Counts:
    """Replica id -> {"queries", "hits"} in tokens since the engine began."""
    found = await asyncio.gather(*(_read(str(item["url"])) for item in await replicas(admin)))
    return {name: counts for name, counts in found if counts}


async def _read(url: str) -> tuple[str, dict[str, float]]:
    try:
        client = Client(url, timeout=5)
    except BadURL:
        return url, {}
    status, page, _ = await client.get("/metrics")
    client.close()
    return url, parse_counts(page) if status == 200 else {}


def parse_counts(page: bytes) -> dict[str, float]:
    """{"queries": tokens looked up, "hits": tokens found}, summed over the page's engines; {} if it has neither."""
    counts: dict[str, float] = {}
    for name, value in _COUNTER.findall(page):
        key = name.decode()
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts if len(counts) == 2 else {}


def between(before: Counts, after: Counts) -> dict[str, object] | None:
    """Queries, hits and rate that fell between two readings; None when no engine counts."""
    queries = hits = 0.0
    for url, counts in after.items():
        earlier = before.get(url, {"queries": 0.0, "hits": 0.0})
        if counts["queries"] < earlier["queries"]:
            earlier = {"queries": 0.0, "hits": 0.0}  # the engine was restarted meanwhile
        queries += counts["queries"] - earlier["queries"]
        hits += counts["hits"] - earlier["hits"]
    if not after:
        return None
    return {
        "engines": len(after),
        "queries": round(queries),
        "hits": round(hits),
        "hit_rate": round(hits / queries, 4) if queries else None,
    }
