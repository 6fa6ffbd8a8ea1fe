"""What every verb needs before it sends a load: the server's model, who sends, and a way to stop."""

from __future__ import annotations

import argparse
import asyncio
import signal

import orjson

from loadgen import options
from loadgen.client import Client
from loadgen.drive import Asking, Run
from loadgen.processes import Processes, Share
from loadgen.workloads import Workload


class Unreachable(Exception):
    """The server can't be used; the message says why and what to do."""


async def model_of(client: Client, asked: str | None) -> str:
    """The model to ask for: as given, else the first the server lists. Raises Unreachable."""
    if asked:
        return asked
    status, body, problem = await client.get("/v1/models")
    if problem:
        raise Unreachable(f"{client.base_url} does not answer ({problem}). Is the server up, and the port right?")
    try:
        told = orjson.loads(body)
        if status == 503:  # a gateway whose engines are not up yet says so, and which
            raise Unreachable(f"{client.base_url} answers 503: {told['error']['message']}")
        return told["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise Unreachable(f"{client.base_url} answers {status} to /v1/models and lists no model; "
                          "name one with --model") from None


def load_of(args: argparse.Namespace, work: Workload, client: Client, asking: Asking) -> Run | Processes:
    """What will send the work: this process, or as many as asked for."""
    if args.processes == 1:
        return Run(work.conversations, work.starts, client, asking, args.max_concurrency, args.users)
    share = Share(work, client.base_url, options.headers(args), args.timeout, asking, args.max_concurrency, args.users)
    return Processes(share, args.processes)


def stop_on_interrupt(load: Run | Processes) -> None:
    """Ctrl-C ends the load and still gives the report; a second Ctrl-C ends the program."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        load.stop()

    loop.add_signal_handler(signal.SIGINT, stop)
