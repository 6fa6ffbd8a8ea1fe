"""The target of a load: its flags, its model, the form of its requests, and how Ctrl-C stops the load."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import orjson

from loadgen.drive.client import Client, base_url
from loadgen.drive.run import CHAT, COMPLETIONS, Asking, Run
from loadgen.options import INTERRUPTED, KEY_NEEDED, BadOption, Failed, flags, positive
from loadgen.workload import datasets

# `timeout -s INT` signals its child and then the whole process group: two signals this close count as one Ctrl-C
_ONE_INTERRUPT_SECONDS = 0.2
_PATH = re.compile(r"/[!-~]+")


class Unreachable(Failed):
    """The server cannot be used; the message says why and what to do."""


def add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    flags(
        group,
        ("--base-url", base_url, "URL", "http://127.0.0.1:8080", "server or gateway to ask, with or without /v1 (default %(default)s)"),
    )  # fmt: skip
    add_asking(group)


def add_asking(group: argparse._ArgumentGroup) -> None:
    flags(
        group,
        ("--model", str, None, None, "model name (default: the first in /v1/models)"),
        ("--backend", ("openai-chat", "openai", "vllm"), None, None,
         "openai-chat asks chat completions, openai or vllm asks completions (default: completions with token ids "
         "where the load has no text, else chat)"),
        ("--endpoint", _path, "PATH", None, "path to ask (default: the backend's own)"),
        ("--header", [str], "NAME=VALUE", [], "request header, repeatable; OPENAI_API_KEY from the environment becomes a bearer token"),
        ("--extra-body", _object, "JSON", {}, "fields to merge into every request; null removes one"),
        ("--timeout", positive, "S", 600.0, "give a request up after this many seconds (default %(default)g)"),
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="ask for full-length replies, which engines take beside OpenAI's fields (default: for traces with times)",
    )


def headers(args: argparse.Namespace) -> dict[str, str]:
    """Return the request headers from flags and environment. Raises BadOption."""
    found = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        found["authorization"] = f"Bearer {key}"
    for item in args.header:
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or "\n" in item or "\r" in item:
            raise BadOption(f"--header {item!r}: expected NAME=VALUE")
        found[name.strip().lower()] = value
    return found


def _path(text: str) -> str:
    if _PATH.fullmatch(text):
        return text
    right = f"/{text}" if _PATH.fullmatch(f"/{text}") and "://" not in text else f"one like {COMPLETIONS}"
    raise argparse.ArgumentTypeError(f"{text!r} is no path; write {right}")


def _object(text: str) -> dict[str, object]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


async def model_of(client: Client, asked: str | None) -> str:
    """Return the model to ask for: `asked`, or the first that the server lists. Raises Unreachable."""
    if asked:
        return asked
    status, body, problem = await client.get("/v1/models")
    if problem:
        raise Unreachable(f"{client.base_url} does not answer ({problem}). Is the server up, and the port right?")
    try:
        if status == 401:
            raise Unreachable(f"{client.base_url} answers 401 to /v1/models: {KEY_NEEDED}")
        told = orjson.loads(body)
        if status == 503:  # a gateway whose engines are not ready yet names them
            raise Unreachable(f"{client.base_url} answers 503: {told['error']['message']}")
        return str(told["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise Unreachable(
            f"{client.base_url} answers {status} to /v1/models and lists no model; name one with --model, "
            "or is this not the clients' port?"
        ) from None


def asking(args: argparse.Namespace, model: str) -> Asking:
    """Return what the flags set for all requests of a load: endpoint, body fields, and the seed of made-up tokens.

    `model`: name of the model that the requests ask for.
    """
    completions = datasets.completions(args)
    endpoint = args.endpoint or (COMPLETIONS if completions else CHAT)
    ignore_eos = args.ignore_eos if args.ignore_eos is not None else datasets.has_times(args)
    tokens = datasets.salt(args), args.vocab_size
    return Asking(model, endpoint, completions, args.replies == "engine", ignore_eos, args.extra_body, *tokens)


@contextmanager
def stopped_by_interrupt(load: Run) -> Iterator[None]:
    """Make Ctrl-C within the block end the load early, so that it is still reported.

    A second Ctrl-C, even during the report, ends the program at once.
    """
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    stopped: float | None = None

    def interrupted(*_: object) -> None:
        nonlocal stopped
        if stopped is None:
            stopped = perf_counter()
            load.stop()
        elif perf_counter() - stopped > _ONE_INTERRUPT_SECONDS:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # shows the cursor again, which the live view hides
            os._exit(INTERRUPTED)  # engines that were started end with this process (`stack.die_with_parent`)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before if stopped is None else interrupted)
