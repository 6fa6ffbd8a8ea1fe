"""A proxy played without sockets: a script says what clients, replicas and the clock do, step by step.

Clients' and replicas' connections are the gateway's own objects (`Downstream`, `Upstream`) on wires that keep what is
written to them. So what the gateway does is data here: bytes on a wire, the end of a wire, a connection asked for. A
step takes microseconds.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import time
from types import ModuleType

import pytest

from cachemap import CacheMap
from gateway.http.downstream import Downstream
from gateway.http.server import Server
from gateway.http.upstream import Pool, Upstream, UpstreamError
from gateway.models import Models
from gateway.ops.metrics import Metrics
from gateway.prompt.pipeline import Pipeline
from gateway.proxy import preparation
from gateway.proxy.proxy import Proxy
from policies import CostGroup, Ledger, Router, make
from replicas.simulated.model import sim_model_dir

from .stack import backend_for, nothing_new

ROOMS = ("gateway", "cachemap", "policies", "replicas")
PIPELINE = Pipeline(sim_model_dir(), "m", 16)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a script puts ahead, and with it the gateway's; timers follow."""

    ahead = 0.0

    def time(self):
        return time.monotonic() + self.ahead


def played(test):
    """Run a test, a coroutine function, in a loop of that kind."""

    @functools.wraps(test)
    def run(*given, **named):
        with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=Clock) as runner:
            now = runner.get_loop().time
            for module in timed():
                patch.setattr(module, "monotonic", now)
            patch.setattr(preparation, "LOOP_SECONDS", math.inf)  # on a busy machine a thread would prepare
            runner.run(test(*given, **named))

    return run


@functools.cache
def timed() -> list[ModuleType]:
    """The product's modules that tell the time."""
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ROOMS]
    return [module for module in ours if getattr(module, "monotonic", None) is time.monotonic]


class Wire(asyncio.Transport):
    """One connection. `sent`: what the gateway wrote to it. `ended`: how it ended, None while it is open: "closed" or
    "aborted" by the gateway, "left" by the peer."""

    def __init__(self, protocol: Downstream | Upstream):
        super().__init__()
        self.protocol, self.sent, self.ended = protocol, b"", None
        protocol.connection_made(self)

    def write(self, data):
        assert self.ended is None, "the gateway wrote to a connection that it had ended"
        self.sent += data

    def writelines(self, parts):
        self.write(b"".join(parts))

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self): ...
    def resume_reading(self): ...
    def can_write_eof(self):
        return True

    def write_eof(self): ...
    def is_closing(self):
        return self.ended is not None

    def close(self):
        self._end("closed")

    def abort(self):
        self._end("aborted")

    def leave(self, error: Exception | None = None) -> None:
        """The peer ends the connection, with an error if it resets it."""
        self._end("left", error)

    def _end(self, how, error=None):
        if self.ended is None:
            self.ended = how
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def says(self, data: bytes) -> None:
        """The peer sends these bytes in one read."""
        if self.ended is None:
            self.protocol.data_received(data)


class Connections(Pool):
    """A replica's pool, whose connections the script opens or refuses."""

    def __init__(self):
        super().__init__("127.0.0.1", 1, None, "")
        self.asked, self.wires = [], []

    def connect(self, sink, check):
        self.asked.append(sink)

    def accept(self) -> Wire:
        """Open the connection that was asked for first."""
        self.wires.append(Wire(Upstream(self)))
        self.asked.pop(0).connected(self.wires[-1].protocol)
        return self.wires[-1]

    def refuse(self) -> None:
        self.asked.pop(0).lost(UpstreamError("connect", "no connection: refused"))

    @property
    def busy(self) -> list[Wire]:
        """The connections on which a request waits for its answer, or for the rest of it."""
        return [wire for wire in self.wires if wire.ended is None and wire.protocol.sink is not None]


class Play:
    """A proxy in front of replicas r0, r1, ... `options`: of `Proxy`."""

    def __init__(self, replicas: int, policy: str = "round_robin", **options):
        given = {"retries": 2, "request_timeout": 60.0, "idle_timeout": 30.0, **options}
        self.proxy = Proxy(
            models=Models.of(PIPELINE), router=Router(make(policy), CacheMap(1 << 20), Ledger(), CostGroup()),
            metrics=Metrics(), replicas={}, response_headers=True, on_traffic=lambda *_: None, ask_models=nothing_new, **given,
        )  # fmt: skip
        self.server = Server(self.proxy)
        self.backends = [backend_for(self.proxy, 9000 + number) for number in range(replicas)]
        for backend in self.backends:
            backend.pool = Connections()
        self.clients: list[Wire] = []

    def client(self) -> Wire:
        """A client that connects."""
        self.clients.append(Wire(Downstream(self.server.clients)))
        return self.clients[-1]

    def replica(self, number: int) -> Connections:
        return self.backends[number].pool

    async def turn(self) -> None:
        """What the event loop has to do is done."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Time passes, and the sweep sees that it has."""
        clock = asyncio.get_running_loop()
        assert isinstance(clock, Clock)
        clock.ahead += seconds
        self.proxy.sweep(clock.time())
        await self.turn()

    async def asks(self, request: bytes) -> Wire:
        """A client sends a request on a connection of its own."""
        client = self.client()
        client.says(request)
        await self.turn()
        return client

    async def answers(self, wire: Wire, *reads: bytes) -> None:
        """A replica sends these reads."""
        for read in reads:
            wire.says(read)
            await self.turn()

    def left(self) -> dict[str, object]:
        """Return what is left of requests: nothing, once all have ended."""
        total, resumer = self.proxy.router.ledger.total(), self.proxy.handler.resumer
        counts = {
            "exchanges": len(self.proxy.exchanges),
            "requests": total.requests,
            "prefilling": total.prefilling,
            "prefill tokens": total.prefill_tokens,
            "decoding": total.decoding,
            "context": total.context_tokens,
            "busy connections": sum(len(backend.pool.busy) for backend in self.backends),
            "kept for resumption": 0 if resumer is None else resumer.kept,
            "bytes of requests": self.server.held,
        }
        return {name: count for name, count in counts.items() if count}
