"""The ZMQ endpoints of an engine's KV events."""

from typing import Any, NamedTuple

from replicas.addresses import check_endpoint
from replicas.names import bracketed

WILDCARDS = ("*", "0.0.0.0", "::", "[::]")  # hosts in the endpoint of a publisher that listens on all interfaces


class EventSource(NamedTuple):
    """The ZMQ endpoints at which a replica publishes KV events, as clients connect to them."""

    endpoint: str
    replay: str | None  # endpoint that repeats past events on request
    topic: str

    def at_rank(self, rank: int) -> "EventSource | None":
        """Return the event source of data-parallel rank `rank`, where this source is that of rank 0.

        vLLM adds the rank's number to each port. The result is None if the endpoint has no port.
        """
        if rank == 0:
            return self
        endpoint = _port_plus(self.endpoint, rank)
        replay = self.replay and _port_plus(self.replay, rank)
        return None if endpoint is None else EventSource(endpoint, replay, self.topic)

    def at(self, host: str, address: str) -> "EventSource":
        """Return this source with the IP address `address` in place of the host name `host` in its endpoints."""

        def moved(endpoint: str) -> str:
            where, _, port = endpoint.rpartition(":")
            return f"tcp://{bracketed(address)}:{port}" if where == f"tcp://{bracketed(host)}" else endpoint

        return EventSource(moved(self.endpoint), self.replay and moved(self.replay), self.topic)


def _port_plus(endpoint: str, rank: int) -> str | None:
    """Return the endpoint with `rank` added to its port; None if it has no port (ipc://)."""
    where, _, port = endpoint.rpartition(":")
    return f"{where}:{int(port) + rank}" if endpoint.startswith("tcp://") and port.isdigit() else None


def reported(endpoint: str, replay: Any, topic: Any, host: str) -> EventSource:
    """Return the event source that an engine reports, with `host` in place of wildcard addresses such as `*`.

    `host`: the engine's host as clients reach it. `replay`, `topic`: ignored if they are no text. Raises ValueError if
    nobody can connect to an endpoint.
    """

    def reached(endpoint: str) -> str:
        bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        is_open = endpoint.startswith("tcp://") and bound in WILDCARDS
        found = f"tcp://{bracketed(host)}:{port}" if is_open else endpoint
        check_endpoint(found)
        return found

    repeats = reached(replay) if isinstance(replay, str) else None
    return EventSource(reached(endpoint), repeats, topic if isinstance(topic, str) else "")
