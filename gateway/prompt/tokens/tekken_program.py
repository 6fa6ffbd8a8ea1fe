"""Everything in a model's `tekken.json` but its vocabulary, which selects the rules of mistral-common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ..render.program import UNSPOKEN, Program
from ..render.programs import mistral
from . import folder

FILE = "tekken.json"
# The special tokens of a file that names none, by id.
_UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_NAMES_NEEDED_ABOVE = 7  # versions above this one must name their special tokens


class Tekken:
    """The contents of a `tekken.json`, except for its vocabulary."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Read the parsed file. Raises KeyError, TypeError or ValueError."""
        config = told["config"]
        self.pattern = str(config["pattern"])
        self.reserved = int(config["default_num_special_tokens"])
        self.words = int(config["default_vocab_size"]) - self.reserved
        self.version = int(str(config["version"]).removeprefix("v"))
        if self.version not in mistral.VERSIONS:
            raise ValueError(f"its version is {config['version']}, which is not known here")
        named = told.get("special_tokens")
        if named is None and self.version > _NAMES_NEEDED_ABOVE:
            raise ValueError("it names no special tokens")
        self.special = (
            {str(one["token_str"]): int(one["rank"]) for one in named}
            if named is not None
            else {name: id for id, name in enumerate(_UNNAMED)}
        )
        if sorted(self.special.values()) != list(range(len(self.special))) or len(self.special) > self.reserved:
            raise ValueError("its special tokens are not numbered in a row")
        self.efforts = _efforts(told.get("model_settings_builder"))

    def names(self) -> dict[str, int]:
        """Return the ids of all special tokens, reserved ones included, by names that no text contains."""
        kept = {f"<SPECIAL_{id}>": id for id in range(len(self.special), self.reserved)}
        return {UNSPOKEN + name: id for name, id in (self.special | kept).items()}


def read(directory: Path) -> tuple[Tekken, dict[str, Any]]:
    """Return the file's settings and its whole content. Raises ValueError."""
    try:
        whole = orjson.loads(folder.read(directory / FILE))
        return Tekken(whole), whole
    except (folder.ModelError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"can't read {FILE}: {type(error).__name__}: {error}") from error


def program_of(directory: Path) -> tuple[Program | None, str]:
    """Return the rules by which engines write this model's conversations, or None and why they are not known."""
    try:
        told, _ = read(directory)
    except ValueError as error:
        return None, str(error)
    return mistral.program(told.version, told.efforts), ""


def _efforts(builder: Any) -> tuple[str, ...]:
    """Return the efforts that a request may choose, the default first; () where it may choose none."""
    effort = builder.get("reasoning_effort") if isinstance(builder, dict) else None
    if effort is None:
        return ()
    values, default = [str(one) for one in effort["values"]], str(effort["default"])
    return (default, *(one for one in values if one != default))
