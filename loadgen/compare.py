"""`loadgen compare`: send the same load to several URLs, or to a fresh gateway and fresh engines per policy."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product

from rich.console import Console

import policies
from loadgen import options
from loadgen.drive import engines, target
from loadgen.drive.client import BadURL, Client
from loadgen.drive.stack import Stack
from loadgen.report import files
from loadgen.report.summary import exit_code, now, setting
from loadgen.run import Measured, check, until_interrupted
from loadgen.workload import datasets


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
        "--policy",
        type=partial(options.names, known=policies.NAMES),
        metavar="A,B",
        help=f"start `hitherto serve` once per policy, engines fresh each time; {policies.FORM} is one of your own",
    )
    options.flags(
        group,
        ("--launch", options.whole, "N", 4, "with --policies: engines (default %(default)s)"),
        ("--profile", str, "NAME", "sim", "with --policies: launch profile, name or file (default %(default)s)"),
    )  # fmt: skip
    target.add_asking(group)
    datasets.add_workload(parser)
    datasets.add_seeds(parser)
    files.add_report(parser)


def targets(args: argparse.Namespace) -> dict[str, str]:
    """Return the URLs by name from `--target NAME=URL ...`. Raises BadOption for a malformed or repeated one."""
    found: dict[str, str] = {}
    for item in args.target:
        name, equals, url = item.partition("=")
        if not equals or not name or not url:
            raise options.BadOption(f"--target {item!r}: expected NAME=URL")
        if name in found:
            raise options.BadOption(f"--target {name!r} is given twice")
        try:
            Client(url)  # raises for a bad URL, before anything is sent
        except BadURL as error:
            raise options.BadOption(f"--target {name}: {error}") from None
        found[name] = url
    return found


async def compare_verb(args: argparse.Namespace, console: Console) -> int:
    check(args)
    began, urls = now(), targets(args) if args.target else dict.fromkeys(args.policies)
    found = {name: Measured(name) for name in urls}
    with until_interrupted(console):
        for name, (seed, one) in product(urls, enumerate(datasets.of_seeds(args))):
            if url := urls[name]:
                await measure(one, console, found[name], url, None, seed)
            else:
                console.print(f"[dim]{name}: starting {args.launch} engine{'s' * (args.launch > 1)} and a gateway …[/]")
                async with Stack(name, args.launch, args.profile) as stack:
                    await measure(one, console, found[name], stack.base_url, stack.admin, seed)
            if found[name].interrupted:
                break
    reports = {name: one.report for name, one in found.items() if one.reports}
    if not reports:
        return options.INTERRUPTED
    about = {
        "workload": next(iter(found.values())).workload,
        "setting": setting(["loadgen", *sys.argv[1:]], args.seed, args.seeds, began),
    }
    records = {label: done for one in found.values() for label, done in one.records.items()}
    files.conclude(args, reports, records, console, about)
    return exit_code(reports.values(), sum(len(one.reports) for one in found.values()) == len(urls) * args.seeds)


async def measure(
    args: argparse.Namespace, console: Console, found: Measured, url: str, admin: Client | None, seed: int
) -> None:
    """Send the load with one seed to the target at `url`, and add its report and records to `found`.

    `args.seed`: value of the seed; `seed`: its position among the seeds to run, from 0. `admin`: a client of the
    gateway's admin API; None for a target that the user named by its URL. With a client, the report's `engines` has the
    change of the engines' own prefix-cache counters during the run.
    """
    client = Client(url, target.headers(args), args.timeout)
    before = await engines.cache_counts(admin) if admin else {}
    names = [str(item["id"]) for item in await engines.replicas(admin)] if admin else []
    await found.ask(args, console, client, seed, names)
    counted = engines.between(before, await engines.cache_counts(admin)) if admin else None
    client.close()
    found.reports[-1]["engines"] = counted
