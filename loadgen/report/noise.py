"""Whether two figures differ by more than runs of one and the same thing do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from loadgen.report import seeds
from loadgen.report.summary import Report

ENOUGH_SEEDS = 3  # from so many on the range over the seeds says what is noise
SAME = 0.05  # of a figure: smaller differences between single runs are noise
SAME_TAIL = 0.2  # of a percentile from p90 on, which few requests make
SAME_SHARE = 0.01  # of all tokens or requests
_LEAST = 0.01  # of a figure: nobody acts on less, however sure it is


class Verdict(enum.Enum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "about the same"
    NEITHER = "neither is better"  # or one of the two does not know it


def of_itself(value: float, report: Report) -> float:
    return SAME * abs(value)


def of_share(value: float, report: Report) -> float:
    return SAME_SHARE


def of_requests(value: float, report: Report) -> float:
    return SAME_SHARE * report["requests"]


def of_latency(name: str) -> Callable[[float, Report], float]:
    """`name`: mean, p50, p99 ..."""
    tail = name.startswith("p") and float(name[1:]) >= 90
    return lambda value, report: (SAME_TAIL if tail else SAME) * value


class Row(NamedTuple):
    """One figure in a comparison."""

    label: str
    read: Callable[[Report], float | None]
    form: Callable[[float], str]
    better: Callable | None = None  # min or max; None: neither is better
    least: Callable[[float, Report], float] = of_itself  # the smallest difference that is no noise
    said: str = ""  # what it is called in a sentence, where that is not its label


def judged(row: Row, report: Report, base: Report) -> Verdict:
    """Return what became of one figure since `base`.

    With three seeds or more on both sides a difference counts where the ranges over the seeds do not overlap: of 3 and
    3 seeds of one and the same thing one pair in ten is so far apart, of 5 and 5 one in 126. With fewer it counts from
    a fixed part of the figure on.
    """
    new, old = seeds.mean(report, row.read), seeds.mean(base, row.read)
    if row.better is None or new is None or old is None:
        return Verdict.NEITHER
    if not _differ(row, report, base, new, old):
        return Verdict.SAME
    return Verdict.BETTER if row.better((new, old)) == new else Verdict.WORSE


def _differ(row: Row, report: Report, base: Report, new: float, old: float) -> bool:
    news, olds = seeds.each(report, row.read), seeds.each(base, row.read)
    if min(len(news), len(olds)) < ENOUGH_SEEDS:
        return abs(new - old) > row.least(old, base)
    return (max(news) < min(olds) or max(olds) < min(news)) and abs(new - old) > min(
        _LEAST * abs(old), row.least(old, base)
    )
