"""Several seeds of one load put together: the mean of every figure, and how far the seeds are apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from loadgen.report.summary import Records, Report, Reports

_ADDED = ("errors",)  # counted over all seeds


def merged(reports: Sequence[Report]) -> Report:
    """Return one report with the means, and the reports it was made of under `by_seed`; a single one as it is."""
    if len(reports) == 1:
        return reports[0]
    made = _mean(reports)
    for key in _ADDED:
        made[key] = dict(sum((Counter(report[key]) for report in reports), Counter()))
    return {**made, "by_seed": list(reports)}


def _mean(values: Sequence[object]) -> object:
    """Numbers become their mean, tables go key by key, of anything else the first is taken."""
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
    """What the requests of one seed are called in files where there are several."""
    return name if seeds == 1 else f"{name}, seed {seed}"


def first(reports: Reports, records: Records, seed: int) -> Records:
    """The records of each target under its first seed."""
    return {name: records.get(name, records.get(label(name, seed, 2), ())) for name in reports}


def each(report: Report, read: Callable[[Report], float | None]) -> list[float]:
    """What `read` finds in the report of each seed that knows it; of a single run its one value."""
    values = [read(one) for one in report.get("by_seed") or [report]]
    return [value for value in values if value is not None]


def mean(report: Report, read: Callable[[Report], float | None]) -> float | None:
    """The mean over the seeds that know it; of a single run its one value."""
    values = each(report, read)
    return sum(values) / len(values) if values else None
