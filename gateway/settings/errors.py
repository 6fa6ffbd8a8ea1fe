"""What is wrong with a setting, in words that say where it was set and what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from replicas.pods import Discover
from replicas.sizes import show_bytes
from replicas.spelling import closest, known_or_meant, none_of

from ..validation import TABLE, TEXT, TEXTS, wanted
from .pools import Pool
from .schema import SECRETS, SIZES, Settings, flag


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Where a setting was set, and its name where that does not say it: `flag --port`, `file hitherto.yaml:3: port`."""
    source = sources.get(name, f"flag {flag(name)}")
    return source if source.startswith(("flag ", "environment ")) else f"{source}: {name}"


def misspelt(name: str, known: Iterable[str]) -> str:
    """Return the setting that this name misspells, or "". Likeness has to be high, since `replicas` and `admin_url` may
    be somebody else's variables; the same letters in another order are a slip however short the name is."""
    names = list(known)
    swapped = [one for one in names if sorted(one) == sorted(name)]
    return swapped[0] if swapped else closest(name, names, 0.8)


def explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """What pydantic found, one line for each setting that is wrong."""
    return "\n".join(_explain(item, sources) for item in _told_once(error.errors()))


def _told_once(items: Sequence[Any]) -> list[Any]:
    """pydantic's errors without the settings that are missing only for being misspelt, which is an error of its own."""
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], closest(str(loc[-1]), _known(loc))) for loc in unknown}
    return [item for item in items if item["type"] != "missing" or item["loc"] not in misspelt]


def _known(loc: Sequence[Any]) -> Mapping[str, Any]:
    """The settings that there are where pydantic found one that there is not."""
    of = {"pools": Pool, "discover": Discover}.get(loc[0]) if len(loc) > 1 else None
    return (of or Settings).model_fields


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """One pydantic error as: place: what is wrong; what would be right."""
    name, *within = item["loc"]
    inner = [one for one in within if isinstance(one, str)] if "[key]" not in within else []  # a wrong key names itself
    place, part = place_of(name, sources), ".".join(inner)
    takes = f"It takes {Settings.model_fields[name].description}" if name in Settings.model_fields else ""
    if item["type"] == "extra_forbidden":
        known = _known(item["loc"])
        return f"{place}: {part and part + ' is an '}unknown setting{known_or_meant(str(item['loc'][-1]), known)}"
    if item["type"] == "missing":
        return f"{place}: {part or name} is missing. {takes}"
    place += f": {part}" if part else ""
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    if item["type"] == "literal_error":
        return f"{place}: {none_of(item['input'], _choices(item))}"
    what = wanted(Settings, item["loc"], name in SIZES, item["type"] == "finite_number")
    if item["input"] is None or item["input"] == "":
        which = f"entry {within[-1] + 1}" if within and isinstance(within[-1], int) else "it"
        return f"{place}: {which} has no value, where {what} belongs. {takes}"
    given = _given(name, item["input"])
    if what == TEXT and isinstance(item["input"], str):
        return f"{place}: {given} cannot be used there. {takes}"
    if what == TEXT and not isinstance(item["input"], (list, dict)):
        return f"{place}: {given} is not {what}; put it in quotes"
    wordy = what in (TEXT, TABLE, TEXTS)
    return f"{place}: {given} is not {what}{f'. {takes}' if wordy else ''}"


def _given(name: str, value: Any) -> str:
    if name in SECRETS:
        return "what it is set to"
    return show_bytes(value) if name in SIZES and isinstance(value, int) else repr(value)


def _choices(item: Any) -> list[str]:
    """The words of which one belongs there."""
    return item["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
