"""What `bench.field` found, as text and as a plot. What is aimed at, and whether it is met: `bench.field_verdict`."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from bench.rules.oracle import Oracle, OracleAnswer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, ORACLE, ORACLE_ANSWER = "least_time", Oracle.name, OracleAnswer.name
ORACLES = (ORACLE, ORACLE_ANSWER)
# What rules are compared in; of each the least is best.
COMPARED = {
    "ttft_mean": "mean TTFT",
    "ttft_p99": "p99 TTFT",
    "e2e_mean": "mean E2E",
    "e2e_p99": "p99 E2E",
}
_LISTED = {
    **COMPARED,
    "tpot_mean": "mean TPOT, ms",
    "tpot_p99": "p99 TPOT, ms",
    "tokens_s": "output tokens/s",
    "tokens_s_busy": "output tokens/s until the last conversation begins",
    "wall": "seconds until the last answer",
    "trajectory": "mean seconds of a conversation",
    "goodput": "share of requests within the SLO, %",
    "hit": "hit rate, %",
    "hit_least": "hit rate of the replica with the least, %",
    "spread": "requests of the busiest replica by an even share",
}
# What a rate decides where requests come at one: told of closed loops alone.
_CLOSED_ALONE = ("tokens_s_busy", "wall", "trajectory")
_NAME, _COLUMN = 47, 7  # characters
Runs = dict[str, dict]  # a cell by rule, a rule by seed


@dataclass(frozen=True)
class Judged:
    """One cell's runs, and which of its rules is compared with the others."""

    name: str
    cell: dict
    ours: str = OURS

    @property
    def runs(self) -> Runs:
        return runs(self.cell)

    @property
    def closed(self) -> bool:
        return " users" in self.name

    @property
    def others(self) -> list[str]:
        """Rules that a gateway could have; not a variant of ours from another tree."""
        return [rule for rule in self.runs if rule != self.ours and rule not in ORACLES and OURS not in rule]

    def mean(self, rule: str, figure: str) -> float:
        return fmean(run[figure] for run in self.runs[rule].values())

    def pairs(self, rule: str, figure: str) -> list[tuple[float, float]]:
        """Ours and that rule's, for each seed that both have."""
        ours, theirs = self.runs[self.ours], self.runs[rule]
        return [(ours[seed][figure], theirs[seed][figure]) for seed in ours if seed in theirs]

    def ratio(self, rule: str, figure: str) -> float:
        """Ours by that rule's: below 1, ours is less."""
        ours, theirs = zip(*self.pairs(rule, figure))
        return sum(ours) / sum(theirs)

    def more(self, rule: str, figure: str) -> float:
        """Ours less that rule's."""
        return fmean(ours - theirs for ours, theirs in self.pairs(rule, figure))

    def error(self, rule: str, figure: str) -> float:
        """Standard error of `ratio`; infinite with one seed."""
        ratios = [ours / theirs for ours, theirs in self.pairs(rule, figure)]
        return stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else inf

    def best(self, figure: str, among: Iterable[str] = ()) -> str:
        """The rule with the least of a figure, ours and the oracles aside."""
        return max(among or self.others, key=lambda rule: self.ratio(rule, figure))

    def behind(self, figure: str) -> float:
        """Our figure above that of the best other rule, as a share; negative: ours is the least."""
        return self.ratio(self.best(figure), figure) - 1


def runs(cell: dict) -> Runs:
    return {rule: run for rule, run in cell.items() if isinstance(run, dict) and run}


def judged(cells: Runs, ours: str = OURS) -> list[Judged]:
    """Those cells that can be judged."""
    found = [Judged(name, cell, ours) for name, cell in cells.items() if ours in runs(cell)]
    return [one for one in found if one.others]


def near(cell: dict, share: float) -> set[str]:
    """Ours, and the rules that come as near, or nearer, with the first seed that there is; the oracles are none of
    them."""
    if OURS not in runs(cell):
        return set()
    first = {rule: dict(list(run.items())[:1]) for rule, run in runs(cell).items()}
    one = Judged("", first)
    return {OURS} | {
        rule for rule in one.others if any(one.ratio(rule, figure) > 1 / (1 + share) for figure in COMPARED)
    }


