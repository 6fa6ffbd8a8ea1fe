"""Engines that were given under several names.

Each name is a replica, so the engine's load and cache count more than once. A counter's creation time in /metrics
identifies a process: it has microseconds, so two names with the same one lead to one process. An address and port do
not, since a proxy there may tell engines apart by name, nor does the start time of a process, which has hundredths of a
second: a host can start several engines in one.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .problems import Problem


class Name(NamedTuple):
    """One name of an engine, and what is known of the engine behind it."""

    id: str
    address: str  # IP address; "" if it is not known
    port: int
    created: float | None  # see `Scrape`


def _is_same(one: Name, other: Name) -> bool:
    if one.created is not None and other.created is not None:
        return one.created == other.created
    return bool(one.address) and (one.address, one.port) == (other.address, other.port)


def duplicate(one: Name, names: Iterable[Name]) -> Problem | None:
    """Return the problem that other `names` lead to the same engine as `one`, or None."""
    same = sorted((other for other in names if other.id != one.id and _is_same(one, other)), key=lambda other: other.id)
    if not same:
        return None
    is_sure = all(None not in (one.created, other.created) for other in same)
    engine = "the same engine" if is_sure else "what by its address and port is the same engine"
    others = " and ".join(other.id for other in same)
    return Problem(
        f"{engine} is also given as {others}: its load and its cache count under each name",
        "give an engine once, by one of its names",
    )
