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

from loadgen import compare, run, sweep
from loadgen.demo import verb as demo
from loadgen.options import BadInput, Failed
from loadgen.plan import verb as plan
from loadgen.simulate import verb as simulate


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
    except BadInput as error:
        print(f"{prog} {args.verb}: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"{prog} {args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def hitherto_plan(argv: list[str]) -> int:
    """`hitherto plan`: the gateway finds it as an entry point, since it imports nothing of this room."""
    return main(["plan", *argv], prog="hitherto")


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Load tests for OpenAI endpoints.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=Parser)
    for verb, add_arguments, act, about in VERBS:
        one = verbs.add_parser(verb, help=about)
        add_arguments(one)
        one.set_defaults(act=act)
    return parser


VERBS = (
    ("run", run.add_arguments, run.run_verb, "one load against one OpenAI endpoint"),
    ("compare", compare.add_arguments, compare.compare_verb, "the same load against several endpoints or policies"),
    (
        "plan",
        plan.add_arguments,
        plan.plan_verb,
        "what a model's KV cache holds, and the replicas that a load needs to keep an SLO",
    ),
    (
        "simulate",
        simulate.add_arguments,
        simulate.simulate_verb,
        "the same load in virtual time: any number of engines, gateways and policies",
    ),
    ("sweep", sweep.add_arguments, sweep.sweep_verb, "the highest request rate at which an SLO is kept"),
    ("demo", demo.add_arguments, demo.demo_verb, "two policies side by side, live, in about two minutes"),
)


if __name__ == "__main__":
    raise SystemExit(main())
