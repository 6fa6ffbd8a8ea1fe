"""Many streams on one core: what it carries, who suffers from slow readers, what idle connections hold.

    python -m bench.streams [--parts rates,slow,idle] [--fronts nginx,hitherto,...] [--streams 1000,3000,...] [--json
    FILE]

A gateway keeps to one core; engine and clients, one thread in C (`bench.native`), to the other. Every chunk tells when
it was written, so its delay is measured by one clock; "direct" has no gateway between and shows what of it is the
generator's.

rates   endless streams at 20 chunks/s, more and more of them: CPU per chunk, delay and unevenness of chunks (how much
        longer or shorter the time between two was at the client than at the engine), and chunks/s and bytes/s, which
        level off where the gateway's core, or the generator's, is used up: `core` and `generator` say which
slow    200 such streams, without and with 40 beside them whose clients stop reading after their first chunk, while
        engines write 2.6 MB/s to each: the delay of the others, and memory. The kernel holds a part: `taken` is what
        was written for each slow reader, and `in the last quarter` must be 0, or the gateway goes on taking what nobody
        reads
idle    memory per idle keep-alive connection that has had an answer: (RSS at 15,000 - RSS at 5,000) / 10,000, and the
        share of a core that 15,000 of them take

Runs of a FILE that is there are kept and added to, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from bench.native import Generator, generator
from bench.native.fronts import HELLO, Front, available, running
from loadgen.report.summary import machine

FRONTS = "direct,nginx,hitherto,sglang-router,smg,vllm-router"
PACE_US, CHUNK, SECONDS = 50_000, 180, 2.5
BESIDE, SLOW, SLOW_CHUNK, SLOW_SECONDS = 200, 40, 131_072, 8.0
FEW, MANY, IDLE_SECONDS = 5_000, 15_000, 4.0


def stream_window(made: Generator, front: Front | None, port: int, count: int, seconds: float, slow: int = 0) -> dict:
    """One window of `count` streams besides `slow` ones."""
    made.say("streams", port, count + slow, PACE_US, CHUNK, seconds, slow, SLOW_CHUNK)
    made.event()
    before = front.used() if front else None
    found = made.event()
    if front:
        used = front.used() - before
        ticks = max(1e-9, used.user + used.system)
        found |= {"cpu": used.total, "system_share": used.system / ticks, "rss": front.rss()}
    made.event()
    return found


def rates(made: Generator, front: Front | None, levels: list[int]) -> dict:
    found = {}
    for count in levels:
        one = stream_window(made, front, front.port if front else made.ports[0], count, SECONDS)
        found[str(count)] = {
            "chunks_per_second": round(one["read"] / one["seconds"]),
            "planned_per_second": round(one["planned"] / one["seconds"]),
            "megabytes_per_second": round(one["bytes"] / one["seconds"] / 1e6, 2),
            "microseconds_per_chunk": round(1e6 * one["cpu"] / max(1, one["read"]), 2) if front else None,
            "system_share": round(one["system_share"], 2) if front else None,
            "core": round(one["cpu"] / one["seconds"], 3) if front else None,
            "rss_mb": round(one["rss"] / 1e6) if front else None,
            "generator": one["generator_cpu"],
            "delay_ms": one["delay_ms"],
            "gap_ms": one["gap_ms"],
            "failed": one["failed"],
        }
        print(count, found[str(count)], flush=True)
    return found


def slow(made: Generator, front: Front) -> dict:
    found = {}
    for readers in (0, SLOW):
        rss = front.rss()
        one = stream_window(made, front, front.port, BESIDE, SLOW_SECONDS, readers)
        each = max(1, readers)
        found["with" if readers else "without"] = {
            "delay_ms": one["delay_ms"],
            "gap_ms": one["gap_ms"],
            "failed": one["failed"],
            "rss_growth_mb": round((one["rss"] - rss) / 1e6, 1),
            "taken_mb_each": round(one["slow_bytes"] / each / 1e6, 2),
            "taken_mb_each_in_the_last_quarter": round(one["slow_bytes_last_quarter"] / each / 1e6, 2),
        }
        print(readers, found["with" if readers else "without"], flush=True)
    return found


def answered(port: int) -> socket.socket:
    """A connection that has had one answer and is kept. SystemExit if the answer is not a 200."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(HELLO), HELLO)
    )
    if not connection.recv(65_536).startswith(b"HTTP/1.1 200"):
        raise SystemExit("a connection that was to be kept idle was not answered")
    return connection


