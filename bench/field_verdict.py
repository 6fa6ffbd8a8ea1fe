"""What `least_time` is to reach in the cells of `bench.field`, and whether it does, with the figure in each cell.

| aim | is met in a cell when | wanted in |
|---|---|---|
| E2E mean | at most 1 % above the least of any rule | 90 % of the cells |
| E2E mean, load alone | at most 3 % above round_robin's and least_load's | all |
| TTFT mean | at most 3 % above the least | 90 % |
| TTFT p99, E2E p99 | at most 3 % above the least | 80 % |
| wall time, closed loops | 10 % under the best sticky rule's, hits within a point of any sticky rule's | all |
| thrash survived | no longer than the best sticky rule's, hits within a point of any sticky rule's | all |
| oracle | E2E mean at most 10 % above that of `oracle_answer` | all at 70 % |

Each is stated against every rule that was run in the cell, the oracles aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from bench.field_tables import ORACLE_ANSWER, OURS, Judged, Runs, judged, runs

STICKY = ("session_hash", "sticky_least_loaded", "consistent_hash")
_BLIND = ("round_robin", "least_load")  # to caches: who uses one of these today must not lose by the change


@dataclass(frozen=True)
class Gap:
    """Our figure against the one it is judged by: a share above it, and whose that is."""

    value: float
    rule: str
    met: bool
    shown: str


@dataclass(frozen=True)
class Aim:
    title: str
    short: str
    share: float  # of the cells it is wanted in
    gap: Callable[[Judged], Gap | None]  # None: means nothing in this cell, or there is nothing to judge it by


def _least(figure: str, limit: float, among: tuple[str, ...] = ()) -> Callable[[Judged], Gap | None]:
    def gap(one: Judged) -> Gap | None:
        rules = [rule for rule in among or one.others if rule in one.runs and one.pairs(rule, figure)]
        if not rules:
            return None
        best = one.best(figure, rules)
        value = one.ratio(best, figure) - 1
        return Gap(value, best, value <= limit, f"{value:+.1%}")

    return gap


def _wall(one: Judged) -> Gap | None:
    return None if "thrash" in one.name else _closed(one, -0.1)


def _thrash(one: Judged) -> Gap | None:
    return _closed(one, 0.0) if "thrash" in one.name else None


def _closed(one: Judged, limit: float) -> Gap | None:
    """Wall time and hits against the sticky rule that is through first, with what the oracle's wall time is by its."""
    rules = [rule for rule in STICKY if rule in one.runs]
    if not one.closed or not rules:
        return None
    best = one.best("wall", rules)
    value, hits = one.ratio(best, "wall") - 1, min(one.more(rule, "hit") for rule in rules)
    shown = f"{value:+.1%}, hits {100 * hits:+.1f}"
    if ORACLE_ANSWER in one.runs and one.pairs(ORACLE_ANSWER, "wall"):
        shown += f", oracle {(value + 1) / one.ratio(ORACLE_ANSWER, 'wall') - 1:+.1%}"
    return Gap(value, best, value <= limit and hits >= -0.01, shown)


def _oracle(one: Judged) -> Gap | None:
    if ORACLE_ANSWER not in one.runs or " 70%" not in one.name:
        return None
    value = one.ratio(ORACLE_ANSWER, "e2e_mean") - 1
    return Gap(value, ORACLE_ANSWER, value <= 0.1, f"{value:+.1%}")


AIMS = (
    Aim("E2E mean within 1 % of the least", "E2E mean", 0.9, _least("e2e_mean", 0.01)),
    Aim("E2E mean within 3 % of round_robin, least_load", "E2E blind", 1.0, _least("e2e_mean", 0.03, _BLIND)),
    Aim("TTFT mean within 3 % of the least", "TTFT mean", 0.9, _least("ttft_mean", 0.03)),
    Aim("TTFT p99 within 3 % of the least", "TTFT p99", 0.8, _least("ttft_p99", 0.03)),
    Aim("E2E p99 within 3 % of the least", "E2E p99", 0.8, _least("e2e_p99", 0.03)),
    Aim("closed loops: wall 10 % under the best sticky rule", "wall", 1.0, _wall),
    Aim("thrash survived", "thrash", 1.0, _thrash),
    Aim("E2E mean within 10 % of the oracle at 70 %", "oracle", 1.0, _oracle),
)


def text(cells: Runs) -> str:
    """The verdict on our rule, and on each variant of it from another tree."""
    variants = sorted({rule for cell in cells.values() for rule in runs(cell) if OURS in rule}, key=len)
    parts = [_verdict(found, variant) for variant in variants if (found := judged(cells, variant))]
    if len(variants) > 1:
        parts += [_compared(cells, variant) for variant in variants[1:]]
    return "\n".join(parts) or "nothing to judge yet\n"


def _verdict(cells: list[Judged], ours: str) -> str:
    gaps = {aim: {one.name: gap for one in cells if (gap := aim.gap(one))} for aim in AIMS}
    lines = [f"{ours}: {'what is aimed at':50} {'met in':>9} {'wanted':>6}  {'':6}   worst cell"]
    for aim, found in gaps.items():
        if found:
            met, wanted = sum(gap.met for gap in found.values()), ceil(aim.share * len(found))
            worst = max(found, key=lambda name: found[name].value)
            lines.append(
                f"{'':{len(ours)}}  {aim.title:50} {met:3} of {len(found):2} {wanted:6}  {'met' if met >= wanted else 'MISSED':6}   "
                f'{found[worst].shown} in "{worst}" ({found[worst].rule})'
            )
    width = {
        aim: max(len(aim.short), *(len(_cell(gap)) for gap in found.values())) for aim, found in gaps.items() if found
    }
    lines += ["", f"{'* missed':48}" + "".join(f"  {aim.short:>{width[aim]}}" for aim in width)]
    for one in cells:
        shown = [f"  {_cell(gaps[aim].get(one.name)):>{width[aim]}}" for aim in width]
        lines.append(f"{one.name:48}" + "".join(shown))
    return "\n".join(lines) + "\n"


def _cell(gap: Gap | None) -> str:
    return "" if gap is None else f"{gap.rule[:12]} {gap.shown}{' ' if gap.met else '*'}"


def _compared(cells: Runs, variant: str) -> str:
    """Our rule's figures against those of the variant, per cell; below 0: ours is less."""
    figures = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "tpot_p99", "wall", "hit")
    titles = "".join(f"{figure:>17}" for figure in figures[:-1]) + f"{'hits, points':>17}"
    lines = [f"{OURS} against {variant}", f"{'':48}{titles}"]
    for name, cell in cells.items():
        if OURS not in runs(cell) or variant not in runs(cell):
            continue
        one = Judged(name, cell)
        shown = []
        for figure in figures:
            if figure == "hit":
                shown.append(f"{100 * one.more(variant, figure):+17.1f}")
                continue
            error = one.error(variant, figure)
            within = f" +-{error:.1%}" if error < 9 else ""
            shown.append(f"{f'{one.ratio(variant, figure) - 1:+.1%}{within}':>17}")
        lines.append(f"{name:48}" + "".join(shown))
    return "\n".join(lines) + "\n"
