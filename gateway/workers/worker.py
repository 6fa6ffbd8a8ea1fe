"""A worker: a gateway in a process of its own.

    python -m gateway.workers.worker        (started by the supervisor, never by hand)

A worker differs from a gateway that runs alone in three ways. Its admin API is on a unix socket, for the supervisor's
requests. It shares its port with the other workers, its siblings, and begins with the replicas that one of them has.
And it stops when the supervisor tells it to, not on a signal. When the supervisor ends, in whatever way, so does the
worker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import orjson
from aiohttp import web

from replicas import Replica, State

from .. import datapath, threads
from ..app import Gateway
from ..http.server import allow_many_connections
from ..ops import log as lines
from ..ops.admin import Admin
from ..ops.side import answer
from ..settings import ConfigError, Secrets, Settings
from .process import FAILED, OPEN, decision_prefix

TAKEN_OUT = (State.DRAINING, State.STOPPED)  # the states of a replica that an operator has drained
# Service managers send these signals to all processes, but only the supervisor decides when a worker stops.
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Worker(Admin):
    """A gateway and its admin API, with further routes for the supervisor alone.

    `hello`: the supervisor's first message. It has the settings, the secrets, and the state to begin with (`known`),
    such as replicas and learned costs. That state is another worker's answer to `/worker/known`. Raises ConfigError for
    settings that cannot be used.
    """

    gateway: Gateway

    def __init__(self, hello: dict[str, Any]):
        settings, secrets, self._begins_with = hello["settings"], Secrets(*hello["secrets"]), hello["known"]
        prefix = decision_prefix(hello["index"])
        gateway = Gateway(Settings.model_validate(settings), self._begins_with["costs"], prefix, secrets)
        super().__init__(gateway, gateway.admin.guard)
        gateway.admin = self
        gateway.fleet.on_change.append(self._replica_changed)
        # State from before this worker's start, for replicas that it has not reached yet: the replicas that an operator
        # drained, and the model names that each replica served.
        self._drained: set[str] = set(self._begins_with["drained"])
        self._served: dict[str, list[str]] = {}

    def routes(self) -> list[web.RouteDef]:
        own = {"": self.counted, "/loads": self.loads, "/recent": self.kept, "/known": self.known}
        return [*super().routes(), *(web.get(f"/worker{path}", handler) for path, handler in own.items())]

    async def counted(self, request: web.Request) -> web.Response:
        """Answer with this worker's status and counts, which the supervisor adds up over all workers."""
        gateway = self.gateway
        counts = gateway.metrics.counts()
        return answer({"status": gateway.status(), "counts": counts, "connections": gateway.server.open})

    async def kept(self, request: web.Request) -> web.Response:
        """Answer with this worker's record of the last 15 minutes; the supervisor merges those of all workers."""
        return answer(self.gateway.recent.kept())

    async def loads(self, request: web.Request) -> web.Response:
        """Answer with this worker's load on each replica that has any.

        By replica's id: the number of requests there, and for how many seconds the oldest has had no answer.
        """
        gateway, now = self.gateway, monotonic()
        sent, ran = gateway.proxy.oldest_unanswered(), gateway.proxy.pulse.ran
        found = {id: (gateway.ledger.own(id)[0], ran(sent.get(id, now), now)) for id in gateway.fleet.replicas}
        return answer({id: load for id, load in found.items() if any(load)})

    async def known(self, request: web.Request) -> web.Response:
        """Answer with the state with which the replacement of a dead worker begins.

        `urls`: the URLs, by id, of engines that are not pods of a cluster.
        `drained`: the ids of replicas that an operator drained.
        `pods`, `left_out`: the pods discovered in the cluster, and those of them that operators have removed.
        `names`: the model names that replicas served before, and for each model the time since its last pod went.
        `costs`: the learned costs of tokens.
        """
        fleet, discovery = self.gateway.fleet, self.gateway.discovery
        pods = discovery.handed_on() if discovery is not None else {"pods": [], "left_out": []}
        stay = {id: engine for id, engine in fleet.engines.items() if engine.removal is None}
        drained = {one.id for one in fleet.replicas.values() if one.engine in stay and one.state in TAKEN_OUT}
        return answer({
            "urls": {id: engine.url for id, engine in stay.items() if id not in pods["pods"]},
            "drained": sorted(drained | self._drained),
            "names": self.gateway.proxy.eligible.known.handed_on(),
            "costs": self.gateway.costs.state(),
            **pods,
        })  # fmt: skip

    async def begin(self, patience: float) -> None:
        """Add the replicas that the worker begins with, then accept connections. Raises ConfigError.

        `patience`: for how many seconds at most the worker waits before it accepts connections. It waits until a
        replica is ready and the load of the other workers is known, since until then it would serve requests worse than
        they do.
        """
        gateway, told = self.gateway, self._begins_with
        if (names := told["names"]) is not None:
            self._served = names["served"]
            gateway.proxy.eligible.known.resume(names["since_pod_went"], names["gone"])
        if gateway.discovery is not None:
            gateway.discovery.resume(told["left_out"], told["pods"])
            gateway.discovery.gone = self._forget
        await gateway.begin(told["urls"].values())
        deadline = monotonic() + patience
        while monotonic() < deadline and not (gateway.view.why_not_ready() is None and gateway.shared_ledger.joined):
            await asyncio.sleep(0.02)
        await gateway.listen(shared_port=True)
        datapath.started()

    def _forget(self, engine: str) -> None:
        """Drop the drained state and the model names that were kept for an engine's replicas, because its pod is gone.

        A new pod at the same address must not get them.
        """
        self._drained = {id for id in self._drained if not _is_of(id, engine)}
        self._served = {id: names for id, names in self._served.items() if not _is_of(id, engine)}

    def _replica_changed(self, replica: Replica, old: State, new: State) -> None:
        if (served := self._served.pop(replica.id, None)) is not None:
            self.gateway.proxy.eligible.known.served_before(replica.id, served)
        if replica.id in self._drained:
            self._drained.discard(replica.id)
            asyncio.get_running_loop().call_soon(self.gateway.fleet.drain, replica.id)


