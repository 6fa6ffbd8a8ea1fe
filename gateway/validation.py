"""Descriptions, in words, of the values that pydantic expected in a setting where it found other values."""

from __future__ import annotations

from typing import Any

TABLE, LIST = "a table of names and values", "a list"
# The expected value, by the first word of pydantic's error type.
_KINDS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "finite": "a finite number", "dict": TABLE,
    "mapping": TABLE, "model": TABLE, "tuple": LIST, "list": LIST, "string": "text (put it in quotes)",
}  # fmt: skip
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "up to"}


def wanted(item: Any) -> str:
    """Return in words the value that pydantic expected, like `a whole number of at least 1`.

    `item`: one error of pydantic's `ValidationError.errors()`. The words name bounds only for a number out of bounds.
    """
    if item["type"] == "too_short":
        return "a list with one entry or more"
    bounds = {name: value for name, value in item.get("ctx", {}).items() if name in _BOUNDS}
    if not bounds:
        return _KINDS.get(item["type"].partition("_")[0], "what belongs there")
    (name, bound), seconds = bounds.popitem(), " of seconds" * str(item["loc"][-1]).endswith("_s")
    kind, text = ("a whole number", str(bound)) if isinstance(bound, int) else ("a number", f"{bound:g}")
    return f"{kind}{seconds} {_BOUNDS[name]} {text}"
