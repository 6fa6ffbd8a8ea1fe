"""Decide whether two values of a figure differ by more than repeated runs of the same setup do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from loadgen.report import seeds
from loadgen.report.summary import Report

ENOUGH_SEEDS = 3  # with this many, the range over the seeds measures the noise
# Differences up to these are noise between single runs:
SAME = 0.05  # as a share of the figure
SAME_TAIL = 0.2  # as a share of the figure, for percentiles from p90 on, which depend on few requests
SAME_SHARE = 0.01  # absolute, for shares of all tokens or requests: one percentage point
_LEAST = 0.01  # as a share of the figure: smaller differences do not matter, however certain they are


class Verdict(enum.Enum):
    """The outcome of comparing one figure of two reports; the values are words for tables."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "about the same"
    NEITHER = "neither is better"  # no direction is better, or the figure is missing in one report


def of_itself(value: float, report: Report) -> float:
    """Return the largest difference that counts as noise for most figures: a fixed share (SAME) of the `value`."""
    return SAME * abs(value)


def of_share(value: float, report: Report) -> float:
    """Return the largest difference that counts as noise for a share of tokens or requests: one percentage point."""
    return SAME_SHARE


class Row(NamedTuple):
    """A figure by which reports are compared: one row of the comparison's table."""

    label: str
    read: Callable[[Report], float | None]  # takes the figure from a report
    form: Callable[[float], str]  # writes the figure as text
    better: Callable | None = None  # min or max, whichever value is better; None: neither
    least: Callable[[float, Report], float] = of_itself  # (figure, report) -> the largest difference that is noise
    said: str = ""  # its name in a sentence, if other than the label


def judged(row: Row, report: Report, base: Report) -> Verdict:
    """Compare one figure of `report` with that of `base`, and return the verdict on `report`.

    With at least three seeds in both reports, the figures differ if their ranges over the seeds do not overlap. Two
    equal setups look different in one of ten comparisons with 3 seeds each, and in one of 126 with 5. With fewer seeds,
    the figures differ if the difference is above `row.least`. The verdict is NEITHER if a report lacks the figure.
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
