"""What pydantic finds wrong with a setting, in words."""

from __future__ import annotations

import difflib
from typing import Any

_WHOLE, _TRUTH = "it is no whole number", "it is neither true nor false"
_WORDS = {
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_parsing": "it is no number",
    "float_type": "it is no number",
    "finite_number": "it is not finite",
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
    "dict_type": "it is no table of names and values",
    "model_type": "it is no table of names and values",
    "greater_than": "it is not above {gt}",
    "greater_than_equal": "it is below {ge}",
    "less_than": "it is not below {lt}",
    "less_than_equal": "it is above {le}",
}


def reason(item: Any) -> str:
    """Why a value is not valid; `item` is one of `ValidationError.errors()`."""
    words = _WORDS.get(item["type"])
    return words.format(**_readable(item.get("ctx", {}))) if words else item["msg"][0].lower() + item["msg"][1:]


def _readable(context: dict[str, Any]) -> dict[str, Any]:
    """What the words may name, limits of whole numbers without their .0; of a table's type it is a name."""
    return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in context.items()}


def none_of(item: Any) -> str:
    """Which words there are, and the one that was probably meant."""
    choices = item["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
    near = difflib.get_close_matches(str(item["input"]), choices.split(", "), 1)
    return f"{item['input']!r} is none of {choices}" + (f". Did you mean {near[0]!r}?" if near else "")
