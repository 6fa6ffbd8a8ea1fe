"""Messages for pydantic's errors, which say where each setting was set and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from replicas.spelling import known_or_meant, none_of

from ..validation import wanted
from .credentials import SECRETS
from .errors import place_of
from .schema import Settings

DESCRIPTIONS = {name: field.description or "" for name, field in Settings.model_fields.items()}


def explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """Return a message for the errors that pydantic found, with one line for each.

    `sources`: where each setting was set, by the setting's name.
    """
    return "\n".join(_explain(item, sources) for item in error.errors())


def path_of(parts: Sequence[str | int]) -> str:
    """Return a place within a setting as people write it: `qos_classes[0].slo`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "[key]").lstrip(
        "."
    )


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """Return one line about one of pydantic's errors: where the setting was set, what is wrong, what would be right."""
    name, *within = item["loc"]
    place, part = place_of(name, sources), "" if "[key]" in within else path_of(within)  # a wrong key names itself
    if name not in DESCRIPTIONS:
        return f"{place}: unknown setting{known_or_meant(name, DESCRIPTIONS)}"
    takes = f"It takes {DESCRIPTIONS[name]}"
    if item["type"] == "missing":
        return f"{place}: {part or name} is missing. {takes}"
    place += f": {part}" if part else ""
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    if item["type"] == "literal_error":
        choices = item["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{place}: {none_of(item['input'], choices.split(', '))}"
    if item["input"] is None or item["input"] == "":
        return f"{place}: it has no value, where {wanted(item)} belongs. {takes}"
    given = "what it is set to" if name in SECRETS else repr(item["input"])
    return f"{place}: {given} is not {wanted(item)}{'' if part else f'. {takes}'}"
