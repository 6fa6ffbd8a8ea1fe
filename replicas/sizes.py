"""Sizes in bytes as people write them, for every command and setting of the project: `512MiB`, `5G`.

Units are always binary, as memory is sold, however they are written: `80G`, `80GB`, `80Gi` and `80GiB` are the same.
"""

import re

MOST_BYTES = 2**50
LIKE = "like 512MiB or 5G"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:b|([kmgt])(?:i?b?))?")


def parse_size(text: str) -> int:
    """Return the bytes of a size with or without a unit. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a size; write a number with its unit, {LIKE}")
    size = float(found[1]) * 1024 ** (1 + "kmgt".index(found[2]) if found[2] else 0)
    if size > MOST_BYTES:
        raise ValueError(f"{text[:40]!r} is more than any machine has; write a size {LIKE}")
    return int(size)


def show_bytes(count: int) -> str:
    """Return the shortest exact way to write a size: 67108864 -> '64MiB'."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)
