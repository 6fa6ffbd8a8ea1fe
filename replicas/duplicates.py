"""The detection of engines that were given under several names.

Each name becomes a replica, so the engine's load and cache count more than once. The creation time of a counter in
/metrics identifies a process: it has microseconds, so two names with the same creation time lead to one process. The
start time of a process is no proof, since it has only hundredths of a second, in which a host can start several
engines. Equal addresses and ports are no proof either, since a proxy may distinguish engines by name; they make it
likely where no creation time is known.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .problems import Problem


class Name(NamedTuple):
    """One name of an engine, and the facts that identify the engine behind it."""

    id: str
    address: str  # IP address; "" if it is not known
    port: int
    created: float | None  # unix time of a counter's creation, from /metrics


def duplicate(one: Name, names: Iterable[Name]) -> tuple[Problem | None, list[str]]:
    """Find other names of the engine that `one` names; return a problem (None if there are none), and their ids.

    `names`: all names, `one` included. The ids are those of names that certainly lead to the same engine; if there are
    none, those of names that probably do.
    """
    others = [other for other in names if other.id != one.id]
    sure = [other for other in others if other.created is not None and other.created == one.created]
    alike = [other for other in others if one.address and (one.address, one.port) == (other.address, other.port)]
    same = sure or [other for other in alike if None in (one.created, other.created)]
    ids = sorted(other.id for other in same)
    said = "the same engine is also given as" if sure else "by its address and port it may be the same engine as"
    counts = f": {'' if sure else 'then '}its load and its cache count under each name"
    condition = "" if sure else "if it is one engine, "
    problem = Problem(f"{said} {' and '.join(ids)}{counts}", f"{condition}give it once, by one of its names")
    return (problem if ids else None), ids
