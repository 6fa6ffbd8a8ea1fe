"""Secrets that an operator gives: in the environment, in the configuration file, or as @FILE."""

from __future__ import annotations

import os
import re
from pathlib import Path

from replicas.pipes import refuse_pipe

TOKEN = re.compile(r"[!-~]{16,1024}")  # of the admin side, made for this
ENGINE_KEY = re.compile(r"[!-~]{1,1024}")  # whatever an engine was started with
HIDDEN = "********"  # shown in place of a secret
MAKE_TOKEN = "`openssl rand -hex 32` makes one"


def check_token(token: str) -> str:
    """The admin side's token as a setting has it. Raises ValueError."""
    _check(token, "token")
    if not token.startswith("@") and not TOKEN.fullmatch(token):
        raise ValueError(f"it must have at least 16 characters, no spaces and none outside ASCII. {MAKE_TOKEN}")
    return token


def check_engine_key(key: str) -> str:
    """The engines' key as a setting has it. Raises ValueError."""
    _check(key, "key")
    if not key.startswith("@") and not ENGINE_KEY.fullmatch(key):
        raise ValueError("it must have 1 to 1024 characters, no spaces and none outside ASCII")
    return key


def _check(secret: str, what: str) -> None:
    if secret == HIDDEN:
        raise ValueError(f"the {what} is hidden here, as `hitherto config` prints it; write the real one, or @FILE")
    if os.path.isfile(secret):
        raise ValueError(f"{secret} is a file: write @{secret} for the {what} in it")


def read(given: str | None, allowed: re.Pattern[str], what: str) -> str | None:
    """The secret itself, out of its file if it is in one; None where there is none. Raises ValueError. `what`: one that
    is well formed, in words."""
    if given is None or not given.startswith("@"):
        return given
    try:
        refuse_pipe(Path(given[1:]))
        secret = Path(given[1:]).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ValueError(f"cannot read it from {given[1:]}: {reason}") from None
    if not allowed.fullmatch(secret):
        raise ValueError(f"{given[1:]} holds none: that is {what}")
    return secret


def shown(given: str | None) -> str | None:
    """A secret setting as it may be printed."""
    return HIDDEN if given and not given.startswith("@") else given
