"""Compare two reports in plain sentences, on the figures that got worse as well as on those that got better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console

from loadgen.report import noise, rates, seeds, show
from loadgen.report.noise import Row, Verdict
from loadgen.report.summary import Report, Reports
from loadgen.report.tables import drawn

_NAMED = 3  # changed figures that a sentence names; the table has all of them


def comparison(name: str, report: Report, base_name: str, base: Report) -> list[str]:
    """Return sentences on the figures that are worse and better with one target than with another.

    The last sentence counts all changes. `name`, `report`: the target to judge; `base_name`, `base`: the target to
    compare it with. If the two did not answer the same requests, the only sentence says so.
    """
    if void_because({base_name: base, name: report}):
        said = f"{name} cannot be compared with {base_name}: they did not answer the same requests"
        if report["failed"] or base["failed"]:
            said += f", and {report['failed']:,.0f} failed with {name}, {base['failed']:,.0f} with {base_name}"
        return [f"{said}."]
    found = changes(report, base)
    return [
        f"Worse with {name} than with {base_name}: {largest(found[Verdict.WORSE])}.",
        *([f"Better with {name}: {largest(found[Verdict.BETTER])}."] if found[Verdict.BETTER] else []),
        f"{name} against {base_name}: {counted(found)}.",
    ]


def largest(changed: Sequence[str]) -> str:
    """Join the first three phrases, and append how many more there are; "nothing" if there are none.

    `changed`: phrases on figures that changed, largest changes first.
    """
    more = len(changed) - _NAMED
    return "; ".join((*changed[:_NAMED], *([f"{more} more in the table"] if more > 0 else ()))) or "nothing"


def counted(found: Mapping[Verdict, Sequence[str]]) -> str:
    """Return how many figures got better, got worse and stayed the same, as a phrase."""
    return ", ".join(f"{len(found[one])} {one.value}" for one in (Verdict.BETTER, Verdict.WORSE, Verdict.SAME))


def changes(report: Report, base: Report) -> dict[Verdict, list[str]]:
    """Return phrases that compare the figures of `report` with those of `base`, by verdict, largest changes first.

    Figures for which neither a higher nor a lower value is better are left out. The size of a change is the ratio of
    the two values, infinite if one of them is 0. Two times that would be printed alike get more digits.
    """
    found: dict[Verdict, list[tuple[float, str]]] = {verdict: [] for verdict in Verdict}
    for row in show.rows_of({"": report}):
        verdict = noise.judged(row, report, base)
        if verdict is Verdict.NEITHER:
            continue
        new, old = seeds.mean(report, row.read), seeds.mean(base, row.read)
        much = f" ({change(row, old, new)})" if change(row, old, new) else ""
        ratio = max(new, old) / min(new, old) if min(new, old) > 0 else math.inf
        now, was = row.form(new), row.form(old)
        if now == was and new != old and row.form is show.milliseconds:  # they would be printed alike
            now, was = f"{new:,.2f} ms", f"{old:,.2f} ms"
        found[verdict].append((ratio, f"{row.said or row.label} {now} instead of {was}{much}"))
    return {
        verdict: [said for _, said in sorted(changed, key=lambda one: -one[0])] for verdict, changed in found.items()
    }


def change(row: Row, old: float, new: float) -> str:
    """Return in words by how much a figure changed from `old` to `new`.

    The change of a share is in percentage points, computed from the rounded values that are shown. The change of
    another figure is in percent, or "" if `old` is 0.
    """
    if row.form is show.percent:
        return f"{_signed(round(new * 100, 1) - round(old * 100, 1), 1)} points"
    return f"{_signed((new - old) / old * 100, 0)} %" if old else ""


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}" if round(value, digits) else "0"


def void_because(reports: Reports) -> str | None:
    """Return why the targets' figures cannot be compared, or None.

    Each target's figures describe the requests it answered, so the targets must have answered the same requests. Their
    numbers of answered requests may differ by 1 % of the requests: this moves no figure noticeably, and the errors are
    in the report. If the user interrupted a run, the result is None.
    """
    if any(report["interrupted"] for report in reports.values()):
        return None
    answered = {name: report["completed"] for name, report in reports.items()}
    if max(answered.values()) - min(answered.values()) <= 0.01 * max(report["requests"] for report in reports.values()):
        return None
    return "the targets did not answer the same requests: " + ", ".join(
        f"{name} {count:,.0f} of {reports[name]['requests'] + reports[name]['not_sent']:,.0f}"
        for name, count in answered.items()
    )


def print_comparison(console: Console, reports: Reports) -> None:
    """Print the figures of targets measured under the same load, how they compare, and what went wrong."""
    print_table(console, reports)
    if void := void_because(reports):
        console.print(f"\n[bold red]This comparison is void:[/] {void}. The figures of each are of what it answered.")
    (base_name, base), *others = reports.items()
    for name, report in others:
        console.print()
        console.print(show.bullets(comparison(name, report, base_name, base)))
    if others:
        console.print(f"\n[dim]{how_sure(reports)}[/]")
    show.print_troubles(console, reports)


def print_table(console: Console, reports: Reports, rows: Sequence[Row] | None = None) -> None:
    """Print the targets' figures next to each other, and why each answered fewer requests a second than offered.

    `rows`: the figures to print (default: all).
    """
    console.print(drawn(show.compared(reports, rows)))
    same = len(offers := {rates.offered(report) for report in reports.values()}) == 1
    if same and offers != {""}:
        console.print(f"[dim]{offers.pop()}[/]")
    for name, report in reports.items():
        console.print(f"[dim]{name}: {rates.answered(report) if same else rates.rates(report)}[/]")


def how_sure(reports: Reports) -> str:
    """Return a sentence that says how large a difference must be to count as better or worse."""
    runs = min(len(report.get("by_seed") or [report]) for report in reports.values())
    if runs >= noise.ENOUGH_SEEDS:
        return f"Better and worse mean that the ranges over the seeds ({runs} each) do not overlap."
    return (
        f"With {'one run' if runs == 1 else f'{runs} seeds'} each, better and worse are differences above "
        f"{noise.SAME * 100:g} % ({noise.SAME_TAIL * 100:g} % from p90 on, one point of a share); "
        f"--seeds {noise.ENOUGH_SEEDS} or more measures the noise instead."
    )
