"""`loadgen diff A.json B.json`: what got better and what got worse from one file of figures to another.

Exit codes: 0 if nothing got worse, 1 if something did or the two cannot be compared, 2 if a file cannot be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.options import BadInput, flags
from loadgen.report import comparison, files, noise, seeds, show
from loadgen.report.noise import Verdict
from loadgen.report.summary import PERCENTILES, Report, Reports, percentile_name
from loadgen.report.tables import Cell, Grid, drawn

_LOOKS = {Verdict.BETTER: "better", Verdict.WORSE: "worse", Verdict.SAME: "soft", Verdict.NEITHER: ""}
# Fields of a workload that depend on its seed, so that `differences` does not compare them.
_PASSED_OVER = ("seed", "notes", "conversations", "last_start_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="A.json", help="what `loadgen ... --json` wrote first")
    parser.add_argument("new", type=Path, metavar="B.json", help="what it wrote later")
    flags(parser, ("--json", Path, "FILE", None, "write verdicts and figures (- for stdout)"))


def read(path: Path) -> Mapping[str, object]:
    """Return the figures that `--json` wrote to this file. Raises BadInput if it is unreadable or has no figures."""
    try:
        figures = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = getattr(error, "strerror", None) or f"not JSON: {error}"
        raise BadInput(f"{path}: {why}. Name two files that --json wrote") from None
    if not isinstance(figures, dict) or not reports_of(figures):
        verbs = "`loadgen run`, `compare`, `simulate` or `sweep`"
        raise BadInput(f"{path}: it has no figures of {verbs}. Name two files that --json wrote")
    return figures


def reports_of(figures: Mapping[str, object]) -> Reports:
    """Return the reports in the figures of one file, by target, policy or request rate.

    A file of `loadgen run` has a single report, whose name is "".
    """
    if "ttft_ms" in figures:
        found = {"": figures}
    elif isinstance(sweep := figures.get("sweep"), dict):
        found = {f"{step['rate']:.4g}/s": step["report"] for step in sweep["steps"]}
    else:
        found = figures.get("targets") or {}
    usual = [percentile_name(one) for one in PERCENTILES]
    return {name: {"percentiles": usual, **report} for name, report in found.items()}


def pairs(args: argparse.Namespace, old: Reports, new: Reports) -> Iterator[tuple[str, Report, Report]]:
    """Yield (name, old report, new report) for each target, policy or rate that both files have.

    If each file has one report, the two are compared whatever their names. Raises BadInput if the files have no name in
    common.
    """
    if len(old) == len(new) == 1:
        (before, was), (after, now) = *old.items(), *new.items()
        yield (before if before == after else f"{before or args.old} → {after or args.new}"), was, now
        return
    if not old.keys() & new.keys():
        there = " and ".join(
            f"{path} has {', '.join(of) or 'one run'}" for path, of in ((args.old, old), (args.new, new))
        )
        raise BadInput(f"{there}: nothing to compare")
    for name in old:
        if name in new:
            yield name, old[name], new[name]


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return phrases on the settings in which the two files differ: workload, simulated fleet, seeds and machine."""
    compared = [[one.get(part) or {} for one in (old, new)] for part in ("workload", "fleet")]
    compared = [[{key: one[key] for key in one if key not in _PASSED_OVER} for one in pair] for pair in compared]
    settings = [{"seeds": 1, **(one.get("setting") or {})} for one in (old, new)]
    compared.append([{key: one.get(key) for key in ("seed", "seeds", "machine")} for one in settings])
    found = []
    for was, now in compared:
        for key in dict.fromkeys((*was, *now)):
            a, b = was.get(key), now.get(key)
            if a is None or b is None:  # kinds of load and fleet have different settings
                found += [] if a == b else [f"{key} {b if a is None else a} in {'B' if a is None else 'A'} alone"]
            elif a != b:
                found.append(f"{key} {a} → {b}")
    return found


def table(old: Report, new: Report, void: str | None = None) -> Table:
    """Return a table with a row per figure: its values in A (`old`) and B (`new`), the verdict on B, and the change.

    `void`: why the two reports cannot be compared, or None; verdicts are shown only if it is None.
    """
    rows = []
    for row in show.rows_of({"": new}):
        was, now = seeds.mean(old, row.read), seeds.mean(new, row.read)
        if was is None and now is None:
            continue
        verdict = noise.judged(row, new, old)
        change = "" if was is None or now is None else comparison.change(row, was, now)
        judged = "" if void or verdict is Verdict.NEITHER else verdict.value
        said = f"{judged} ({change})" if judged and change else judged or change
        values = (Cell(show.written(report, row.read, row.form)) for report in (old, new))
        rows.append([Cell(row.label), *values, Cell(said, _LOOKS[verdict] if judged else "")])
    return drawn(Grid(("", "A", "B", "B against A"), rows))


def verdict_of(found: Mapping[Verdict, Sequence[str]]) -> str:
    """Return the verdict on all figures as a sentence with the numbers of better, worse and unchanged figures.

    `found`: by verdict, a phrase for each figure with that verdict.
    """
    worse, better = found[Verdict.WORSE], found[Verdict.BETTER]
    kind = "Mixed" if worse and better else "Worse" if worse else "Better" if better else "No difference beyond noise"
    return f"{kind}: {comparison.counted(found)}."


async def diff_verb(args: argparse.Namespace, console: Console) -> int:
    files.check_writable(args.json)
    old, new = read(args.old), read(args.new)
    console.print(f"[dim]A is {args.old}, B is {args.new}[/]")
    if unlike := differences(old, new):
        console.print(Text(f"They were made differently: {'; '.join(unlike)}.", "yellow"), soft_wrap=True)
    written: dict[str, dict[str, object]] = {}
    sure, bad = "", False
    for name, was, now in list(pairs(args, reports_of(old), reports_of(new))):
        void = comparison.void_because({"A": was, "B": now})
        changes = {} if void else comparison.changes(now, was)
        said = f"{name}: " if name else ""
        said += f"This comparison is void: {void}." if void else verdict_of(changes)
        console.print(table(was, now, void))
        console.print(Text(said, "bold red" if void else "bold"), soft_wrap=True)
        for verdict in (Verdict.WORSE, Verdict.BETTER):
            if changes.get(verdict):
                console.print(show.bullets([f"{verdict.value}: {comparison.largest(changes[verdict])}"]))
        known = {one.value: changes[one] for one in _LOOKS if changes.get(one)}
        written[name] = {"verdict": said, "void": void, **known}
        bad |= bool(void or changes[Verdict.WORSE])
        sure = sure or ("" if void else comparison.how_sure({"A": was, "B": now}))
    if sure:
        console.print(f"\n[dim]{sure}[/]")
    files.write_json(args.json, {"different": unlike, "targets": written}, console)
    return int(bad)
