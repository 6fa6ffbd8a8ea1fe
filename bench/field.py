"""Every rule of the field beside ours, cell by cell, in virtual time: first tokens, whole answers, hits, load spread.

    python -m bench.field [--quick [--seeds N]] [--cells TEXT,...] [--policies NAME,...] [--beside TREE]
                          [--processes 2] [--minutes M] [--json FILE]

A cell is a load, a fleet, and a rate or a number of users; `bench.field_cells` lists them. A rate is a share of
saturation: what `round_robin` gets through when 32 conversations a replica are always open and nobody thinks (64
replicas: eight times that of 8). A cache of 1 x the working set holds, over all replicas together, as many blocks as
all prompts of the slice have different ones. Past saturation nothing is steady, and what counts is the same slice for
all rules. In a closed loop each user asks again when answered, after a pause, until all conversations are over. Rules
see no reply's length, only the `max_tokens` that clients send (`loadgen.workload.limits`).

Each run is kept in the JSON with a hash of what made it, its cell, its rate, its seed and the source of its rule: what
has not changed is not run again, so a run can be made in parts (`--minutes`), and a change of one rule runs that alone.
Figures are of the requests of those conversations that begin in the middle eight tenths of the arrivals, which are the
same requests under every rule; in a closed loop of all. How steady a cell was: `halves`, the mean TTFT of the later
half of these by that of the earlier half; and, since the 99th percentile of a slice is its ten slowest requests, the
rules that come near ours with the first seed are run with further ones. Two rules are compared over the seeds that both
were run with.

The text beside the JSON is kept whole as it is written: commit and day, the verdict, how many seeds the cells have, all
figures of `least_time`, and for each figure a matrix of cells and rules.

All of it takes an estimated 5,700 s of CPU, 48 minutes on two cores. `--quick` has twelve cells, the rules that come
near ours, and two seeds, in a JSON of its own: 600 s of CPU at first, and 60 s for a change of `least_time`. `--beside
TREE` runs `least_time` as another checkout of this repository has it, too, and compares the two.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, lru_cache
from itertools import product
from pathlib import Path

import numpy as np

import policies
from bench import field_tables, field_verdict
from bench.field_cells import CELLS, QUICK, SLOS, Cell, files, made_of, saturated, setting, work, working_set
from bench.rules import NAMES as OTHERS
from bench.rules import make
from loadgen.drive.records import Record
from loadgen.report.summary import machine, meets
from loadgen.simulate import Outcome, simulate

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "field.json"
# What one asks about first. `sglang_chars` does as `sglang_tokens` wherever no tree is full, which none is here.
KNOWN = tuple(dict.fromkeys((field_tables.OURS, *field_tables.ORACLES, *OTHERS, *policies.NAMES)))
RULES = tuple(rule for rule in KNOWN if rule != "sglang_chars")
QUICK_RULES = (
    field_tables.OURS,
    "round_robin",
    "least_load",
    "vllm_kv_aware",
    "lmetric",
    "llmd_weights",
    "session_hash",
    "sticky_least_loaded",
    field_tables.ORACLE_ANSWER,
)
SEEDS = (1, 2, 3)  # every rule with the first, which the cells' rates and caches are of, too
NEAR = 0.03  # no further behind ours than this, in a mean or a p99: run with the other seeds, too
Kept = dict[str, dict]


def fingerprint(*what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()


@cache
def source(rule: str) -> str:
    """The code that decides: the rule's file, the simulation, and what the rule uses of the gateway: learned costs with
    all of `policies`, or the engines' true state."""
    text = inspect.getsource(sys.modules[type(make(rule, truth=object())).__module__])
    text += _code("loadgen/simulate", "gateway.py", "rules.py", "verb.py") + _code("replicas/simulated")
    if rule in field_tables.ORACLES:
        text += (ROOT / "bench/rules/truth.py").read_text()
    if ".costs" in text:
        text += _code("policies") + _code("policies/rules") + _code("loadgen/simulate", "rules.py")
    return text


@cache
def _code(folder: str, *without: str) -> str:
    found = sorted((ROOT / folder).glob("*.py"))
    return "".join(path.read_text() for path in found if path.name not in without)


def figures(outcome: Outcome, cell: Cell) -> dict[str, float]:
    """Of the conversations that begin in the middle of the arrivals; in a closed loop of all."""
    count = len(outcome.conversations)
    edge = 0 if cell.users else count // 10
    counted = {conversation.id for conversation in outcome.conversations[edge : count - edge]}
    asked = [record for record in outcome.done if record.conversation.split(".")[0] in counted]
    good = [record for record in asked if record.error is None]
    ttft, e2e = (1e3 * np.array([getattr(record, time) for record in good]) for time in ("ttft", "e2e"))
    tpot = 1e3 * np.array([record.tpot for record in good if record.tpot is not None])
    busiest = Counter(record.replica for record in asked).most_common(1)[0][1]
    slo = SLOS[cell.load]
    return {
        "requests": len(asked),
        "failed": len(asked) - len(good),
        "ttft_mean": ttft.mean(),
        **{f"ttft_p{part}": np.percentile(ttft, part) for part in (50, 90, 99)},
        "e2e_mean": e2e.mean(),
        "e2e_p99": np.percentile(e2e, 99),
        "tpot_mean": tpot.mean(),
        "tpot_p99": np.percentile(tpot, 99),
        "tokens_s": sum(record.outputs for record in outcome.done) / outcome.ended,
        "tokens_s_busy": busy_rate(outcome.done),
        "wall": outcome.ended,
        "trajectory": trajectory(good),
        "goodput": sum(meets(record, slo) for record in good) / len(asked),
        "hit": hits(good),
        "hit_least": min(hits([one for one in good if one.replica == name]) for name in {one.replica for one in good}),
        "spread": busiest * cell.replicas / len(asked),
        "halves": halves(good),
    }


