"""Prefix-cache counters read from the engines' /metrics pages, which have vLLM's metric names.

Replicas are found through the gateway's admin side. An engine that cannot be read or lacks these counters is left out.
Without any counters, the report has only the cached tokens that replies state.
"""

from __future__ import annotations

import asyncio
import re

import orjson

from loadgen.drive.client import BadURL, Client

_COUNTER = re.compile(rb"^(?:\w+:)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)
Counts = dict[str, dict[str, float]]


async def replicas(admin: Client) -> list[dict[str, object]]:
    """Return the replicas that the gateway's GET /replicas lists; [] when there is no usable answer."""
    status, body, _ = await admin.get("/replicas")
    if status != 200:
        return []
    try:
        return [item for item in orjson.loads(body)["replicas"] if "url" in item and "id" in item]
    except (ValueError, LookupError, TypeError):
        return []


async def cache_counts(admin: Client) -> Counts:
    """Return the "queries" and "hits" of each replica, by URL, in tokens since the engine began."""
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
    """Return {"queries": tokens looked up, "hits": tokens found}, summed over the engines on the page.

    Returns {} if the page lacks either counter.
    """
    counts: dict[str, float] = {}
    for name, value in _COUNTER.findall(page):
        key = name.decode()
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts if len(counts) == 2 else {}


def between(before: Counts, after: Counts) -> dict[str, object] | None:
    """Return queries and hits (tokens) and hit rate between two readings, or None when no engine has counters."""
    if not after:
        return None
    queries = hits = 0.0
    for url, counts in after.items():
        earlier = before.get(url)
        if earlier is None or counts["queries"] < earlier["queries"]:
            earlier = {"queries": 0.0, "hits": 0.0}  # the engine was started meanwhile
        queries += counts["queries"] - earlier["queries"]
        hits += counts["hits"] - earlier["hits"]
    hit_rate = round(hits / queries, 4) if queries else None
    return {"engines": len(after), "queries": round(queries), "hits": round(hits), "hit_rate": hit_rate}
