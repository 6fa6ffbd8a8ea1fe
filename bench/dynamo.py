"""Dynamo's offline replay beside ours: the same trace, the same engine model, two simulators and two routers.

    DYNAMO=VENV/bin/python python -m bench.dynamo [--blocks 16384,65536] [--speeds 1,2,3] [--requests N] [--processes 2] [--json FILE]

Mooncake's conversation trace (HITHERTO_DATA) on 8 engines with the mocker's own settings: profile `gpu-8b`. On round robin
both know the same, so the simulators must agree; then `least_time` stands beside Dynamo's `kv_router`, and, in our
simulator alone, beside Dynamo's rule as `loadgen.field` states it. VENV is a virtual environment with Dynamo 1.6.1:

    pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    pip install msgspec pyzmq tqdm zstandard typing-extensions pydantic uvloop pyyaml

  hit     share of prompt tokens found in a cache when the request was first admitted
  TTFT    ms; TPOT ms, of replies of two tokens and more
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from bench.conversations import DATA
from loadgen.datasets import DATASETS
from loadgen.report import machine
from loadgen.simulate import Setting, simulate
from replicas.simulated.profile import load_profile

TRACE, REPLICAS = "mooncake_conversation_blk512.jsonl.gz", 8
ROUTERS = {"round_robin": "round_robin", "kv_router": "least_time"}  # theirs: ours


@dataclass
class Row:
    by: str  # dynamo or hitherto
    router: str
    blocks: int
    speed: float
    hit: float
    mean: float
    p50: float
    p90: float
    p99: float
    tpot: float
    tpot_p99: float


def theirs(python: str, trace: Path, case: tuple[str, int, float]) -> Row:
    mode, blocks, speed = case
    script = Path(__file__).with_name("dynamo_replay.py")
    told = json.loads(subprocess.run([python, "-P", script, trace, mode, str(blocks), str(speed), str(REPLICAS)],
                                     check=True, capture_output=True, text=True).stdout.splitlines()[-1])  # fmt: skip
    return Row("dynamo", *case, told["first_admission_prefix_cache_reused_ratio"], told["mean_ttft_ms"], told["median_ttft_ms"],
               told["p90_ttft_ms"], told["p99_ttft_ms"], told["mean_tpot_ms"], told["p99_tpot_ms"])  # fmt: skip


def ours(trace: Path, case: tuple[str, int, float]) -> Row:
    policy, blocks, speed = case
    work = DATASETS["mooncake"](random.Random(0), None, dataset_path=trace, trace_speed=speed)
    done = simulate(work, Setting(policy, [load_profile("gpu-8b", num_blocks=blocks)] * REPLICAS)).done
    ttft = 1e3 * np.array([record.ttft for record in done])
    tpot = 1e3 * np.array([record.tpot for record in done if record.tpot is not None])
    hit = sum(record.cached_tokens for record in done) / sum(record.prompt_tokens for record in done)
    return Row("hitherto", *case, hit, float(ttft.mean()), *map(float, np.percentile(ttft, (50, 90, 99))),
               float(tpot.mean()), float(np.percentile(tpot, 99)))  # fmt: skip


def table(rows: list[Row]) -> None:
    print(f"{'blocks':>7} {'speed':>5}  {'':22} {'hit':>6} {'TTFT mean':>10} {'p50':>8} {'p90':>9} {'p99':>10} {'TPOT':>7} {'p99':>7}")
    for (blocks, speed), (mode, policy) in product(dict.fromkeys((row.blocks, row.speed) for row in rows), ROUTERS.items()):
        here = {(row.by, row.router): row for row in rows if (row.blocks, row.speed) == (blocks, speed)}
        group = [here.get(key) for key in (("dynamo", mode), ("hitherto", policy))]
        if mode == "kv_router":
            group.append(here.get(("hitherto", "dynamo")))
        for row in filter(None, group):
            print(f"{blocks:7} {speed:4g}x  {row.by + ' ' + row.router:22} {row.hit:6.4f} {row.mean:10.1f} {row.p50:8.1f} {row.p90:9.1f} "
                  f"{row.p99:10.1f} {row.tpot:7.2f} {row.tpot_p99:7.1f}")  # fmt: skip
        if None not in group[:2]:
            them, us = group[:2]
            print(f"{'':15}{'  ours against theirs':22} {us.hit - them.hit:+6.4f} " + " ".join(
                f"{100 * (getattr(us, name) / getattr(them, name) - 1):+{width}.1f}%"
                for name, width in (("mean", 9), ("p50", 7), ("p90", 8), ("p99", 9), ("tpot", 6), ("tpot_p99", 6))))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="16384,65536")
    parser.add_argument("--speeds", default="1,2,3")
    parser.add_argument("--requests", type=int, help="the first so many (default: all 12,031)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    python = os.environ.get("DYNAMO")
    if not (DATA / TRACE).exists() or not python:
        print(f"skipped: this needs {TRACE} in {DATA} (HITHERTO_DATA), and in DYNAMO the Python of an environment with Dynamo")
        return 0
    cells = list(product(map(int, args.blocks.split(",")), map(float, args.speeds.split(","))))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        with gzip.open(DATA / TRACE, "rt") as lines:
            trace.write_text("".join(line for number, line in enumerate(lines) if args.requests is None or number < args.requests))
        with ProcessPoolExecutor(args.processes) as pool:
            rows = []
            for made in (pool.map(partial(theirs, python, trace), [(mode, *cell) for cell in cells for mode in ROUTERS]),
                         pool.map(partial(ours, trace), [(policy, *cell) for cell in cells for policy in (*ROUTERS.values(), "dynamo")])):  # fmt: skip
                for row in made:
                    rows.append(row)
                    print(f"{row.by} {row.router}, {row.blocks} blocks, {row.speed:g}x: mean {row.mean:.1f} ms", file=sys.stderr, flush=True)
    table(rows)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
