"""`loadgen compare`: the same seed against several URLs, or against a fresh gateway per policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial

from rich.console import Console

import policies
from loadgen import datasets, engines, options, show, words
from loadgen.client import Client
from loadgen.progress import watched
from loadgen.records import Record
from loadgen.report import setting, summarise
from loadgen.serving import load_of, model_of, stop_on_interrupt
from loadgen.stack import Stack
from loadgen.workloads import Workload

Report = Mapping[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to compare")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument("--target", nargs="+", metavar="NAME=URL",
                        help="servers or gateways, each with engines of its own, else the second finds the first's cache warm")
    either.add_argument("--policies", type=partial(options.names, known=policies.NAMES), metavar="A,B", help="start `hitherto serve` once per policy, engines fresh each time")
    group.add_argument("--launch", type=options.whole, default=4, metavar="N", help="with --policies: engines (default %(default)s)")
    group.add_argument("--profile", default="sim", metavar="NAME", help="with --policies: launch profile, name or file (default %(default)s)")
    options.add_asking(group)
    datasets.add_workload(parser)
    options.add_report(parser)


def targets(args: argparse.Namespace) -> dict[str, str]:
    """NAME=URL -> URL by name. Raises BadOption."""
    found: dict[str, str] = {}
    for item in args.target:
        name, equals, url = item.partition("=")
        if not equals or not name or not url:
            raise options.BadOption(f"--target {item!r}: expected NAME=URL")
        if name in found:
            raise options.BadOption(f"--target {name!r} is given twice")
        Client(url)  # raises BadURL before anything is sent
        found[name] = url
    return found


async def compare_verb(args: argparse.Namespace, console: Console) -> int:
    options.check(args)
    datasets.check(args)
    work = datasets.workload(args)
    show.print_notes(console, work.notes)
    reports: dict[str, Report] = {}
    records: dict[str, list[Record]] = {}
    if args.target:
        for name, url in targets(args).items():
            reports[name], records[name] = await measure(args, console, work, name, url, None)
    else:
        for policy in args.policies:
            console.print(f"[dim]{policy}: starting {args.launch} engines and a gateway …[/]")
            async with Stack(policy, args.launch, args.profile) as stack:
                reports[policy], records[policy] = await measure(args, console, work, policy, stack.base_url, stack.admin)
    console.print(show.comparison_table(reports))
    say_ratios(console, reports)
    say_troubles(console, reports)
    console.print("\n[dim]Single runs differ by some percent; --seed N gives other conversations, --json FILE all figures.[/]")
    about = {"void": void_because(reports), "workload": datasets.describe(args, work), "setting": setting(["loadgen", *sys.argv[1:]], args.seed)}
    options.write_json(args.json, {"targets": reports, **about}, console)
    options.write_reports(args, reports, records, console, about)
    return 0 if all(report["completed"] for report in reports.values()) else 1


async def measure(args: argparse.Namespace, console: Console, work: Workload, name: str, url: str,
                  admin: Client | None) -> tuple[Report, list[Record]]:
    """One target's report and records, with the engines' own counters where an admin side lists engines."""
    client = Client(url, options.headers(args), args.timeout)
    asking = datasets.asking(args, await model_of(client, args.model))
    before = await engines.cache_counts(admin) if admin else {}
    load = load_of(args, work, client, asking)
    stop_on_interrupt(load)
    await watched(load, console, name)
    counted = engines.between(before, await engines.cache_counts(admin)) if admin else None
    client.close()
    return {"target": url, "model": asking.model, **summarise(load, options.slo(args)), "engines": counted}, load.done


def say_troubles(console: Console, reports: Mapping[str, Report]) -> None:
    for name, report in reports.items():
        for trouble in filter(None, (show.errors(report), show.caution(report))):
            console.print(f"\n[bold]{name}[/]")
            console.print(trouble)


def void_because(reports: Mapping[str, Report]) -> str | None:
    """Return why the targets' figures cannot be compared, or None: their figures are of the requests that each answered.

    A difference of at most 1 % of the requests moves no figure that a single run can tell, and the errors are in the report. An
    interrupted run is cut where the user cut it, and says so itself.
    """
    if any(report["interrupted"] for report in reports.values()):
        return None
    answered = {name: report["completed"] for name, report in reports.items()}
    if max(answered.values()) - min(answered.values()) <= 0.01 * max(report["requests"] for report in reports.values()):
        return None
    return "the targets did not answer the same requests: " + ", ".join(
        f"{name} {count:,} of {reports[name]['requests'] + reports[name]['not_sent']:,}" for name, count in answered.items())


def say_ratios(console: Console, reports: Mapping[str, Report]) -> None:
    """Every later target in words against the first, and loudly if they did not do the same work."""
    if void := void_because(reports):
        console.print(f"\n[bold red]This comparison is void:[/] {void}. The figures of each are of what it answered.")
    (base_name, base), *others = reports.items()
    for name, report in others:
        console.print()
        console.print(show.bullets(words.comparison(name, report, base_name, base)))
