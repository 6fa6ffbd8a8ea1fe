"""The program in a model's folder that reads its `tiktoken.model`, analysed without running it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from .folder import ModelError, matching, read_text

# The program encodes longer runs of blanks, or of other characters, in parts, and so a text longer than LONGEST_TEXT.
LONGEST_RUN = 25_000
LONGEST_TEXT = 400_000


def word_pattern(directory: Path) -> str:
    """Return the program's pattern of words, or "" where there is none.

    The pattern is what the program assigns to `pat_str`: a string, or a list of strings joined by another string.
    """
    for node in ast.walk(ast.parse(_program(directory))):
        if isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["pat_str"]:
            return _joined(node.value)
    return ""


def can_be_read(directory: Path) -> bool:
    """Return whether the folder has a tiktoken.model, and a program in which the word pattern can be found."""
    try:
        return (directory / "tiktoken.model").is_file() and bool(word_pattern(directory))
    except (ModelError, SyntaxError, ValueError):
        return False


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


def _joined(value: ast.expr) -> str:
    try:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "join":
            return ast.literal_eval(value.func.value).join(ast.literal_eval(value.args[0]))
        found = ast.literal_eval(value)
    except (ValueError, TypeError, AttributeError, IndexError):
        return ""
    return found if isinstance(found, str) else ""
