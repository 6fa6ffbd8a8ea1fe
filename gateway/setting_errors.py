"""What is wrong with a setting, in words that say where it was set and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from replicas.pods import Discover
from replicas.simulated.complaints import none_of

from .complaints import TABLE, TEXT, TEXTS, wanted
from .other_routers import policy_answer
from .pools import Pool
from .settings import SECRETS, SIZES, Settings, flag
from .sizes import show_bytes

LONG_NAME = 8  # characters: a longer name may have two slips, as one of three (`log`) is two from many (`slo`)


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Where a setting was set, and its name where that does not say it: `flag --port`, `file hitherto.yaml:3: port`."""
    source = sources.get(name, f"flag {flag(name)}")
    return source if source.startswith(("flag ", "environment ")) else f"{source}: {name}"


def suggest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """'Did you mean X?', or the list of what there is."""
    near = _meant(name, known)
    return f"Did you mean {near!r}?" if near else "Known: " + ", ".join(known)


def misspelt(name: str, known: Iterable[str]) -> str:
    """The known name that this one misspells, or "": they differ in underscores alone, or in one slip, in a known name
    of `LONG_NAME` characters or more two. Likeness (`difflib`) would call `replicas` and `admin_url` misspelt as well,
    which may be somebody else's."""
    plain = name.replace("_", "")
    near = min(known, key=lambda one: 0 if one.replace("_", "") == plain else slips(name, one))
    is_meant = near.replace("_", "") == plain or slips(name, near) <= 1 + (len(near) >= LONG_NAME)
    return near if is_meant else ""


def slips(name: str, other: str) -> int:
    """How many characters too many, missing, wrong or swapped with their neighbour make the one of the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, char in enumerate(name, 1):
        before, above, row = row, before, [i]
        for j, wanted_char in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (char != wanted_char)))
            if i > 1 and j > 1 and char == other[j - 2] and name[i - 2] == wanted_char:
                row[-1] = min(row[-1], above[j - 2] + 1)
    return row[-1]


def explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """What pydantic found, one line for each setting that is wrong."""
    return "\n".join(_explain(item, sources) for item in _told_once(error.errors()))


def _meant(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """The known name that was probably meant, or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), "")


def _told_once(items: Sequence[Any]) -> list[Any]:
    """pydantic's errors without the settings that are missing only for being misspelt, which is an error of its own."""
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], _meant(str(loc[-1]), _known(loc))) for loc in unknown}
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
        return f"{place}: {part and part + ' is an '}unknown setting. {suggest(item['loc'][-1], known)}"
    if item["type"] == "missing":
        return f"{place}: {part or name} is missing. {takes}"
    place += f": {part}" if part else ""
    if item["type"] == "value_error":
        return f"{place}: {item['ctx']['error']}"
    if item["type"] == "literal_error":
        others = policy_answer(item["input"]) if name == "policy" else ""
        return f"{place}: {others or none_of(item['input'], _choices(item))}"
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
