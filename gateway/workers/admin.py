"""One admin side for all workers. Each has one of its own, on a unix socket; this one asks them.

    /metrics                    all workers' series, each with the label `worker`
    /status, /replicas, /readyz all workers' in one: counts added up, the least ready view of each replica, ready when
                                all are
    /recent                     their last 15 minutes in one
    POST /replicas, DELETE, drain   passed on to every worker, as an operator would to several gateways; a worker that
                                    takes another one's place begins with the replicas that a sibling has
    /decide/ID/...              the worker that made the decision, which its id begins with
    anything else               one worker, in turn

A request is passed on with its headers, so the answer, a refusal included, is the worker's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from .process import GONE, OWN_HEADERS, Answer, Places, WorkerProcess, decision_prefix

ANSWER_SECONDS = 30.0
LONG_SECONDS = 660.0  # an engine may take its time: the worker knows until when
# Until a change is made. It may have to wait for a drain; a worker that is stuck is killed by the supervisor long
# before.
CHANGE_SECONDS = 86_400.0


class WorkersAdmin(Side):
    """The admin side of the workers that have `places`. `launched` has the engines that the supervisor started, `kept`
    is the file of replicas that operators added, `background` the supervisor's own work."""

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
        # By engine: all workers hear of its changes in one order. An entry lasts as long as a change holds its lock or
        # waits for it.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # What `Worker.begin` reads, as a worker had it last; `urls` at the start are those of the settings.
        self._replicas: dict[str, Any] = {"urls": {}, "pods": [], "left_out": [], "drained": [], "names": None}

    # --- of all workers in one

    async def metrics(self, request: web.Request) -> web.Response:
        found = await self.places.query_all("/metrics")
        page = pages({str(worker.index): page for worker, page in found}, self._own_page())
        return metrics_page(request, page, CONTENT_TYPE_LATEST)

    def _own_page(self) -> bytes:
        """The supervisor's own part of the page."""
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
                "managed": True,
                "pid": one.pid,
                "restarts": one.restarts,
                "state": str(one.state),
                "reason": one.reason,
                "fault": one.fault or None,
                "since_seconds": round(monotonic() - one.since, 3),
            }
            for id, one in self.launched.replicas.items()
        }
        return statuses(found, launched, self._shadows, own)

    # --- of one worker

    async def report(self, request: web.Request) -> web.Response:
        """Of a decision. What a worker counted goes with it, so any other one rightly says that there is no such
        decision."""
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
        """What this worker answers to the request. Raises Refusal if it ends meanwhile."""
        seconds = LONG_SECONDS if request.match_info.route.name == PASSED_ON else ANSWER_SECONDS
        try:
            return await worker.ask(*await _passed_on(request), seconds)
        except GONE:
            raise Refusal(503, "the worker that was asked has ended or is stuck; ask again", "worker_gone") from None

    # --- a change of the replicas

    async def replicas(self) -> dict[str, Any]:
        """Return the replicas that a worker has now, as `Worker.begin` reads them. Where no worker answers, they are
        those that one had after the last change."""
        if (found := await self.places.query_one("/worker/replicas")) is None:
            return self._replicas
        self._replicas = {**found, "names": None}  # nobody remembers since when they are waited for
        return found

    def given(self, urls: Mapping[str, str]) -> None:
        """Give these replicas, URLs by id, to the workers that begin without a sibling as well."""
        self._replicas["urls"] |= urls

    async def add(self, request: web.Request) -> web.Response:
        url, address = replica_of(await request.read())

        async def follow() -> None:
            if address.id in self.launched.engines:  # launched by the supervisor, and stopped perhaps
                self.launched.add(url)

        return await self._change(request, address.id, follow, url)

    async def drain(self, request: web.Request) -> web.Response:
        """Answers at once; the replica's state tells when it is done."""
        id = request.match_info["id"]

        async def follow() -> None:
            if id in self.launched.engines or id in self.launched.replicas:
                self.launched.drain(id)

        return await self._change(request, id, follow)

    async def remove(self, request: web.Request) -> web.Response:
        """Answers when it is done."""
        id = request.match_info["id"]

        async def follow() -> None:
            if id in self.launched.engines:
                await self.launched.remove(id)

        return await self._change(request, id, follow)

    async def _change(
        self, request: web.Request, id: str, follow: Callable[[], Awaitable[None]], url: str | None = None
    ) -> web.Response:
        """Have all workers make a change, and the supervisor `follow`. `url`: of a replica that is added. A client that
        does not wait changes nothing."""
        await request.read()
        engine, _, rank = id.rpartition("-dp")
        lock = self._changing.setdefault(engine if rank.isdecimal() else id, asyncio.Lock())
        return await asyncio.shield(self._change_in_turn(lock, request, id, follow, url))

    async def _change_in_turn(
        self,
        lock: asyncio.Lock,
        request: web.Request,
        id: str,
        follow: Callable[[], Awaitable[None]],
        url: str | None,
    ) -> web.Response:
        async with lock:
            known = await self.replicas()
            if not self.places.hearing:
                raise _nobody_ready()
            undo: tuple[str, str] | None = None  # what keeps the file of replicas as it was
            if request.method == "DELETE":
                before = await self._keep("remove", id)
                undo = ("add", before) if before else None
            elif url is not None and id not in known["urls"] and id not in known["pods"]:
                await self._keep("add", url)
                undo = ("remove", id)
            answers = await self._tell(request)
            if answers and all(one.status < 300 for one in answers):
                await self.places.look()  # what they have there now: `launched` waits until they have nothing
                await follow()
            elif undo is not None:
                await self._keep(*undo)
            await self.replicas()
        if not answers:
            raise _nobody_ready()
        return _worst(answers).response()

    async def _tell(self, request: web.Request) -> list[Answer]:
        """What the workers answer to a change. A worker that begins meanwhile may have taken over the replicas of a
        sibling as they were before it, so it is told as well."""
        told = self.places.hearing
        change = await _passed_on(request)
        answers = [one for one in await asyncio.gather(*(_have_follow(one, change) for one in told)) if one]
        while answers and (late := [one for one in self.places.hearing if one not in told]):
            followed = await asyncio.gather(*(_have_follow(one, change) for one in late))
            answers += [one for one in followed if one and one.status < 300]
            told += late
        return answers

    async def _keep(self, change: str, what: str) -> str | None:
        async with self._keeping:
            return await keep(self._kept, change, what)


