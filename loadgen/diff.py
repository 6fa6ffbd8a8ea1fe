"""`loadgen diff A.json B.json`: what got better and what got worse from one file of figures to another.

Exit codes: 0 if nothing got worse, 1 if something did or the two cannot be compared, 2 if a file cannot be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson
from rich.console import Console
from rich.text import Text

from loadgen.options import BadInput, flags
from loadgen.report import comparison, files, noise, seeds, show
from loadgen.report.noise import Verdict
from loadgen.report.summary import PERCENTILES, Report, Reports, percentile_name
from loadgen.report.tables import Cell, Fitting, Grid, fitted

_LOOKS = {Verdict.BETTER: "better", Verdict.WORSE: "worse", Verdict.SAME: "soft", Verdict.NEITHER: ""}
_PASSED_OVER = ("seed", "notes", "conversations", "last_start_s")  # workload fields that depend on the seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="A.json", help="what `loadgen ... --json` wrote first")
    parser.add_argument("new", type=Path, metavar="B.json", help="what it wrote later")
    flags(parser, ("--json", Path, "FILE", None, "write verdicts and figures (- for stdout)"))


def read(path: Path) -> Mapping[str, object]:
    """Return the figures in the file. Raises BadInput."""
    try:
        figures = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = getattr(error, "strerror", None) or f"not JSON: {error}"
        raise BadInput(f"{path}: {why}. Name two files that --json wrote") from None
    if not isinstance(figures, dict) or not reports_of(figures):
        raise BadInput(
            f"{path}: it has no figures of `loadgen run`, `compare`, `simulate` or `sweep`. Name two files that --json wrote"
        )
    return figures


def reports_of(figures: Mapping[str, object]) -> Reports:
    """Return the reports by target, policy or rate; the report of a single run has the empty name."""
    if "ttft_ms" in figures:
        found = {"": figures}
    elif isinstance(sweep := figures.get("sweep"), dict):
        found = {f"{step['rate']:.4g}/s": step["report"] for step in sweep["steps"]}
    else:
        found = figures.get("targets") or {}
    usual = [percentile_name(one) for one in PERCENTILES]
    return {name: {"percentiles": usual, **report} for name, report in found.items()}


def pairs(args: argparse.Namespace, old: Reports, new: Reports) -> Iterator[tuple[str, Report, Report]]:
    """Yield the name and both reports of each target that both files have.

    Where each file has one report, the two are compared whatever their names. Raises BadInput if nothing is common.
    """
    if len(old) == len(new) == 1:
        (before, was), (after, now) = *old.items(), *new.items()
        yield (before if before == after else f"{before or args.old} → {after or args.new}"), was, now
        return
    common = [name for name in old if name in new]
    if not common:
        raise BadInput(
            f"{args.old} has {', '.join(old) or 'one run'} and {args.new} has {', '.join(new) or 'one run'}: nothing to compare"
        )
    for name in common:
        yield name, old[name], new[name]


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return the settings in which the two files differ, apart from the target."""
    found = []
    for part in ("workload", "fleet"):
        was, now = old.get(part) or {}, new.get(part) or {}
        for key in dict.fromkeys((*was, *now)):
            if key not in _PASSED_OVER and was.get(key) != now.get(key):
                found.append(_difference(key, was.get(key), now.get(key)))
    was, now = ({"seeds": 1, **(one.get("setting") or {})} for one in (old, new))
    found += [
        _difference(key, was.get(key), now.get(key))
        for key in ("seed", "seeds", "machine")
        if was.get(key) != now.get(key)
    ]
    return found


def _difference(key: str, was: object, now: object) -> str:
    """Describe one differing setting; loads and fleets have different keys, so one side may lack it."""
    if was is None or now is None:
        return f"{key} {now if was is None else was} in {'B' if was is None else 'A'} alone"
    return f"{key} {was} → {now}"


def table(old: Report, new: Report, void: str | None = None) -> Fitting:
    """Return a table with a row per figure: its values in A (`old`) and B (`new`), the verdict on B, and the change.

    `void`: why the two cannot be compared; no verdicts are shown then.
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
    return fitted(Grid(("", "A", "B", "B against A"), rows), "by_seed" in old or "by_seed" in new)


def verdict_of(name: str, old: Report, new: Report, void: str | None) -> tuple[str, dict[Verdict, list[str]]]:
    """Return the verdict in a sentence, and phrases on figures by verdict (none if `void` says why not to compare)."""
    if void:
        return f"{name}{': ' if name else ''}This comparison is void: {void}.", {verdict: [] for verdict in Verdict}
    found = comparison.changes(new, old)
    worse, better, count = found[Verdict.WORSE], found[Verdict.BETTER], comparison.counted(found)
    if worse and better:
        said = f"Mixed: {count}."
    elif worse:
        said = f"Worse: {count}."
    else:
        said = f"Better: {count}." if better else f"No difference beyond noise: {count}."
    return (f"{name}: {said}" if name else said), found


async def diff_verb(args: argparse.Namespace, console: Console) -> int:
    files.check_writable(args.json)
    old, new = read(args.old), read(args.new)
    console.print(f"[dim]A is {args.old}, B is {args.new}[/]")
    if unlike := differences(old, new):
        console.print(Text(f"They were made differently: {'; '.join(unlike)}.", "yellow"), soft_wrap=True)
    written: dict[str, dict[str, object]] = {}
    found = list(pairs(args, reports_of(old), reports_of(new)))
    bad = False
    for name, was, now in found:
        void = comparison.void_because({"A": was, "B": now})
        console.print(table(was, now, void))
        said, changes = verdict_of(name, was, now, void)
        console.print(Text(said, "bold red" if void else "bold"), soft_wrap=True)
        for verdict in (Verdict.WORSE, Verdict.BETTER):
            if changes[verdict]:
                console.print(show.bullets([f"{verdict.value}: {comparison.largest(changes[verdict])}"]))
        written[name] = {"verdict": said, "void": void, **{one.value: changes[one] for one in _LOOKS if changes[one]}}
        bad |= bool(void or changes[Verdict.WORSE])
    sure = [(was, now) for name, was, now in found if not written[name]["void"]]
    if sure:
        console.print(f"\n[dim]{comparison.how_sure(dict(zip('AB', sure[0])))}[/]")
    files.write_json(args.json, {"different": unlike, "targets": written}, console)
    return int(bad)