def made_by(command: str) -> str:
    """The first line of a table that is kept: the command, the commit and the day."""
    asked = ["git", "describe", "--always", "--dirty=+changes"]
    try:
        said = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        said = "unknown"
    return f"{command}, commit {said.strip()}, {date.today():%d %B %Y}"


def seeds(cells: Runs) -> str:
    """How many seeds the figures are of."""
    counts = Counter(len(run) for cell in cells.values() for run in runs(cell).values())
    if set(counts) <= {1}:
        return "Each rule was run with one seed in each cell, so no figure has an error."
    pairs = ", ".join(f"{count} with {_seeds(many)}" for many, count in sorted(counts.items()))
    ours = Counter(len(runs(cell)[OURS]) for cell in cells.values() if OURS in runs(cell))
    said = ", ".join(f"{_seeds(many)} in {count} cells" for many, count in sorted(ours.items()))
    return (
        f"Runs of a rule in a cell: {pairs}; {OURS} has {said}. Figures are means over a rule's seeds,\n"
        "comparisons are over the seeds that both rules have. +-: the standard error of a comparison over those seeds."
    )


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def text(cells: Runs) -> str:
    found = judged(cells)
    if not found:
        return "nothing to compare yet\n"
    counts = [len(one.others) for one in found]
    lines = [
        f"{len(found)} cells, {min(counts)} to {max(counts)} rules beside {OURS} in each, and the oracles",
        "",
        "Virtual time, engine gpu-8b, rates in shares of round_robin's saturation.",
        seeds(cells),
        "halves: mean TTFT of the later half of the requests by that of the earlier, 1 is steady; a hot prefix is there in the later half only.",
        "",
        *_ours(found),
        "",
    ]
    for figure, title in _LISTED.items():
        if told := [one for one in found if one.closed or figure not in _CLOSED_ALONE]:
            lines += [*_matrix(told, figure, title), ""]
    return "\n".join(lines)


def _ours(cells: list[Judged]) -> list[str]:
    lines = [
        f"{OURS}",
        "",
        f"{'cell':48} {'req/s':>6} {'TTFT':>7} {'p50':>7} {'p90':>7} {'p99':>7} {'E2E':>8} {'p99':>8} {'TPOT99':>7} {'tok/s':>6} "
        f"{'wall s':>7} {'within':>7} {'hit':>6} {'least':>6} {'spread':>6} {'halves':>6}",
    ]
    for one in cells:
        figures = next(iter(one.runs[OURS].values()))
        run = {figure: one.mean(OURS, figure) for figure in figures if figure not in ("of", "took_s")}
        lines.append(
            f"{one.name:48} {run['requests'] / run['wall'] if one.closed else one.cell['rate']:6.1f} {run['ttft_mean']:7.1f} "
            f"{run['ttft_p50']:7.1f} {run['ttft_p90']:7.1f} {run['ttft_p99']:7.1f} {run['e2e_mean']:8.0f} {run['e2e_p99']:8.0f} "
            f"{run['tpot_p99']:7.1f} {run['tokens_s']:6.0f} {run['wall']:7.1f} {run['goodput']:7.1%} {run['hit']:6.1%} "
            f"{run['hit_least']:6.1%} {run['spread']:6.2f} {run['halves']:6.2f}"
        )
    return lines


def _matrix(cells: list[Judged], figure: str, title: str) -> list[str]:
    """All rules; times of answers in multiples of ours, the rest as it is."""
    rules = list(_rules(cells))
    times = figure in COMPARED
    scale = 100 if figure in ("goodput", "hit", "hit_least") else 1
    lines = [title + (f", as a multiple of {OURS}'s" if times else ""), *_heads(rules)]
    for one in cells:
        shown = [" " * _COLUMN] * len(rules)
        for place, rule in enumerate(rules):
            if rule in one.runs and one.pairs(rule, figure):
                value = 1 / one.ratio(rule, figure) if times else one.mean(rule, figure) * scale
                digits = 0 if value >= 1000 else 1 if scale > 1 or value >= 100 else 2
                shown[place] = f"{value:{_COLUMN}.{digits}f}"
        lines.append(f"{one.name:{_NAME}}{''.join(shown)}".rstrip())
    return lines


