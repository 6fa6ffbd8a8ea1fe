"""The flags that several verbs share, beside the load's own (`datasets`), and what they mean as objects."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import orjson
from rich.console import Console

from loadgen.report import parse_slo


class BadOption(ValueError):
    """Flags that don't go together; the message names them."""


def add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument("--base-url", default="http://127.0.0.1:8080", metavar="URL",
                       help="server or gateway to ask, with or without /v1 (default %(default)s)")
    add_asking(group)


def add_asking(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="model name (default: the first in /v1/models)")
    group.add_argument("--backend", choices=("openai-chat", "openai", "vllm"),
                       help="openai-chat asks chat completions, openai or vllm asks completions (default: completions with token ids "
                            "where the load has no text, else chat)")
    group.add_argument("--endpoint", metavar="PATH", help="path to ask (default: the backend's own)")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE",
                       help="request header, repeatable; OPENAI_API_KEY from the environment becomes a bearer token")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON",
                       help="fields to merge into every request; null removes one")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction,
                       help="ask for full-length replies, a vLLM extension (default: for traces with times)")
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S",
                       help="give a request up after this many seconds (default %(default)g)")


def add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--slo", "--goodput", nargs="+", metavar="LIMIT", help="e.g. ttft:500ms,tpot:50ms: count what meets it")
    group.add_argument("--json", "--result-filename", type=Path, metavar="FILE", help="write all figures (- for stdout)")


def check(args: argparse.Namespace) -> None:
    """Find out before a run, not after it, what is wrong. Raises BadOption, BadSLO."""
    slo(args), headers(args)
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


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> float:
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero and finite")
    return value


def rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not zero or above")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
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