def idle(made: Generator, front: Front) -> dict:
    rss, held = {}, []
    try:
        for count in (FEW, MANY):
            while len(held) < count:
                held.append(answered(front.port))
            time.sleep(1)
            rss[count] = front.rss()
            before = front.used()
            time.sleep(IDLE_SECONDS)
            share = (front.used() - before).total / IDLE_SECONDS
    finally:
        for connection in held:
            connection.close()
    found = {"kilobytes_each": round((rss[MANY] - rss[FEW]) / (MANY - FEW) / 1e3, 2), "core": round(share, 4)}
    print(found, flush=True)
    return found


def carried(levels: dict) -> dict:
    """The most a front carried, and what stood in the way of more."""
    count, best = max(levels.items(), key=lambda item: item[1]["chunks_per_second"])
    limit = (
        "gateway"
        if (best["core"] or 0) > 0.93
        else "generator"
        if best["generator"] > 0.93
        else "neither core was used up"
    )
    return {
        "chunks_per_second": best["chunks_per_second"],
        "megabytes_per_second": best["megabytes_per_second"],
        "at": int(count),
        "limit": limit,
    }


def show(results: dict) -> None:
    if "rates" in results:
        print("\nus of gateway CPU a chunk, delay p50 and p99 ms, unevenness p99 ms")
    for name, levels in results.get("rates", {}).items():
        print(f"  {name}: at most {carried(levels)}")
        for count, one in levels.items():
            print(
                f"    {count:>6} streams {one['chunks_per_second']:>7}/s of {one['planned_per_second']:>7}"
                f" {one['microseconds_per_chunk'] or 0:6.1f} us"
                f" {one['delay_ms']['p50']:8.2f} {one['delay_ms']['p99']:8.2f} {one['gap_ms']['p99']:8.2f}"
                f"   cores {one['core'] or 0:.2f} + {one['generator']:.2f}"
            )
    nginx = results.get("idle", {}).get("nginx", {}).get("kilobytes_each")
    for name, one in results.get("slow", {}).items():
        print(
            f"slow readers, {name}: others' delay p99 {one['without']['delay_ms']['p99']} -> {one['with']['delay_ms']['p99']} ms,"
            f" memory +{one['with']['rss_growth_mb']} MB,"
            f" taken {one['with']['taken_mb_each']} MB each, {one['with']['taken_mb_each_in_the_last_quarter']} in the last quarter"
        )
    for name, one in results.get("idle", {}).items():
        ratio = f" ({one['kilobytes_each'] / nginx:.1f} x nginx)" if nginx and "kilobytes_each" in one else ""
        print(f"idle, {name}: {one}{ratio}")


def keep(results: dict, file: Path | None) -> None:
    if file:
        file.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rates,slow,idle")
    parser.add_argument("--fronts", default=FRONTS)
    parser.add_argument("--streams", default="1000,3000,5000")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    results = orjson.loads(args.json.read_bytes()) if args.json and args.json.exists() else {}
    results["machine"] = f"{machine()}; the gateway on one core, engine and clients on the other"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # for the idle connections
    levels = [int(one) for one in args.streams.split(",")]
    parts: dict[str, Callable[[Generator, Front], dict]] = {
        "rates": lambda made, front: rates(made, front, levels),
        "slow": slow,
        "idle": idle,
    }
    names = args.fronts.split(",")
    with generator() as made:
        for part in args.parts.split(","):
            if part == "rates" and "direct" in names:
                results.setdefault(part, {})["direct"] = rates(made, None, levels)
            for name in available([name for name in names if name != "direct"]):
                print(part, name, flush=True)
                with running(name, made.ports) as front:
                    results.setdefault(part, {})[name] = parts[part](made, front)
                keep(results, args.json)
    keep(results, args.json)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