def hits(records: list[Record]) -> float:
    return sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)


def busy_rate(records: list[Record]) -> float:
    """Output tokens a second until the last conversation begins: in a closed loop, as long as every user has one."""
    until = max(record.sent for record in records if not record.turn)
    return sum(record.outputs for record in records if record.last <= until) / until if until else 0.0


def trajectory(records: list[Record]) -> float:
    """Mean seconds from a conversation's first request to its last answer."""
    spans: dict[str, tuple[float, float]] = {}
    for record in records:
        first, last = spans.get(record.conversation, (record.sent, record.last))
        spans[record.conversation] = min(first, record.sent), max(last, record.last)
    return float(np.mean([last - first for first, last in spans.values()]))


def halves(records: list[Record]) -> float:
    ttft = [record.ttft for record in sorted(records, key=lambda record: record.sent)]
    return float(np.mean(ttft[len(ttft) // 2 :]) / np.mean(ttft[: len(ttft) // 2]))


# --- in the processes

_work = lru_cache(maxsize=1)(work)


def measure(cell: Cell) -> dict[str, float]:
    """What the cell's rate and caches follow from."""
    if cell.users:
        return {"working_set": 0, "saturation": 0.0}
    blocks = working_set(_work(cell, 1.0, SEEDS[0])) if cell.cache else 0
    return {"working_set": blocks, "saturation": saturated(cell, blocks, SEEDS[0])}


def play(cell: Cell, rule: str, blocks: int, rate: float, seed: int) -> dict[str, float]:
    began = time.process_time()
    loaded = _work(cell, rate, seed)
    found = figures(simulate(loaded, setting(cell, rule, blocks, rate, seed)), cell)
    return {name: round(float(value), 4) for name, value in found.items()} | {
        "took_s": round(time.process_time() - began, 1)
    }


# --- in parts


class Grid:
    """The results there are, and those there should be."""

    def __init__(self, path: Path, until: float, processes: int) -> None:
        self.path, self.until, self.processes = path, until, processes
        self.kept: Kept = json.loads(path.read_text()) if path.exists() else {"fleets": {}, "cells": {}}
        for table, names in (("fleets", [cell.fleet for cell in CELLS]), ("cells", [cell.name for cell in CELLS])):
            self.kept[table] = {name: self.kept[table].get(name, {}) for name in names}  # in this order, and no others

    def save(self) -> None:
        self.kept["machine"] = machine()
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.kept, indent=1) + "\n")
        beside.replace(self.path)

    def missing_fleets(self, cells: list[Cell]) -> list[tuple]:
        wanted = {cell.fleet: cell for cell in cells}
        return [
            ((name,), fingerprint(cell.basis, made_of(), SEEDS[0]), (cell,))
            for name, cell in wanted.items()
            if self.kept["fleets"].get(name, {}).get("of") != fingerprint(cell.basis, made_of(), SEEDS[0])
        ]

    def run(self, cell: Cell, rule: str, seed: int) -> tuple[str, tuple] | None:
        """The hash of a run and the arguments of `play`; None: the cell's rate is not known yet."""
        if not (fleet := self.kept["fleets"].get(cell.fleet)):
            return None
        rate, blocks = cell.at * fleet["saturation"] * cell.replicas / 8, int(fleet["working_set"])
        of = fingerprint(cell, SLOS[cell.load], made_of(), blocks, rate, seed, source(rule))
        return of, (cell, rule, blocks, rate, seed)

    def forget_stale(self) -> None:
        """Drop what other code made, also of rules and cells that are not asked for: it would be compared."""
        for cell in CELLS:
            entry = self.kept["cells"][cell.name]
            for rule, runs in list(field_tables.runs(entry).items()):
                if "@" in rule:
                    continue
                current = {seed: self.run(cell, rule, int(seed)) if rule in KNOWN else None for seed in runs}
                left = {seed: run for seed, run in runs.items() if (now := current[seed]) and now[0] == run["of"]}
                entry[rule] = left
                if not left:
                    del entry[rule]

    def missing_runs(
        self, cells: list[Cell], rules: Sequence[str], seeds: Sequence[int], for_all: Sequence[int]
    ) -> list[tuple]:
        """Of those rules that a cell is to be run with: all with the seeds `for_all`, those near ours with others."""
        found = []
        for rule, cell, seed in product(rules, cells, seeds):
            if run := self.run(cell, rule, seed):
                of, arguments = run
                entry = self.kept["cells"][cell.name]
                entry.update(rate=round(arguments[3], 2), about=cell.about(arguments[2]))
                if seed not in for_all and rule not in field_tables.near(entry, NEAR):
                    entry.get(rule, {}).pop(str(seed), None)
                elif str(seed) not in entry.get(rule, {}):
                    found.append(((cell.name, rule, str(seed)), of, arguments))
        return found

    def fill(self, task, table: dict, missing: list[tuple]) -> bool:
        """Run what is missing, until it is late; whether all was done."""
        if time.monotonic() > self.until or not missing:
            return not missing
        done = 0
        with ProcessPoolExecutor(self.processes, multiprocessing.get_context("fork")) as pool:
            futures = {pool.submit(task, *arguments): (place, of) for place, of, arguments in missing}
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                (*above, name), of = futures[future]
                entry = table
                for part in above:
                    entry = entry.setdefault(part, {})
                entry[name] = {**future.result(), "of": of}
                done += 1
                print(
                    f"{done:4} of {len(missing)}  {' / '.join((*above, name)):44} "
                    + " ".join(
                        f"{key} {entry[name][key]:,.2f}"
                        for key in ("saturation", "ttft_mean", "e2e_mean", "e2e_p99", "hit", "took_s")
                        if key in entry[name]
                    ),
                    flush=True,
                )
                self.save()
                if time.monotonic() > self.until:
                    for waiting in futures:
                        waiting.cancel()
        return done == len(missing)


def beside(grid: Grid, tree: Path, argv: list[str]) -> None:
    """Our rule by the code of another checkout, in the same cells at the same rates, as a rule of its own name."""
    path = grid.path.with_name(f"{grid.path.stem}-{tree.name}.json")
    theirs = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    path.write_text(json.dumps(theirs | {"fleets": grid.kept["fleets"]}))
    command = [sys.executable, "-m", "bench.field", *argv, "--policies", field_tables.OURS, "--json", str(path)]
    subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL, check=False
    )
    for name, cell in json.loads(path.read_text())["cells"].items():
        if field_tables.OURS in cell and name in grid.kept["cells"]:
            grid.kept["cells"][name][f"{field_tables.OURS}@{tree.name}"] = cell[field_tables.OURS]
    grid.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="twelve cells, nine rules, two seeds")
    parser.add_argument("--cells", default="", help="only those whose name has one of these in it (default: all)")
    parser.add_argument("--policies", help="default: all but sglang_chars; with --quick nine")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="compare with least_time of another checkout")
    parser.add_argument(
        "--seeds",
        type=int,
        default=2,
        choices=range(1, len(SEEDS) + 1),
        help="with --quick, for every rule (default 2)",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing after so long; the next run goes on"
    )
    parser.add_argument("--json", type=Path, help="kept there; the tables and the plot are written beside it")
    args = parser.parse_args()
    if missing := files():
        print(missing)
        return 0
    path = args.json or (RESULTS.with_name("field-quick.json") if args.quick else RESULTS)
    cells = [cell for cell in CELLS if any(part in cell.name for part in args.cells.split(","))]
    cells = [cell for cell in cells if not args.quick or cell.name in QUICK]
    rules = args.policies.split(",") if args.policies else QUICK_RULES if args.quick else RULES
    seeds, for_all = [SEEDS[: args.seeds]] * 2 if args.quick else (SEEDS, SEEDS[:1])
    grid = Grid(path, time.monotonic() + 60 * args.minutes, args.processes)
    all_done = grid.fill(measure, grid.kept["fleets"], grid.missing_fleets(cells))
    grid.forget_stale()
    for some in (for_all, [seed for seed in seeds if seed not in for_all]):
        all_done = grid.fill(play, grid.kept["cells"], grid.missing_runs(cells, rules, some, for_all)) and all_done
    if args.beside:
        beside(
            grid,
            args.beside.resolve(),
            [
                *["--quick"] * args.quick,
                "--seeds",
                str(args.seeds),
                "--cells",
                args.cells,
                "--processes",
                str(args.processes),
            ],
        )
    names = {cell.name for cell in cells}
    found = {name: cell for name, cell in grid.kept["cells"].items() if name in names}
    if not args.beside:  # what was kept of another tree may be old
        found = {name: {key: one for key, one in cell.items() if "@" not in key} for name, cell in found.items()}
    verdict = field_verdict.text(found)
    heading = field_tables.made_by("python -m bench.field" + " --quick" * args.quick)
    path.with_suffix(".txt").write_text("\n".join((heading, "", verdict, field_tables.text(found))))
    print(verdict)
    print(f"all figures of all rules: {path.with_suffix('.txt')}")
    if all_done and not args.quick:
        field_tables.plot(found, path.with_suffix(".png"))
    return 0 if all_done else 3


if __name__ == "__main__":
    sys.exit(main())
