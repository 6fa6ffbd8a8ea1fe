"""Readers for flag values with units: memory sizes, bandwidths and parameter counts.

Memory units are binary, with or without the "i": 80GB is 80GiB. Units of links and parameters are decimal. A number
without a unit is refused with an example.
"""

from __future__ import annotations

import argparse
import re

from replicas.sizes import LIKE, MOST_BYTES, parse_size

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
MOST_PARAMETERS = 10**15
_LINK_READS = "it reads 100Gbit/s (bits) or 25GB/s (bytes), per second"
_PARAMETERS_READ = "it reads 70B (billions) or 350M"
_PER_SECOND = re.compile(r"(\d+(?:\.\d+)?) *([kMGT]?i?)(bit|byte|b|B)(?:/s|ps)")


def size(text: str) -> int:
    """Read `80GiB`, `80G` or `80GB` as bytes; a number without a unit is refused, as it could mean GiB or bytes."""
    try:
        found = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte; write a size {LIKE}")
    if (bare := text.strip())[-1].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: {bare}GiB, or {bare}B for bytes?")
    return found


def link(text: str) -> float:
    """Read `100Gbit/s`, `100Gbps` or `12.5GB/s` as bytes per second."""
    found = _PER_SECOND.fullmatch(text.strip())
    scale = {**_DECIMAL, **_BINARY}.get(found[2]) if found else None
    if found is None or scale is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth: {_LINK_READS}")
    if (rate := float(found[1]) * scale / (8 if found[3] in ("bit", "b") else 1)) > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any link has: {_LINK_READS}")
    return rate


def parameters(text: str) -> int:
    """Read `70B` or `350M` as a number of model parameters."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([MBT])", text.strip())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: {_PARAMETERS_READ}")
    if (count := float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2]]) > MOST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any model has: {_PARAMETERS_READ}")
    return int(count)
