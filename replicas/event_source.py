"""Where an engine publishes its KV events."""

from collections.abc import Mapping
from typing import NamedTuple

from replicas.names import bracketed


class EventSource(NamedTuple):
    """Where a replica publishes KV events: ZMQ endpoints one can connect to."""

    endpoint: str
    replay: str | None
    topic: str
    snapshot: str | None = None  # tells all that it holds

    def at_rank(self, rank: int) -> "EventSource | None":
        """Where data-parallel rank `rank` publishes if the first one does here: vLLM adds the rank to both ports."""
        if rank == 0:
            return self
        endpoint = _port_plus(self.endpoint, rank)
        if endpoint is None:
            return None
        further = (where and _port_plus(where, rank) for where in (self.replay, self.snapshot))
        return EventSource(endpoint, next(further), self.topic, next(further))

    @property
    def hosts(self) -> set[str]:
        """The hosts that its endpoints name."""
        return {
            host for endpoint in (self.endpoint, self.replay, self.snapshot) if endpoint and (host := _host(endpoint))
        }

    def at(self, addresses: Mapping[str, str]) -> "EventSource":
        """With each host in its endpoints replaced by its address, where that is known."""
        replay, snapshot = (where and _at(where, addresses) for where in (self.replay, self.snapshot))
        return EventSource(_at(self.endpoint, addresses), replay, self.topic, snapshot)


def _host(endpoint: str) -> str:
    """The host of a TCP endpoint; "" for any other."""
    return endpoint[6:].rpartition(":")[0].strip("[]") if endpoint.startswith("tcp://") else ""


def _at(endpoint: str, addresses: Mapping[str, str]) -> str:
    address = addresses.get(_host(endpoint))
    return f"tcp://{bracketed(address)}:{endpoint.rpartition(':')[2]}" if address else endpoint


def _port_plus(endpoint: str, rank: int) -> str | None:
    """None where there is no port to add to (ipc)."""
    where, _, port = endpoint.rpartition(":")
    return f"{where}:{int(port) + rank}" if endpoint.startswith("tcp://") and port.isdigit() else None
