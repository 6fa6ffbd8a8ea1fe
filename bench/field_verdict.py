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

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

import policies
from bench.field_tables import ORACLE_ANSWER, ORACLES, OURS, Judged, Runs, judged, runs
from bench.rules import NAMES as OTHERS

STICKY = ("session_hash", "sticky_least_loaded", "consistent_hash")
_BLIND = ("round_robin", "least_load")  # to caches: who uses one of these today must not lose by the change


@dataclass(frozen=True)
class Gap:
    """Our figure against the one it is judged by: a share above it, and whose that is."""

    value: float
    rule: str
    met: bool
    shown: str
    error: float = inf  # standard error of `value` over the seeds; infinite with one
    hits: float | None = None  # ours less the sticky rule's with the most, where hits are part of the aim


@dataclass(frozen=True)
class Aim:
    title: str
    short: str
    share: float  # of the cells it is wanted in
    gap: Callable[[Judged], Gap | None]  # None: means nothing in this cell, or there is nothing to judge it by
    limit: float  # of a gap's value, where it is met


Gaps = dict[str, dict[str, Gap]]  # an aim, by its short title, by cell
HITS = -0.01  # a point fewer than a sticky rule's are met


def _least(figure: str, limit: float, among: tuple[str, ...] = ()) -> Callable[[Judged], Gap | None]:
    def gap(one: Judged) -> Gap | None:
        rules = [rule for rule in among or one.others if rule in one.runs and one.pairs(rule, figure)]
        if not rules:
            return None
        best = one.best(figure, rules)
        value, error = one.ratio(best, figure) - 1, one.error(best, figure)
        return Gap(value, best, value <= limit, f"{value:+.1%}{_within(error)}", error)

    return gap


def _within(error: float) -> str:
    return "" if error == inf else f" +-{error:.1%}"


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
    value, error = one.ratio(best, "wall") - 1, one.error(best, "wall")
    hits = min(one.more(rule, "hit") for rule in rules)
    shown = f"{value:+.1%}{_within(error)}, hits {100 * hits:+.1f}"
    if ORACLE_ANSWER in one.runs and one.pairs(ORACLE_ANSWER, "wall"):
        shown += f", oracle {(value + 1) / one.ratio(ORACLE_ANSWER, 'wall') - 1:+.1%}"
    return Gap(value, best, value <= limit and hits >= HITS, shown, error, hits)


def _oracle(one: Judged) -> Gap | None:
    if ORACLE_ANSWER not in one.runs or " 70%" not in one.name:
        return None
    value, error = one.ratio(ORACLE_ANSWER, "e2e_mean") - 1, one.error(ORACLE_ANSWER, "e2e_mean")
    return Gap(value, ORACLE_ANSWER, value <= 0.1, f"{value:+.1%}{_within(error)}", error)


def _of_least(title: str, short: str, share: float, figure: str, limit: float, among: tuple[str, ...] = ()) -> Aim:
    return Aim(title, short, share, _least(figure, limit, among), limit)


AIMS = (
    _of_least("E2E mean within 1 % of the least", "E2E mean", 0.9, "e2e_mean", 0.01),
    _of_least("E2E mean within 3 % of round_robin, least_load", "E2E blind", 1.0, "e2e_mean", 0.03, _BLIND),
    _of_least("TTFT mean within 3 % of the least", "TTFT mean", 0.9, "ttft_mean", 0.03),
    _of_least("TTFT p99 within 3 % of the least", "TTFT p99", 0.8, "ttft_p99", 0.03),
    _of_least("E2E p99 within 3 % of the least", "E2E p99", 0.8, "e2e_p99", 0.03),
    Aim("closed loops: wall 10 % under the best sticky rule", "wall", 1.0, _wall, -0.1),
    Aim("thrash survived", "thrash", 1.0, _thrash, 0.0),
    Aim("E2E mean within 10 % of the oracle at 70 %", "oracle", 1.0, _oracle, 0.1),
)


