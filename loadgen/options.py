"""The flags that several verbs share, beside the load's own (`datasets`), and what they mean as objects."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import orjson
from rich.console import Console

from loadgen import reports as files
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
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with tables and plots (pip install 'hitherto[plots]')")
    group.add_argument("--png", type=Path, metavar="FILE", help="write the plots alone")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write a line per request")


def check(args: argparse.Namespace) -> None:
    """Find out before a run, not after it, what is wrong. Raises BadOption, BadSLO."""
    headers(args)
    check_report(args)


def check_report(args: argparse.Namespace) -> None:
    """The same for the flags of `add_report` alone. Raises BadOption, BadSLO."""
    slo(args)
    for kind in ("json", "html", "png", "csv"):
        check_writable(getattr(args, kind), f"--{kind}")
    if (args.html or args.png) and not files.can_draw():
        raise BadOption("--html and --png need matplotlib: pip install 'hitherto[plots]'")


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """Raises BadOption when a flag names a place that can't be written."""
    if path is None or str(path) == "-":
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise BadOption(f"{flag} {path}: can't be written; name a file in a folder that exists")


def write_json(path: Path | None, report: object, console: Console) -> None:
    if path is None:
        return
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"
    if str(path) == "-":
        os.write(1, data)
        return
    path.write_bytes(data)
    console.print(f"[dim]figures written to {path}[/]")


def write_reports(args: argparse.Namespace, reports: files.Reports, records: files.Records, console: Console,
                  about: Mapping[str, object] | None = None) -> None:
    """Whatever was asked for beside `--json`, from reports and records by the name of target or policy.

    `about` has the `setting` and the `workload` where they are not in the reports themselves.
    """
    if args.html or args.png:
        files.draw(reports, records, about or {}, args.html, args.png)
    if args.csv:
        files.write_csv(args.csv, records)
    for what, path in (("page", args.html), ("plots", args.png), ("requests", args.csv)):
        if path:
            console.print(f"[dim]{what} written to {path}[/]")


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


def names(text: str, known: Collection[str]) -> list[str]:
    """Policies, joined by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: name each policy once, joined by commas")
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no policy {name!r}; there are {', '.join(known)}")
    return found
