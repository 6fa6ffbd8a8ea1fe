"""What pydantic finds wrong with a setting, in words that say what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from replicas.sizes import show_bytes

TEXT, TABLE, TEXTS = "text", "a table of names and values", "a list of texts"
_KINDS = {"boolean": "true or false", "array": TEXTS, "object": TABLE}


def wanted(schema: type[BaseModel], where: Sequence[str | int], is_size: bool = False, finite: bool = False) -> str:
    """What belongs there, in words: `a whole number from 0 to 65535`. `where`: names and indexes from the schema.
    `finite`: whether it is to be said that infinity is no such number."""
    whole = schema.model_json_schema()
    found = whole
    for step in ("", *where):
        if step != "":
            inner = found.get("properties", {}).get(step) or found.get("items") or found.get("additionalProperties")
            found = inner if isinstance(inner, dict) else {}
        found = next((one for one in found.get("anyOf", ()) if one.get("type") != "null"), found)
        if "$ref" in found:
            found = whole["$defs"][found["$ref"].rpartition("/")[2]]
    kind = found.get("type")
    if kind not in ("integer", "number"):
        return _KINDS.get(str(kind), TEXT)
    if is_size:
        least = found.get("minimum", found.get("ge", 0))  # the latter behind a validator of its own
        return f"a size {f'of at least {show_bytes(least)}' if least > 1 else 'above 0'}, like 512MiB"
    unit = " of seconds" if str(where[-1]).endswith("_s") else ""
    which = "whole " if kind == "integer" else "finite " if finite else ""
    return f"a {which}number{unit}{_range(found)}"


def _range(found: dict[str, Any]) -> str:
    least, most, above = found.get("minimum"), found.get("maximum"), found.get("exclusiveMinimum")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" of at least {least}"
    return f" above {above}" if above is not None else ""
