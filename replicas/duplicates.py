"""Engines that were given under several names.

Each name is a replica, so the engine's load and cache count more than once. A counter's creation time in /metrics
identifies a process: it has microseconds, so two names with the same one lead to one process. The start time of a
process does not, since it has hundredths of a second and a host can start several engines in one. Nor do an address and
port, since a proxy there may tell engines apart by name: they only make it likely, where no creation time is known.
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


def duplicates(one: Name, names: Iterable[Name]) -> tuple[list[str], bool]:
    """Return the ids of other `names` that lead to the same engine as `one`, and whether that is certain.

    If some do for certain, those that may are left out.
    """
    others = [other for other in names if other.id != one.id]
    if sure := [other.id for other in others if other.created is not None and other.created == one.created]:
        return sorted(sure), True
    unsure = [other for other in others if one.address and None in (one.created, other.created)]
    return sorted(other.id for other in unsure if (one.address, one.port) == (other.address, other.port)), False


def duplicate(one: Name, names: Iterable[Name]) -> Problem | None:
    """Return the problem that other `names` lead to the same engine as `one`, or may do so, or None."""
    same, is_sure = duplicates(one, names)
    if not same:
        return None
    others = " and ".join(same)
    if is_sure:
        return Problem(
            f"the same engine is also given as {others}: its load and its cache count under each name",
            "give an engine once, by one of its names",
        )
    return Problem(
        f"by its address and port it may be the same engine as {others}: "
        "then its load and its cache count under each name",
        "if it is one engine, give it once, by one of its names",
    )
