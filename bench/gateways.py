"""Several gateways before one fleet: what a shared map and ledger in Redis keep of what one gateway alone would reach.

    python -m bench.gateways [--ways redis,each,events,guess,fixed] [--counts 1,2,4,8] [--json FILE]

The same load each time, request by request to the next gateway, nothing sticky: tau-bench airline conversations, open
loop. Eight simulated engines whose caches together hold CACHES x the work's distinct blocks, so that a conversation
kept in two places pushes another one out. Everything else is real: gateway processes, sockets, Redis, KV events.
Engines are slow and replies short, so that two cores are enough for all of it and engines' times, not the machine's,
decide.

  redis    one map and one ledger for all gateways
  each     one ledger in Redis; every gateway follows every engine's events (`--event-intake each`)
  events   no Redis; every gateway follows every engine's events, and knows nothing of the others' load
  guess    no Redis, engines without events; every gateway has a map of its own, of what it sent: what gateways without
           events do
  fixed    only the burst below, by policies that do not decide by predicted time: consistent_hash (bounded load),
           round_robin

After the load, with 4 gateways: BURST equal prompts that nobody has seen, all at once, over all of them, a few times.
After the largest number of them one more gateway is started, and the time until it knows what the others know is taken,
except for `guess`. `CPU` is what all gateways together took, in ms a request.

Runs of a FILE that is there are kept and added to, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.conversations import DATA, TAU, missing
from bench.head_to_head import cpu_seconds
from bench.real_engines import BLOCK, Work, prompts_of
from bench.share import counters
from bench.simulated import empty, engines
from gateway.prompt.pipeline import Pipeline
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import CHAT, Asking, Run
from loadgen.report.summary import machine, spread, summarise
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Turn
from loadgen.workload.traces import conversation_file
from replicas.simulated.model import sim_model_dir
from tests.gateway.running import Running, running
from tests.redis_server import RedisServer
from tests.redis_server import running as redis_running

REPLICAS, CACHES = 8, 1.0
REQUESTS, RATE, THINK, OUTPUT = 800, 35.0, 0.3, 4
PROFILE = """\
block_size: 16
max_num_seqs: 64
max_num_batched_tokens: 2048
num_blocks: {blocks}
step: {{base: 2, prefill: 5, prefill_token: 0.2, decode: 10, decode_sequence: 0.5}}
"""
WAYS = ("redis", "each", "events", "guess", "fixed")
EACH = ("--event-intake", "each")
BURSTS, BURST, BURST_WORDS, BURST_GATEWAYS = 5, 64, 2400, 4
FIXED = ("consistent_hash", "round_robin")
ASKING = Asking("sim", ignore_eos=True)
_BUCKET = re.compile(r'^hitherto_stage_seconds_bucket\{le="([^"]+)",stage="choose"\} ([0-9.e+]+)$', re.MULTILINE)
_DECISIONS = re.compile(r'^hitherto_shared_decisions_total\{outcome="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)


class InTurn:
    """A client of several gateways: each request goes to the next one."""

    def __init__(self, urls: Sequence[str]):
        self._clients = [Client(url, timeout=120) for url in urls]
        self._next = itertools.cycle(self._clients)

    @property
    def opened(self) -> int:
        return sum(one.opened for one in self._clients)

    async def ask(self, endpoint: str, body: bytes, record: Record) -> None:
        await next(self._next).ask(endpoint, body, record)

    def close(self) -> None:
        for one in self._clients:
            one.close()


def make_work(seed: int, requests: int) -> Work:
    rng = random.Random(seed)
    conversations = conversation_file(DATA / TAU, requests, OUTPUT, THINK, rng)
    starts = conversation_starts([len(item.turns) for item in conversations], RATE, rng)
    return Work(seed, conversations, starts, prompts_of(conversations, ASKING, Pipeline(sim_model_dir(), "sim", BLOCK)))


@asynccontextmanager
async def gateways(count: int, policy: str, redis_url: str | None, urls: Sequence[str], *more: str):
    async with AsyncExitStack() as stack:
        redis = ["--redis-url", redis_url] if redis_url else []
        flags = ["--model", "sim", "--policy", policy, *redis, *more, "--replica-url", *urls]
        found = await asyncio.gather(*(stack.enter_async_context(running(*flags)) for _ in range(count)))
        for one in found:
            await one.until(lambda status: ready(status, len(urls), redis_url), 60)
        yield found


def ready(status: dict, replicas: int, redis_url: str | None) -> bool:
    """All replicas known, their caches followed by somebody, and Redis joined."""
    if sum(one["state"] == "ready" for one in status["replicas"]) < replicas:
        return False
    if redis_url is not None and not status["map"]["redis"]["ledger_joined"]:
        return False
    return all(
        one["map_role"] in ("leader", "follower") if one["map_role"] else one["events"] in ("live", "off")
        for one in status["replicas"]
    )


async def choosing(fleet: Sequence[Running]) -> dict:
    """What the gateways counted of their choices: seconds by bucket, and who decided."""
    buckets: dict[float, float] = {}
    outcomes: dict[str, int] = {}
    for one in fleet:
        page = (await one.admin.get("/metrics")).text
        for bound, count in _BUCKET.findall(page):
            buckets[float(bound)] = buckets.get(float(bound), 0) + float(count)
        for outcome, count in _DECISIONS.findall(page):
            outcomes[outcome] = outcomes.get(outcome, 0) + int(float(count))
    quantile = {f"p{share * 100:g}": quantile_ms(sorted(buckets.items()), share) for share in (0.5, 0.99)}
    return {"choose_ms": quantile, "decided": outcomes}


def quantile_ms(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Linear within a bucket, as Prometheus does it; at most the last bound."""
    rank, lower, below = share * buckets[-1][1] if buckets else 0.0, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return (
                None
                if math.isinf(bound)
                else round(1e3 * (lower + (bound - lower) * (rank - below) / (count - below)), 3)
            )
        lower, below = bound, count
    return None


