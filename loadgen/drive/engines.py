"""Prefix-cache counters read from the engines' /metrics pages, which have vLLM's metric names.

The gateway's admin API lists the engines. An engine whose page cannot be read or lacks these counters is left out.
Without any counters, the report has only the cached tokens that replies state.
"""

from __future__ import annotations

import asyncio

import orjson

from loadgen.drive.client import BadURL, Client
from replicas.engines import DEFAULT
from replicas.metrics import parse

# (queries, hits) by engine URL: the prompt tokens that the engine looked up in its prefix cache since it started, and
# those of them that it found there.
Counts = dict[str, tuple[int, int]]


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
    """Return the prefix-cache counters of the gateway's engines by URL; engines without counters are left out."""
    urls = [str(item["url"]) for item in await replicas(admin)]
    found = await asyncio.gather(*map(_read, urls))
    return {url: counts for url, counts in zip(urls, found) if counts}


async def _read(url: str) -> tuple[int, int] | None:
    try:
        client = Client(url, timeout=5)
    except BadURL:
        return None
    status, page, _ = await client.get("/metrics")
    client.close()
    found = parse(page, 0.0, DEFAULT.metrics) if status == 200 else None
    if found is None or found.prefix_queries is None or found.prefix_hits is None:
        return None
    return found.prefix_queries, found.prefix_hits


def between(before: Counts, after: Counts) -> dict[str, object] | None:
    """Return the tokens looked up (queries), those found (hits) and the hit rate between two readings of the counters.

    Returns None if no engine has counters. An engine that was restarted in between counts from its restart.
    """
    if not after:
        return None
    queries = hits = 0
    for url, (asked, found) in after.items():
        earlier = before.get(url, (0, 0))
        if asked < earlier[0]:
            earlier = (0, 0)  # the engine was restarted in between
        queries, hits = queries + asked - earlier[0], hits + found - earlier[1]
    hit_rate = round(hits / queries, 4) if queries else None
    return {"engines": len(after), "queries": queries, "hits": hits, "hit_rate": hit_rate}
