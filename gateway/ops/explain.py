"""The command `hitherto explain`: prints where a gateway would send one request, and why, in numbers.

The command asks a running gateway by `POST /explain`. The answer (`reasons.describe`) comes from the gateway's cache
map, its load and its learned costs. The gateway sends nothing to an engine, and counts no load.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from pathlib import Path

from gateway import files
from gateway.errors import ApiError
from gateway.settings import Config, ConfigError

from .admin_client import answer_of, side_of
from .explain_text import show


def run(args: argparse.Namespace, config: Config) -> int:
    """Print the explanation and return the exit code: 0, or 1 if the gateway would refuse the request.

    Raises ConfigError if the body cannot be read or no gateway answers.
    """
    side, body = side_of(args.admin, config), _read_body(args.body)
    query = urllib.parse.urlencode({"path": args.path}, errors="surrogateescape")
    try:
        told = answer_of(side, config, "POST", f"/explain?{query}", body)
    except ApiError as wrong:
        print(f"hitherto: this request would be answered with {wrong.status}: {wrong.message}", file=sys.stderr)
        return 1
    print(json.dumps(told, indent=2) if args.json else show(told))
    return 0


def _read_body(name: str) -> bytes:
    try:
        return files.read_to_end(sys.stdin.buffer) if name == "-" else files.read(Path(name))
    except OSError as error:
        remedy = "Give a JSON file as a client would send it, or - for standard input"
        raise ConfigError(f"{name}: cannot read the request's body: {error.strerror}. {remedy}") from None
