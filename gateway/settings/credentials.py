"""The two secret settings, given in the environment, in the configuration file, or as @FILE."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from replicas.pipes import refuse_pipe

from .errors import UnusableFile

HIDDEN = "********"  # shown in place of a secret
MAKE_TOKEN = "`openssl rand -hex 32` makes one"


class Secret(NamedTuple):
    """A setting that holds a secret, and the form of that secret."""

    setting: str  # its name
    what: str  # the secret in a word, for messages
    allowed: re.Pattern[str]  # what the whole secret must match
    refusal: str  # for a text of another form
    remedy: str  # what to do instead

    def check(self, given: str) -> str:
        """Return the setting's value unchanged. Raises ValueError if it is neither such a secret nor an @FILE."""
        if given == HIDDEN:
            raise ValueError(
                f"the {self.what} is hidden here, as `hitherto config` prints it; write the real one, or @FILE"
            )
        if os.path.isfile(given):
            raise ValueError(f"{given} is a file: write @{given} for the {self.what} in it")
        if not given.startswith("@") and not self.allowed.fullmatch(given):
            raise ValueError(f"{self.refusal}. {self.remedy}")
        return given

    def read(self, given: str | None) -> str | None:
        """Return the secret in the setting's value `given`, or in the @FILE that it names. Raises UnusableFile."""
        if given is None or not given.startswith("@"):
            return given
        try:
            refuse_pipe(Path(given[1:]))
            secret = Path(given[1:]).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise UnusableFile(f"cannot read it from {given[1:]}: {reason}. {self.remedy}", self.setting) from None
        if not self.allowed.fullmatch(secret):
            raise UnusableFile(f"{given[1:]} holds none: {self.refusal}. {self.remedy}", self.setting)
        return secret


TOKEN = Secret(
    "admin_token",
    "token",
    re.compile(r"[!-~]{16,1024}"),  # made for this
    "it must have at least 16 characters in one line, no spaces and none outside ASCII",
    MAKE_TOKEN,
)
ENGINE_KEY = Secret(
    "engine_api_key",
    "key",
    re.compile(r"[!-~]{1,1024}"),  # whatever an engine was started with
    "it must have 1 to 1024 characters in one line, no spaces and none outside ASCII",
    "Write there what the engines were started with, or leave the setting out",
)
SECRETS = {one.setting: one for one in (TOKEN, ENGINE_KEY)}
Token = Annotated[str, AfterValidator(TOKEN.check)]
EngineKey = Annotated[str, AfterValidator(ENGINE_KEY.check)]


def shown(given: str | None) -> str | None:
    """Return a secret setting's value as it may be printed: a secret is replaced by HIDDEN, an @FILE stays."""
    return HIDDEN if given and not given.startswith("@") else given
