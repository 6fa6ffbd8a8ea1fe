"""First token against whole answer: `least_time` with other weights of what comes after the first token.

    python -m bench.tradeoff [--cells TEXT,...] [--seeds N] [--processes 2] [--json FILE]

The cells of `bench.field` in which an aim is missed by the most, and two in which none is, at the same loads. The two
weights of a second after the first token, where a conversation begins (1) and where it goes on (0.15), are multiplied
by each of FACTORS; 1 is the rule as it is. Beside it the rules that had the least of something in one of these cells.
Every figure is a ratio to the least of those rules in that cell, means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

from bench.field import measure, play
from bench.field_cells import CELLS, Cell, files
from bench.field_tables import COMPARED, OURS
from loadgen.report.summary import machine
from policies.rules import least_time
from policies.rules.least_cost import Cost

FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
OTHERS = (
    "round_robin", "least_load", "vllm_kv_aware", "lmetric", "sticky_least_loaded", "overlap_cost", "dynamo",
    "prefix_affinity", "llmd_weights",
)  # fmt: skip
CELL_NAMES = (
    "agents 10%",
    "agents 70%",
    "tau 50%",
    "azure 90%",
    "rag 90%",
    "rag 90%, hot prefix",
    "mooncake 50%",
    "coders 4 users a replica, 4 replicas",
    "rollouts 4 users a replica, 4 replicas",
    "rollouts 2 users a replica, 16 replicas",
)
_WEIGHTS = least_time._BEGINNING, least_time._GOING_ON
Figures = dict[str, float]
Found = dict[str, dict[str, list[Figures]]]  # a cell by variant (a factor or a rule) by seed


def weigh(factor: float) -> None:
    """Make `least_time` of this process weigh what comes after the first token so."""
    least_time._BEGINNING, least_time._GOING_ON = (factor * weight for weight in _WEIGHTS)
    least_time.COST = least_time.LeastTime.cost = Cost(
        least_time.TERMS, least_time.terms, slack=least_time.COST.slack
    )  # weights are constants in what a statement is compiled to


def play_with(cell: Cell, variant: str, blocks: int, rate: float, seed: int) -> Figures:
    ours = variant not in OTHERS
    weigh(float(variant) if ours else 1.0)
    return play(cell, OURS if ours else variant, blocks, rate, seed)


def run(cells: Sequence[Cell], seeds: Sequence[int], processes: int) -> Found:
    variants = [*(f"{factor:g}" for factor in FACTORS), *OTHERS]
    found: Found = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        basis = {cell.name: pool.submit(measure, cell) for cell in cells}
        futures = {}
        for cell in cells:
            fleet = basis[cell.name].result()
            rate, blocks = cell.at * fleet["saturation"] * cell.replicas / 8, int(fleet["working_set"])
            for variant in variants:
                futures[cell.name, variant] = [
                    pool.submit(play_with, cell, variant, blocks, rate, seed) for seed in seeds
                ]
        for (name, variant), runs in futures.items():
            found.setdefault(name, {})[variant] = [one.result() for one in runs]
            print(f"{name} / {variant}", file=sys.stderr, flush=True)
    return found


def ratios(variants: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Each variant's figures by the least of the other rules'."""
    means = {name: {key: fmean(one[key] for one in runs) for key in COMPARED} for name, runs in variants.items()}
    least = {key: min(means[rule][key] for rule in OTHERS) for key in COMPARED}
    return {name: {key: mean[key] / least[key] for key in COMPARED} for name, mean in means.items()}


def table(found: Found) -> str:
    lines = [f"{'':44}{'weight x':>9}" + "".join(f"{title:>11}" for title in COMPARED.values())]
    for name, variants in found.items():
        by = ratios(variants)
        for factor in FACTORS:
            values = "".join(f"{100 * (by[f'{factor:g}'][key] - 1):>+10.1f}%" for key in COMPARED)
            lines.append(f"{name if factor == FACTORS[0] else '':44}{factor:>9g}{values}")
    return "\n".join(lines)


def plot(found: Found, path: Path) -> None:
    """A panel a cell: the curve of the weights, and where the other rules are."""
    from matplotlib.figure import Figure

    columns = 5
    figure = Figure((4 * columns, 3.6 * -(-len(found) // columns)), layout="constrained")
    for place, (name, variants) in enumerate(found.items()):
        axes = figure.add_subplot(-(-len(found) // columns), columns, place + 1)
        by = ratios(variants)
        curve = [(by[f"{factor:g}"]["ttft_mean"], by[f"{factor:g}"]["e2e_mean"]) for factor in FACTORS]
        axes.plot(*zip(*curve), color="#12907f", marker="o", markersize=4, linewidth=1.5, zorder=3)
        axes.scatter(
            *curve[FACTORS.index(1.0)], s=90, facecolors="none", edgecolors="#12907f", linewidths=1.5, zorder=4
        )
        for factor, at in zip(FACTORS, curve):
            axes.annotate(f"{factor:g}", at, textcoords="offset points", xytext=(4, 4), fontsize=7, color="#12907f")
        far = 1.25 * max(1.2, *(x for x, _ in curve)), 1.1 * max(1.05, *(y for _, y in curve))
        for rule in OTHERS:
            at = by[rule]["ttft_mean"], by[rule]["e2e_mean"]
            if at[0] < far[0] and at[1] < far[1]:
                axes.scatter(*at, s=16, color="#6b746f", zorder=2)
                axes.annotate(rule, at, textcoords="offset points", xytext=(4, -8), fontsize=7, color="#6b746f")
        axes.set_title(name, loc="left", fontsize=9, fontweight="bold")
        axes.set_xlabel("mean TTFT / least of the others", fontsize=8)
        axes.set_ylabel("mean E2E / least of the others", fontsize=8)
        axes.grid(color="#dfe3dd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="only those whose name has one of these in it (default: all)")
    parser.add_argument("--seeds", type=int, default=1, choices=(1, 2, 3), metavar="N", help="how many (default 1)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures; the plot is written beside it")
    args = parser.parse_args()
    if missing := files():
        print(missing)
        return 3
    cells = [cell for name in CELL_NAMES for cell in CELLS if cell.name == name]
    cells = [cell for cell in cells if any(part in cell.name for part in args.cells.split(","))]
    found = run(cells, range(1, args.seeds + 1), args.processes)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "cells": found}, indent=1) + "\n")
        plot(found, args.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
