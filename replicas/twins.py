"""Engines that were given under several names: each name is a replica, so their load and cache count more than once.

What is sure is a counter's creation time in /metrics: it has microseconds, so two names that tell the same one lead to
one process. The same address and port are not, since a proxy there may tell engines apart by name, and neither is the
start of a process, which has hundredths of a second: a host starts several engines in one.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .problems import Problem

REMEDY = "give an engine once, by one of its names"


class Name(NamedTuple):
    """One name of an engine, and what is known of whom it leads to."""

    id: str
    address: str  # IP address; "" if it is not known
    port: int
    created: float | None  # as of `Scrape`


class Twins(NamedTuple):
    """Names of one engine, or, if not `is_sure`, of one address and port."""

    names: tuple[str, ...]
    is_sure: bool
    place: str  # ADDRESS:PORT of those that are not sure
    beside: tuple[str, ...] = ()  # names that lead there too, of which another `Twins` says what is sure


def find(names: Iterable[Name]) -> list[Twins]:
    """Engines that have several names."""
    by_process: dict[float, list[Name]] = {}
    by_place: dict[tuple[str, int], list[Name]] = {}
    for one in names:
        if one.created is not None:
            by_process.setdefault(one.created, []).append(one)
        if one.address:
            by_place.setdefault((one.address, one.port), []).append(one)
    found = [Twins(tuple(one.id for one in same), True, "") for same in by_process.values() if len(same) > 1]
    sure = {id for twins in found for id in twins.names}
    for (address, port), same in by_place.items():
        told = [one.created for one in same if one.created is not None]
        if len(same) > 1 and len(told) < len(same) and len({*told}) < 2:  # else they are told apart, or sure
            unsure = tuple(one.id for one in same if one.id not in sure)
            beside = tuple(one.id for one in same if one.id in sure)
            found.append(Twins(unsure, False, f"{address}:{port}", beside))
    return found


def complaints(names: Iterable[Name]) -> Iterator[tuple[str, Problem]]:
    """What is said of each of the names, in the same words whatever their order."""
    for twins in find(names):
        for id in twins.names:
            yield id, complaint(twins, id)


def complaint(twins: Twins, of: str) -> Problem:
    """What is said of that one of the names."""
    alike = sorted(one for one in (*twins.names, *twins.beside) if one != of)
    others = " and ".join(alike)
    if twins.is_sure:
        return Problem(
            f"the same engine is also given as {others}: its load and its cache count under each name", REMEDY
        )
    lead, all_of_it = ("lead", "all of them are") if len(alike) > 1 else ("leads", "it is")
    apart = "if no proxy there tells engines apart by name"
    return Problem(
        f"{others} {lead} to {twins.place} as well: {apart}, {all_of_it} one engine that counts under each name", REMEDY
    )
