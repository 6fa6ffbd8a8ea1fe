"""The ZMQ endpoints of an engine's KV events."""

from collections.abc import Mapping
from typing import NamedTuple

from replicas.names import bracketed


class EventSource(NamedTuple):
    """The ZMQ endpoints at which a replica publishes KV events, as clients connect to them."""

    endpoint: str
    replay: str | None  # endpoint that repeats past events on request
    topic: str
    snapshot: str | None = None  # endpoint that reports all blocks that the engine holds

    def at_rank(self, rank: int) -> "EventSource | None":
        """Return the source of data-parallel rank `rank`, if this is the source of the first rank.

        vLLM adds the rank to each port. None if an endpoint has no port.
        """
        if rank == 0:
            return self
        endpoint = _port_plus(self.endpoint, rank)
        if endpoint is None:
            return None
        further = (where and _port_plus(where, rank) for where in (self.replay, self.snapshot))
        return EventSource(endpoint, next(further), self.topic, next(further))

    @property
    def hosts(self) -> set[str]:
        """The hosts in the endpoints."""
        return {
            host for endpoint in (self.endpoint, self.replay, self.snapshot) if endpoint and (host := _host(endpoint))
        }

    def at(self, addresses: Mapping[str, str]) -> "EventSource":
        """Return this source with each host in its endpoints replaced by its IP address, if `addresses` has it."""
        replay, snapshot = (where and _at(where, addresses) for where in (self.replay, self.snapshot))
        return EventSource(_at(self.endpoint, addresses), replay, self.topic, snapshot)


def _host(endpoint: str) -> str:
    """Return the host of a TCP endpoint; "" for an endpoint of another kind."""
    return endpoint[6:].rpartition(":")[0].strip("[]") if endpoint.startswith("tcp://") else ""


def _at(endpoint: str, addresses: Mapping[str, str]) -> str:
    address = addresses.get(_host(endpoint))
    return f"tcp://{bracketed(address)}:{endpoint.rpartition(':')[2]}" if address else endpoint


def _port_plus(endpoint: str, rank: int) -> str | None:
    """Return the endpoint with `rank` added to its port; None if it has no port (ipc)."""
    where, _, port = endpoint.rpartition(":")
    return f"{where}:{int(port) + rank}" if endpoint.startswith("tcp://") and port.isdigit() else None
