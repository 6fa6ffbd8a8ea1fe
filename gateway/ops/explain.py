"""The command `hitherto explain`: what would happen to one request, in numbers.

A running gateway answers `POST /explain` with what `reasons.describe` says of the decision, from the gateway's map,
load and learned costs. It sends nothing to an engine, and reserves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway import files
from gateway.errors import ApiError
from gateway.settings import ADMIN_SIDE, Config, ConfigError, admin_headers, admin_url

from .explain_text import show
from .gateway_checks import ADMIN_SECONDS, COMPARED, do_not_count, not_in_force

HANGS = "Something listens there and does not answer: if it is the gateway, it hangs; `hitherto doctor` says what to do"
NO_URL = "it is no URL: write http://HOST:PORT"
AS_CLIENTS_SEND = 'Give a body as a client would send it: {"messages": [{"role": "user", "content": "..."}]}'
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment


class Unanswered(Exception):
    """No gateway's admin side answers there. `hangs`: something accepts connections and does not answer."""

    def __init__(self, reason: str, hangs: bool = False) -> None:
        super().__init__(reason)
        self.hangs = hangs

    def remedy(self, otherwise: str) -> str:
        """Return what to do: what to do about a server that hangs, or else `otherwise`."""
        return HANGS if self.hangs else otherwise


def run(args: argparse.Namespace, config: Config) -> int:
    """Print the explanation, and return the exit code: 1 if the request would be refused. Raises ConfigError."""
    body = _read_body(args.body)
    try:
        told = _answer(args.admin, args.path, body, config)
    except ApiError as wrong:
        print(f"hitherto: this request would be answered with {wrong.status}: {wrong.message}", file=sys.stderr)
        if wrong.status == 400 and not _is_json(body):
            given = "standard input" if args.body == "-" else args.body
            print(f"{given} has no JSON. {AS_CLIENTS_SEND}", file=sys.stderr)
        return 1
    print(json.dumps(told, indent=2) if args.json else show(told))
    return 0


def _answer(admin: str | None, path: str, body: bytes, config: Config) -> dict[str, Any]:
    """Return the running gateway's answer. Raises ConfigError and ApiError.

    `admin`: the admin side's URL, None for the one that follows from the settings; `path`: the API path of the request.
    """
    settings = config.settings
    if admin and not is_url(admin):
        raise ConfigError(f"--admin {admin}: {NO_URL}")
    url = (admin or admin_url(settings)).rstrip("/")
    try:
        told = ask(url, path, body, admin_headers(settings))
    except ConfigError as refused:
        if (why := config.unusable.get("admin_token")) is None:
            raise
        raise ConfigError(f"{refused}\n{why}") from None
    except Unanswered as reason:
        if admin:
            remedy = reason.remedy("Give the admin side's URL of a running gateway")
            raise ConfigError(f"--admin {admin}: {reason}. {remedy}") from None
        remedy = reason.remedy(
            "Start one, or name its admin side with --admin URL; `hitherto doctor` checks replicas without a gateway"
        )
        raise ConfigError(f"no gateway answers at {url} ({reason}). {remedy}") from None
    if given := _not_in_force(url, config):
        print(f"the running gateway answers, {do_not_count(given)}\n", file=sys.stderr)
    return told


def _not_in_force(admin: str, config: Config) -> list[str]:
    """Return the settings given here for which the running gateway has other values, as far as its status shows them.

    It is not asked unless a setting in COMPARED was given: users tend to give the same flags to all commands.
    """
    if any(config.sources[name] != "default" for name in COMPARED):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            request = urllib.request.Request(f"{admin}/status", headers=admin_headers(config.settings))
            with _DIRECT.open(request, timeout=ADMIN_SECONDS) as response:
                return not_in_force(config, json.loads(response.read()))
    return []


def is_url(text: str) -> bool:
    """Return whether urllib can read a server from this text; other faults of a host show when it is contacted."""
    try:
        parts = urllib.parse.urlsplit(text)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname and parts.port != 0) and "@" not in parts.netloc
        )
    except ValueError:
        return False


def _read_body(name: str) -> bytes:
    try:
        return files.read_to_end(sys.stdin.buffer) if name == "-" else files.read(Path(name))
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot read the request's body: {error.strerror}. Give a JSON file as a client would send it, or - for standard input"
        ) from None


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def ask(admin: str, path: str, body: bytes, headers: Mapping[str, str] = {}, seconds: float = 30.0) -> dict[str, Any]:
    """Return the running gateway's answer to POST /explain for a request with this path and body.

    `admin`: the URL of its admin side; `headers`: those of the admin token. Raises Unanswered, ConfigError, and
    ApiError if the gateway refuses the request.
    """
    url = f"{admin}/explain?{urllib.parse.urlencode({'path': path}, errors='surrogateescape')}"
    answer = call(admin, "POST", url, body, headers, seconds)
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if not isinstance(told, dict) or "replicas" not in told:
        raise Unanswered("something else answers there")
    return told


def call(admin: str, method: str, url: str, body: bytes | None, headers: Mapping[str, str], seconds: float) -> bytes:
    """Return the body that an admin side answers. Raises Unanswered, ConfigError, and ApiError if it refuses."""
    try:
        typed = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body, headers={**typed, **headers}, method=method)
        with _DIRECT.open(request, timeout=seconds) as response:
            answer: bytes = response.read()
            if ADMIN_SIDE not in response.headers:
                raise Unanswered("something else answers there")
            return answer
    except urllib.error.HTTPError as refused:
        raise _refusal(refused, admin) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        hangs = isinstance(error, TimeoutError)  # urllib wraps a connection timeout in a URLError
        raise Unanswered(_in_words(getattr(error, "reason", error), admin, seconds), hangs) from None


def _in_words(reason: object, admin: str, seconds: float) -> str:
    """Return why nothing answers, as far as it is known."""
    match reason:
        case socket.gaierror():
            return f"host name {urllib.parse.urlsplit(admin).hostname!r} does not resolve"
        case ConnectionRefusedError():
            return "nothing listens there"
        case TimeoutError():
            return f"it does not answer within {seconds:g} s"
        case http.client.IncompleteRead():
            return "its answer breaks off"
        case http.client.RemoteDisconnected():
            return "it closes the connection without an answer"
        case ValueError() | http.client.InvalidURL():
            return NO_URL
        case http.client.HTTPException():
            return "something else answers there"
    return getattr(reason, "strerror", None) or str(reason)


def _refusal(refused: urllib.error.HTTPError, admin: str) -> Exception:
    """Return the exception for an error status: a refusal only if a gateway's admin side sent it.

    Engines, and the clients' side of a gateway, answer in the same shape.
    """
    if ADMIN_SIDE not in refused.headers:
        return Unanswered(f"what answers there, with status {refused.code}, is no gateway's admin side")
    try:
        error = json.loads(refused.read())["error"]
        if refused.code in (401, 403):
            return ConfigError(f"the admin side at {admin} refuses: {error['message']}")
        return ApiError(refused.code, error["message"], error["type"], error["param"], error["code"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return Unanswered(f"its answer, with status {refused.code}, cannot be read")
