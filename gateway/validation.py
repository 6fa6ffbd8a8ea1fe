"""Descriptions, in words, of the values that pydantic expected where it found others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

TEXT = "text"
WORDY = (TEXT, TABLE := "a table of names and values", LIST := "a list")  # callers add what the field takes
# The expected value, by the first word of pydantic's error type.
_KINDS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "finite": "a finite number", "dict": TABLE,
    "mapping": TABLE, "model": TABLE, "tuple": LIST, "list": LIST,
}  # fmt: skip


def wanted(item: Any, field: FieldInfo | None = None) -> str:
    """Return the value that one of pydantic's errors asks for, like `a whole number from 0 to 65535`.

    `item`: the error, from `errors()`. `field`: the field that has the error; its bounds are named even where the value
    was no number.
    """
    if item["type"] == "too_short":
        return "a list with one entry or more"
    bounds = {name: value for name, value in item.get("ctx", {}).items() if name in ("ge", "gt", "le")}
    if bounds:
        what = "a whole number" if type(next(iter(bounds.values()))) is int else "a number"
    else:
        what = _KINDS.get(item["type"].partition("_")[0], TEXT)
    if not what.endswith("number"):
        return what
    for one in field.metadata if field is not None else ():
        bounds |= {name: getattr(one, name) for name in ("ge", "gt", "le") if hasattr(one, name)}
    return what + " of seconds" * str(item["loc"][-1]).endswith("_s") + _range(bounds)


def _range(bounds: Mapping[str, float]) -> str:
    if "ge" in bounds and "le" in bounds:
        return f" from {_number(bounds['ge'])} to {_number(bounds['le'])}"
    words = {"ge": "of at least", "gt": "above", "le": "up to"}
    return "".join(f" {words[name]} {_number(bound)}" for name, bound in bounds.items())


def _number(bound: float) -> str:
    return f"{bound:g}" if type(bound) is float else str(bound)
