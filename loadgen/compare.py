"""`loadgen compare`: the same seed against several URLs, or against a fresh gateway per policy."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from rich.console import Console

import policies
from loadgen import options
from loadgen.drive import engines, target
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.stack import Stack
from loadgen.report import comparison, files, show
from loadgen.report.summary import Report, setting, summarise
from loadgen.run import ask, check
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to compare")
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--target",
        nargs="+",
        metavar="NAME=URL",
        help="servers or gateways, each with engines of its own, else the second finds the first's cache warm",
    )
    either.add_argument(
        "--policies",
        type=partial(options.names, known=policies.NAMES),
        metavar="A,B",
        help="start `hitherto serve` once per policy, engines fresh each time",
    )
    options.flags(
        group,
        ("--launch", options.whole, "N", 4, "with --policies: engines (default %(default)s)"),
        ("--profile", str, "NAME", "sim", "with --policies: launch profile, name or file (default %(default)s)"),
    )  # fmt: skip
    target.add_asking(group)
    datasets.add_workload(parser)
    files.add_report(parser)


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
    check(args)
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
                reports[policy], records[policy] = await measure(
                    args, console, work, policy, stack.base_url, stack.admin
                )
    comparison.print_comparison(console, reports)
    console.print(
        "\n[dim]Single runs differ by some percent; --seed N gives other conversations, --json FILE all figures.[/]"
    )
    about = {
        "void": comparison.void_because(reports),
        "workload": datasets.describe(args, work),
        "setting": setting(["loadgen", *sys.argv[1:]], args.seed),
    }
    files.write(args, {"targets": reports, **about}, reports, records, console, about)
    return 0 if all(report["completed"] for report in reports.values()) else 1


async def measure(
    args: argparse.Namespace, console: Console, work: Workload, name: str, url: str, admin: Client | None
) -> tuple[Report, list[Record]]:
    """One target's report and records, with the engines' own counters where an admin side lists engines."""
    client = Client(url, target.headers(args), args.timeout)
    asking = target.asking(args, await target.model_of(client, args.model))
    before = await engines.cache_counts(admin) if admin else {}
    load = await ask(args, console, work, client, asking, name)
    counted = engines.between(before, await engines.cache_counts(admin)) if admin else None
    client.close()
    return {"target": url, "model": asking.model, **summarise(load, files.slo(args)), "engines": counted}, load.done
