"""Report files and their flags: JSON figures, an HTML page, and a CSV line per request.

All files are made from two dictionaries whose keys are the targets or policies: one has their reports (made by
`summary.summarise`), the other the records of their requests, measured or simulated.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Mapping
from pathlib import Path

import orjson
from rich.console import Console

from loadgen.options import BadOption, flags, percentiles
from loadgen.report import comparison
from loadgen.report.summary import PERCENTILES, Records, Reports, began, parse_slo

COLUMNS = tuple(
    """
    target conversation turn due_s sent_s lateness_ms ttft_ms tpot_ms e2el_ms prompt_tokens output_tokens cached_tokens
    predicted_tokens replica status error
    """.split()
)


def add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--slo",
        "--goodput",
        nargs="+",
        metavar="LIMIT",
        help="e.g. ttft:500ms,tpot:50ms: count what meets it (milliseconds where there is no unit)",
    )
    flags(
        group,
        ("--percentiles --metric-percentiles", percentiles, "P,P", list(PERCENTILES), "percentiles of the latencies in tables (default 50,90,99)"),
        ("--json --result-filename", Path, "FILE", None, "write all figures (- for stdout)"),
        ("--html", Path, "FILE", None, "write a page with tables, and with plots where there is matplotlib (pip install 'hitherto[plots]')"),
        ("--csv", Path, "FILE", None, "write a line per request"),
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Check, before a run, the --slo flag and that all report files can be written. Raises BadOption."""
    slo(args)
    for kind in ("json", "html", "csv"):
        check_writable(getattr(args, kind), f"--{kind}")


def slo(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the limits of the flag --slo in milliseconds, or None without the flag. Raises BadOption."""
    try:
        return parse_slo(" ".join(args.slo)) if args.slo else None
    except BadOption as error:
        raise BadOption(f"--slo: {error}") from None


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """Check that the file `path`, given by `flag`, can be written; None and "-" always can. Raises BadOption."""
    if path is None or str(path) == "-":
        return
    real = Path(os.path.realpath(path))  # still a symbolic link only if links form a loop
    usable = real.parent.is_dir() and not (real.is_symlink() or path.is_dir())
    if not usable or not os.access(path if path.exists() else real.parent, os.W_OK):
        raise BadOption(f"{flag} {path}: can't be written; name a file in a folder that exists")


def write_json(path: Path | None, report: object, console: Console) -> None:
    if path is None:
        return
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"
    if str(path) == "-":
        os.write(1, data)
        return
    path.write_bytes(data)
    console.print(f"[dim]figures written to {path}[/]")


def write(
    args: argparse.Namespace,
    figures: object,
    reports: Reports,
    records: Records,
    console: Console,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write the files that the flags ask for: JSON of `figures`, HTML of the reports and records, CSV of the records.

    `about`: entries that the HTML page needs and the reports do not have, such as `setting` and `workload` (see
    `page`).
    """
    write_json(args.json, figures, console)
    if args.html:
        from loadgen.report.page import page  # only a page needs Jinja

        args.html.write_text(page(reports, records, about or {}), encoding="utf-8")
    if args.csv:
        write_csv(args.csv, records)
    for what, path in (("page", args.html), ("requests", args.csv)):
        if path:
            console.print(f"[dim]{what} written to {path}[/]")


def conclude(
    args: argparse.Namespace, reports: Reports, records: Records, console: Console, about: Mapping[str, object]
) -> None:
    """Print the comparison of targets measured under the same load, and write the files that the flags ask for.

    `about`: further entries of the JSON figures, such as `setting` and `workload`.
    """
    comparison.print_comparison(console, reports)
    about = {"void": comparison.void_because(reports), **about}
    write(args, {"targets": reports, **about}, reports, records, console, about)


def write_csv(path: Path, records: Records) -> None:
    """Write a line per request in the order of sending; unknown values are empty."""

    def milliseconds(value: float | None) -> float | None:
        return None if value is None else round(value * 1000, 3)

    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name, done in records.items():
            zero = began(done)
            for one in sorted(done, key=lambda record: (record.sent, record.due)):
                at = round(one.due - zero, 6), round(one.sent - zero, 6)
                times = one.lateness, one.ttft, one.tpot if one.error is None else None, one.e2e
                counts = one.prompt_tokens, one.outputs, one.cached_tokens, one.predicted_tokens
                end = one.replica, one.status or None, one.error
                table.writerow((name, one.conversation, one.turn, *at, *map(milliseconds, times), *counts, *end))