Passed = tuple[str, str, list[tuple[str, str]], bytes]  # method, path, headers and body of a request


async def _have_follow(worker: WorkerProcess, change: Passed) -> Answer | None:
    """The worker's answer to a change. None if there is none: nobody knows whether that worker made the change, so it
    is ended, and the one in its place begins with what a sibling has."""
    try:
        return await worker.ask(*change, CHANGE_SECONDS)
    except GONE:
        worker.kill()
        return None


def _worst(answers: Sequence[Answer]) -> Answer:
    """Return the answer with the highest status. Where workers have requests left at a replica that was removed, it
    counts and names those of all workers."""
    worst = max(answers, key=lambda one: one.status)
    told = [orjson.loads(one.body) for one in answers] if worst.status < 300 else []
    if having := [one for one in told if one.get("left")]:
        ids = [id for one in having for id in one["requests"]][:MOST_LEFT]
        body = orjson.dumps(having[0] | {"left": sum(one["left"] for one in having), "requests": ids})
        return worst._replace(body=body)
    return worst


async def _passed_on(request: web.Request) -> Passed:
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in OWN_HEADERS]
    return request.method, request.rel_url.raw_path_qs, headers, await request.read()


def _shown(worker: WorkerProcess, said: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the status says of a worker, of which it `said` this itself."""
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
