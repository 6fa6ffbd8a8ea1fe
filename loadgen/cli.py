"""The command `loadgen`: run a load, compare targets or policies, live or simulated, plan a fleet, show the demo.

Flags are named as in `vllm bench serve` where it has them. A flag or a file that is wrong gets one
message and exit code 2 before anything is sent; a server that can't be reached gets exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import uvloop
from rich.console import Console

from loadgen import compare, datasets, demo, options, plan, show, sweep
from loadgen.client import BadURL, Client
from loadgen.kv_space import BadModel
from loadgen.processes import ProcessFailed
from loadgen.progress import watched
from loadgen.report import BadSLO, setting, summarise
from loadgen.scenes import NoEngines
from loadgen.serving import Unreachable, load_of, model_of, stop_on_interrupt
from loadgen.simulate import verb as simulated
from loadgen.sources import BadSource
from loadgen.stack import StackFailed
from loadgen.workloads import BadWorkload


class Parser(argparse.ArgumentParser):
    """argparse that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists what there is)\n")


def main(argv: list[str] | None = None, prog: str = "loadgen") -> int:
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    try:
        # with --json - standard output is the JSON's alone
        return uvloop.run(args.act(args, Console(highlight=False, stderr=str(args.json) == "-")))
    except (options.BadOption, BadModel, BadSLO, BadSource, BadURL, BadWorkload) as error:
        print(f"{prog} {args.verb}: {error}", file=sys.stderr)
        return 2
    except (NoEngines, ProcessFailed, StackFailed, Unreachable) as error:
        print(f"{prog} {args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def hitherto_plan(argv: list[str]) -> int:
    """`hitherto plan`: the gateway finds it as an entry point, since it imports nothing of this room."""
    return main(["plan", *argv], prog="hitherto")


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Load tests for OpenAI endpoints.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    for verb, add_arguments, act, about in VERBS:
        one = verbs.add_parser(verb, help=about)
        add_arguments(one)
        one.set_defaults(act=act)
    return parser


async def run_verb(args: argparse.Namespace, console: Console) -> int:
    options.check(args)
    datasets.check(args)
    work = datasets.workload(args)
    show.print_notes(console, work.notes)
    client = Client(args.base_url, options.headers(args), args.timeout)
    asking = datasets.asking(args, await model_of(client, args.model))
    load = load_of(args, work, client, asking)
    stop_on_interrupt(load)
    await watched(load, console, client.base_url)
    client.close()
    report = {"target": client.base_url, "model": asking.model, **summarise(load, options.slo(args)),
              "setting": setting(["loadgen", *sys.argv[1:]], args.seed), "workload": datasets.describe(args, work)}
    show.print_report(console, report)
    options.write_json(args.json, report, console)
    options.write_reports(args, {client.base_url: report}, {client.base_url: load.done}, console)
    return 0 if report["completed"] else 1


def run_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_target(parser)
    datasets.add_workload(parser)
    options.add_report(parser)


VERBS = (
    ("run", run_arguments, run_verb, "one load against one OpenAI endpoint"),
    ("compare", compare.add_arguments, compare.compare_verb, "the same load against several endpoints or policies"),
    ("plan", plan.add_arguments, plan.plan_verb, "what a model's KV cache holds, and the replicas that a load needs to keep an SLO"),
    ("simulate", simulated.add_arguments, simulated.simulate_verb, "the same load in virtual time: any number of engines, gateways and policies"),
    ("sweep", sweep.add_arguments, sweep.sweep_verb, "the highest request rate at which an SLO is kept"),
    ("demo", demo.add_arguments, demo.demo_verb, "two policies side by side, live, in about two minutes"),
)


if __name__ == "__main__":
    raise SystemExit(main())