def _heads(rules: list[str]) -> list[str]:
    """Names of rules above narrow columns, a word a line."""
    words = [[word[: _COLUMN - 1] for word in rule.split("_")] for rule in rules]
    deep = max(map(len, words))
    above = [[""] * (deep - len(some)) + some for some in words]
    return [(" " * _NAME + "".join(f"{some[line]:>{_COLUMN}}" for some in above)).rstrip() for line in range(deep)]


def _rules(cells: list[Judged]) -> Iterator[str]:
    seen = dict.fromkeys(rule for one in cells for rule in one.runs)
    yield OURS
    yield from (rule for rule in seen if rule != OURS and rule not in ORACLES)
    yield from (rule for rule in ORACLES if rule in seen)


def plot(cells: Runs, path: Path) -> None:
    drawn(cells).savefig(path, dpi=130)


def drawn(cells: Runs) -> Figure:
    """A row a cell: where each rule's times are, ours being 1. What is beyond an edge points out of it."""
    from matplotlib.figure import Figure

    found = judged(cells)
    figure = Figure((20, 1.6 + 0.24 * len(found)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)  # inches on both sides of a panel, for the marks at its edges
    panels = figure.subplots(1, len(COMPARED), sharey=True)
    for axes, (key, title) in zip(panels, COMPARED.items()):
        for row, one in enumerate(found):
            _row(axes, row, one, key)
        axes.axvline(1, color="#12907f", linewidth=2, zorder=1)
        axes.set_xscale("log")
        axes.set_xlim(_LEFT, _RIGHT)
        ticks = (0.8, 1, 1.5, 2, 3, 5, 10)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel(f"as a multiple of {OURS}'s")
        axes.grid(axis="x", color="#dfe3dd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[0].set_yticks(range(len(found)), [one.name for one in found], fontsize=8.5)
    panels[0].invert_yaxis()
    panels[0].set_ylim(len(found) - 0.4, -0.6)
    _legend(figure)
    return figure


_LEFT, _RIGHT = 0.7, 12.0  # the edges of a panel
_DRAWN = (
    ("round_robin", "o", "#d97a1e", "round_robin"),
    ("oracle", "D", "#5a76d8", "oracle of the same objective (sees what no gateway can)"),
    ("best", "o", "#17201e", "best of the other rules"),
    ("rest", "o", "#b9c1bd", "any other rule"),
)


def _row(axes, row: int, one: Judged, key: str) -> None:
    oracle = ORACLE_ANSWER if key.startswith("e2e") else ORACLE
    times = {rule: 1 / one.ratio(rule, key) for rule in (*one.others, oracle) if rule in one.runs}
    first = one.best(key)
    groups: dict[str, Iterable[float]] = {
        "rest": [value for rule, value in times.items() if rule not in (first, oracle, "round_robin")],
        "best": [times[first]],
        "round_robin": [times[rule] for rule in ("round_robin",) if rule in times],
        "oracle": [times[rule] for rule in (oracle,) if rule in times],
    }
    for order, (group, marker, colour, _) in enumerate(reversed(_DRAWN)):
        by_shape: dict[str, list[float]] = {"<": [], marker: [], ">": []}
        for value in groups[group]:
            shape = "<" if value < _LEFT else ">" if value > _RIGHT else marker
            by_shape[shape].append(min(max(value, _LEFT), _RIGHT))
        for shape, values in by_shape.items():
            axes.scatter(
                values,
                [row] * len(values),
                s=13 if group == "rest" else 22,
                marker=shape,
                color=colour,
                zorder=2 + order,
                linewidths=0,
                clip_on=False,  # half of a mark at the edge is beyond it
            )


def _legend(figure) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color="#12907f", linewidth=2, label=OURS)]
    handles += [
        Line2D([], [], marker=marker, color=colour, linestyle="", markersize=5, label=label)
        for _, marker, colour, label in _DRAWN
    ]
    handles += [
        Line2D([], [], marker=shape, color="#6b736f", linestyle="", markersize=5, label=label)
        for shape, label in (("<", f"beyond the edge: below {_LEFT:g}"), (">", f"above {_RIGHT:g}"))
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=7, frameon=False, fontsize=9)
