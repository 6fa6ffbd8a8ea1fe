"""`loadgen run`: one load against one server; and what the other verbs that ask servers share with it."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from loadgen.drive import target
from loadgen.drive.client import Client
from loadgen.drive.processes import Processes
from loadgen.drive.run import Asking, Run
from loadgen.report import files, show
from loadgen.report.progress import watched
from loadgen.report.summary import setting, summarise
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_target(parser)
    datasets.add_workload(parser)
    files.add_report(parser)


def check(args: argparse.Namespace) -> None:
    """Find out before a run, not after it, what is wrong. Raises BadInput."""
    target.headers(args)
    files.check(args)
    datasets.check(args)


async def ask(
    args: argparse.Namespace, console: Console, work: Workload, client: Client, asking: Asking, label: str
) -> Run | Processes:
    """Send the whole load while showing how far it is; Ctrl-C ends it early."""
    load = target.load_of(args, work, client, asking)
    target.stop_on_interrupt(load)
    await watched(load, console, label)
    return load


async def run_verb(args: argparse.Namespace, console: Console) -> int:
    check(args)
    work = datasets.workload(args)
    show.print_notes(console, work.notes)
    client = Client(args.base_url, target.headers(args), args.timeout)
    asking = target.asking(args, await target.model_of(client, args.model))
    load = await ask(args, console, work, client, asking, client.base_url)
    client.close()
    report = {
        "target": client.base_url,
        "model": asking.model,
        **summarise(load, files.slo(args)),
        "setting": setting(["loadgen", *sys.argv[1:]], args.seed),
        "workload": datasets.describe(args, work),
    }
    console.print(show.run_report(report))
    files.write(args, report, {client.base_url: report}, {client.base_url: load.done}, console)
    return 0 if report["completed"] else 1
