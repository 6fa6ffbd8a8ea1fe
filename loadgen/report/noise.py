"""The decision whether two figures differ by more than repeated runs of the same setup do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from loadgen.report import seeds
from loadgen.report.summary import Report

ENOUGH_SEEDS = 3  # with this many, the range over the seeds measures the noise
SAME = 0.05  # of a figure: smaller differences between single runs are noise
SAME_TAIL = 0.2  # of a percentile from p90 on, which few requests make
SAME_SHARE = 0.01  # of all tokens or requests
_LEAST = 0.01  # of a figure: smaller differences do not matter, however certain


class Verdict(enum.Enum):
    """The outcome of comparing one figure of two reports; the values are words for tables."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "about the same"
    NEITHER = "neither is better"  # or the figure is missing on one side


def of_itself(value: float, report: Report) -> float:
    """Return the difference that counts as noise for a figure that varies in proportion to its value."""
    return SAME * abs(value)


def of_share(value: float, report: Report) -> float:
    """Return the difference that counts as noise for a share of tokens or requests."""
    return SAME_SHARE


class Row(NamedTuple):
    """A figure in a comparison: a row of its table."""

    label: str
    read: Callable[[Report], float | None]  # takes the figure from a report
    form: Callable[[float], str]  # writes it
    better: Callable | None = None  # min or max; None: neither less nor more is better
    least: Callable[[float, Report], float] = of_itself  # larger differences are no noise
    said: str = ""  # its name in a sentence, if other than the label


def judged(row: Row, report: Report, base: Report) -> Verdict:
    """Return the verdict on one figure against `base`.

    With at least three seeds on both sides, a difference counts if the ranges over the seeds do not overlap: with equal
    setups this happens for one pair in ten with 3 seeds each, and for one in 126 with 5. With fewer seeds, a difference
    counts if it is above `row.least`.
    """
    new, old = seeds.mean(report, row.read), seeds.mean(base, row.read)
    if row.better is None or new is None or old is None:
        return Verdict.NEITHER
    news, olds = seeds.each(report, row.read), seeds.each(base, row.read)
    least, apart = row.least(old, base), True
    if min(len(news), len(olds)) >= ENOUGH_SEEDS:
        least, apart = min(_LEAST * abs(old), least), max(news) < min(olds) or max(olds) < min(news)
    if not apart or abs(new - old) <= least:
        return Verdict.SAME
    return Verdict.BETTER if row.better((new, old)) == new else Verdict.WORSE
