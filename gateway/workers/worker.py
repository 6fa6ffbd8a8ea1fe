"""One worker: a gateway in a process of its own.

    python -m gateway.workers.worker        (started by the supervisor, never by hand)

It is the gateway that runs alone otherwise, with three differences: its admin side is on a unix socket, where the
supervisor's asks it; it listens on a port that its siblings listen on as well, once it has a replica to send requests
to; and it drains when the supervisor says so, not on a signal. When the supervisor is gone, however it went, so is this
process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import orjson
import uvloop
from aiohttp import web

from replicas import Replica, State

from .. import datapath
from ..app import Gateway
from ..http.server import allow_many_connections
from ..memory import share_one_heap
from ..ops import log as lines
from ..ops.admin import Admin
from ..ops.guard import Refusal
from ..ops.side import answer
from ..settings import ConfigError, Secrets, Settings
from .process import NOT_FOR_WORKERS, OPEN, decision_prefix

TAKEN_OUT = (State.DRAINING, State.STOPPED)


class Worker(Admin):
    """A gateway and its admin side, which also answers what only the supervisor asks.

    Raises ConfigError for settings that cannot be. `hello` is what the supervisor says first.
    """

    gateway: Gateway

    def __init__(self, hello: dict[str, Any]):
        gateway = Gateway(
            Settings.model_validate(hello["settings"]),
            hello["costs"],
            decision_prefix(hello["index"]),
            Secrets(*hello["secrets"]),
        )
        super().__init__(gateway, gateway.admin.guard)
        gateway.admin = self
        gateway.fleet.on_change.append(self._replica_changed)
        self._begun = asyncio.Event()
        # From before this worker was there, of replicas that it has not met yet: those that an operator drained, and
        # the names that each served.
        self._drained: set[str] = set()
        self._served: dict[str, list[str]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/worker", self.counted),
            web.get("/worker/costs", self.costs),
            web.get("/worker/loads", self.loads),
            web.get("/worker/recent", self.kept),
            web.get("/worker/replicas", self.known_replicas),
            web.post("/worker/begin", self.begin),
            web.post("/worker/listen", self.listen),
        ]

    # --- what it answers for all

    async def counted(self, request: web.Request) -> web.Response:
        """Answer with this worker's status and counts, which the admin door adds up over all workers."""
        gateway = self.gateway
        return answer(
            {"status": gateway.status(), "counts": gateway.metrics.counts(), "connections": gateway.server.open}
        )

    async def kept(self, request: web.Request) -> web.Response:
        """Answer with this worker's last 15 minutes, which the admin door joins with those of the others."""
        return answer(self.gateway.recent.kept())

    async def loads(self, request: web.Request) -> web.Response:
        """What it has on replicas: by id, how many requests, and for how many seconds the oldest has had no answer."""
        gateway, now = self.gateway, monotonic()
        sent, ran = gateway.proxy.oldest_unanswered(), gateway.proxy.pulse.ran
        found = {id: (gateway.ledger.own(id)[0], ran(sent.get(id, now), now)) for id in gateway.fleet.replicas}
        return answer({id: load for id, load in found.items() if any(load)})

    async def costs(self, request: web.Request) -> web.Response:
        """Answer with the learned costs, which a replacement for a dead worker begins with."""
        return answer(self.gateway.costs.state())

    async def known_replicas(self, request: web.Request) -> web.Response:
        """Answer with the replicas this worker knows, which a replacement for a dead worker adopts in `begin`."""
        fleet, discovery = self.gateway.fleet, self.gateway.discovery
        pods = discovery.handed_on() if discovery is not None else {"pods": [], "left_out": []}
        stay = {id: engine for id, engine in fleet.engines.items() if engine.removal is None}
        drained = {one.id for one in fleet.replicas.values() if one.engine in stay and one.state in TAKEN_OUT}
        return answer({
            "urls": {id: engine.url for id, engine in stay.items() if id not in pods["pods"]},
            "drained": sorted(drained | self._drained),
            "names": self.gateway.proxy.eligible.known.handed_on(),
            **pods,
        })  # fmt: skip

    # --- how it starts

    async def begin(self, request: web.Request) -> web.Response:
        """Follow the replicas as `known_replicas` of a sibling has them: `urls` by id, of engines that are no pods;
        which replicas were `drained`; of `pods`, which operators have removed (`left_out`); and the `names` that are
        waited for, which this worker has not seen served."""
        gateway, told = self.gateway, orjson.loads(await request.read())
        self._drained = set(told["drained"])
        if (names := told["names"]) is not None:
            self._served = names["served"]
            gateway.proxy.eligible.known.resume(names["since_pod_went"], names["gone"])
        if gateway.discovery is not None:
            gateway.discovery.resume(told["left_out"], told["pods"])
            gateway.discovery.gone = self._forget
        await gateway.begin(told["urls"].values())
        self._begun.set()
        return answer({})

    async def listen(self, request: web.Request) -> web.Response:
        """Take connections, once requests can be served as siblings serve them, or after so many seconds of
        `patience`."""
        gateway = self.gateway
        deadline = monotonic() + orjson.loads(await request.read())["patience"]
        while monotonic() < deadline and not (gateway.view.why_not_ready() is None and gateway.shared_ledger.joined):
            await asyncio.sleep(0.02)
        try:
            await gateway.listen(shared_port=True)
        except ConfigError as error:
            raise Refusal(500, str(error), "cannot_listen") from None
        datapath.started()
        return answer({})

    async def add(self, request: web.Request) -> web.Response:
        await self._begun.wait()
        return await super().add(request)

    async def drain(self, request: web.Request) -> web.Response:
        await self._begun.wait()
        return await super().drain(request)

    async def remove(self, request: web.Request) -> web.Response:
        await self._begun.wait()
        return await super().remove(request)

    def _forget(self, engine: str) -> None:
        """Its pod is gone: what was known of its replicas does not hold for another pod."""
        self._drained = {id for id in self._drained if not _is_of(id, engine)}
        self._served = {id: names for id, names in self._served.items() if not _is_of(id, engine)}

    def _replica_changed(self, replica: Replica, old: State, new: State) -> None:
        if (served := self._served.pop(replica.id, None)) is not None:
            self.gateway.proxy.eligible.known.served_before(replica.id, served)
        if replica.id in self._drained:
            self._drained.discard(replica.id)
            asyncio.get_running_loop().call_soon(self.gateway.fleet.drain, replica.id)


