"""Requests of the commands `explain`, `replicas` and `doctor` to the admin API of a running gateway."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Any

from gateway.errors import ApiError
from gateway.settings import ADMIN_SIDE, Config, ConfigError, admin_headers, admin_url
from replicas.replica import parse_url

HANGS = "Something listens there and does not answer: if it is the gateway, it hangs; `hitherto doctor` says what to do"
NOBODY = "nothing listens there"
ANSWER_SECONDS = 30.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores HTTP_PROXY and the like


class Unanswered(Exception):
    """Raised if no gateway's admin API answers at a URL.

    `hangs`: whether something accepts connections there but does not answer.
    """

    def __init__(self, reason: str, hangs: bool = False) -> None:
        super().__init__(reason)
        self.hangs = hangs


def side_of(admin: str | None, config: Config) -> str:
    """Return the URL of a gateway's admin API: the one given with --admin, or else the one in the settings.

    Raises ConfigError if `admin`, the value of --admin, is no URL of a server.
    """
    try:
        return parse_url(admin).url if admin else admin_url(config.settings)
    except ValueError as wrong:
        raise ConfigError(f"--admin {admin}: {str(wrong).partition(': ')[2]}") from None


def answer_of(
    side: str, config: Config, method: str, path: str, body: bytes | None = None, seconds: float = 0.0
) -> Any:
    """Send a request to the admin API at the URL `side`, and return the parsed JSON of its answer.

    `seconds`: the time limit; 0 for ANSWER_SECONDS. Raises ConfigError if no gateway answers or if it refuses the admin
    token, and ApiError for any other refusal.
    """
    try:
        return ask(side, config, method, path, body, seconds)
    except Unanswered as reason:
        remedy = HANGS if reason.hangs else "Start one, or name its admin side with --admin URL"
        raise ConfigError(f"no gateway answers at {side} ({reason}). {remedy}") from None


def ask(side: str, config: Config, method: str, path: str, body: bytes | None = None, seconds: float = 0.0) -> Any:
    """Send a request to the admin API at the URL `side`, and return the parsed JSON of its answer.

    `seconds`: the time limit; 0 for ANSWER_SECONDS. Raises Unanswered if no admin API answers there, ConfigError if it
    refuses the admin token in the settings, and ApiError for any other refusal.
    """
    typed = {} if body is None else {"Content-Type": "application/json"}
    seconds = seconds or ANSWER_SECONDS
    try:
        headers = {**typed, **admin_headers(config.settings)}
        request = urllib.request.Request(side + path, data=body, headers=headers, method=method)
        with _DIRECT.open(request, timeout=seconds) as response:
            answer = response.read()
            if ADMIN_SIDE not in response.headers:
                raise Unanswered("something else answers there")
            return json.loads(answer)
    except urllib.error.HTTPError as refused:
        raise _refusal(refused, side, config) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib wraps a connection's error in a URLError
        match reason:
            case ConnectionRefusedError():
                raise Unanswered(NOBODY) from None
            case socket.gaierror():
                raise Unanswered("its host name does not resolve") from None
            case TimeoutError():
                raise Unanswered(f"it does not answer within {seconds:g} s", hangs=True) from None
            case ValueError() | http.client.HTTPException():
                raise Unanswered("something else answers there") from None
        raise Unanswered(getattr(reason, "strerror", None) or str(reason)) from None


def _refusal(refused: urllib.error.HTTPError, side: str, config: Config) -> Exception:
    """Return the exception for an answer with an error status.

    A header shows whether the answer comes from a gateway's admin API. If not, the exception is Unanswered: engines,
    and a gateway's port for clients, send errors of the same format. If so, it is ConfigError for the admin token, else
    ApiError.
    """
    if ADMIN_SIDE not in refused.headers:
        return Unanswered(f"what answers there, with status {refused.code}, is no gateway's admin side")
    try:
        error = json.loads(refused.read())["error"]
        if refused.code in (401, 403):
            unread = config.unusable.get("admin_token")
            why = f"the admin side at {side} refuses: {error['message']}"
            return ConfigError(why if unread is None else f"{why}\n{unread}")
        return ApiError(refused.code, error["message"], error["type"], error["param"], error["code"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return Unanswered(f"its answer, with status {refused.code}, cannot be read")
