"""Every rule of the field beside ours, cell by cell, in virtual time: TTFT, goodput, hit rate, load spread.

    python -m bench.field [--cells TEXT,...] [--policies NAME,...] [--processes 2] [--minutes M] [--json FILE]

A cell is a load, a fleet and a rate; `bench.field_cells` lists them. A rate is a share of saturation: what
`round_robin` gets through when 32 conversations a replica are always open and nobody thinks (64 replicas: eight times
that of 8). A cache of 1 x the working set holds, over all replicas together, as many blocks as all prompts of the slice
have different ones. Past saturation nothing is steady, and what counts is the same slice for all rules.

Each run is kept in the JSON with a hash of what made it, its cell, its rate, its seed and the source of its rule: what
has not changed is not run again, so a run can be made in parts (`--minutes`). Figures are of the requests of those
conversations that begin in the middle eight tenths of the arrivals, which are the same requests under every rule. How
steady a cell was: `halves`, the mean TTFT of the later half of these by that of the earlier half; and, since the 99th
percentile of a slice is its ten slowest requests, the rules that come near ours with the first seed are run with five
more. Two rules are compared over the seeds that both were run with.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

import policies
from bench import field_tables
from bench.field_cells import CELLS, SLOS, Cell, files, saturated, setting, work, working_set
from loadgen.drive.records import Record
from loadgen.report.summary import machine, meets
from loadgen.simulate import Outcome, field, simulate
from policies import costs, ledger

RESULTS = Path(__file__).with_name("results") / "field.json"
# what one asks first
RULES = tuple(dict.fromkeys((field_tables.OURS, field_tables.ORACLE, *field.NAMES, *policies.NAMES)))
SEEDS = (1, 2, 3, 4, 5, 6)  # every rule with the first, which the cells' rates and caches are of, too
NEAR = 0.03  # no further behind ours than this, in mean or p99: run with the other seeds, too
Kept = dict[str, dict]


def fingerprint(*what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()


def source(rule: str) -> str:
    """The code that decides: the rule's file, and if it uses learned costs that of these, and of the ledger that tells
    when load began."""
    text = inspect.getsource(sys.modules[type(field.make(rule, truth=object())).__module__])
    return text + inspect.getsource(costs) + inspect.getsource(ledger) if ".costs" in text else text


def figures(outcome: Outcome, cell: Cell) -> dict[str, float]:
    """Of the conversations that begin in the middle of the arrivals."""
    count = len(outcome.conversations)
    counted = {conversation.id for conversation in outcome.conversations[count // 10 : count - count // 10]}
    asked = [record for record in outcome.done if record.conversation.split(".")[0] in counted]
    good = [record for record in asked if record.error is None]
    ttft = 1e3 * np.array([record.ttft for record in good])
    tpot = 1e3 * np.array([record.tpot for record in good if record.tpot is not None])
    busiest = Counter(record.replica for record in asked).most_common(1)[0][1]
    slo = SLOS[cell.load]
    return {
        "requests": len(asked),
        "failed": len(asked) - len(good),
        "mean": ttft.mean(),
        **{f"p{part}": np.percentile(ttft, part) for part in (50, 90, 99)},
        "goodput": sum(meets(record, slo) for record in good) / len(asked),
        "hit": sum(record.cached_tokens for record in good) / sum(record.prompt_tokens for record in good),
        "spread": busiest * cell.replicas / len(asked),
        "tpot99": np.percentile(tpot, 99),
        "halves": halves(good),
    }


def halves(records: list[Record]) -> float:
    ttft = [record.ttft for record in sorted(records, key=lambda record: record.sent)]
    return float(np.mean(ttft[len(ttft) // 2 :]) / np.mean(ttft[: len(ttft) // 2]))


# --- in the processes

_work = lru_cache(maxsize=1)(work)


def measure(cell: Cell) -> dict[str, float]:
    """What the cell's rate and caches follow from."""
    blocks = working_set(_work(cell, 1.0, SEEDS[0])) if cell.cache else 0
    return {"working_set": blocks, "saturation": saturated(cell, blocks, SEEDS[0])}


def play(cell: Cell, rule: str, blocks: int, rate: float, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    loaded = _work(cell, rate, seed)
    found = figures(simulate(loaded, setting(cell, rule, blocks, rate, seed)), cell)
    return {name: round(float(value), 4) for name, value in found.items()} | {
        "took_s": round(time.perf_counter() - began, 1)
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
            ((name,), (fingerprint(cell.basis, SEEDS[0])), (cell,))
            for name, cell in wanted.items()
            if self.kept["fleets"].get(name, {}).get("of") != fingerprint(cell.basis, SEEDS[0])
        ]

    def missing_runs(self, cells: list[Cell], rules: list[str], seeds: Sequence[int]) -> list[tuple]:
        """Of those rules that a cell is to be run with: all with the first seed, those near ours with others."""
        found = []
        for rule, cell, seed in product(rules, cells, seeds):
            if fleet := self.kept["fleets"][cell.fleet]:
                rate, blocks = cell.at * fleet["saturation"] * cell.replicas / 8, int(fleet["working_set"])
                entry, of = (
                    self.kept["cells"][cell.name],
                    fingerprint(cell, SLOS[cell.load], blocks, rate, seed, source(rule)),
                )
                entry.update(rate=round(rate, 2), about=cell.about(blocks))
                if seed != SEEDS[0] and rule not in field_tables.near(entry, NEAR):
                    entry.get(rule, {}).pop(str(seed), None)
                elif entry.get(rule, {}).get(str(seed), {}).get("of") != of:
                    found.append(((cell.name, rule, str(seed)), of, (cell, rule, blocks, rate, seed)))
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
                        for key in ("saturation", "mean", "p99", "hit", "took_s")
                        if key in entry[name]
                    ),
                    flush=True,
                )
                self.save()
                if time.monotonic() > self.until:
                    for waiting in futures:
                        waiting.cancel()
        return done == len(missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="only those whose name has one of these in it (default: all)")
    parser.add_argument("--policies", default=",".join(RULES), help="default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing after so long; the next run goes on"
    )
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="kept there; the tables and the plot are written beside it"
    )
    args = parser.parse_args()
    if missing := files():
        print(missing)
        return 0
    cells = [cell for cell in CELLS if any(part in cell.name for part in args.cells.split(","))]
    rules = args.policies.split(",")
    grid = Grid(args.json, time.monotonic() + 60 * args.minutes, args.processes)
    all_done = grid.fill(measure, grid.kept["fleets"], grid.missing_fleets(cells))
    for seeds in (SEEDS[:1], SEEDS[1:]):
        all_done = grid.fill(play, grid.kept["cells"], grid.missing_runs(cells, rules, seeds)) and all_done
    text = field_tables.text(grid.kept["cells"])
    args.json.with_suffix(".txt").write_text(text)
    print(text)
    if all_done:
        field_tables.plot(grid.kept["cells"], args.json.with_suffix(".png"))
    return 0 if all_done else 3


if __name__ == "__main__":
    sys.exit(main())
