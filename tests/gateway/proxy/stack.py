"""A proxy behind a real listening socket, in front of replicas that follow a script."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from cachemap import CacheMap
from gateway.http.messages import Limits
from gateway.http.server import Server
from gateway.models import Models
from gateway.ops.metrics import Metrics
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.backend import Backend
from gateway.proxy.proxy import Proxy
from policies import CostGroup, Ledger, Router, make
from replicas import Replica, State

from ..http.talk import Talker, eventually, scripted


class Stack:
    def __init__(self, proxy, server, port, faults, unconfirmed):
        self.proxy, self.server, self.port = proxy, server, port
        # Kinds of failures; replicas of which an error was told that may be the request's fault
        self.faults, self.unconfirmed = faults, unconfirmed
        self.metrics = proxy.metrics
        self.talkers = []

    async def talk(self) -> Talker:
        self.talkers.append(await Talker.to(self.port))
        return self.talkers[-1]

    async def say(self, request: bytes) -> Talker:
        """Send a request on a connection of its own."""
        talker = await self.talk()
        await talker.say(request)
        return talker

    async def crowd(self, count: int, request: bytes) -> list[Talker]:
        """Send a request on each of so many connections of their own."""
        talkers = [await self.talk() for _ in range(count)]
        for talker in talkers:
            await talker.say(request)
        return talkers

    async def ask(self, request: bytes, seconds: float = 5):
        """Status, headers and body of the response to a request on a connection of its own."""
        return await (await self.talk()).ask(request, seconds)

    async def answered(self, count: int, request: bytes, body: bytes | None = None) -> None:
        """Send a request `count` times on one connection: each is answered with 200, and with `body` if given."""
        talker = await self.talk()
        for _ in range(count):
            status, _, got = await talker.ask(request)
            assert status == 200 and body in (None, got)

    async def exchange(self, begun=lambda attempt: attempt.sent_at):
        """Return the only exchange once its latest attempt has `begun`: by default, once it was sent."""
        await eventually(lambda: any(one.attempts and begun(one.attempts[-1]) for one in self.proxy.exchanges))
        (only,) = self.proxy.exchanges
        return only

    def becomes(self, replica: Replica, state: State) -> None:
        replica.state = state
        self.proxy.changed()

    def idle(self) -> bool:
        """Nothing reserved, nothing in flight."""
        total = self.proxy.router.ledger.total()
        return not self.proxy.exchanges and not any(
            (total.requests, total.prefilling, total.prefill_tokens, total.decoding, total.context_tokens)
        )


async def all_answered(talkers: Iterable[Talker], seconds: float = 5) -> None:
    """Each gets a complete answer of status 200."""
    for talker in talkers:
        assert (await talker.response(seconds))[0] == 200


def backend_for(proxy: Proxy, port: int, models=("m",)) -> Backend:
    replica = Replica(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "127.0.0.1", port)
    replica.state = State.READY
    replica.models = dict.fromkeys(models)
    slot = proxy.router.map.attach(replica.id, 1000, False)
    backend = Backend(replica, proxy.router.add(replica.id, slot))
    proxy.add(backend)
    return backend


def unforeseen(metrics: Metrics) -> list[tuple[str, str]]:
    """Values of labels that were counted, and are not among those that the metric states."""
    return [
        (metric.name, value)
        for metric in metrics.all()
        for key in metric.values
        for known, value in zip(metric.labels.values(), key, strict=True)
        if known and value not in known
    ]


async def nothing_new() -> None:
    """All replicas serve what they did."""


@asynccontextmanager
async def stack(
    *scripts,
    ports=(),
    policy="round_robin",
    retries=2,
    request_timeout=5.0,
    idle_timeout=5.0,
    pipeline=None,
    limits=Limits(),
    tls=None,
    ends_idle=True,
    **options,
):
    """One replica per script, plus replicas at `ports` (where perhaps nobody listens). With `ends_idle`, nothing may be
    reserved, in flight or kept for resumption at the end of the block."""
    faults, unconfirmed = [], []

    def traffic(replica, kind, count):
        if kind == "unconfirmed":
            unconfirmed.append(replica)
        elif kind is not None:
            faults.append(kind)

    async with AsyncExitStack() as resources:
        proxy = Proxy(
            models=Models.of(pipeline or Pipeline(None, "m", 16)), router=Router(make(policy), CacheMap(1 << 24), Ledger(), CostGroup()),
            retries=retries, request_timeout=request_timeout, idle_timeout=idle_timeout, response_headers=True,
            on_traffic=traffic, **{"replicas": {}, "ask_models": nothing_new, "metrics": Metrics(), **options},
        )  # fmt: skip
        for port in ports:
            backend_for(proxy, port)
        for script in scripts:
            backend_for(proxy, await resources.enter_async_context(scripted(script)))
        server = Server(proxy, limits)
        port = await server.start("127.0.0.1", 0, tls=tls)
        made = Stack(proxy, server, port, faults, unconfirmed)
        try:
            yield made
            if ends_idle:
                await eventually(lambda: made.idle() and not (proxy.handler.resumer and proxy.handler.resumer.kept))
            assert not unforeseen(made.metrics), (
                "a label's value that is not stated beforehand is first seen at 1, which rate() misses"
            )
        finally:
            for talker in made.talkers:
                await talker.close()
            await server.close()
            for backend in proxy.backends.values():
                backend.stop()
