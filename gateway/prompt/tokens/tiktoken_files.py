"""Reading tokenizers that come as `tiktoken.model`, with a Python program in the folder that reads it (Kimi K2).

The gateway does not run the program but analyses its source. The program may do more than the analysis finds, so no
prompt is treated as exact until an engine's tokens of fixed texts have equalled the gateway's.
"""

from __future__ import annotations

import ast
import base64
from pathlib import Path
from typing import Any

from .folder import ModelError, matching, read, read_text, using
from .ranked import RankedReadings, tokenizer_json

# The program tokenizes longer runs of blanks or of other characters in parts, and also texts longer than LONGEST_TEXT.
# Both are in characters.
LONGEST_RUN = 25_000
LONGEST_TEXT = 400_000
_RESERVED = 256 + 2  # the number of special tokens after the vocabulary, with and without names
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def can_be_read(directory: Path) -> bool:
    """Return whether the folder has a tiktoken.model, and a program in whose source the word pattern can be found."""
    try:
        return (directory / "tiktoken.model").is_file() and bool(_word_pattern(directory))
    except (ModelError, SyntaxError, ValueError):
        return False


def readings(directory: Path, config: dict[str, Any], settings: dict[str, Any]) -> RankedReadings:
    """Return the tokenizer that is made of the folder's tiktoken.model. Raises ModelError.

    `config`: the content of tokenizer_config.json, which names the special tokens; `settings` is not used.
    """

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
    """Return whether the Python code in a model's folder sorts the keys of tools before the chat template gets them."""
    return "deep_sort_dict(tools)" in _program(directory)


def with_sorted_keys(value: Any) -> Any:
    """Return a JSON value with the keys of all its objects in alphabetical order."""
    if isinstance(value, dict):
        return {key: with_sorted_keys(one) for key, one in sorted(value.items())}
    return [with_sorted_keys(one) for one in value] if isinstance(value, list) else value


def _program(directory: Path) -> str:
    return "\n".join(read_text(path) for path in matching(directory, "tokenization_*.py"))


def _word_pattern(directory: Path) -> str:
    """Return the regular expression by which the folder's program splits a text into words, or "" if none is found.

    It is what the program assigns to `pat_str`: a string, or a list of strings joined by another string. Raises
    SyntaxError or ModelError for a program that cannot be read.
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
