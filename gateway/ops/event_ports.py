"""Ports of KV events: which are free on an engine's host, and which a dead engine still holds."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable

from gateway.ops.trial import Finding
from replicas.event_source import EventSource
from replicas.problems import Problem
from replicas.replica import Address

FIRST = 5557  # the port in the engines' own documentation; replay uses the next one
PROBE_SECONDS = 1.0
_BOUND = re.compile(r"tcp://\*:\d+")


class EventPorts:
    """The ports of each host that engines publish at, or that a remedy proposed."""

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

    async def check_held(self, address: Address, host: str) -> Finding | None:
        """Return a warning if an engine serves nothing and an unknown process holds its ports, else None."""
        wanted = ports_of(address.source) if address.source else {FIRST, FIRST + 1}
        free = sorted(wanted - self._used.get(host, set()))
        taken = await asyncio.gather(*(_listens(host, port) for port in free))
        if not (held := [port for port, listens in zip(free, taken, strict=True) if listens]):
            return None
        which = " or ".join(f"sport = :{port}" for port in held)
        return Finding(
            "warn",
            f"event ports {address.id}",
            f"nothing serves there, but {', '.join(map(str, held))} of {host} {'is' if len(held) == 1 else 'are'} taken, and by no engine that "
            "answers here: a server that was killed leaves the process behind that computes for it (EngineCore), with these "
            "ports and its GPU memory, and no new one can start",
            f"on that machine: ss -ltnp '{which}' names it; if it is one, kill -9 its PID, and start the engine again",
        )


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
