"""The few `vllm:` series that routing needs, cut out of a /metrics page.

A full parse of vLLM's page takes milliseconds, and a gateway reads one per replica and second.
So: search for the names wanted and read those lines only. Names that are missing or have
changed give None; older names are tried after today's.
"""

import re
from typing import NamedTuple


class Scrape(NamedTuple):
    """Counts are summed over the data-parallel ranks of one server, use is the fullest rank's."""

    at: float  # monotonic seconds
    running: int | None
    waiting: int | None
    kv_usage: float | None  # 0 to 1
    prefix_queries: int | None  # tokens looked up since the process began
    prefix_hits: int | None  # of these, found
    started: float | None  # unix time at which the process began
    block_size: int | None
    num_blocks: int | None


_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


def _lines(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """(labels, value) of each sample of exactly this name."""
    found, at = [], 0
    if page.startswith(name):
        page = b"\n" + page
    while (at := page.find(b"\n" + name, at)) >= 0:
        end = page.find(b"\n", at + 1)
        line = page[at + 1 + len(name) : end if end >= 0 else len(page)]
        at += len(name)
        labels, value = b"", line
        if line[:1] == b"{":
            labels, _, value = line[1:].rpartition(b"}")
        elif line[:1] not in (b" ", b"\t"):
            continue  # a longer name that begins alike
        try:
            found.append((labels, float(value.split()[0])))
        except (ValueError, IndexError):
            continue
    return found


def _pick(page: bytes, combine, *names: bytes) -> float | None:
    for name in names:
        values = [value for _, value in _lines(page, name)]
        if values:
            return combine(values)
    return None


def _count(value: float | None) -> int | None:
    """None also for NaN and infinities, which a page may hold."""
    return int(value) if value is not None and abs(value) < 2**63 else None


def _cache_config(page: bytes) -> tuple[int | None, int | None]:
    for labels, _ in _lines(page, b"vllm:cache_config_info"):
        given = dict(_LABEL.findall(labels))
        size, blocks = given.get(b"block_size", b""), given.get(b"num_gpu_blocks", b"")
        if size.isdigit():
            return int(size), int(blocks) if blocks.isdigit() else None
    return None, None


def parse(page: bytes, now: float) -> Scrape:
    """Read a Prometheus text page. Never raises: what is not there is None."""
    usage = _pick(page, max, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    # Some deployments export no process metrics; a counter's creation time moves with a restart too.
    started = _pick(page, min, b"process_start_time_seconds", b"vllm:prompt_tokens_created")
    queries = _pick(page, sum, b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total")
    hits = _pick(page, sum, b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total")
    block_size, num_blocks = _cache_config(page)
    return Scrape(
        at=now,
        running=_count(_pick(page, sum, b"vllm:num_requests_running")),
        waiting=_count(_pick(page, sum, b"vllm:num_requests_waiting")),
        kv_usage=min(max(usage, 0.0), 1.0) if usage is not None and usage == usage else None,
        prefix_queries=_count(queries),
        prefix_hits=_count(hits),
        started=started,
        block_size=block_size,
        num_blocks=num_blocks,
    )
