"""A gateway of plain objects, and its admin side over real HTTP."""

import types
from contextlib import asynccontextmanager

import aiohttp

from gateway.errors import ApiError
from gateway.ops.admin import Admin
from gateway.ops.guard import Guard
from gateway.ops.metrics import Metrics, labels_of
from gateway.ops.recent.recent import Recent
from gateway.ops.view import View
from gateway.settings import Settings
from policies import Ledger
from replicas.lifecycle import State
from replicas.replica import Replica, parse_url


class StandIn:
    """As replicas.Fleet, but nobody probes: the tests set the states."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.engines: dict[str, object] = {}

    async def quiet(self, id: str) -> None:
        pass

    def add(self, url: str, state: State = State.STARTING, models: dict | None = None) -> Replica:
        address = parse_url(url)
        made = Replica(address.id, address.url, address.host, address.port, role=address.role)
        made.state, made.models = state, models or {}
        return self.replicas.setdefault(address.id, made)


class Gateway:
    """`left`: ids of the requests that go on at a replica which is removed."""

    left = ()

    def __init__(self, fleet=None, kept=None) -> None:
        self.fleet, self.metrics, self.ledger, self.kept = fleet or StandIn(), Metrics(), Ledger(), kept
        self.stats = {"blocks": 10, "bytes": 320, "bytes_per_block": 32.0, "evicted": 4, "slots": {0: 7}}
        self.slots, self.intakes = {"a:1": 0}, {}
        cachemap = types.SimpleNamespace(stats=lambda: self.stats)
        self.view = View(Settings(), self.metrics, self.fleet.replicas, self.ledger, cachemap, self.slots, self.intakes)
        self.metrics.read_from(self.view.reading)
        self.status = self.view.status
        self.recent = Recent(self.view, types.SimpleNamespace(queue=None, shadows=None, onlooker=None))

    def requests_at(self, replicas):
        return self.left

    async def explain(self, path, body, headers):
        if body == b"bad":
            raise ApiError(400, "messages is missing", param="messages", code="missing")
        return {"path": path, "bytes": len(body)}


def count(metrics: Metrics, **numbers: dict) -> None:
    """Add to these metrics: by name, and by the labels' values."""
    for name, series in numbers.items():
        for labels, number in series.items():
            getattr(metrics, name).inc(*labels_of(labels), by=number)


@asynccontextmanager
async def served(gateway: Gateway, guard: Guard | None = None):
    """The port of its admin side."""
    admin = Admin(gateway, guard or Guard())
    try:
        yield await admin.start("127.0.0.1", 0)
    finally:
        await admin.stop()


@asynccontextmanager
async def asking(gateway: Gateway):
    """A session with its admin side."""
    async with served(gateway) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        yield http
