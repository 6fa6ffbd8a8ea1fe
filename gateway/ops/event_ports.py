"""Ports of KV events: which are free on an engine's host, and which the remains of a dead engine still occupy."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable

from replicas.event_source import EventSource
from replicas.problems import Problem

FIRST = 5557  # the port in the engines' own documentation; replay uses the next one
PROBE_SECONDS = 1.0
_BOUND = re.compile(r"tcp://\*:\d+")


class EventPorts:
    """The ports on each host at which engines publish, or which a remedy proposed."""

    def __init__(self) -> None:
        self._used: dict[str, set[int]] = {}
        self._given: dict[str, tuple[int, int]] = {}

    def add(self, host: str, sources: Iterable[EventSource | None]) -> None:
        """Note the event ports of an engine on this host."""
        self._used.setdefault(host, set()).update(port for one in sources if one for port in ports_of(one))

    def remedy(self, problem: Problem, engine: str, host: str, ranks: int) -> Problem:
        """Return the problem with ports in its remedy that no other engine of the host has.

        The engine gets a range of ports for events and one for replay, each with a port per rank.
        """
        if not _BOUND.search(problem.remedy):
            return problem
        used, wide = self._used.setdefault(host, set()), max(1, ranks)
        if engine not in self._given:
            first = next(port for port in range(FIRST, 65_536) if used.isdisjoint(range(port, port + 2 * wide)))
            self._given[engine] = first, first + wide
            used.update(range(first, first + 2 * wide))
        ports = iter(self._given[engine])
        return problem._replace(remedy=_BOUND.sub(lambda found: f"tcp://*:{next(ports)}", problem.remedy))

    async def held(self, source: EventSource | None, host: str) -> list[int]:
        """Return the event ports of an engine, or the usual ones, where something listens that is no known engine.

        `source`: where the engine publishes, if that is known. `host`: the engine's host.
        """
        wanted = ports_of(source) if source else {FIRST, FIRST + 1}
        free = sorted(wanted - self._used.get(host, set()))
        taken = await asyncio.gather(*(_listens(host, port) for port in free))
        return [port for port, listens in zip(free, taken, strict=True) if listens]


def ports_of(source: EventSource) -> set[int]:
    ends = (one for one in (source.endpoint, source.replay) if one and one.startswith("tcp://"))
    return {int(port) for one in ends if (port := one.rpartition(":")[2]).isdecimal()}


async def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
