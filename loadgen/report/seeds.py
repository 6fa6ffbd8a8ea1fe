"""Merge the reports of one load with several seeds: the mean of every figure, and its range over the seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from loadgen.report.summary import Records, Report, Reports


def merged(reports: Sequence[Report]) -> Report:
    """Return one report with the mean of every figure and the sum of the errors of each kind.

    It has the original reports under `by_seed`. A single report is returned as it is.
    """
    if len(reports) == 1:
        return reports[0]
    errors = dict(sum((Counter(report["errors"]) for report in reports), Counter()))
    return {**_mean(reports), "errors": errors, "by_seed": list(reports)}


def _mean(values: Sequence[object]) -> object:
    """Merge the values of one figure from several reports; None if all of them are None.

    Numbers are merged to their mean, booleans to whether any is true, dictionaries key by key. Of other values the
    first one is taken. Values that are None are left out.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        keys = dict.fromkeys(key for value in known for key in value)
        return {key: _mean([value.get(key) for value in known]) for key in keys}
    if isinstance(known[0], bool):
        return any(known)
    if not isinstance(known[0], (int, float)) or len(set(known)) == 1:
        return known[0]
    return round(sum(known) / len(known), 6)


def label(name: str, seed: int, seeds: int) -> str:
    """Return the name of a target's requests with seed `seed` in report files, or `name` alone if `seeds` is 1."""
    return name if seeds == 1 else f"{name}, seed {seed}"


def first(reports: Reports, records: Records, seed: int) -> Records:
    """Return the records of each target's run with the first seed, whose value is `seed`."""
    return {name: records.get(name, records.get(label(name, seed, 2), ())) for name in reports}


def each(report: Report, read: Callable[[Report], float | None]) -> list[float]:
    """Return the figure that `read` takes from the report of each seed, without seeds that lack it.

    The report of a single run gives one value.
    """
    values = [read(one) for one in report.get("by_seed") or [report]]
    return [value for value in values if value is not None]


def mean(report: Report, read: Callable[[Report], float | None]) -> float | None:
    """Return the mean over the seeds of the figure that `read` takes from a report; None if no seed has it."""
    values = each(report, read)
    return sum(values) / len(values) if values else None
