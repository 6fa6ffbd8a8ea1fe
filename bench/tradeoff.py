"""What each missed aim would cost: `least_time` with other weights of what comes after the first token.

    python -m bench.tradeoff [--field FILE] [--cells TEXT,...] [--seeds N] [--processes 2] [--minutes M] [--json FILE]

Aims and cells are those of a verdict of `bench.field`: of each aim that it says is missed the two cells that miss it by
the most, and of the wall time of closed loops also the two that miss its hits by the most. FILE is the JSON that it
keeps, or the text that it writes (default: the committed `field.txt`). `--cells` puts other cells in their place.

The two weights of a second after the first token, where a conversation begins (1) and where it goes on (0.15), are
multiplied by each of FACTORS; 1 is the rule as it is. Beside it are played the rules that the verdict judges it by in
that cell, and a closed loop's sticky rules, at the same load with the same seeds. Every figure but hits is told as a
share above the least of those rules, hits as points above the most of them. Runs are kept in the JSON with a hash of
what made them, so a run can be made in parts (`--minutes`); the table and the plot are written beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from bench.field import SEEDS, Grid, fingerprint, measure, play
from bench.field_cells import CELLS, Cell, files
from bench.field_tables import COMPARED, ORACLES, OURS, Judged, Runs, judged, made_by, seeds
from bench.field_verdict import HITS, STICKY, Aim, Gaps, gaps, missed, read
from policies.rules import least_time

FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
WORST = 2  # cells of each aim
RESULTS = Path(__file__).with_name("results")
FIGURES = {**COMPARED, "wall": "wall time", "hit": "hits, points"}
_WEIGHTS = least_time._BEGINNING, least_time._GOING_ON


@dataclass(frozen=True)
class Panel:
    """An aim that is missed, or the half of it that is about hits, in one of the cells that miss it by the most."""

    aim: Aim
    cell: str
    hits: bool = False

    @property
    def title(self) -> str:
        return "hits" if self.hits else self.aim.short

    @property
    def asks(self) -> str:
        return "closed loops: hits within a point of sticky rules'" if self.hits else self.aim.title

    @property
    def limit(self) -> float:
        return HITS if self.hits else self.aim.limit

    def at(self, one: Judged) -> tuple[float, float]:
        """How far above what it is judged by this variant is, and the standard error of that."""
        gap = self.aim.gap(one)
        assert gap is not None
        return (gap.hits or 0.0, inf) if self.hits else (gap.value, gap.error)


def panels(found: Gaps, names: Sequence[str] = ()) -> list[Panel]:
    """For each missed aim its worst cells; or those of `names` in which it means something."""
    chosen = []
    for aim in missed(found):
        by_cell = {name: gap for name, gap in found[aim.short].items() if not names or name in names}
        failing = [name for name, gap in by_cell.items() if names or gap.value > aim.limit]
        worst = sorted(failing, key=lambda name: by_cell[name].value, reverse=True)
        chosen += [Panel(aim, name) for name in worst[: len(names) or WORST]]
        fewer = {name: gap.hits for name, gap in by_cell.items() if gap.hits is not None}
        failing = [name for name, hits in fewer.items() if names or hits < HITS]
        worst = sorted(failing, key=lambda name: fewer[name])
        chosen += [Panel(aim, name, hits=True) for name in worst[: len(names) or WORST]]
    return chosen


def rivals(found: Gaps, cell: str) -> list[str]:
    """Whom the verdict judges ours by in this cell; the oracles if it is missed that is judged by them."""
    failed = {aim.short for aim in missed(found)}
    named = [by_cell[cell].rule for short, by_cell in found.items() if cell in by_cell]
    named = [rule for rule in named if rule not in ORACLES or "oracle" in failed]
    return list(dict.fromkeys((*named, *(STICKY if " users" in cell else ()))))


def variant(factor: float) -> str:
    return f"{OURS}@x{factor:g}"


def weigh(factor: float) -> None:
    """Make `least_time` of this process weigh what comes after the first token so."""
    least_time._BEGINNING, least_time._GOING_ON = (factor * weight for weight in _WEIGHTS)


def play_with(cell: Cell, name: str, blocks: int, rate: float, seed: int) -> dict[str, float]:
    rule, _, factor = name.partition("@x")
    weigh(float(factor or 1))
    return play(cell, rule, blocks, rate, seed)


def wanted(grid: Grid, cells: Iterable[Cell], found: Gaps, numbers: Sequence[int]) -> list[tuple]:
    """The runs that there are to be, seed by seed: where they are kept, a hash of what makes them, what to play."""
    asked = []
    for seed in numbers:
        for cell in cells:
            for name in (*map(variant, FACTORS), *rivals(found, cell.name)):
                rule = name.partition("@")[0]
                if run := grid.run(cell, rule, seed):
                    of, (_, _, *rest) = run
                    asked.append(((cell.name, name, str(seed)), fingerprint(of, name), (cell, name, *rest)))
    return asked


def kept(grid: Grid, place: tuple[str, str, str], of: str) -> dict[str, float] | None:
    """That run, if the present code made it."""
    cell, name, seed = place
    run = grid.kept["cells"][cell].get(name, {}).get(seed, {})
    return run if run.get("of") == of else None


def current(grid: Grid, asked: list[tuple]) -> Runs:
    """What is kept of these runs, of the seeds that all variants of a cell have."""
    found: Runs = {}
    for (cell, name, seed), of, _ in asked:
        runs = found.setdefault(cell, {}).setdefault(name, {})
        if run := kept(grid, (cell, name, seed), of):
            runs[seed] = run
    whole = {cell: set.intersection(*map(set, variants.values())) for cell, variants in found.items()}
    return {
        cell: {name: {seed: runs[seed] for seed in sorted(whole[cell])} for name, runs in variants.items()}
        for cell, variants in found.items()
        if whole[cell]
    }


def curve(variants: Runs, cell: str) -> list[Judged]:
    return [Judged(cell, variants, variant(factor)) for factor in FACTORS]


def above(one: Judged, figure: str) -> tuple[float, float]:
    """A share above the least of the rules played beside it, and its standard error; hits in points above the most."""
    if figure == "hit":
        return 100 * min(one.more(rule, "hit") for rule in one.others), inf
    least = one.best(figure)
    return 100 * (one.ratio(least, figure) - 1), 100 * one.error(least, figure)


# --- as text


def text(found: Runs, chosen: list[Panel]) -> str:
    lines = [
        "least_time with both weights of what comes after the first token multiplied; x1 is the rule as it is.",
        "Percent above the least of the rules beside it, hits in points above the most; +-: standard error over the seeds.",
        seeds({cell: {OURS: variants[variant(1.0)]} for cell, variants in found.items()}),
        "",
        f"{'missed':10} {'aim':>6}   at x1 as played here, in the cells that miss it by the most",
    ]
    for panel in chosen:
        if panel.cell in found:
            value, error = panel.at(Judged(panel.cell, found[panel.cell], variant(1.0)))
            lines.append(f"{panel.title:10} {_percent(panel.limit):>6}   {_percent(value, error):>16}  {panel.cell}")
    for cell, variants in found.items():
        lines += ["", *_table(cell, variants, [panel.title for panel in chosen if panel.cell == cell])]
    return "\n".join(lines) + "\n"


def _table(cell: str, variants: Runs, titles: list[str]) -> list[str]:
    figures = list(FIGURES)[: None if " users" in cell else len(COMPARED)]
    ours = curve(variants, cell)
    others = ", ".join(f"{FIGURES[figure]} {ours[0].best(figure)}" for figure in figures if figure != "hit")
    lines = [
        f"{cell}: {', '.join(titles)}",
        f"the least: {others}",
        f"{'weights':>9}" + "".join(f"{FIGURES[figure]:>17}" for figure in figures),
    ]
    for factor, one in zip(FACTORS, ours):
        shown = (above(one, figure) for figure in figures)
        lines.append(f"{f'x{factor:g}':>9}" + "".join(f"{_shown(*value, '%'):>17}" for value in shown))
    return lines


def _percent(value: float, error: float = inf) -> str:
    return _shown(100 * value, 100 * error, " %")


def _shown(value: float, error: float, unit: str) -> str:
    return f"{value:+.1f}{'' if error == inf else f' +-{error:.1f}'}{unit}"


# --- as a plot

_MISSED, _COST = "#12907f", {"ttft_mean": "#d97a1e", "e2e_mean": "#3d5bbf"}
_COLUMNS = 4


def plot(found: Runs, chosen: list[Panel]):
    """For each panel the missed figure over the weights and, below it, what the other figures cost."""
    from matplotlib.figure import Figure

    drawn = [panel for panel in chosen if panel.cell in found]
    rows = -(-len(drawn) // _COLUMNS)
    figure = Figure((4.1 * _COLUMNS, 3.2 * rows + 0.5), layout="constrained")
    figure.get_layout_engine().set(hspace=0.0, wspace=0.03, h_pad=0.03)
    grid = figure.add_gridspec(rows, _COLUMNS)
    for place, panel in enumerate(drawn):
        both = grid[place // _COLUMNS, place % _COLUMNS].subgridspec(2, 1)
        upper = figure.add_subplot(both[0])
        lower = figure.add_subplot(both[1], sharex=upper)
        ours = curve(found[panel.cell], panel.cell)
        _missed(upper, panel, ours)
        _costs(lower, ours)
        for axes in (upper, lower):
            axes.set_xlim(-0.4, len(FACTORS) - 0.6)
            axes.axvline(FACTORS.index(1.0), color="#dfe3dd", linewidth=6, zorder=0)
            axes.grid(axis="y", color="#dfe3dd", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    _legend(figure)
    return figure


def _missed(axes, panel: Panel, ours: list[Judged]) -> None:
    values = [panel.at(one) for one in ours]
    _line(axes, [(100 * value, 100 * error) for value, error in values], _MISSED)
    axes.axhline(100 * panel.limit, color="#17201e", linewidth=1, linestyle=(0, (4, 3)))
    axes.tick_params(labelbottom=False)
    axes.set_ylabel(f"{panel.title}, {'points' if panel.hits else '%'}", fontsize=8, color=_MISSED)
    axes.set_title(f"{panel.asks}\n{panel.cell}", loc="left", fontsize=9, fontweight="bold")


def _costs(axes, ours: list[Judged]) -> None:
    for key, colour in _COST.items():
        _line(axes, [above(one, key) for one in ours], colour)
    axes.set_xticks(range(len(FACTORS)), [f"{factor:g}" for factor in FACTORS])
    axes.set_ylabel("means, %", fontsize=8)


def _line(axes, values: list[tuple[float, float]], colour: str) -> None:
    errors = [0.0 if error == inf else error for _, error in values]
    axes.errorbar(
        range(len(values)),
        [value for value, _ in values],
        yerr=errors if any(errors) else None,
        color=colour,
        marker="o",
        markersize=3.5,
        linewidth=1.5,
        elinewidth=1,
        capsize=2,
    )


def _legend(figure) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_MISSED, marker="o", markersize=4, label="the missed figure, above what it is judged by"),
        Line2D([], [], color="#17201e", linewidth=1, linestyle=(0, (4, 3)), label="the aim: at or below (hits: above)"),
        Line2D([], [], color=_COST["ttft_mean"], marker="o", markersize=4, label="mean TTFT above the least"),
        Line2D([], [], color=_COST["e2e_mean"], marker="o", markersize=4, label="mean E2E above the least"),
        Line2D([], [], color="#dfe3dd", linewidth=6, label="the rule as it is; across: both weights times"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)


# --- the command


def verdict(path: Path) -> Gaps:
    if path.suffix == ".json":
        return gaps(judged(json.loads(path.read_text())["cells"]))
    return read(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--field", type=Path, default=RESULTS / "field.txt", metavar="FILE", help="JSON or text")
    parser.add_argument("--cells", default="", help="those whose name has one of these in it (default: the worst)")
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, len(SEEDS) + 1), help="how many (default 1)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=inf, help="begin nothing after so long; the next run goes on")
    parser.add_argument("--json", type=Path, default=RESULTS / "tradeoff.json", metavar="FILE", help="kept there")
    args = parser.parse_args()
    if gone := files():
        print(gone)
        return 3
    found = verdict(args.field)
    names = [cell.name for cell in CELLS if args.cells and any(part in cell.name for part in args.cells.split(","))]
    chosen = panels(found, names)
    if not chosen:
        print(f"no aim is missed in {args.field}, or nothing is judged there")
        return 0
    worst = {panel.cell for panel in chosen}
    cells = [cell for cell in CELLS if cell.name in worst]
    grid = Grid(args.json, time.monotonic() + 60 * args.minutes, args.processes)
    grid.fill(measure, grid.kept["fleets"], grid.missing_fleets(cells))
    asked = wanted(grid, cells, found, SEEDS[: args.seeds])
    grid.fill(play_with, grid.kept["cells"], [one for one in asked if kept(grid, *one[:2]) is None])
    done = current(grid, asked)
    said = f"{made_by('python -m bench.tradeoff')}\n\n{text(done, chosen)}"
    args.json.with_suffix(".txt").write_text(said)
    print(said)
    if done:
        plot(done, chosen).savefig(args.json.with_suffix(".png"), dpi=80)
    return 0 if len(done) == len(cells) else 3


if __name__ == "__main__":
    sys.exit(main())