async def play(way: str, count: int, urls: Sequence[str], work: Work, folder: Path) -> dict:
    """One run: empty caches, fresh gateways, an empty Redis, the whole load."""
    await empty(urls)
    async with AsyncExitStack() as stack:
        shares, each = way in ("redis", "each"), EACH if way == "each" else ()
        server = stack.enter_context(redis_running(RedisServer(folder / f"redis-{way}-{count}"))) if shares else None
        fleet = await stack.enter_async_context(gateways(count, "least_time", server and server.url, urls, *each))
        pids = [one.process.pid for one in fleet]
        client = InTurn([one.url for one in fleet])
        run = Run(work.conversations, work.starts, client, ASKING)
        before, began = server and counters(server.url), perf_counter()
        used = sum(map(cpu_seconds, pids))
        await run.go()
        used = sum(map(cpu_seconds, pids)) - used
        after, took = server and counters(server.url), perf_counter() - began
        report = summarise(run)
        told = {
            "way": way, "gateways": count, "seed": work.seed, "requests": report["requests"], "failed": report["failed"], "errors": report["error_examples"],
            "hit_rate": report["cache"]["hit_rate"], "predicted_hit_rate": report["cache"]["predicted_hit_rate"],
            "ideal_hit_rate": round(work.ideal(run.done), 4),
            "ttft_ms": {name: (report["ttft_ms"] or {}).get(name) for name in ("mean", "p50", "p99")},
            "busiest_share": round(max(one["requests"] for one in report["replicas"].values()) / len(run.done), 3),
            "late_p99_ms": report["generator"]["lateness_ms"]["p99"], "duration_s": report["duration_s"],
            "cpu_ms_per_request": round(1e3 * used / len(run.done), 2), **await choosing(fleet),
        }  # fmt: skip
        if server:
            told["redis"] = {
                f"{name}_per_s": round((after[name] - before[name]) / took, 3 if name == "cpu" else 1) for name in after
            }
        if count == BURST_GATEWAYS:
            before = await choosing(fleet)
            told["burst"] = await bursts(client)
            after = await choosing(fleet)
            told["burst"]["decided"] = {
                name: number - before["decided"].get(name, 0) for name, number in after["decided"].items()
            }
        if count > 4 and way != "guess":
            told["late_gateway"] = await one_more(fleet[0], server and server.url, urls, *each)
        client.close()
    return told


async def bursts(client: InTurn) -> dict:
    """Medians over some bursts of equal prompts: how many replicas they ended on, and what that took."""
    found = []
    for number in range(BURSTS):
        words = random.Random(f"burst {number}").choices(
            "river lantern copper meadow orbit velvet anchor thistle".split(), k=BURST_WORDS
        )
        body = ASKING.body([{"role": "user", "content": f"{number} {' '.join(words)}"}], Turn([], OUTPUT), {})
        records = [Record("", 0, 0.0) for _ in range(BURST)]
        await asyncio.gather(*(client.ask(CHAT, body, one) for one in records))
        bad = [one.detail for one in records if one.error]
        if bad:
            raise RuntimeError(f"a burst's request failed: {bad[0]}")
        ttft = spread(one.ttft for one in records)
        found.append({"replicas": len({one.replica for one in records}), "ttft_mean_ms": ttft["mean"], "ttft_last_ms": ttft["max"],
                      "computed": sum(one.prompt_tokens - one.cached_tokens for one in records) / records[0].prompt_tokens})  # fmt: skip
        await asyncio.sleep(1.0)  # the next one meets idle engines
    return {"prompt_tokens": records[0].prompt_tokens, **{name: round(median(one[name] for one in found), 1) for name in found[0]},
            "replicas_each": [one["replicas"] for one in found]}  # fmt: skip


