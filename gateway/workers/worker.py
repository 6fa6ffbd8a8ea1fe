"""One worker: a gateway in a process of its own.

    python -m gateway.workers.worker        (started by `supervisor`, never by hand)

It is the gateway that runs alone otherwise, with three differences: its admin side is on a unix socket, where the
supervisor's asks it; it listens on a port that its siblings listen on as well, once it has a replica to send requests
to; and it drains when the supervisor says so, not on a signal. Standard input is a socket to the supervisor, with a
line of JSON for each message. When the supervisor is gone, however it went, so is this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import uvloop
from aiohttp import web

from replicas import Replica, State

from .. import datapath
from ..app import Gateway
from ..config import ConfigError, Secrets, Settings
from ..http.server import allow_many_connections
from ..memory import share_one_heap
from ..ops import log as lines
from ..ops.admin import Admin
from ..ops.side import answer
from .admin import decision_prefix
from .last_good import heard as heard_copies
from .member import NOT_FOR_WORKERS

log = logging.getLogger("hitherto.workers")

BEAT_SECONDS = 0.25


class WorkerAdmin(Admin):
    """An admin side that also answers what only the supervisor asks."""

    def __init__(self, worker: Worker):
        super().__init__(worker.gateway, worker.gateway.admin.guard)
        self.worker = worker

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get("/worker", self.counted),
            web.get("/worker/costs", self.costs),
            web.get("/worker/names", self.names),
            web.get("/worker/recent", self.kept),
            web.put("/worker/replicas/{id}", self.take_back),
        ]

    async def counted(self, request: web.Request) -> web.Response:
        """The status, with all that was counted, for a status of all workers."""
        gateway = self.gateway
        return answer(
            {
                "status": gateway.status(),
                "counts": gateway.metrics.counts(),
                "connections": gateway.server.open,
            }
        )

    async def kept(self, request: web.Request) -> web.Response:
        """Its last 15 minutes, for those of all workers."""
        return answer(self.gateway.recent.kept())

    async def costs(self, request: web.Request) -> web.Response:
        """What this worker has learned, for one that takes another's place."""
        return answer(self.gateway.costs.state())

    async def names(self, request: web.Request) -> web.Response:
        """Names that are waited for, for a worker that takes another's place: it has not seen who served them."""
        return answer(self.gateway.proxy.eligible.known.handed_on())

    async def take_back(self, request: web.Request) -> web.Response:
        """Make an engine what it was before a change that a sibling refused: the body is an `admin.Known`."""
        before = orjson.loads(await request.read())
        await self.worker.take_back(request.match_info["id"], before["url"], before["drained"], before["left_out"])
        return answer({})


