"""The command `hitherto replicas`: list, add, drain and remove the replicas of a running gateway by its admin API."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any
from urllib.parse import quote

from gateway.errors import ApiError
from gateway.ops.admin_client import answer_of, side_of
from gateway.settings import Config, ConfigError
from replicas.replica import parse_url

COLUMNS = {"id": "id", "state": "state", "inflight": "in flight", "models": "models", "reason": "reason"}
REMOVAL_SECONDS = 86_400.0  # the longest wait for a removal, which first drains the replica


def run(args: argparse.Namespace, config: Config) -> int:
    """Run the command and return its exit code: 0 if done, 1 if the gateway refused.

    Raises ConfigError for wrong arguments, and if no gateway answers.
    """
    if (args.which is None) != (args.action == "list"):
        is_added = args.action == "add"
        what = "the replica's URL, as in http://gpu3:8000" if is_added else "the id that `hitherto replicas` shows"
        raise ConfigError(f"replicas {args.action}: " + (f"give {what}" if args.which is None else "takes no replica"))
    side = side_of(args.admin, config)
    one = f"/replicas/{quote(_id(args.which or ''), safe=':', errors='surrogateescape')}"
    try:
        match args.action:
            case "add":
                answer = answer_of(side, config, "POST", "/replicas", json.dumps({"url": args.which}).encode())
            case "drain":
                answer = answer_of(side, config, "POST", f"{one}/drain", b"")
            case "remove":
                answer = answer_of(side, config, "DELETE", one, seconds=REMOVAL_SECONDS)
            case _:
                answer = answer_of(side, config, "GET", "/replicas")
    except ApiError as refused:
        print(f"hitherto: {refused.message}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(answer, indent=2))
    elif args.action == "remove":
        left = answer.get("left", 0)
        more = f"; {left} requests go on at its engine: stop it once its own /metrics shows none" if left else ""
        print(f"{args.which} removed{more}")
    else:
        print(table(answer["replicas"] if args.action == "list" else [answer]))
        if last := answer.get("last_ready_of"):
            print(f"this was the last ready replica of {', '.join(last)}: its requests fail until another one is ready")
    return 0


def _id(given: str) -> str:
    """Return the id of the replica with this URL; text that is no URL, such as a rank's id, is returned unchanged."""
    try:
        return parse_url(given).id
    except ValueError:
        return given


def table(replicas: list[dict[str, Any]]) -> str:
    """Return the replicas as a table in text, followed by a line for each problem.

    `replicas`: their entries in a gateway's status.
    """
    if not replicas:
        return "no replicas"
    rows = [tuple(COLUMNS.values()), *(tuple(_cell(one.get(name)) for name in COLUMNS) for one in replicas)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide)).rstrip() for row in rows]
    for one in replicas:
        slow = [one["slow"]["text"]] if one.get("slow") else []
        lines += [f"{one['id']}: {text}" for text in (*slow, *one.get("problems", ()))]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else "" if value is None else str(value)
