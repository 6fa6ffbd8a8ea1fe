"""The flags that several verbs share, and what they mean as objects."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import orjson
from rich.console import Console

from loadgen import workloads
from loadgen.arrivals import conversation_starts
from loadgen.drive import CHAT, COMPLETIONS, Asking
from loadgen.report import parse_slo
from loadgen.sources import Document, file_documents, stdlib_documents
from loadgen.workloads import CHARS_PER_TOKEN, Conversation

WORKLOADS = ("multi-turn", "shared-prefix", "conversations")


class BadOption(ValueError):
    """Flags that don't go together; the message names them."""


def add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument("--base-url", default="http://127.0.0.1:8080", metavar="URL",
                       help="server or gateway to ask, with or without /v1 (default %(default)s)")
    add_asking(group)


def add_asking(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="model name (default: the first in /v1/models)")
    group.add_argument("--backend", choices=("openai-chat", "openai"), default="openai-chat",
                       help="openai-chat asks chat completions, openai asks completions (default %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="path to ask (default: the backend's own)")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE",
                       help="request header, repeatable; OPENAI_API_KEY from the environment becomes a bearer token")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON",
                       help="fields to merge into every request; null removes one")
    group.add_argument("--ignore-eos", action="store_true", help="ask for full-length replies (vLLM extension)")
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="S",
                       help="give a request up after this many seconds (default %(default)g)")


def add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=WORKLOADS, metavar="NAME",
                       help=f"one of {', '.join(WORKLOADS)} (default: multi-turn, or conversations with a .jsonl file)")
    group.add_argument("--dataset-path", type=Path, metavar="FILE",
                       help="OpenAI messages as JSONL (.gz too), or a text to talk about "
                            "(default: the standard library's documentation)")
    group.add_argument("--num-prompts", type=whole, metavar="N",
                       help="requests in all; every turn is one (default 200, or the whole file)")
    group.add_argument("--request-rate", type=_rate, default=4.0, metavar="R",
                       help="requests per second, Poisson; inf sends all at once (default %(default)g)")
    group.add_argument("--max-concurrency", type=whole, metavar="N",
                       help="never more requests in flight; the wait shows up as lateness")
    group.add_argument("--seed", type=int, default=0, help="same seed, same load (default %(default)s)")
    group.add_argument("--turns", type=whole, default=5, metavar="N", help="multi-turn: mean turns (default %(default)s)")
    group.add_argument("--think-time", type=_seconds, default=1.0, metavar="S",
                       help="mean seconds between a reply and the next turn (default %(default)g)")
    group.add_argument("--replies", choices=("file", "engine"),
                       help="whose replies stay in the conversation (default: the file's where it has them)")
    group.add_argument("--num-prefixes", "--prefix-repetition-num-prefixes", type=whole, default=12, metavar="N",
                       help="different documents or system prompts (default %(default)s)")
    group.add_argument("--prefix-len", "--prefix-repetition-prefix-len", type=whole, default=2000, metavar="TOKENS",
                       help="length of each, about (default %(default)s)")
    group.add_argument("--suffix-len", "--prefix-repetition-suffix-len", type=whole, default=128, metavar="TOKENS",
                       help="shared-prefix: length of each question, about (default %(default)s)")
    group.add_argument("--output-len", "--prefix-repetition-output-len", type=whole, metavar="TOKENS",
                       help="longest reply (default 64, or as in the file)")


def add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--slo", "--goodput", nargs="+", metavar="LIMIT", help="e.g. ttft:500ms,tpot:50ms: count what meets it")
    group.add_argument("--json", "--result-filename", type=Path, metavar="FILE", help="write all figures (- for stdout)")


def check(args: argparse.Namespace) -> None:
    """Find out before a run, not after it, what is wrong. Raises BadOption, BadSLO."""
    slo(args), headers(args), dataset(args)
    check_writable(args.json)


def check_writable(path: Path | None) -> None:
    """Raises BadOption when `--json` names a place that can't be written."""
    if path is None or str(path) == "-":
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise BadOption(f"--json {path}: can't be written; name a file in a folder that exists")


def write_json(path: Path | None, report: object, console: Console) -> None:
    if path is None:
        return
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"
    if str(path) == "-":
        os.write(1, data)
        return
    path.write_bytes(data)
    console.print(f"[dim]figures written to {path}[/]")


def slo(args: argparse.Namespace) -> dict[str, float] | None:
    return parse_slo(" ".join(args.slo)) if args.slo else None


def headers(args: argparse.Namespace) -> dict[str, str]:
    """The flags' headers. Raises BadOption."""
    found = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        found["authorization"] = f"Bearer {key}"
    for item in args.header:
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or "\n" in item or "\r" in item:
            raise BadOption(f"--header {item!r}: expected NAME=VALUE")
        found[name.strip().lower()] = value
    return found


def asking(args: argparse.Namespace, model: str) -> Asking:
    completions = args.backend == "openai"
    return Asking(model, args.endpoint or (COMPLETIONS if completions else CHAT), completions,
                  args.replies == "engine", args.ignore_eos, args.extra_body)


def dataset(args: argparse.Namespace) -> str:
    """The workload's name; a file of messages implies it. Raises BadOption."""
    messages = args.dataset_path is not None and any(suffix == ".jsonl" for suffix in args.dataset_path.suffixes)
    name = args.dataset_name or ("conversations" if messages else "multi-turn")
    if name == "conversations" and args.dataset_path is None:
        raise BadOption("--dataset-name conversations needs --dataset-path FILE")
    if name != "conversations" and args.replies == "file":
        raise BadOption("--replies file needs a file of conversations (--dataset-path FILE.jsonl)")
    return name


def workload(args: argparse.Namespace) -> tuple[list[Conversation], list[float]]:
    """The conversations and their start times (s). Raises BadOption, BadSource, BadWorkload."""
    name = dataset(args)
    rng = random.Random(args.seed)
    if name == "conversations":
        asked = workloads.conversation_file(args.dataset_path, args.num_prompts, args.output_len, args.think_time, rng)
    else:
        documents = texts(args.dataset_path, args.num_prefixes, args.prefix_len * CHARS_PER_TOKEN)
        requests, output = args.num_prompts or 200, args.output_len or 64
        if name == "multi-turn":
            asked = workloads.multi_turn(documents, requests, args.turns, args.think_time, output, rng)
        else:
            asked = workloads.shared_prefix(documents, requests, args.num_prefixes, args.suffix_len, output, rng)
    return asked, conversation_starts([len(conversation.turns) for conversation in asked], args.request_rate, rng)


def texts(path: Path | None, number: int, length: int) -> list[Document]:
    """Up to `number` documents of about `length` characters, from a file or the standard library."""
    return stdlib_documents(number, length) if path is None else file_documents(path, length)[:number]


def describe(args: argparse.Namespace) -> dict[str, object]:
    """The flags that made the load, for the record."""
    names = ("dataset_path", "num_prompts", "request_rate", "max_concurrency", "seed", "turns", "think_time", "replies",
             "num_prefixes", "prefix_len", "suffix_len", "output_len")
    values = {name: getattr(args, name) for name in names}
    return {"dataset_name": dataset(args), **values,
            "dataset_path": str(args.dataset_path) if args.dataset_path else None}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero and finite")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not zero or above")
    return value


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _object(text: str) -> dict[str, object]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
