"""What `bench.field` found, as text and as a plot."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from pathlib import Path
from statistics import fmean, stdev

from loadgen.simulate import field

OURS, ORACLE = "least_time", field.Oracle.name
_WORTH = 0.03  # further behind than this is a loss that one names
_NOTES = (
    "python -m bench.field; virtual time, engine gpu-8b, rates in shares of round_robin's saturation. Rules near ours are run with six seeds, the others",
    "with one; figures are means over a rule's seeds, comparisons over those that both rules have. +-: standard error of a comparison over those seeds.",
    "halves: mean TTFT of the later half of the requests by that of the earlier, 1 is steady; a hot prefix is there in the later half only.",
)
Runs = dict[str, dict]  # a cell by rule, a rule by seed


def runs(cell: dict) -> Runs:
    return {rule: run for rule, run in cell.items() if isinstance(run, dict) and run}


def others(cell: dict) -> list[str]:
    return [rule for rule in runs(cell) if rule not in (OURS, ORACLE)]


def mean(cell: dict, rule: str, figure: str) -> float:
    return fmean(run[figure] for run in cell[rule].values())


def pairs(cell: dict, rule: str, figure: str) -> list[tuple[float, float]]:
    """Ours and that rule's, for each seed that both have."""
    ours, theirs = cell[OURS], cell[rule]
    return [(ours[seed][figure], theirs[seed][figure]) for seed in ours if seed in theirs]


def ahead(cell: dict, rule: str, figure: str) -> float:
    """Ours by that rule's: below 1, ours is less."""
    ours, theirs = zip(*pairs(cell, rule, figure))
    return sum(ours) / sum(theirs)


def error(cell: dict, rule: str, figure: str) -> float:
    """Standard error of `ahead`; infinite with one seed."""
    ratios = [ours / theirs for ours, theirs in pairs(cell, rule, figure)]
    return stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else inf


def best(cell: dict, figure: str) -> str:
    """The rule with the least of a figure, ours and the oracle aside."""
    return max(others(cell), key=lambda rule: ahead(cell, rule, figure))


def behind(cell: dict, figure: str) -> float:
    """Our figure above that of the best other rule, as a share; negative: ours is the least."""
    return ahead(cell, best(cell, figure), figure) - 1


def clearly(cell: dict, figure: str) -> int:
    """-1: ours is less than every other rule's by more than two standard errors, 1: more than some other's, 0: a tie.

    A rule with one seed, where ours has more, is further away than that."""
    if len(cell[OURS]) < 2:
        return 0
    said = [
        (ahead(cell, rule, figure) - 1) / error(cell, rule, figure)
        for rule in others(cell)
        if len(pairs(cell, rule, figure)) > 1
    ]
    return 1 if max(said, default=-inf) > 2 else -1 if max(said, default=-inf) < -2 else 0


def near(cell: dict, share: float) -> set[str]:
    """Ours, and the rules that come as near, or nearer, with the first seed that there is; the oracle is none of
    them."""
    if OURS not in cell:
        return set()
    first = {OURS: dict(list(cell[OURS].items())[:1])}
    return {OURS} | {
        rule
        for rule in others(cell)
        if any(ahead({**first, rule: cell[rule]}, rule, figure) > 1 / (1 + share) for figure in ("mean", "p99"))
    }


def complete(cells: Runs) -> Runs:
    """Those cells that can be judged."""
    return {name: cell for name, cell in cells.items() if OURS in cell and others(cell)}


def summary(cells: Runs) -> list[str]:
    judged = complete(cells)
    counts = [len(runs(cell)) for cell in judged.values()]
    lines = [
        f"{len(judged)} cells, {'' if min(counts) == max(counts) else f'{min(counts)} to '}{max(counts)} rules in each, with ours and the oracle"
    ]
    for figure, title in (("mean", "mean TTFT"), ("p99", "p99 TTFT")):
        gaps = {name: behind(cell, figure) for name, cell in judged.items()}
        worst = max(gaps, key=gaps.get)
        lines.append(
            f"{title}: {OURS} has the least in {sum(gap <= 0 for gap in gaps.values())} of {len(gaps)} cells, is within "
            f'{_WORTH:.0%} of the best in {sum(gap <= _WORTH for gap in gaps.values())}; worst {gaps[worst]:+.1%} in "{worst}" '
            f"({best(judged[worst], figure)})"
        )
        said = [clearly(cell, figure) for cell in judged.values()]
        lines.append(
            f"  by more than two standard errors: less than every other rule in {said.count(-1)}, more than some other in {said.count(1)}"
        )
    both = sum(max(behind(cell, figure) for figure in ("mean", "p99")) <= 0 for cell in judged.values())
    lines.append(f"both the least: {both} of {len(judged)}")
    to_oracle = {
        name: ahead(cell, ORACLE, "mean") - 1 for name, cell in judged.items() if ORACLE in cell and " 70%" in name
    }
    if to_oracle:
        worst = max(to_oracle, key=to_oracle.get)
        lines.append(
            f'mean TTFT against the oracle at 70 %: {min(to_oracle.values()):+.1%} to {to_oracle[worst]:+.1%} ("{worst}"), '
            f"within 10 % in {sum(gap <= 0.1 for gap in to_oracle.values())} of {len(to_oracle)}"
        )
    return lines


