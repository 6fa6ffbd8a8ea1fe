"""The command `loadgen`: run a load, compare targets or policies, show the demo.

Flags are named as in `vllm bench serve` where it has them. A flag or a file that is wrong gets one
message and exit code 2 before anything is sent; a server that can't be reached gets exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson
import uvloop
from rich.console import Console

from loadgen import options, show
from loadgen.client import BadURL, Client
from loadgen.drive import Run
from loadgen.progress import watched
from loadgen.report import BadSLO, setting, summarise
from loadgen.sources import BadSource
from loadgen.workloads import BadWorkload


class Unreachable(Exception):
    """The server can't be used; the message says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return uvloop.run(args.act(args, Console(highlight=False)))
    except (options.BadOption, BadSLO, BadSource, BadURL, BadWorkload) as error:
        print(f"loadgen {args.verb}: {error}", file=sys.stderr)
        return 2
    except Unreachable as error:
        print(f"loadgen {args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadgen", description=__doc__.split("\n\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser("run", help="one open-loop load against one OpenAI endpoint")
    options.add_target(run)
    options.add_workload(run)
    options.add_report(run)
    run.set_defaults(act=run_verb)
    return parser


async def run_verb(args: argparse.Namespace, console: Console) -> int:
    slo = options.slo(args)
    conversations, starts = options.workload(args)
    client = Client(args.base_url, options.headers(args), args.timeout)
    asking = options.asking(args, await model_of(client, args.model))
    load = Run(conversations, starts, client, asking, args.max_concurrency)
    stop_on_interrupt(load)
    await watched(load, console, client.base_url)
    client.close()
    report = {"target": client.base_url, "model": asking.model, **summarise(load, slo),
              "setting": setting(["loadgen", *sys.argv[1:]], args.seed), "workload": options.describe(args)}
    show.print_report(console, report)
    write_json(args.json, report, console)
    return 0 if report["completed"] else 1


def stop_on_interrupt(load: Run) -> None:
    """Ctrl-C ends the load and still gives the report."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)


async def model_of(client: Client, asked: str | None) -> str:
    """The model to ask for: as given, else the first the server lists. Raises Unreachable."""
    if asked:
        return asked
    status, body, problem = await client.get("/v1/models")
    if problem:
        raise Unreachable(f"{client.base_url} does not answer ({problem}). Is the server up, and the port right?")
    try:
        return orjson.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise Unreachable(f"{client.base_url}/v1/models answered {status} and lists no model; "
                          "name one with --model") from None


def write_json(path: Path | None, report: object, console: Console) -> None:
    if path is None:
        return
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n"
    if str(path) == "-":
        os.write(1, data)
        return
    path.write_bytes(data)
    console.print(f"[dim]figures written to {path}[/]")


if __name__ == "__main__":
    raise SystemExit(main())
