"""Times and time limits as people write them: `2s`, `50ms`, `ttft=2s,tpot=50ms`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

LIMITS = ("ttft", "tpot")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def parse_seconds(value: Any) -> float:
    """Return the seconds of a time written with its unit, like `2s`, `50ms` or `1.5 m`. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m)\s*", value) if isinstance(value, str) else None
    if found is None:
        if value is None or value == "":
            what = "it has no value"
        else:
            what = f"{_shown(value)} {'has no unit' if type(value) in (int, float) else 'is not a time'}"
        raise ValueError(f"{what}; write a time with ms, s or m, like 2s or 50ms")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0.0 < seconds <= 3600.0:
        raise ValueError(f"{_shown(value)} is out of range; write a time above 0 and up to 60m")
    return seconds


def show_seconds(seconds: float) -> str:
    """Return a time as text with its unit, which `parse_seconds` reads back: 0.05 -> '50ms'."""
    number, unit = (1e3 * seconds, "ms") if seconds < 1.0 else (seconds, "s")
    return f"{Decimal(f'{number:.12g}'):f}{unit}"  # never with an exponent


def split_limits(text: str) -> dict[str, str]:
    """Return the text of each limit in `ttft=2s,tpot=50ms`, by the limit's name.

    A colon may replace each `=`, since load generators write `ttft:2s`. Raises ValueError if the text is no such list.
    """
    pairs = [part.replace(":", "=", 1).partition("=") for part in text.split(",")]
    found = {name.strip(): value for name, _, value in pairs}
    if not all(sign for _, sign, _ in pairs) or len(found) < len(pairs):
        raise ValueError(f"{text[:100]!r} is not a list of limits; write ttft=2s,tpot=50ms, or one of the two")
    return found


def parse_limits(text: str) -> dict[str, float]:
    """Return the seconds of each latency limit in a text like `ttft=2s,tpot=50ms`, by the limit's name.

    The known names are `ttft` (time to first token) and `tpot` (time per output token). Raises ValueError for another
    name, and for a value that is no time.
    """
    seconds: dict[str, float] = {}
    for name, value in split_limits(text).items():
        if name not in LIMITS:
            raise ValueError(f"{name[:100]!r} is unknown; limits are {', '.join(LIMITS)}")
        try:
            seconds[name] = parse_seconds(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return seconds


def _shown(value: Any) -> str:
    """Return the value as an error message quotes it.

    Text is cut to 100 characters, since a header from a client may have any length.
    """
    return repr(value[:100] if isinstance(value, str) else value)
