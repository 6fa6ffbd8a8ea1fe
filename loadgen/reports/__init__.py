"""Reports as files: a page and plots for people, a line per request for whoever computes on.

All come from the same two dictionaries by target or policy, its report (`report.summarise`) and its records, whether they
were measured or simulated. matplotlib, an extra of the project, is loaded only when something is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from loadgen.records import Record

Reports = Mapping[str, Mapping[str, object]]
Records = Mapping[str, Sequence[Record]]

COLUMNS = ("target", "conversation", "turn", "due_s", "sent_s", "lateness_ms", "ttft_ms", "tpot_ms", "e2el_ms", "prompt_tokens",
           "output_tokens", "cached_tokens", "predicted_tokens", "replica", "status", "error")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(reports: Reports, records: Records, about: Mapping[str, object], html: Path | None, png: Path | None) -> None:
    """Write the page, the sheet of plots, or both.

    `about` has the `setting` and the `workload`, of a sweep (`loadgen.sweep`) its `sweep`, of a plan (`loadgen.plan`) its `plan`;
    without the first two those of the first report are taken.
    """
    from loadgen.reports import fleets, page, plots  # matplotlib takes half a second, and may be missing

    about = {key: next(iter(reports.values())).get(key) for key in ("setting", "workload")} | dict(about)
    sweep, plan = about.get("sweep"), about.get("plan")
    drawn = plots.lines(reports, ordered=bool(sweep or plan))
    figures = plots.of_runs(reports, records, drawn)
    if sweep:
        figures = plots.of_sweep(sweep["steps"], sweep["slo_ms"], sweep["attainment"], sweep["rate"]) + figures[:1]
    title = _title(reports, about)
    if plan:
        figures = fleets.plots_of(plan["points"], plan["attainment"], drawn) + figures
    if html:
        html.write_text(page.page(title, reports, records, drawn, figures, about), encoding="utf-8")
    if png:
        plots.png(png, figures, drawn, title)


def _title(reports: Reports, about: Mapping[str, object]) -> str:
    load = (about.get("workload") or {}).get("dataset_name") or "load"
    if about.get("sweep"):
        return f"{load}: the highest rate that keeps the SLO"
    if about.get("plan"):
        return f"{load}: how many replicas keep the SLO"
    return f"{load}: {' against '.join(reports)}" if len(reports) < 3 else f"{load}: {len(reports)} side by side"


def began(records: Sequence[Record]) -> float:
    """The zero of a run's times: when its first request was due."""
    return min((record.due for record in records), default=0.0)


def write_csv(path: Path, records: Records) -> None:
    """A line per request in the order of sending; what is not known is left empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name, done in records.items():
            zero = began(done)
            table.writerows(_row(name, record, zero) for record in sorted(done, key=lambda record: (record.sent, record.due)))


def _row(name: str, record: Record, zero: float) -> tuple[object, ...]:
    failed = record.error is not None
    return (name, record.conversation, record.turn, _seconds(record.due - zero), _seconds(record.sent - zero),
            _milliseconds(record.lateness), _milliseconds(record.ttft), _milliseconds(None if failed else record.tpot),
            _milliseconds(record.e2e), record.prompt_tokens, record.outputs, record.cached_tokens, record.predicted_tokens,
            record.replica, record.status or None, record.error)


def _seconds(value: float) -> float:
    return round(value, 6)


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else round(value * 1000, 3)
