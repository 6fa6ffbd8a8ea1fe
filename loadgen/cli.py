"""The command `loadgen`: run, compare, simulate and plan loads, and measure engines.

Flags that `vllm bench serve` also has are named as there. A wrong flag or file ends the command with one message and
exit code 2 before anything is sent; a server that cannot be reached ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib.metadata import version
from typing import IO, Any, NoReturn, cast

import shtab
import uvloop
from rich.console import Console

from loadgen import compare, diff, run, sweep
from loadgen.calibrate import verb as calibrate
from loadgen.demo import verb as demo
from loadgen.options import BadInput, Failed
from loadgen.plan import verb as plan
from loadgen.simulate import verb as simulate
from policies.kv_space import BadModel
from replicas import cli_errors
from replicas.spelling import known_or_meant

_UNBOUNDED = 100_000  # columns, more than any table needs
_PADDING = re.compile(r" +$", re.M)


class Parser(cli_errors.PlainParser):
    """An argument parser that reports errors in one line and has `--version`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        said = _version(self.prog.split()[0])
        self.add_argument("-V", "--version", action="version", version=said, help="show the version and exit")

    def refuse(self, why: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {why}\n")


def main(argv: list[str] | None = None, prog: str = "loadgen") -> int:
    """Run the command line `argv` (default: `sys.argv`) and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(prog)
    if not argv:
        parser.print_help()
        return 0
    args, unknown = _parsed(parser, argv)
    if unknown:
        verbs = next(action for action in parser._actions if action.dest == "verb").choices or {}
        parser.exit(2, f"{prog} {args.verb}: {cli_errors.unknown(unknown[0], verbs[args.verb])}\n")
    if args.verb == "version":
        print(_version(prog))
        return 0
    if args.verb == "completion":
        print(shtab.complete(parser, args.shell))
        return 0
    try:
        return uvloop.run(act(args, prog))
    except KeyboardInterrupt:
        return 130


async def act(args: argparse.Namespace, prog: str = "loadgen") -> int:
    """Run the parsed command and return its exit code.

    An error is printed as one message on standard error. The exit code is 2 for a wrong input, and 1 for a server or a
    process that cannot be used.
    """
    try:
        return await args.act(args, _console(args))
    except (BadInput, BadModel, Failed) as error:
        print(f"{prog} {args.verb}: {error}", file=sys.stderr)
        return 1 if isinstance(error, Failed) else 2


def _console(args: argparse.Namespace) -> Console:
    """Return the console that reports are printed on: standard output, or standard error with `--json -`.

    With `--json -` standard output has only the JSON. On a console that is not a terminal, tables are as wide as they
    need to be and lines have no trailing blanks.
    """
    console = Console(highlight=False, stderr=str(args.json) == "-")
    if not console.is_terminal:
        console.file = cast(IO[str], Unpadded(console.file))
        if "COLUMNS" not in os.environ:
            console.width = _UNBOUNDED
    return console


class Unpadded:
    """A file wrapper that strips the blanks with which Rich pads lines to the table width.

    Call `write` with whole lines, as Rich does. If a text ended in the middle of a line, its last blanks would be lost.
    """

    def __init__(self, file: IO[str]):
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _parsed(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.exit(2, f"{parser.prog}: unknown command {argv[0]!r}{known_or_meant(argv[0], COMMANDS)}\n")
    if argv[0].startswith("-") and argv[0] not in cli_errors.HELP_AND_VERSION:
        parser.exit(2, f"{parser.prog}: {cli_errors.before_command(argv[0], parser.prog)}\n")
    return parser.parse_known_args(argv)


def hitherto_plan(argv: list[str]) -> int:
    """Run `hitherto plan` with the arguments `argv`, and return the exit code.

    The gateway does not import `loadgen`: it finds this function through an entry point of the package.
    """
    return main(["plan", *argv], prog="hitherto")


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Load tests for OpenAI endpoints.")
    verbs = parser.add_subparsers(title="commands", dest="verb", required=True, metavar="COMMAND", parser_class=Parser)
    for verb, module, act, about in VERBS:
        one = verbs.add_parser(verb, help=about, description=f"{about[0].upper()}{about[1:]}.")
        module.add_arguments(one)
        one.set_defaults(act=act)
    verbs.add_parser("version", help="print the version", description="Print the version.")
    about = f'Print a script that completes commands and flags: eval "$({prog} completion bash)".'
    completion = verbs.add_parser(
        "completion", help="print a script that completes commands and flags in a shell", description=about
    )
    completion.add_argument("shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS)
    return parser


def _version(prog: str) -> str:
    return f"{prog} {version('hitherto')}"


# One row per command: its name, the module whose `add_arguments` adds its flags, the function that runs it, and its
# help text, which is a line of `loadgen --help` and the first line of the command's own help.
VERBS = (
    ("run", run, run.run_verb, "send a load to an OpenAI endpoint and report latencies, rates, hit rates and errors"),
    ("compare", compare, compare.compare_verb, "send one load to several endpoints, or to fresh engines per policy"),
    ("plan", plan, plan.plan_verb, "compute what a model's KV cache holds, and the replicas that a load needs"),
    ("simulate", simulate, simulate.simulate_verb, "play a load in virtual time under one policy or several"),
    ("sweep", sweep, sweep.sweep_verb, "find the highest request rate at which an SLO is kept"),
    ("diff", diff, diff.diff_verb, "compare two files of --json and exit with 1 if anything got worse"),
    ("calibrate", calibrate, calibrate.calibrate_verb, "measure an engine, for simulated ones as fast as it"),
    ("demo", demo, demo.demo_verb, "play the same conversations under two policies, side by side, in two minutes"),
)
COMMANDS = [*(verb for verb, *_ in VERBS), "version", "completion"]


if __name__ == "__main__":
    raise SystemExit(main())
