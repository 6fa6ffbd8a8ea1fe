"""The simulated engine against the real one: calibrated, then both under the same load.

    HITHERTO_VLLM=~/.cache/hitherto/vllm-0.28.0 python -m bench.calibration [--quick] [--profile FILE] [--json FILE]

A real vLLM on the CPU with a tiny model is measured by `loadgen calibrate`; a simulated engine gets the profile. Work:
tau-bench airline conversations (tools, one long system prompt) and MT-Bench-101 dialogues (nothing shared), half of the
requests each, turn by turn with the file's replies, so that both engines get the same prompts; conversations begin as a
Poisson process. Loads are shares of the rate at which the real engine gets through a backlog. Each load runs on the
real engine, on the simulated, and on the real one again: what the real engine differs from itself by is what no
simulation can get below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.conversations import DATA, MTBENCH, TAU, missing
from loadgen.demo.tiny_model import tiny_model
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import Asking, Run
from loadgen.report.summary import machine
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation
from loadgen.workload.traces import conversation_file
from replicas.launch import ports
from replicas.simulated.model import sim_model_dir
from replicas.simulated.profile import load_profile
from tests.vllm.engines import Engine, version

LOADS = (0.4, 0.7)
OUTPUT, THINK = 32, 1.0
BLOCKS = 8192  # 64 MiB of a tiny model's cache
BACKLOG = 16  # requests in flight that keep the engine busy
QUANTILES = (10, 25, 50, 75, 90, 99)
RUNS = ("real", "simulated", "real again")


def work(requests: int, seed: int, think: float = THINK) -> list[Conversation]:
    rng = random.Random(seed)
    chosen = [conversation_file(DATA / name, requests // 2, OUTPUT, think, rng) for name in (TAU, MTBENCH)]
    mixed = [conversation for one in chosen for conversation in one]
    rng.shuffle(mixed)
    return mixed


async def drive(url: str, conversations: list[Conversation], rate: float, seed: int) -> list[Record]:
    """The whole load on an empty cache; an infinite rate keeps BACKLOG requests in flight."""
    client = Client(url, timeout=120)
    emptied = Record("", 0, 0.0)
    await client.ask("/reset_prefix_cache", b"{}", emptied)
    if emptied.status != 200:
        raise RuntimeError(f"{url}: the cache was not emptied ({emptied.status})")
    starts = conversation_starts([len(one.turns) for one in conversations], rate, random.Random(seed))
    run = Run(conversations, starts, client, Asking("tiny", ignore_eos=True), BACKLOG if rate == float("inf") else None)
    await run.go()
    client.close()
    if failed := [record for record in run.done if record.error]:
        raise RuntimeError(f"{len(failed)} requests failed on {url}: {failed[0].error} {failed[0].detail}")
    return run.done


def milliseconds(records: list[Record]) -> dict[str, np.ndarray]:
    return {"ttft": 1e3 * np.array([record.ttft for record in records]),
            "itl": 1e3 * np.array([gap for record in records for gap in record.gaps])}  # fmt: skip


def hit_rate(records: list[Record]) -> float:
    return sum(record.cached_tokens or 0 for record in records) / sum(record.prompt_tokens for record in records)


@contextmanager
def simulated(profile: Path, model: Path, log: Path):
    """A simulated engine of that profile behind HTTP; ends with the block."""
    (port,) = ports.pick(1, "127.0.0.1", set())
    command = [sys.executable, "-m", "replicas.simulated", "--profile", str(profile), "--model", str(model), "--served-model-name", "tiny",
               "--port", str(port)]  # fmt: skip
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def saturation(url: str, requests: int, seed: int) -> float:
    """Requests a second with BACKLOG in flight; the beginning and the end, where fewer are, are not counted."""
    ends = sorted(record.last for record in await drive(url, work(requests, seed, think=0.0), float("inf"), seed))
    first, last = len(ends) // 4, len(ends) * 3 // 4
    return (last - first) / (ends[last] - ends[first])


async def answers(url: str) -> None:
    client = Client(url, timeout=2)
    async with asyncio.timeout(30):
        while (await client.get("/health"))[0] != 200:
            await asyncio.sleep(0.05)
    client.close()


async def measure(real: str, sim: str, requests: int, seed: int) -> dict:
    """Return the figures of all loads."""
    conversations = work(requests, seed)
    await saturation(real, requests // 4, seed + 1)  # warms it up
    top = await saturation(real, requests, seed)
    print(f"\nthe real engine gets through {top:.1f} requests/s with {BACKLOG} in flight", flush=True)
    loads, seen = {}, {}
    for load in LOADS:
        rows = {}
        for name, url in zip(RUNS, (real, sim, real)):
            records = await drive(url, conversations, load * top, seed)
            seen[load, name] = milliseconds(records)
            rows[name] = {"hit_rate": round(hit_rate(records), 4), **figures(seen[load, name])}
        loads[f"{load:g}"] = {"rate": round(load * top, 2), **rows, "error": {
            "simulated / real": compare(seen[load, "simulated"], seen[load, "real"], seen[load, "real again"]),
            "real again / real": compare(seen[load, "real again"], seen[load, "real"])}}  # fmt: skip
        print(table(load, loads[f"{load:g}"]), flush=True)
    return {"requests": requests, "backlog_rps": round(top, 2), "loads": loads}


def figures(times: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    return {f"{name}_ms": {"mean": round(float(values.mean()), 3), **{f"p{q}": round(float(np.percentile(values, q)), 3) for q in QUANTILES}}
            for name, values in times.items()}  # fmt: skip


def compare(one: dict[str, np.ndarray], *others: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """one / other - 1 per quantile; the other's is the mean of what several runs have there."""

    def error(name: str, of) -> float:
        return round(float(of(one[name]) / np.mean([of(other[name]) for other in others]) - 1), 4)

    return {name: {"mean": error(name, np.mean), **{f"p{q}": error(name, lambda values, q=q: np.percentile(values, q)) for q in QUANTILES}}
            for name in one}  # fmt: skip


