"""Tokenizers that come as `tiktoken.model`, with a program in the model's folder that reads it (Kimi K2).

The program is not run; its text is analysed. A program may do anything, so no prompt counts as exact until an engine
has made the gateway's tokens of fixed texts.
"""

from __future__ import annotations

import ast
import base64
from pathlib import Path
from typing import Any

from .folder import ModelError, matching, read, read_text, using
from .ranked import RankedReadings, tokenizer_json

# The program encodes longer runs of blanks, or of other characters, in parts, and so a text longer than LONGEST_TEXT.
LONGEST_RUN = 25_000
LONGEST_TEXT = 400_000
_RESERVED = 256 + 2  # special tokens after the vocabulary, named or not
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def can_be_read(directory: Path) -> bool:
    """Return whether the folder has a tiktoken.model, and a program in which the word pattern can be found."""
    try:
        return (directory / "tiktoken.model").is_file() and bool(_word_pattern(directory))
    except (ModelError, SyntaxError, ValueError):
        return False


def readings(directory: Path, config: dict[str, Any], settings: dict[str, Any]) -> RankedReadings:
    """Read the files; `config` is tokenizer_config.json. Raises ModelError."""

    def make() -> str:
        with using(directory / "tiktoken.model"):
            lines = [line.split() for line in read(directory / "tiktoken.model").splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        names = {int(id): _text(one) for id, one in (config.get("added_tokens_decoder") or {}).items()}
        ids = range(len(ranks), len(ranks) + _RESERVED)
        special = {names.get(id, f"<|reserved_token_{id}|>"): id for id in ids}
        return tokenizer_json(ranks, _word_pattern(directory), special)

    with using(directory / "tokenizer_config.json"):
        named = {key: _text(config[key]) for key in _NAMED if config.get(key)}
        unknown = "the model brings tokenizer code of its own (tiktoken.model)"
        return RankedReadings("tiktoken.model by the model's own rules", make, unknown, named, LONGEST_RUN)


def sorts_tools(directory: Path) -> bool:
    """Return whether tools reach the template with their keys in alphabetical order."""
    return "deep_sort_dict(tools)" in _program(directory)


def with_sorted_keys(value: Any) -> Any:
    """Return a JSON value with the keys of all its objects in alphabetical order."""
    if isinstance(value, dict):
        return {key: with_sorted_keys(one) for key, one in sorted(value.items())}
    return [with_sorted_keys(one) for one in value] if isinstance(value, list) else value


def _program(directory: Path) -> str:
    return "\n".join(read_text(path) for path in matching(directory, "tokenization_*.py"))


def _word_pattern(directory: Path) -> str:
    """Return the program's pattern of words, or "" where there is none.

    The pattern is what the program assigns to `pat_str`: a string, or a list of strings joined by another string.
    """
    for node in ast.walk(ast.parse(_program(directory))):
        if isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["pat_str"]:
            value = node.value
            try:
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "join":
                    return ast.literal_eval(value.func.value).join(ast.literal_eval(value.args[0]))
                found = ast.literal_eval(value)
            except (ValueError, TypeError, AttributeError, IndexError):
                return ""
            return found if isinstance(found, str) else ""
    return ""


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
