"""`loadgen run`: send one load to one server; the other commands share functions of this module."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from loadgen.drive import target
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import Asking, Run
from loadgen.options import INTERRUPTED
from loadgen.report import files, seeds, show
from loadgen.report.progress import watched
from loadgen.report.summary import Report, exit_code, now, setting, summarise
from loadgen.report.warm import warm
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_target(parser)
    datasets.add_workload(parser)
    datasets.add_seeds(parser)
    files.add_report(parser)


def check(args: argparse.Namespace) -> None:
    """Check the flags before anything is sent. Raises BadInput."""
    target.headers(args)
    files.check(args)
    datasets.check(args)


async def ask(
    args: argparse.Namespace, console: Console, work: Workload, client: Client, asking: Asking, label: str
) -> Run:
    """Send the whole load while showing its progress, and return the run; Ctrl-C ends it early.

    `label`: the heading of the live view.
    """
    load = Run(work.conversations, work.starts, client, asking, args.max_concurrency, args.users)
    with target.stopped_by_interrupt(load):
        await watched(load, console, label)
    return load


def figures(args: argparse.Namespace, load: Run) -> dict[str, object]:
    """Return the report of one load: its figures, and how warm the prefix caches were before it."""
    return {**summarise(load, files.slo(args), args.percentiles), "warm_caches": warm(load)}


class Measured:
    """The reports of a load test of one target, one report for each random seed.

    `interrupted`: whether the user stopped the run before its end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reports: list[Report] = []
        self.records: dict[str, list[Record]] = {}
        self.workload: dict[str, object] = {}  # describes the load with the first seed
        self.interrupted = False

    @property
    def report(self) -> Report:
        return seeds.merged(self.reports)

    async def ask(
        self, args: argparse.Namespace, console: Console, client: Client, seed: int, replicas: Sequence[str] = ()
    ) -> None:
        """Send the load with one seed, and add its report and records to this target's.

        `args.seed`: value of the seed; `seed`: its position among the seeds to run, from 0. `replicas`: ids of the
        target's replicas where they are known, so that the report also lists replicas that got no request.
        """
        work = datasets.workload(args)
        if not seed:
            show.print_notes(console, work.notes)
        asking = target.asking(args, await target.model_of(client, args.model))
        self.workload = self.workload or {**datasets.describe(args, work), "vocab_size": asking.vocabulary}
        label = seeds.label(self.name, args.seed, args.seeds)
        load = await ask(args, console, work, client, asking, label)
        self.interrupted, load.replicas = load.interrupted, replicas
        self.records[label] = load.done
        about = {"target": client.base_url, "model": asking.model, "asked": datasets.drawn_for(args)}
        self.reports.append({**about, **figures(args, load)})


@contextmanager
def until_interrupted(console: Console) -> Iterator[None]:
    """Catch the cancellation by Ctrl-C in the block, so that the program goes on and reports what was measured."""
    try:
        yield
    except asyncio.CancelledError:
        console.print("[yellow]Stopped by hand: what follows was measured until then.[/]")


async def run_verb(args: argparse.Namespace, console: Console) -> int:
    check(args)
    began = now()
    client = Client(args.base_url, target.headers(args), args.timeout)
    found = Measured(client.base_url)
    with until_interrupted(console):
        for seed, one in enumerate(datasets.of_seeds(args)):
            await found.ask(one, console, client, seed)
            if found.interrupted:
                break
    client.close()
    if not found.reports:
        return INTERRUPTED
    report = {
        **found.report,
        "setting": setting(["loadgen", *sys.argv[1:]], args.seed, args.seeds, began),
        "workload": found.workload,
    }
    console.print(show.run_report(report))
    files.write(args, report, {client.base_url: report}, found.records, console)
    return exit_code([report], len(found.reports) == args.seeds)
