"""Reading the tokenizer of models in Mistral's own format: `tekken.json`, which engines read with mistral-common.

In this format no special token is ever found in a text, so special tokens get names that no text contains (`UNSPOKEN`).
The rules by which mistral-common writes conversations depend on its version, which an engine does not report. So no
prompt is treated as exact until an engine's tokens of fixed texts and chats have equalled the gateway's.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import orjson

from ..render.program import UNSPOKEN, Program
from ..render.programs import mistral
from .folder import ModelError, read, using
from .ranked import RankedReadings, tokenizer_json

FILE = "tekken.json"
# The special tokens of a tekken.json that names none, in the order of their ids.
_UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_NAMES_NEEDED_ABOVE = 7  # a tekken.json of a later version must name its special tokens


class Unreadable(Exception):
    """Raised for a folder that engines read with mistral-common but that the gateway cannot read; the text says why."""


def is_used(directory: Path) -> bool:
    """Return whether vLLM reads the tokenizer of this folder with mistral-common.

    vLLM does so if the folder also holds the model's weights in Mistral's own format. In a folder without weights, as
    `find_model` downloads it, the presence of params.json decides. Raises Unreadable if vLLM does so but the gateway
    cannot read the files.
    """

    def has(*patterns: str) -> bool:
        return any(next(directory.glob(pattern), None) for pattern in patterns)

    if not (has("consolidated*.safetensors") and has(FILE, "tokenizer.model.v*")) and (
        not has("params.json") or has("*.safetensors", "*.bin", "*.gguf")
    ):
        return False
    why = "the engine makes this model's tokens with mistral-common (--tokenizer-mode hf would make it use tokenizer.json)"
    if not (directory / FILE).is_file():
        raise Unreadable(why)
    try:
        _parsed(directory)
    except (ModelError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreadable(f"{why}; can't read {FILE}: {type(error).__name__}: {error}") from error
    return True


def program(directory: Path) -> Program:
    """Return the rules by which engines write the conversations of the model in this folder."""
    told, _ = _parsed(directory)
    builder = told.get("model_settings_builder")
    effort = builder.get("reasoning_effort") if isinstance(builder, dict) else None
    values = [str(effort["default"]), *map(str, effort["values"])] if effort is not None else []
    return mistral.program(_version(told), tuple(dict.fromkeys(values)))


def readings(directory: Path, config: dict[str, Any], settings: dict[str, Any]) -> RankedReadings:
    """Return the tokenizer that is made of the folder's tekken.json. Raises ModelError.

    `config` and `settings` are not used.
    """

    def make() -> str:
        told, special = _parsed(directory)
        reserved = int(told["config"]["default_num_special_tokens"])
        words = int(told["config"]["default_vocab_size"]) - reserved
        ranks = {base64.b64decode(one["token_bytes"]): rank for rank, one in enumerate(told["vocab"][:words])}
        kept = {f"<SPECIAL_{id}>": id for id in range(len(special), reserved)}
        names = {UNSPOKEN + name: id for name, id in (special | kept).items()}
        begin, first = UNSPOKEN + "<s>", {"type_id": 0}
        adds_begin = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, **first}}, {"Sequence": {"id": "A", **first}}],
            "pair": [{"Sequence": {"id": "A", **first}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [special["<s>"]], "tokens": [begin]}},
        }
        return tokenizer_json(ranks, str(told["config"]["pattern"]), names, names, reserved, adds_begin)

    with using(directory / FILE):
        unknown = "the engine's mistral-common may write this model by other rules"
        return RankedReadings(f"{FILE} as mistral-common reads it", make, unknown)


def _parsed(directory: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the content of tekken.json and the ids of its special tokens by name.

    Raises ModelError, or any other error that its content leads to, for a file that cannot be used.
    """
    told = orjson.loads(read(directory / FILE))
    if _version(told) not in mistral.VERSIONS:
        raise ValueError(f"its version is {told['config']['version']}, which is not known here")
    named = told.get("special_tokens")
    if named is None and _version(told) > _NAMES_NEEDED_ABOVE:
        raise ValueError("it names no special tokens")
    special = (
        {name: id for id, name in enumerate(_UNNAMED)}
        if named is None
        else {str(one["token_str"]): int(one["rank"]) for one in named}
    )
    reserved = int(told["config"]["default_num_special_tokens"])
    if sorted(special.values()) != list(range(len(special))) or len(special) > reserved:
        raise ValueError("its special tokens are not numbered in a row")
    return told, special


def _version(told: dict[str, Any]) -> int:
    return int(str(told["config"]["version"]).removeprefix("v"))