class Worker:
    def __init__(self, end: socket.socket, hello: dict[str, Any]):
        self._end, self._socket = end, Path(hello["socket"])
        self.gateway = gateway = Gateway(
            Settings.model_validate(hello["settings"]),
            hello["costs"],
            decision_prefix(hello["index"]),
            Secrets(*hello["secrets"]),
            heard_copies(hello["copies"]),
        )
        gateway.admin = WorkerAdmin(self)
        gateway.fleet.on_change.append(self._replica_changed)
        # Before this worker was there: replicas that an operator drained, and by replica the names that it served
        self._drained: set[str] = set()
        self._served: dict[str, list[str]] = {}
        # Engines that came because of their pods (True) or whose pods went, in this order: the supervisor is to be told
        self._pods: list[tuple[str, bool]] = []

    async def run(self, told: asyncio.Queue[dict[str, Any]]) -> None:
        gateway = self.gateway
        await gateway.admin.start_at(self._socket)
        self._say(made=True)
        begin = await told.get()
        self._drained = set(begin["drained"])
        if names := begin["names"]:
            self._served = names["served"]
            gateway.proxy.eligible.known.resume(names["since_pod_went"], names["gone"])
        if gateway.discovery is not None:
            gateway.discovery.resume(begin["left_out"], begin["asked_of"])
            gateway.discovery.found = lambda engine: self._pod_changed(engine, True)
            gateway.discovery.gone = self._pod_gone
        await gateway.begin(begin["urls"])
        self._say(begun=True)
        if begin["patience"]:
            await self._warm(begin["patience"])
        await gateway.listen(shared_port=True)
        self._say(listens=True)
        datapath.started()
        beating = asyncio.create_task(self._beat())
        seconds = (await told.get())["drain"]
        stopping = asyncio.create_task(gateway.stop(seconds))
        hurrying = asyncio.create_task(self._hurry(told))
        await stopping
        for task in (beating, hurrying):
            task.cancel()

    async def _hurry(self, told: asyncio.Queue[dict[str, Any]]) -> None:
        await told.get()
        self.gateway.hurry()

    async def _warm(self, seconds: float) -> None:
        """Until requests can be served as its siblings serve them; not for ever."""
        gateway, deadline = self.gateway, monotonic() + seconds
        while monotonic() < deadline and not (gateway.view.why_not_ready() is None and gateway.shared_ledger.joined):
            await asyncio.sleep(0.02)

    async def take_back(self, engine: str, url: str | None, drained: list[str], left_out: bool) -> None:
        """See `WorkerAdmin.take_back`. Whether it is a pod, and with which URL, is known here."""
        fleet, discovery = self.gateway.fleet, self.gateway.discovery
        await fleet.quiet(engine)
        if url is None and discovery is not None:
            url = discovery.take_back(engine, left_out)
        self._drained = {id for id in self._drained if not _is_of(id, engine)}
        if url is None:
            if engine in fleet.engines:
                await fleet.remove(engine)
            return
        fleet.add(url)
        for id in drained:
            if id in fleet.engines or id in fleet.replicas:
                fleet.drain(id)
            else:
                self._drained.add(id)

    def _pod_gone(self, engine: str) -> None:
        """What is known of its replicas from before this worker was there does not hold for another pod."""
        self._drained = {id for id in self._drained if not _is_of(id, engine)}
        self._served = {id: names for id, names in self._served.items() if not _is_of(id, engine)}
        self._pod_changed(engine, False)

    def _pod_changed(self, engine: str, there: bool) -> None:
        if not self._pods:
            asyncio.get_running_loop().call_soon(self._say_pods)  # of many that come at once in one message
        self._pods.append((engine, there))

    def _say_pods(self) -> None:
        """Once each, so they wait here while the supervisor reads nothing."""
        if self._pods and self._say(pods=self._pods):
            self._pods = []

    def _replica_changed(self, replica: Replica, old: State, new: State) -> None:
        if (served := self._served.pop(replica.id, None)) is not None:
            self.gateway.proxy.eligible.known.served_before(replica.id, served)
        if replica.id in self._drained:
            self._drained.discard(replica.id)
            asyncio.get_running_loop().call_soon(self.gateway.fleet.drain, replica.id)

    async def _beat(self) -> None:
        """Show that the event loop runs, and what is known here of replicas that the supervisor looks after."""
        gateway = self.gateway
        while True:
            now, sent, ran = monotonic(), gateway.proxy.oldest_unanswered(), gateway.proxy.pulse.ran
            loads = {id: (gateway.ledger.own(id)[0], ran(sent.get(id, now), now)) for id in gateway.fleet.replicas}
            self._say_pods()
            self._say(loads={id: load for id, load in loads.items() if any(load)})
            await asyncio.sleep(BEAT_SECONDS)

    def _say(self, **message: Any) -> bool:
        return say(self._end, message)


def _is_of(id: str, engine: str) -> bool:
    """Whether a replica's id is this engine's, or one of its ranks'."""
    return id == engine or id.startswith(f"{engine}-dp")


def say(end: socket.socket, message: dict[str, Any]) -> bool:
    """Whether it was sent. Nobody waits for a supervisor that does not read, unless it took the beginning."""
    line = orjson.dumps(message) + b"\n"
    try:
        sent = end.send(line, socket.MSG_DONTWAIT)
        end.sendall(line[sent:])
    except OSError:
        return False
    return True


def heard(end: socket.socket) -> Iterator[dict[str, Any]]:
    """The supervisor's messages, until it is gone."""
    data = b""
    while True:
        *lines, data = data.split(b"\n")
        yield from map(orjson.loads, lines)
        try:
            more = end.recv(1 << 16)
        except OSError:
            more = b""
        if not more:
            return
        data += more


def _follow(
    messages: Iterator[dict[str, Any]],
    folder: Path,
    loop: asyncio.AbstractEventLoop,
    told: asyncio.Queue[dict[str, Any]],
) -> None:
    """In a thread of its own, which notices also when the event loop is stuck that the supervisor is gone."""
    for message in messages:
        loop.call_soon_threadsafe(told.put_nowait, message)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


async def _main(end: socket.socket, messages: Iterator[dict[str, Any]], hello: dict[str, Any]) -> int:
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    folder = Path(hello["socket"]).parent
    threading.Thread(
        target=_follow, args=(messages, folder, asyncio.get_running_loop(), told), name="supervisor", daemon=True
    ).start()
    try:
        await Worker(end, hello).run(told)
    except ConfigError as error:
        say(end, {"wrong": str(error)})
        return 2
    return 0


def main() -> int:
    for number in NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_WORKERS)  # what came until now is forgotten
    end = socket.socket(fileno=os.dup(0))
    messages = heard(end)
    hello = next(messages, None)
    if hello is None:
        return 0  # the supervisor ended first
    share_one_heap()
    allow_many_connections()
    outbox = lines.setup(hello["settings"]["log_level"], worker=hello["index"])
    try:
        return uvloop.run(_main(end, messages, hello))
    finally:
        outbox.close()


if __name__ == "__main__":
    sys.exit(main())
