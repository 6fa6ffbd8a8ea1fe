"""Settings of what happens when there is not enough for all: limits, classes, and the queue.

The configuration file has them as `slo`, `scheduler`, `request_router` and `admission`. What is wrong with them is said
with its place in there and what would be right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from policies import Classes, QosClass, Rule, Rules, Slo
from policies.classes import DEFAULT_CLASS, NO_LIMITS
from policies.verdicts import OBSERVE, REJECT, STEPS
from replicas.sizes import LIKE

from .sizes import parse_bytes

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_LIMITS = ("ttft", "tpot")
_CLASS_KEYS = ("name", "reserved_fraction", "priority", "slo", "when_full", "max_tokens_floor")
_MATCH_KEYS = ("header", "model", "path", "key")


class Overload(NamedTuple):
    """`tenant_header`: which header of a request names its tenant; None: all are of one."""

    classes: Classes
    rules: Rules
    tenant_header: bytes | None


def parse_seconds(value: Any) -> float:
    """`2s`, `50ms`, `1.5 m` -> seconds. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m)\s*", value) if isinstance(value, str) else None
    if found is None:
        what = "has no unit" if _is_number(value) else "is not a time"
        raise _wrong(value, what, "write a time with ms, s or m, like 2s or 50ms")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0.0 < seconds <= 3600.0:
        raise ValueError(f"{_shown(value)} is out of range; write a time above 0 and up to 60m")
    return seconds