def text(cells: Runs) -> str:
    judged = complete(cells)
    if not judged:
        return "nothing to compare yet\n"
    out = [*summary(judged), "", *_NOTES, "", *_ours(judged), ""]
    for figure, title in (
        ("mean", "mean TTFT"),
        ("p99", "p99 TTFT"),
        ("goodput", "share of requests within the SLO, %"),
        ("hit", "hit rate, %"),
        ("spread", "requests of the busiest replica by an even share"),
        ("tpot99", "p99 TPOT, ms"),
    ):
        out += [*_matrix(judged, figure, title), ""]
    return "\n".join(out)


def _ours(cells: Runs) -> list[str]:
    lines = [
        f"{OURS}, and how far it is from the best of the others (negative: ours is the least; * further behind than {_WORTH:.0%})",
        "",
        f"{'cell':38} {'req/s':>6} {'mean ms':>8} {'p50':>7} {'p90':>8} {'p99':>8} {'within':>7} {'hit':>6} {'spread':>6} {'TPOT99':>7} {'halves':>6}"
        f"   {'mean, against':>31}   {'p99, against':>31} {'oracle':>7}",
    ]
    for name, cell in cells.items():
        run = {figure: mean(cell, OURS, figure) for figure in next(iter(cell[OURS].values())) if figure != "of"}
        oracle = f"{ahead(cell, ORACLE, 'mean') - 1:+7.1%}" if ORACLE in cell else ""
        lines.append(
            f"{name:38} {cell['rate']:6.1f} {run['mean']:8.1f} {run['p50']:7.1f} {run['p90']:8.1f} {run['p99']:8.1f} {run['goodput']:7.1%} {run['hit']:6.1%} "
            f"{run['spread']:6.2f} {run['tpot99']:7.1f} {run['halves']:6.2f}   {_against(cell, 'mean')}   {_against(cell, 'p99')} {oracle}"
        )
    return lines


def _against(cell: dict, figure: str) -> str:
    gap, rule = behind(cell, figure), best(cell, figure)
    within = error(cell, rule, figure)
    return f"{gap:+7.1%}{'*' if gap > _WORTH else ' '}{f'+-{within:.1%}' if within < inf else '':7}{rule:>16}"


def _matrix(cells: Runs, figure: str, title: str) -> list[str]:
    """All rules; TTFT in multiples of ours, the rest as it is."""
    rules = _rules(cells)
    times = figure in ("mean", "p99")
    scale = 100 if figure in ("goodput", "hit") else 1
    lines = [
        title + (f", as a multiple of {OURS}'s" if times else ""),
        " " * 38 + "".join(f"{rule[:9]:>10}" for rule in rules),
    ]
    for name, cell in cells.items():
        shown = []
        for rule in rules:
            value = (
                None
                if rule not in runs(cell)
                else 1 / ahead(cell, rule, figure)
                if times
                else mean(cell, rule, figure) * scale
            )
            shown.append(
                " " * 10 if value is None else f"{value:10.1f}" if scale > 1 or value >= 100 else f"{value:10.2f}"
            )
        lines.append(f"{name:38}" + "".join(shown))
    return lines


def _rules(cells: Runs) -> list[str]:
    seen = dict.fromkeys(rule for cell in cells.values() for rule in runs(cell))
    return [OURS, *(rule for rule in seen if rule not in (OURS, ORACLE)), *([ORACLE] if ORACLE in seen else [])]


def plot(cells: Runs, path: Path) -> None:
    """A row a cell: where each rule's TTFT is, ours being 1."""
    from matplotlib.figure import Figure

    judged = complete(cells)
    figure = Figure((12, 1.6 + 0.24 * len(judged)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(panels, (("mean", "Mean TTFT"), ("p99", "p99 TTFT"))):
        for row, cell in enumerate(judged.values()):
            _row(axes, row, cell, key)
        axes.axvline(1, color="#12907f", linewidth=2, zorder=1)
        axes.set_xscale("log")
        axes.set_xlim(0.7, 12)
        ticks = (0.8, 1, 1.5, 2, 3, 5, 10)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel(f"as a multiple of {OURS}'s")
        axes.grid(axis="x", color="#dfe3dd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[0].set_yticks(range(len(judged)), judged, fontsize=8.5)
    panels[0].invert_yaxis()
    panels[0].set_ylim(len(judged) - 0.4, -0.6)
    _legend(figure)
    figure.savefig(path, dpi=130)


_DRAWN = (
    ("round_robin", "o", "#d97a1e", "round_robin"),
    (ORACLE, "D", "#5a76d8", "oracle (sees what no gateway can)"),
    ("best", "o", "#17201e", "best of the other rules"),
    ("rest", "o", "#b9c1bd", "any other rule; at the edge: 12 times or more"),
)


def _row(axes, row: int, cell: dict, key: str) -> None:
    times = {rule: min(1 / ahead(cell, rule, key), 12) for rule in runs(cell) if rule != OURS}
    first = best(cell, key)
    groups: dict[str, Iterable[float]] = {
        "rest": [value for rule, value in times.items() if rule not in (first, ORACLE, "round_robin")],
        "best": [times[first]],
        "round_robin": [times[rule] for rule in ("round_robin",) if rule in times],
        ORACLE: [times[rule] for rule in (ORACLE,) if rule in times],
    }
    for order, (group, marker, colour, _) in enumerate(reversed(_DRAWN)):
        values = list(groups[group])
        axes.scatter(
            values,
            [row] * len(values),
            s=13 if group == "rest" else 22,
            marker=marker,
            color=colour,
            zorder=2 + order,
            linewidths=0,
            clip_on=False,
        )


def _legend(figure) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color="#12907f", linewidth=2, label=OURS)]
    handles += [
        Line2D([], [], marker=marker, color=colour, linestyle="", markersize=5, label=label)
        for _, marker, colour, label in _DRAWN
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
