"""The command `hitherto replicas`: list, add, drain and remove the replicas of a running gateway by its admin API."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any
from urllib.parse import quote

from gateway.errors import ApiError
from gateway.ops.explain import NO_URL, Unanswered, call, is_url
from gateway.settings import Config, ConfigError, admin_headers, admin_url
from replicas.replica import parse_url

COLUMNS = {"id": "id", "state": "state", "inflight": "in flight", "models": "models", "reason": "reason"}
ANSWER_SECONDS = 30.0
REMOVAL_SECONDS = 86_400.0  # the longest wait for a removal, which begins with a drain


def run(args: argparse.Namespace, config: Config) -> int:
    """Run the command and return its exit code: 0 if done, 1 if the gateway refused. Raises ConfigError."""
    if (args.which is None) != (args.action == "list"):
        what = (
            "the replica's URL, as in http://gpu3:8000"
            if args.action == "add"
            else "the id that `hitherto replicas` shows"
        )
        raise ConfigError(f"replicas {args.action}: " + (f"give {what}" if args.which is None else "takes no replica"))
    if args.admin and not is_url(args.admin):
        raise ConfigError(f"--admin {args.admin}: {NO_URL}")
    admin = (args.admin or admin_url(config.settings)).rstrip("/")
    try:
        answer = asked(admin, args, config)
    except ApiError as refused:
        print(f"hitherto: {refused.message}", file=sys.stderr)
        return 1
    except Unanswered as reason:
        remedy = reason.remedy("Start one, or name its admin side with --admin URL")
        raise ConfigError(f"no gateway answers at {admin} ({reason}). {remedy}") from None
    if args.json:
        print(json.dumps(answer, indent=2))
    elif args.action == "remove":
        left = answer.get("left", 0)
        print(
            f"{args.which} removed"
            + (f"; {left} requests go on at its engine: stop it once its own /metrics shows none" if left else "")
        )
    else:
        print(table(answer["replicas"] if args.action == "list" else [answer]))
        if last := answer.get("last_ready_of"):
            print(f"this was the last ready replica of {', '.join(last)}: its requests fail until another one is ready")
    return 0


def asked(admin: str, args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Send the command to the gateway and return its answer. Raises Unanswered, ConfigError and ApiError."""
    path, body = f"{admin}/replicas", None
    one = f"{path}/{quote(_id(args.which or ''), safe=':', errors='surrogateescape')}"
    seconds = ANSWER_SECONDS
    match args.action:
        case "add":
            method, body = "POST", json.dumps({"url": args.which}).encode()
        case "drain":
            method, path, body = "POST", f"{one}/drain", b""
        case "remove":
            method, path, seconds = "DELETE", one, REMOVAL_SECONDS
        case _:
            method = "GET"
    answer = call(admin, method, path, body, admin_headers(config.settings), seconds)
    try:
        told = json.loads(answer)
        return told if isinstance(told, dict) else {"replicas": told}
    except ValueError:
        raise Unanswered("something else answers there") from None


def _id(given: str) -> str:
    """Return the id of the replica with this URL; other text, such as the id of a rank, is returned as it is."""
    try:
        return parse_url(given).id
    except ValueError:
        return given


def table(replicas: list[dict[str, Any]]) -> str:
    """Return the replicas as a table, followed by their problems."""
    if not replicas:
        return "no replicas"
    rows = [tuple(COLUMNS.values()), *(tuple(_cell(one.get(name)) for name in COLUMNS) for one in replicas)]
    wide = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide)).rstrip() for row in rows]
    for one in replicas:
        slow = [one["slow"]["text"]] if one.get("slow") else []
        lines += [f"{one['id']}: {text}" for text in (*slow, *one.get("problems", ()))]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else "" if value is None else str(value)
