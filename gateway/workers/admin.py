"""The admin API for all workers of one machine. It asks each worker's own admin API, on a unix socket.

    /metrics                    the series of all workers, each with the label `worker`
    /status, /replicas, /readyz one answer for all workers: counts are added up. If workers see a replica in different
                                states, the least ready state is shown. The gateway is ready when all workers are
    /recent                     the figures of all workers for the last 15 minutes, merged
    POST /replicas, DELETE, drain   passed on to every worker. A worker that replaces one that has ended begins with the
                                    replicas of another worker
    /decide/ID/...              passed on to the worker that made the decision, whose number the id begins with
    anything else               passed on to one worker, each in turn

A request is passed on with its headers, so the client gets the worker's own answer, also if it is a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from itertools import count
from time import monotonic, time
from typing import Any
from weakref import WeakValueDictionary

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cachemap.background import Background
from replicas import Fleet
from replicas.kept import KeptReplicas

from ..ops.admin import MOST_LEFT, keep, replica_of
from ..ops.guard import PASSED_ON, Guard, Refusal
from ..ops.metrics import lines
from ..ops.recent.recent import merged, told
from ..ops.side import Side, answer, metrics_page
from .combine import pages, statuses
from .process import GONE, OWN_HEADERS, Answer, Change, Places, WorkerProcess, decision_prefix

ANSWER_SECONDS = 30.0
LONG_SECONDS = 660.0  # for requests that the worker passes on to an engine, with a shorter timeout of its own
# For a change of the replicas, which may have to wait for a drain. The supervisor kills a stuck worker long before.
CHANGE_SECONDS = 86_400.0


class WorkersAdmin(Side):
    """The admin API for all workers of one machine.

    `places`: the worker processes. `launched`: the engines that the supervisor started. `kept`: the file of the
    replicas that operators added, or None without --replica-file. `background`: the supervisor's own background work.
    `shadows`: the policies compared in shadow mode. `guard`: checks who may use the admin API.
    """

    def __init__(
        self,
        places: Places,
        launched: Fleet,
        kept: KeptReplicas | None,
        background: Background,
        shadows: Sequence[str],
        guard: Guard,
    ) -> None:
        super().__init__(guard)
        self.places, self.launched = places, launched
        self._kept, self._background, self._shadows = kept, background, shadows
        self._turns, self._begun = count(), monotonic()
        self._keeping = asyncio.Lock()  # one change of the file of replicas at a time
        # A lock for each engine, so that all workers get the engine's changes in one order. An entry lasts as long as a
        # change holds the lock or waits for it.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # The state with which a worker begins if it has no siblings: a worker's last answer to `/worker/known`, or at
        # the start the URLs in the settings.
        known: dict[str, Any] = {"urls": {}, "pods": [], "left_out": [], "drained": [], "names": None, "costs": None}
        self._known = known

    # --- one answer for all workers

    async def metrics(self, request: web.Request) -> web.Response:
        found = await self.places.query_all("/metrics")
        page = pages({str(worker.index): page for worker, page in found}, self._own_page())
        return metrics_page(request, page, CONTENT_TYPE_LATEST)

    def _own_page(self) -> bytes:
        """Return the series that the supervisor adds to the workers' metrics, in Prometheus' text format."""
        answering = {worker.index for worker in self.places.answering}
        reading = {
            "worker_up": {str(index): float(index in answering) for index in range(self.places.count)},
            "worker_restarts": self.places.restarts,
            "replica_restarts": {id: one.restarts for id, one in self.launched.replicas.items()},
            "background_failures": self._background.counts,
        }
        return "".join(lines(reading)).encode()

    async def recent(self, request: web.Request) -> web.Response:
        found = await self.places.query_all("/worker/recent")
        if not found:
            raise _nobody_ready()
        kept = [orjson.loads(body) for _, body in found]
        return answer(await asyncio.to_thread(lambda: told(merged(kept), time())))

    async def _status(self) -> dict[str, Any]:
        found = {worker.index: orjson.loads(body) for worker, body in await self.places.query_all("/worker")}
        if not found:
            raise _nobody_ready()
        own = {
            "uptime_seconds": round(monotonic() - self._begun, 3),
            "workers": [_shown(one, found.get(index)) for index, one in sorted(self.places.workers.items())],
            "background_failures": self._background.recent(),
        }
        launched = {
            id: {
                **{name: getattr(one, name) for name in ("managed", "pid", "restarts", "reason")},
                "state": str(one.state),
                "fault": one.fault or None,
                "since_seconds": round(monotonic() - one.since, 3),
            }
            for id, one in self.launched.replicas.items()
        }
        return statuses(found, launched, self._shadows, own)

    # --- the answer of one worker

    async def report(self, request: web.Request) -> web.Response:
        """Pass a report on a decision (`/decide/ID/...`) on to the worker that made the decision.

        If that worker has ended, so has the decision. The report then goes to any worker, which answers that there is
        no such decision.
        """
        id = request.match_info["id"]
        whose = next((one for one in self.places.serving if id.startswith(decision_prefix(one.index))), None)
        return (await self._ask(whose or self._next(), request)).response()

    async def pass_on(self, request: web.Request) -> web.Response:
        return (await self._ask(self._next(), request)).response()

    ask_engine = blocks = explain = decide = pass_on
    first_byte = done = report

    def _next(self) -> WorkerProcess:
        answering = self.places.answering
        if not answering:
            raise _nobody_ready()
        return answering[next(self._turns) % len(answering)]

    async def _ask(self, worker: WorkerProcess, request: web.Request) -> Answer:
        """Return the worker's answer to the request. Raises Refusal if the worker ends before it answers."""
        seconds = LONG_SECONDS if request.match_info.route.name == PASSED_ON else ANSWER_SECONDS
        try:
            return await worker.ask(*await _passed_on(request), seconds)
        except GONE:
            raise Refusal(503, "the worker that was asked has ended or is stuck; ask again", "worker_gone") from None

    # --- a change of the replicas

    async def known(self) -> dict[str, Any]:
        """Return the state with which a new worker begins: its replicas, their former models, and learned costs.

        The state is the answer of another worker to `/worker/known`. If none answers, it is the last such answer.
        """
        for worker in self.places.answering:
            if (found := await worker.query("/worker/known")) is not None:
                known: dict[str, Any] = orjson.loads(found)
                self._known = {**known, "names": None}  # without a worker, the times of `names` are not known
                return known
        return self._known

    def given(self, urls: Mapping[str, str]) -> None:
        """Add replicas (URLs by id) to the state that a new worker gets if no other worker answers."""
        self._known["urls"] |= urls

    async def add(self, request: web.Request) -> web.Response:
        """Add a replica to all workers, or take a stopped one back into use."""
        url, address = replica_of(await request.read())
        return await self._change("add", request, address.id, url)

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a replica in all workers. Answers at once; the replica's state then shows when it is drained."""
        return await self._change("drain", request, request.match_info["id"])

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a replica from all workers. Answers once it has been drained and removed."""
        return await self._change("remove", request, request.match_info["id"])

    async def _change(self, change: str, request: web.Request, id: str, url: str = "") -> web.Response:
        """Pass a request to add, drain or remove a replica on to all workers, and return the answer.

        If the client disconnects, the change goes on. `change`: "add", "drain" or "remove". `id`: the replica's id.
        `url`: the URL of a replica to add, else "".
        """
        engine, _, rank = id.rpartition("-dp")
        lock = self._changing.setdefault(engine if rank.isdecimal() else id, asyncio.Lock())
        return await asyncio.shield(self._change_in_turn(lock, change, await _passed_on(request), id, url))

    async def _change_in_turn(
        self, lock: asyncio.Lock, change: str, request: Change, id: str, url: str
    ) -> web.Response:
        async with lock:
            known, undo = await self.known(), None  # `undo`: the change that restores the file of replicas
            if not self.places.serving:
                raise _nobody_ready()
            if change == "remove":
                before = await self._keep("remove", id)
                undo = ("add", before) if before else None
            elif change == "add" and id not in known["urls"] and id not in known["pods"]:
                await self._keep("add", url)
                undo = ("remove", id)
            answers = await self._tell(request)
            if answers and all(one.status < 300 for one in answers):
                await self.places.look()  # updates their loads: `launched` waits until these are zero
                await self._follow(change, id, url)
            elif undo is not None:
                await self._keep(*undo)
            await self.known()
        if not answers:
            raise _nobody_ready()
        return _worst(answers).response()

    async def _follow(self, change: str, id: str, url: str) -> None:
        """Add, drain or remove an engine that the supervisor launched, as the workers did; ignore other engines."""
        launched = self.launched
        if change == "add" and id in launched.engines:  # it was perhaps stopped
            launched.add(url)
        elif change == "drain" and (id in launched.engines or id in launched.replicas):
            launched.drain(id)
        elif change == "remove" and id in launched.engines:
            await launched.remove(id)

    async def _tell(self, change: Change) -> list[Answer]:
        """Send a change of the replicas to all workers, and return their answers.

        A worker that is just starting may have been given the replicas as they were before the change. The change is
        stored in its `missed` and sent to it before it accepts connections. If all other workers refuse the change, it
        is dropped.
        """
        starting = [one for one in self.places.workers.values() if not one.serves]
        for one in starting:
            one.missed.append(change)
        found = await asyncio.gather(*(have_follow(one, change) for one in self.places.serving))
        answers = [one for one in found if one is not None]
        if not any(one.status < 300 for one in answers):
            for one in starting:
                with contextlib.suppress(ValueError):
                    one.missed.remove(change)
        return answers

    async def _keep(self, change: str, what: str) -> str | None:
        async with self._keeping:
            return await keep(self._kept, change, what)


async def have_follow(worker: WorkerProcess, change: Change) -> Answer | None:
    """Send a worker a change of the replicas and return its answer. If none comes, kill the worker and return None.

    A worker that gives no answer may or may not have made the change. Its replacement begins with the replicas of a
    sibling, so afterwards all workers agree again.
    """
    try:
        return await worker.ask(*change, CHANGE_SECONDS)
    except GONE:
        worker.kill()
        return None


def _worst(answers: Sequence[Answer]) -> Answer:
    """Return the workers' answer with the highest HTTP status.

    If it is a success, and workers still have requests on a removed replica, the answer has their number over all
    workers (`left`), and their ids (`requests`, MOST_LEFT at most).
    """
    worst = max(answers, key=lambda one: one.status)
    told = [orjson.loads(one.body) for one in answers] if worst.status < 300 else []
    if having := [one for one in told if one.get("left")]:
        ids = [id for one in having for id in one["requests"]][:MOST_LEFT]
        body = orjson.dumps(having[0] | {"left": sum(one["left"] for one in having), "requests": ids})
        return worst._replace(body=body)
    return worst


async def _passed_on(request: web.Request) -> Change:
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in OWN_HEADERS]
    return request.method, request.rel_url.raw_path_qs, headers, await request.read()


def _shown(worker: WorkerProcess, said: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a worker's entry in the answer to /status. `said`: its answer to /worker, or None if it gave none."""
    return {
        "worker": worker.index,
        "pid": worker.process.pid,
        "ready": bool(worker.serves and said and said["status"]["ready"]),
        "connections": said["connections"] if said else 0,
        "requests": said["status"]["totals"]["requests"] if said else 0,
        "up_seconds": round(monotonic() - worker.begun, 3),
    }


def _nobody_ready() -> Refusal:
    return Refusal(503, "no worker is ready", "no_worker")