def table(load: float, said: dict) -> str:
    lines = [f"\n{load:.0%} of saturation, {said['rate']:g} requests/s"]
    columns = ["mean", *(f"p{q}" for q in QUANTILES)]
    for name in ("ttft", "itl"):
        lines.append(f"{name.upper() + ' ms':22}" + "".join(f"{column:>9}" for column in columns) + f"{'hit rate':>10}")
        lines += [f"{run:22}" + "".join(f"{said[run][f'{name}_ms'][column]:9.2f}" for column in columns) + f"{said[run]['hit_rate']:10.3f}"
                  for run in RUNS]  # fmt: skip
        lines += [
            f"{title:22}" + "".join(f"{error[name][column]:+9.1%}" for column in columns)
            for title, error in said["error"].items()
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, half a minute of measuring")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="do not calibrate, use this one")
    parser.add_argument("--save-profile", type=Path, metavar="FILE", help="keep what was calibrated here")
    parser.add_argument("--requests", type=int, metavar="N", help="of each load (default 480, --quick 120)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if why := missing():
        print(why)
        return 3
    with tempfile.TemporaryDirectory(prefix="calibration-") as name:
        folder = Path(name)
        model = tiny_model(folder / "model", sim_model_dir())
        with Engine(model, log=folder / "engine.log", blocks=BLOCKS) as engine:
            profile = args.profile or args.save_profile or folder / "vllm.yaml"
            if not args.profile:
                subprocess.run([sys.executable, "-m", "loadgen", "calibrate", engine.url, "--seconds", "30" if args.quick else "120",
                                "--out", str(profile)], check=True)  # fmt: skip
            with simulated(profile, model, folder / "sim.log") as sim:
                asyncio.run(answers(sim))
                told = asyncio.run(measure(engine.url, sim, args.requests or (120 if args.quick else 480), args.seed))
        used = load_profile(profile)
    vllm = ".".join(map(str, version()))
    report = {"vllm": vllm, **told, "seed": args.seed, "quick": args.quick, "machine": machine(),
              "profile": {"request": {name: getattr(used.request, name) for name in used.request.__slots__},
                          "step": {name: getattr(used.step, name) for name in used.step.__slots__}}}  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