def gaps(cells: list[Judged]) -> Gaps:
    """Our gap in every cell in which an aim means something; an aim that means nothing in any is left out."""
    found = {aim.short: {one.name: gap for one in cells if (gap := aim.gap(one))} for aim in AIMS}
    return {short: by_cell for short, by_cell in found.items() if by_cell}


def wanted(aim: Aim, found: dict[str, Gap]) -> int:
    """In how many of the cells the aim is to be met."""
    return ceil(aim.share * len(found))


def missed(found: Gaps) -> list[Aim]:
    return [
        aim
        for aim in AIMS
        if (by_cell := found.get(aim.short)) and sum(gap.met for gap in by_cell.values()) < wanted(aim, by_cell)
    ]


def text(cells: Runs) -> str:
    """The verdict on our rule, and on each variant of it from another tree."""
    variants = sorted({rule for cell in cells.values() for rule in runs(cell) if OURS in rule}, key=len)
    parts = [_verdict(found, variant) for variant in variants if (found := judged(cells, variant))]
    if len(variants) > 1:
        parts += [_compared(cells, variant) for variant in variants[1:]]
    return "\n".join(parts) or "nothing to judge yet\n"


def _verdict(cells: list[Judged], ours: str) -> str:
    found = gaps(cells)
    aims = [aim for aim in AIMS if aim.short in found]
    failed = missed(found)
    lines = [f"{ours}: {'what is aimed at':50} {'met in':>9} {'wanted':>6}  {'':6}   worst cell"]
    for aim in aims:
        by_cell = found[aim.short]
        met = sum(gap.met for gap in by_cell.values())
        worst = max(by_cell, key=lambda name: by_cell[name].value)
        lines.append(
            f"{'':{len(ours)}}  {aim.title:50} {met:3} of {len(by_cell):2} {wanted(aim, by_cell):6}  "
            f"{'MISSED' if aim in failed else 'met':6}   "
            f'{by_cell[worst].shown} in "{worst}" ({by_cell[worst].rule})'
        )
    width = {aim: max(len(aim.short), *(len(_cell(gap)) for gap in found[aim.short].values())) for aim in aims}
    lines += ["", f"{_MISSED:48}" + "".join(f"  {aim.short:>{width[aim]}}" for aim in aims)]
    for one in cells:
        shown = [f"  {_cell(found[aim.short].get(one.name)):>{width[aim]}}" for aim in aims]
        lines.append(f"{one.name:48}{''.join(shown)}".rstrip())
    return "\n".join(lines) + "\n"


_MISSED = "* missed"
_SHOWN = re.compile(r"(\w+) ([+-][\d.]+)%(?: \+-([\d.]+)%)?(?:, hits ([+-][\d.]+))?(?:, oracle [+-][\d.]+%)?(\*?)")


def read(said: str) -> Gaps:
    """The gaps of a verdict that was written down, as exact as it prints them."""
    lines = iter(said.splitlines())
    head = next((line for line in lines if line.startswith(_MISSED)), "")
    aims = {head.index(f" {aim.short}") + len(f" {aim.short}"): aim.short for aim in AIMS if f" {aim.short}" in head}
    found: Gaps = {short: {} for short in aims.values()}
    for line in lines:
        if not line:
            break
        for shown in _SHOWN.finditer(line, 48):
            rule, value, error, hits, star = shown.groups()
            found[aims[shown.end() + (not star)]][line[:48].rstrip()] = Gap(
                float(value) / 100,
                _named(rule),
                not star,
                "",
                float(error) / 100 if error else inf,
                float(hits) / 100 if hits else None,
            )
    return found


def _named(cut: str) -> str:
    """The rule whose name was cut."""
    names = (*policies.NAMES, *OTHERS, *ORACLES)
    return cut if cut in names else next(name for name in names if name.startswith(cut))


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