def _is_of(id: str, engine: str) -> bool:
    """Return whether a replica's id is this engine's or that of one of its data-parallel ranks."""
    return id == engine or id.startswith(f"{engine}-dp")


def _follow(
    messages: BinaryIO, folder: Path, loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[dict[str, Any]]
) -> None:
    """Put the supervisor's messages into `orders`; when the supervisor has ended, end this process.

    Runs in a thread of its own, so that it notices the supervisor's end even while the event loop is stuck. `folder`:
    the folder of the workers' sockets, which is removed before this process ends.
    """
    for line in messages:
        loop.call_soon_threadsafe(orders.put_nowait, orjson.loads(line))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


async def _main(messages: BinaryIO, hello: dict[str, Any], supervisor: int) -> int:
    """Serve until the supervisor orders a stop, and return the exit code.

    The order gives the seconds for which running requests may go on. A second message cuts that time short.

    `messages`: the stream of the supervisor's messages.
    `hello`: the first of these messages.
    `supervisor`: the file descriptor for the answer: OPEN once connections are accepted, or FAILED with the reason.
    """
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    path, loop = Path(hello["socket"]), asyncio.get_running_loop()
    threading.Thread(target=_follow, args=(messages, path.parent, loop, orders), name="supervisor", daemon=True).start()
    try:
        worker = Worker(hello)
        await worker.start_at(path)
        await worker.begin(hello["patience"])
    except ConfigError as error:
        os.write(supervisor, FAILED + orjson.dumps(str(error)) + b"\n")
        return 2
    os.write(supervisor, OPEN)
    stopping = asyncio.create_task(worker.gateway.stop((await orders.get())["stop"]))
    hurrying = asyncio.create_task(orders.get())
    hurrying.add_done_callback(lambda told: told.cancelled() or worker.gateway.hurry())
    await stopping
    hurrying.cancel()
    return 0


def main() -> int:
    """Run the worker that the first line of standard input describes, and return its exit code."""
    for number in NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    supervisor, messages = os.dup(1), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what is printed here is not for the supervisor
    if not (line := messages.readline()):
        return 0  # the supervisor ended first
    hello = orjson.loads(line)
    threads.share_one_heap()
    allow_many_connections()
    outbox = lines.setup(hello["settings"]["log_level"], worker=hello["index"])
    try:
        code = threads.run(_main(messages, hello, supervisor))
    finally:
        outbox.close()
    threads.end_process(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
