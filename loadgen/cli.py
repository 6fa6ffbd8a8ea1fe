"""The command `loadgen`: run a load, compare targets or policies, show the demo.

Flags are named as in `vllm bench serve` where it has them. A flag or a file that is wrong gets one
message and exit code 2 before anything is sent; a server that can't be reached gets exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import uvloop
from rich.console import Console

from loadgen import compare, datasets, demo, options, show
from loadgen.client import BadURL, Client
from loadgen.processes import ProcessFailed
from loadgen.progress import watched
from loadgen.report import BadSLO, setting, summarise
from loadgen.scenes import NoEngines
from loadgen.serving import Unreachable, load_of, model_of, stop_on_interrupt
from loadgen.sources import BadSource
from loadgen.stack import StackFailed
from loadgen.workloads import BadWorkload


class Parser(argparse.ArgumentParser):
    """argparse that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists what there is)\n")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        # with --json - standard output is the JSON's alone
        return uvloop.run(args.act(args, Console(highlight=False, stderr=str(args.json) == "-")))
    except (options.BadOption, BadSLO, BadSource, BadURL, BadWorkload) as error:
        print(f"loadgen {args.verb}: {error}", file=sys.stderr)
        return 2
    except (NoEngines, ProcessFailed, StackFailed, Unreachable) as error:
        print(f"loadgen {args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="loadgen", description="Load tests for OpenAI endpoints.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    run = verbs.add_parser("run", help="one load against one OpenAI endpoint")
    options.add_target(run)
    datasets.add_workload(run)
    options.add_report(run)
    run.set_defaults(act=run_verb)
    several = verbs.add_parser("compare", help="the same load against several endpoints or policies")
    compare.add_arguments(several)
    several.set_defaults(act=compare.compare_verb)
    show_it = verbs.add_parser("demo", help="two policies side by side, live, in about two minutes")
    demo.add_arguments(show_it)
    show_it.set_defaults(act=demo.demo_verb)
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
    return 0 if report["completed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
