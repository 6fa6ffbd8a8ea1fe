"""One run of one gateway in front of some engines: started afresh, the whole load, what engines and client counted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bench.contenders import Backend, Contender, running
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import Asking, Run
from loadgen.drive.sse import Reply
from loadgen.report.summary import summarise
from loadgen.workload.conversations import Conversation
from replicas.engines import DEFAULT
from replicas.metrics import parse

_ANSWERED = re.compile(rb"^vllm:request_success_total\{[^}]*\} ([0-9.eE+]+)", re.MULTILINE)


class Talking(Client):
    """Says with every request which conversation it belongs to."""

    async def ask(self, endpoint: str, body: bytes, record: Record) -> None:
        head = b"x-session-id: %b\r\n" % record.conversation.encode()
        request = self._request("POST", endpoint, body).replace(b"\r\n\r\n", b"\r\n" + head + b"\r\n", 1)
        await self._exchange(request, Reply(record))


async def counters(engine: Backend) -> dict[str, float]:
    """What the engine has counted."""
    client = Client(engine.url, timeout=10)
    _, page, _ = await client.get("/metrics")
    client.close()
    answered = sum(map(float, _ANSWERED.findall(page)))
    found = parse(page, 0.0, DEFAULT.metrics)
    counts = {"queries": found.prefix_queries, "hits": found.prefix_hits} if found is not None else {}
    return {name: float(count) for name, count in counts.items() if count is not None} | {"answered": answered}


def cpu_seconds(pid: int) -> float:
    """Of a process and all it started; by the scheduler's own count, in nanoseconds: `stat` counts ticks of 10 ms."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += sum(map(cpu_seconds, map(int, (task / "children").read_text().split())))
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


async def busy(pids: Sequence[int], begin: float, end: float) -> list[float]:
    """CPU seconds a second of each process between two times, seconds from now."""
    await asyncio.sleep(begin)
    before, since = list(map(cpu_seconds, pids)), perf_counter()
    await asyncio.sleep(end - begin)
    return [(cpu_seconds(pid) - used) / (perf_counter() - since) for pid, used in zip(pids, before)]


async def head_to_head(
    contender: Contender,
    engines: Sequence[Backend],
    conversations: Sequence[Conversation],
    starts: Sequence[float],
    asking: Asking,
    log: Path,
) -> tuple[Run, dict]:
    """The run, and its figures. `busy` is CPU while load was full: the later half of the arrivals."""
    async with running(contender, engines, log) as (url, pid):
        before = [await counters(engine) for engine in engines]
        client = (Talking if contender.session else Client)(url, timeout=120)
        run = Run(conversations, starts, client, asking)
        pids = [*(engine.pid for engine in engines), pid]
        _, used = await asyncio.gather(run.go(), busy(pids, starts[-1] / 2, starts[-1]))
        client.close()
        after = [await counters(engine) for engine in engines]
    grown = [{key: late[key] - early[key] for key in late} for early, late in zip(before, after)]
    report = summarise(run)
    answered = sum(one["answered"] for one in grown)
    return run, {
        "gateway": contender.name, "requests": report["requests"], "failed": report["failed"], "errors": report["error_examples"],
        "hit_rate": round(sum(one["hits"] for one in grown) / sum(one["queries"] for one in grown), 4),
        "ttft_ms": {name: (report["ttft_ms"] or {}).get(name) for name in ("mean", "p50", "p90", "p99")},
        "tpot_ms": {name: (report["tpot_ms"] or {}).get(name) for name in ("mean", "p50", "p99")},
        "e2el_ms": {name: (report["e2el_ms"] or {}).get(name) for name in ("mean", "p50", "p99")},
        "shares": [round(one["answered"] / max(answered, 1), 3) for one in grown],
        "busy": [round(one, 3) for one in used[:-1]], "gateway_busy": round(used[-1], 3), "generator_busy": report["generator"]["cpu_share"],
        "duration_s": report["duration_s"], "late_p99_ms": report["generator"]["lateness_ms"]["p99"],
        "generator_was_the_limit": report["generator"]["was_the_limit"],
    }  # fmt: skip
