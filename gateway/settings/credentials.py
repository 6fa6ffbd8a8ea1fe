"""The two settings that hold secrets. The value of each is the secret itself, or @FILE for a file that contains it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from replicas.pipes import refuse_pipe

from .errors import UnusableFile, using_file

HIDDEN = "********"  # shown in place of a secret
MAKE_TOKEN = "`openssl rand -hex 32` makes one"


class Secret(NamedTuple):
    """A setting that holds a secret of printable ASCII, with at least `least` characters."""

    setting: str
    least: int
    remedy: str  # what to do instead of a text that is no such secret

    def check(self, given: str) -> str:
        """Return the setting's value unchanged. Raises ValueError if it is neither such a secret nor an @FILE."""
        if given == HIDDEN:
            raise ValueError("the secret is hidden here, as `hitherto config` prints it; write the real one, or @FILE")
        if os.path.isfile(given):
            raise ValueError(f"{given} is a file: write @{given} for the secret in it")
        if not given.startswith("@") and (why := self._refusal(given)):
            raise ValueError(why)
        return given

    def read(self, given: str | None) -> str | None:
        """Return the secret in the setting's value `given`, or in the @FILE that it names. Raises UnusableFile."""
        if given is None or not given.startswith("@"):
            return given
        with using_file(self.setting, given[1:], self.remedy):
            refuse_pipe(Path(given[1:]))
            secret = Path(given[1:]).read_text(encoding="utf-8").strip()
        if why := self._refusal(secret):
            raise UnusableFile(f"{given[1:]} holds none: {why}", self.setting)
        return secret

    def _refusal(self, text: str) -> str:
        if re.fullmatch(rf"[!-~]{{{self.least},1024}}", text):
            return ""
        size = f"{self.least} to 1024 characters"
        return f"it must have {size} in one line, no spaces and none outside ASCII. {self.remedy}"


TOKEN = Secret("admin_token", 16, MAKE_TOKEN)
ENGINE_KEY = Secret("engine_api_key", 1, "Write there what the engines were started with, or leave the setting out")
SECRETS = {one.setting: one for one in (TOKEN, ENGINE_KEY)}
Token = Annotated[str, AfterValidator(TOKEN.check)]
EngineKey = Annotated[str, AfterValidator(ENGINE_KEY.check)]


def shown(given: str | None) -> str | None:
    """Return the value of a secret setting as it may be printed: asterisks for a secret, @FILE unchanged."""
    return HIDDEN if given and not given.startswith("@") else given
