"""Sizes as people write them, 512MiB, and as the schema has them: bytes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

MOST_BYTES = 2**50
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: Any) -> Any:
    """`64MiB`, `1.5 GB`, `65536` -> bytes (int). Anything else is left to pydantic to refuse."""
    if isinstance(value, int) and value > MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is more than any machine has; write a size like 512MiB")
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or one with KiB, MiB or GiB, like 512MiB")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size > MOST_BYTES:
        raise ValueError(f"{value[:40]!r} is more than any machine has; write a size like 512MiB")
    return int(size)


def show_bytes(count: int) -> str:
    """The shortest exact way to write a size: 67108864 -> '64MiB'."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=MOST_BYTES)]