def _is_of(id: str, engine: str) -> bool:
    """Whether a replica's id is this engine's, or one of its ranks'."""
    return id == engine or id.startswith(f"{engine}-dp")


def _follow(
    messages: BinaryIO, folder: Path, loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[dict[str, Any]]
) -> None:
    """Hand on what the supervisor says, and end with it. In a thread of its own, which notices that it is gone also
    while the event loop is stuck."""
    for line in messages:
        loop.call_soon_threadsafe(orders.put_nowait, orjson.loads(line))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


async def _main(end: socket.socket, messages: BinaryIO, hello: dict[str, Any]) -> int:
    """Serve until the supervisor says how many seconds there are to stop; anything it says after that ends those."""
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    path, loop = Path(hello["socket"]), asyncio.get_running_loop()
    threading.Thread(target=_follow, args=(messages, path.parent, loop, orders), name="supervisor", daemon=True).start()
    try:
        worker = Worker(hello)
    except ConfigError as error:
        end.sendall(orjson.dumps(str(error)) + b"\n")
        return 2
    await worker.start_at(path)
    end.sendall(OPEN)
    stopping = asyncio.create_task(worker.gateway.stop((await orders.get())["stop"]))
    hurrying = asyncio.create_task(orders.get())
    hurrying.add_done_callback(lambda told: told.cancelled() or worker.gateway.hurry())
    await stopping
    hurrying.cancel()
    return 0


def main() -> int:
    for number in NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_WORKERS)  # what came until now is forgotten
    end = socket.socket(fileno=os.dup(0))
    messages = end.makefile("rb")
    if not (line := messages.readline()):
        return 0  # the supervisor ended first
    hello = orjson.loads(line)
    share_one_heap()
    allow_many_connections()
    outbox = lines.setup(hello["settings"]["log_level"], worker=hello["index"])
    try:
        return uvloop.run(_main(end, messages, hello))
    finally:
        outbox.close()


if __name__ == "__main__":
    sys.exit(main())