async def one_more(sibling: Running, redis_url: str | None, urls: Sequence[str], *more: str) -> dict:
    """A gateway that starts while the others have been at it for a while: seconds until it knows what they know."""
    there, began = (await sibling.status())["map"]["blocks"], perf_counter()
    redis = ["--redis-url", redis_url] if redis_url else []
    async with running("--model", "sim", *redis, *more, "--replica-url", *urls) as late:
        listens = perf_counter() - began
        await late.until(lambda status: ready(status, len(urls), redis_url) and status["map"]["blocks"] >= there, 60)
        return {"blocks": there, "listens_s": round(listens, 2), "warm_s": round(perf_counter() - began, 2)}


async def measure(args: argparse.Namespace, keep: list[dict]) -> None:
    work = make_work(args.seed, args.requests)
    blocks = math.ceil(CACHES * work.blocks / REPLICAS)
    print(
        f"{args.requests} requests, {RATE:g}/s; {REPLICAS} engines of {blocks} blocks, the work has {work.blocks}\n{HEAD}",
        flush=True,
    )

    def add(run: dict) -> None:
        mine = (run["way"], run["gateways"])
        keep[:] = [one for one in keep if (one["way"], one["gateways"]) != mine] + [run]
        save(args, keep)
        print(line(run), *run.get("errors", {}).values(), sep="\n  ", flush=True)

    for way in args.ways:
        with tempfile.TemporaryDirectory(prefix="gateways-") as name:
            flags = ["--no-events"] if way == "guess" else []
            async with engines(REPLICAS, PROFILE.format(blocks=blocks), Path(name), *flags) as found:
                urls = [one.url for one in found]
                if way != "fixed":
                    # so that no run has cold engines
                    await play(way, 1, urls, make_work(args.seed + 1, 150), Path(name))
                    for count in args.counts:
                        add(await play(way, count, urls, work, Path(name)))
                    continue
                for policy in FIXED:
                    await empty(urls)
                    async with gateways(BURST_GATEWAYS, policy, None, urls) as fleet:
                        client = InTurn([one.url for one in fleet])
                        add({"way": policy, "gateways": BURST_GATEWAYS, "burst": await bursts(client)})
                        client.close()


HEAD = (f"{'way':16} {'gateways':>8} {'hit %':>6} {'ideal':>6} {'TTFT mean ms':>13} {'p50':>5} {'p99':>6} {'choose p50':>11} {'p99':>6} {'CPU ms':>7} "
        f"{'failed':>7} {'late p99':>9}  burst: replicas, mean, last TTFT, prompts computed")  # fmt: skip


def line(run: dict) -> str:
    start, burst = f"{run['way']:16} {run['gateways']:8d} ", run.get("burst")
    ends = (
        f"{burst['replicas']:g} {burst['ttft_mean_ms']:.0f} {burst['ttft_last_ms']:.0f} {burst['computed']:.1f}"
        if burst
        else ""
    )
    if "ttft_ms" not in run:
        return f"{start}{'':94}{ends}"
    ttft, choose = run["ttft_ms"], run["choose_ms"]
    if late := run.get("late_gateway"):
        ends += f"; one more knows {late['blocks']} blocks after {late['warm_s']:.1f} s"
    return (f"{start}{100 * run['hit_rate']:6.1f} {100 * run['ideal_hit_rate']:6.1f} {ttft['mean']:13.0f} {ttft['p50']:5.0f} {ttft['p99']:6.0f} "
            f"{choose['p50'] or math.nan:11.3f} {choose['p99'] or math.nan:6.2f} {run['cpu_ms_per_request']:7.2f} "
            f"{run['failed']:7d} {run['late_p99_ms']:9.1f}  {ends}")  # fmt: skip


def save(args: argparse.Namespace, runs: list[dict]) -> None:
    if args.json:
        settings = {"replicas": REPLICAS, "requests": args.requests, "rate": RATE, "think_s": THINK, "output_tokens": OUTPUT, "caches": CACHES,
                    "step_ms": PROFILE.format(blocks=0).splitlines()[-1].removeprefix("step: ")}  # fmt: skip
        args.json.write_text(json.dumps({"setting": settings, "machine": machine(), "runs": runs}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), metavar="A,B")
    parser.add_argument(
        "--counts",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[1, 2, 4, 8],
        metavar="N,N",
        help="numbers of gateways",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if missing():
        print(missing())
        return 3
    keep = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    asyncio.run(measure(args, keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