def parse_slo(given: Any) -> Slo:
    """`{ttft: 2s, tpot: 50ms}`, or the text `ttft=2s,tpot=50ms`, with one of them or both. A colon is as good as `=`:
    load generators write it. Raises ValueError."""
    if isinstance(given, str) and given:
        pairs = [part.replace(":", "=", 1).partition("=") for part in given.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if not all(sign for _, sign, _ in pairs) or len({*names}) < len(names):
            raise ValueError(f"{given[:100]!r} is not a list of limits; write ttft=2s,tpot=50ms, or one of the two")
        given = {name: value for name, (_, _, value) in zip(names, pairs, strict=True)}
    mapping = _mapping(given, _LIMITS, "limits")
    if not mapping:
        raise ValueError("it has no limit; write {ttft: 2s}, {tpot: 50ms} or both")
    return Slo(*[_at(name, parse_seconds, mapping[name]) if name in mapping else None for name in _LIMITS])


def parse_scheduler(given: Any, slo: Slo = NO_LIMITS) -> tuple[QosClass, ...]:
    """The classes of `scheduler`; `slo`: limits of those that say nothing of one. Raises ValueError."""
    mapping = _mapping(given, ("qos_classes",), "settings")
    classes = tuple(
        _at(f"qos_classes[{index}]", lambda one: _class(one, slo), one)
        for index, one in enumerate(_list(mapping.get("qos_classes"), "qos_classes"))
    )
    names: set[str] = set()
    for one in classes:
        if one.name in names:
            raise ValueError(f"qos_classes: {one.name!r} is there twice; give each class a name of its own")
        names.add(one.name)
    if (total := sum(one.reserved_fraction for one in classes)) > 1.0 + 1e-9:
        raise ValueError(
            f"qos_classes: the reserved fractions add up to {total:g}, and a fleet has 1 to give; make them smaller"
        )
    return classes


def parse_routes(given: Any, classes: Sequence[QosClass]) -> tuple[Rule, ...]:
    """The rules of `request_router`, for these classes. Raises ValueError."""
    mapping = _mapping(given, ("routes",), "settings")
    rules = tuple(
        _at(f"routes[{index}]", lambda one: _rule(one, classes), one)
        for index, one in enumerate(_list(mapping.get("routes"), "routes"))
    )
    for index, rule in enumerate(rules[:-1]):
        if rule[1:] == (None,) * len(rule[1:]):
            raise ValueError(f"routes[{index}]: it has no condition, so no rule after it is ever used; put it last")
    return rules


def parse_admission(given: Any) -> tuple[Rules, bytes | None]:
    """The queue's settings, and the header that names tenants. Raises ValueError."""
    known = (
        "when_full", "max_tokens_floor", "engine_wait", "max_wait", "max_requests", "max_bytes", "tenant_header",
        "control_window",
    )  # fmt: skip
    mapping = _mapping(given, known, "settings")
    found: dict[str, Any] = {}
    if "when_full" in mapping:
        found["when_full"] = _at("when_full", _steps, mapping["when_full"])
    for name in ("engine_wait", "max_wait"):
        if name in mapping:
            found[name] = _at(name, parse_seconds, mapping[name])
    for name in ("max_requests", "max_tokens_floor"):
        if name in mapping:
            found[name] = _at(name, _count, mapping[name])
    if "max_bytes" in mapping:
        found["max_bytes"] = _at("max_bytes", _size, mapping["max_bytes"])
    if "control_window" in mapping:
        found["control_window"] = _at("control_window", _window, mapping["control_window"])
    header = _at("tenant_header", _header_name, mapping["tenant_header"]) if "tenant_header" in mapping else None
    return Rules(**found), header.encode() if header else None


def overload(slo: Any, scheduler: Any, request_router: Any, admission: Any) -> Overload | None:
    """What these settings say; None if none of them is there. They were checked one by one."""
    if slo is scheduler is request_router is admission is None:
        return None
    limits = parse_slo(slo) if slo is not None else NO_LIMITS
    classes = (
        parse_scheduler(scheduler, limits) if scheduler is not None else (QosClass(DEFAULT_CLASS.name, slo=limits),)
    )
    routes = parse_routes(request_router, classes) if request_router is not None else ()
    rules, header = parse_admission(admission) if admission is not None else (Rules(), None)
    return Overload(Classes(classes, routes), rules, header)


# --- parts


def _class(given: Any, slo: Slo) -> QosClass:
    mapping = _mapping(given, _CLASS_KEYS, "settings of a class")
    name, fraction, priority = mapping.get("name"), mapping.get("reserved_fraction", 0.0), mapping.get("priority", 0)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise _wrong(name, "is not a name", "write 1 to 64 letters, digits, dots, dashes or underscores", "name")
    if not _is_number(fraction) or not 0.0 <= fraction <= 1.0:
        raise _wrong(fraction, "is not a fraction", "write a number from 0 to 1, like 0.1", "reserved_fraction")
    if type(priority) is not int or abs(priority) > 1_000_000:
        raise _wrong(priority, "is not a whole number", "write one like 100, the higher goes first", "priority")
    own = _at("slo", parse_slo, mapping["slo"]) if mapping.get("slo") is not None else NO_LIMITS
    steps = _at("when_full", _steps, mapping["when_full"]) if "when_full" in mapping else None
    floor = _at("max_tokens_floor", _count, mapping["max_tokens_floor"]) if "max_tokens_floor" in mapping else None
    return QosClass(name, float(fraction), priority, own.over(slo), steps, floor)


def _rule(given: Any, classes: Sequence[QosClass]) -> Rule:
    mapping = _mapping(given, ("match", "class", "qos"), "settings of a route")
    if "class" in mapping and "qos" in mapping:
        raise ValueError("class: it is given twice, as qos as well; leave one of them out")
    name = "qos" if "qos" in mapping else "class"  # the same by another name, which other schedulers' files have
    given = mapping.get(name)
    qos = next((one for one in classes if one.name == given), None)
    if qos is None:
        known = ", ".join(one.name for one in classes)
        said = "it has no value" if _is_empty(given) else f"there is no class {_shown(given)}"
        raise ValueError(f"{name}: {said}; name one of scheduler.qos_classes: {known}")
    match = _at(
        "match", lambda one: _mapping({} if one is None else one, _MATCH_KEYS, "conditions"), mapping.get("match")
    )
    texts = {name: _at(f"match.{name}", _text, value) for name, value in match.items()}
    header = _at("match.header", _header, texts["header"]) if "header" in texts else None
    return Rule(qos, header, texts.get("model"), texts.get("path"), texts.get("key"))


def _header(text: str) -> tuple[str, str | None]:
    name, colon, value = text.partition(":")
    return _header_name(name.strip()), value.strip() if colon else None


def _header_name(name: Any) -> str:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise _wrong(name, "is not a header", "write its name, and for a condition a colon and the value")
    return name.lower()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        quotes = isinstance(value, (int, float, date))
        raise _wrong(value, "is not a text", "put it in quotes" if quotes else "write the one to look for")
    return value


def _steps(value: Any) -> tuple[str, ...]:
    """One step, or a list of them in their order."""
    if _is_empty(value):
        raise _wrong(value, "", f"name one or more of {', '.join(STEPS)}")
    steps = value if isinstance(value, list) else [value]
    if not steps:
        raise ValueError(f"it has no step; name one or more of {', '.join(STEPS)}")
    for step in steps:
        if step not in STEPS:
            shown = "a step that has no value" if _is_empty(step) else _shown(step)
            raise ValueError(f"{shown} is none of {', '.join(STEPS)}")
        if steps.count(step) > 1:
            raise ValueError(f"{step} is there twice; name each step once, in the order in which they are tried")
    if OBSERVE in steps and len(steps) > 1:
        raise ValueError(f"{OBSERVE} sends every request, so no step beside it is ever tried; write it alone")
    if REJECT in steps[:-1]:
        raise ValueError(f"{REJECT} refuses every request, so no step after it is ever tried; put it last")
    return tuple(steps)


def _window(value: Any) -> float | None:
    """Seconds; `never`: no control."""
    if value == "never":
        return None
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        raise ValueError(f"{error}; or never, for no control") from None
    if not 1.0 <= seconds <= 60.0:
        raise ValueError(f"{_shown(value)} is out of range; write a time from 1s to 60s, or never")
    return seconds


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(value, "is not a whole number above 0", "write one like 64")
    return value


def _size(value: Any) -> int:
    """Bytes, which may have a unit."""
    if not _is_empty(value):
        value = parse_bytes(value)
    if type(value) is not int or value < 1:
        raise _wrong(value, "is not a size", f"write a number with its unit, {LIKE}")
    return value


def _wrong(value: Any, what: str, remedy: str, place: str = "") -> ValueError:
    """A value that `what` is wrong with, or that is not there at all; and what would be right."""
    said = "it has no value" if _is_empty(value) else f"{_shown(value)} {what}"
    return ValueError(f"{place}{': ' if place else ''}{said}; {remedy}")


def _is_empty(value: Any) -> bool:
    return value is None or value == ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    """What is wrong, as a message repeats it: clients have limits of their own in a header, of any length."""
    return repr(value[:100] if isinstance(value, str) else value)


def _mapping(given: Any, known: Sequence[str], what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(given, "is no mapping", f"write {{{known[0]}: ...}}")
    for name in given:
        if name not in known:
            raise ValueError(f"{_shown(name)} is unknown; {what} are {', '.join(known)}")
    return given


def _list(given: Any, name: str) -> Sequence[Any]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name}: it must be a list with one entry or more, each on a line that begins with a dash")
    return given


def _at(place: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Parse a part; what is wrong in it is said with its place."""
    try:
        return parse(value)
    except ValueError as error:
        text = str(error)
        inner = re.match(r"[a-z_.]+(?:\[\d+\])?: ", text)
        raise ValueError(f"{place}.{text}" if inner else f"{place}: {text}") from None
