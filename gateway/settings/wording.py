"""Messages for pydantic's errors, which say where each setting was set and what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from replicas.spelling import closest, known_or_meant, none_of

from ..validation import TEXT, WORDY, wanted
from .credentials import SECRETS
from .errors import place_of
from .schema import Settings

DESCRIPTIONS = {name: field.description or "" for name, field in Settings.model_fields.items()}


def misspelt(name: str, known: Iterable[str]) -> str:
    """Return the setting that this name misspells, or "".

    The two names must be very similar, because `replicas` and `admin_url` may be other programs' variables. The same
    letters in another order count as a misspelling, however short the name is. `known`: the names of all settings.
    """
    names = list(known)
    swapped = [one for one in names if sorted(one) == sorted(name)]
    return swapped[0] if swapped else closest(name, names, 0.8)


def explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """Return a message on pydantic's errors, one line for each; `sources`: where each setting was set."""
    return "\n".join(_explain(item, sources) for item in error.errors())


def path_of(parts: Sequence[str | int]) -> str:
    """Return a place within a setting as people write it: `qos_classes[0].slo`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "[key]").lstrip(
        "."
    )


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """Return one of pydantic's errors as a line: where the setting was set, what is wrong, what would be right."""
    name, *within = item["loc"]
    part = "" if "[key]" in within else path_of(within)  # a wrong key names itself
    if name not in DESCRIPTIONS:
        return f"{place_of(name, sources)}: unknown setting{known_or_meant(name, DESCRIPTIONS)}"
    place, takes = place_of(name, sources), f"It takes {DESCRIPTIONS[name]}"
    if item["type"] == "missing":
        return f"{place}: {part or name} is missing. {takes}"
    place += f": {part}" if part else ""
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    if item["type"] == "literal_error":
        return f"{place}: {none_of(item['input'], _choices(item))}"
    what = wanted(item, _field_at(item["loc"]))
    if item["input"] is None or item["input"] == "":
        return f"{place}: it has no value, where {what} belongs. {takes}"
    given = "what it is set to" if name in SECRETS else repr(item["input"])
    if what == TEXT and isinstance(item["input"], str):
        return f"{place}: {given} cannot be used there. {takes}"
    if what == TEXT and not isinstance(item["input"], (list, dict)):
        return f"{place}: {given} is not {what}; put it in quotes"
    return f"{place}: {given} is not {what}{f'. {takes}' if what in WORDY else ''}"


def _field_at(parts: Iterable[str | int]) -> FieldInfo | None:
    """Return the field at a place within the settings or a table in them; None for an entry of a list."""
    table: type[BaseModel] = Settings
    field = None
    for part in parts:
        if (field := table.model_fields.get(str(part))) is not None:
            table = next(_tables(field.annotation), table)
    return field


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the types of the tables that a field with this annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _tables(one)


def _choices(item: Any) -> list[str]:
    """Return the words that a field allows, from pydantic's error about another one."""
    return item["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
