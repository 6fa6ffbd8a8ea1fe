"""One admin side for all workers. Each has one of its own, on a unix socket; this one asks them.

    /metrics                    all workers' series, each with the label `worker`
    /status, /replicas, /readyz all workers' in one: counts added up, the least ready view of each replica, ready when
    all are
    /recent                     their last 15 minutes in one
    POST /replicas, DELETE, drain   told to all, and taken back in all if one refuses; a worker that takes another one's
                                    place is told what holds then
    /decide/ID/...              the worker that made the decision, which its id begins with
    anything else               one worker, in turn

What is asked is passed on with its headers, so the answer, a refusal included, is the worker's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from itertools import count
from time import time
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote
from weakref import WeakValueDictionary

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from replicas import Fleet
from replicas.kept import KeptReplicas

from ..ops.admin import keep, replica_of
from ..ops.guard import PASSED_ON, Guard, Refusal
from ..ops.recent.recent import merged, told
from ..ops.side import Side, answer, metrics_page
from .combine import pages
from .member import GONE, OWN_HEADERS, Answer, Member

log = logging.getLogger("hitherto.workers")

# for a question of our own, asked of all workers: one that is stuck must not hold up what the others say
QUERY_SECONDS = 2.0
ANSWER_SECONDS = 30.0
LONG_SECONDS = 660.0  # an engine may take its time: the worker knows until when
# Until a change is made. It may have to wait for a drain; a worker that is stuck is killed by the supervisor long
# before.
CHANGE_SECONDS = 86_400.0


def decision_prefix(worker: int) -> str:
    """How the ids of a worker's decisions begin."""
    return f"{worker}-"


class Workers(Protocol):
    """What this needs of the supervisor."""

    fleet: Fleet
    kept: KeptReplicas | None
    urls: dict[str, str]
    drained: set[str]
    left_out: set[str]
    admin_headers: dict[str, str]

    @property
    def live(self) -> list[Member]:
        """Those that take connections."""

    @property
    def answering(self) -> list[Member]:
        """Those of them that have sent a message a moment ago."""

    @property
    def told(self) -> list[Member]:
        """Those that know the replicas, and are to hear of every change."""

    @property
    def beginning(self) -> asyncio.Lock:
        """Held while a worker is told the replicas that there are."""

    def status(self, found: Sequence[tuple[Member, dict[str, Any]]]) -> dict[str, Any]: ...

    def metrics(self) -> bytes: ...

    async def up_to_date(self) -> None:
        """Wait until each worker has said anew what it has on replicas."""


class Known(NamedTuple):
    """What a worker that begins is told of an engine: its URL, None if it is not there or is a pod, which workers find
    by themselves; which of its replicas an operator drained; whether it is a pod that an operator removed."""

    url: str | None
    drained: frozenset[str]
    left_out: bool


class Kept(NamedTuple):
    """What the file of replicas held for an engine before a change."""

    url: str | None


class WorkersAdmin(Side):
    def __init__(self, workers: Workers, guard: Guard) -> None:
        super().__init__(guard)
        self.workers = workers
        self._turns = count()
        self._keeping = asyncio.Lock()  # one change of the file of replicas at a time
        # By engine: all workers hear of its changes in one order. An entry lasts as long as a change holds its lock or
        # waits for it.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Of the engines that are being changed: what holds again if the change is refused.
        self._before: dict[str, Known] = {}

    async def metrics(self, request: web.Request) -> web.Response:
        found = await self._query("/metrics")
        page = pages({str(member.index): page for member, page in found}, self.workers.metrics())
        return metrics_page(request, page, CONTENT_TYPE_LATEST)

    async def recent(self, request: web.Request) -> web.Response:
        found = await self._query("/worker/recent")
        if not found:
            raise nobody()
        kept = [orjson.loads(body) for _, body in found]
        return answer(await asyncio.to_thread(lambda: told(merged(kept), time())))

    async def add(self, request: web.Request) -> web.Response:
        workers = self.workers
        url, address = replica_of(await request.read())
        id = address.id

        async def follow() -> None:
            if id in workers.fleet.engines:  # launched by the supervisor, and stopped perhaps
                workers.fleet.add(url)

        def alter(before: Known) -> Known:
            return Known(None if self._is_pod(id) else before.url or url, frozenset(), False)

        return await self._change(request, id, alter, follow)

    async def drain(self, request: web.Request) -> web.Response:
        """Answers at once; the replica's state tells when it is done."""
        workers, id = self.workers, request.match_info["id"]

        async def follow() -> None:
            if id in workers.fleet.engines or id in workers.fleet.replicas:
                await workers.up_to_date()
                workers.fleet.drain(id)

        return await self._change(request, id, lambda before: before._replace(drained=before.drained | {id}), follow)

    async def remove(self, request: web.Request) -> web.Response:
        """Answers when it is done."""
        workers, id = self.workers, request.match_info["id"]

        async def follow() -> None:
            if id in workers.fleet.engines:
                await workers.fleet.remove(id)

        def alter(before: Known) -> Known:
            if self._engine(id) != id:  # workers refuse to remove one rank of an engine by itself
                return before
            return Known(None, frozenset(), before.left_out or before.url is None)

        return await self._change(request, id, alter, follow)

    async def report(self, request: web.Request) -> web.Response:
        """Of a decision. What a worker counted goes with it, so any other one rightly says that there is no such
        decision."""
        id = request.match_info["id"]
        whose = next((member for member in self.workers.live if id.startswith(decision_prefix(member.index))), None)
        return (await self._ask(whose or self._next(), request)).response()

    async def pass_on(self, request: web.Request) -> web.Response:
        return (await self._ask(self._next(), request)).response()

    # What one worker answers for all of them, and what the worker that decided is told.
    ask_engine = blocks = explain = decide = pass_on
    first_byte = done = report

    # --- a change of the replicas

    async def _change(
        self, request: web.Request, id: str, alter: Callable[[Known], Known], follow: Callable[[], Awaitable[None]]
    ) -> web.Response:
        """Make a change in all workers, or in none. `alter`: what the engine that `id` belongs to is from then on;
        `follow`: what the supervisor itself does once all workers have done it. A client that does not wait changes
        nothing."""
        await request.read()
        return await asyncio.shield(self._change_in_turn(request, self._engine(id), alter, follow))

    async def _change_in_turn(
        self, request: web.Request, engine: str, alter: Callable[[Known], Known], follow: Callable[[], Awaitable[None]]
    ) -> web.Response:
        lock = self._changing.get(engine)
        if lock is None:
            lock = self._changing[engine] = asyncio.Lock()
        async with lock:
            try:
                return await self._change_alone(request, engine, alter, follow)
            finally:
                self._before.pop(engine, None)

    async def _change_alone(
        self, request: web.Request, engine: str, alter: Callable[[Known], Known], follow: Callable[[], Awaitable[None]]
    ) -> web.Response:
        workers = self.workers
        async with workers.beginning:
            if not workers.told:
                raise nobody()
            before = self._before[engine] = self._known(engine)
            after = alter(before)
            kept = await self._keep(engine, after.url) if (before.url is None) != (after.url is None) else None
            self._set(engine, after)
            telling = asyncio.ensure_future(self._tell(workers.told, request))
        answers = await telling
        if answers and all(one.status < 300 for one in answers.values()):
            await follow()
        else:
            await self._take_back(engine, kept, {member for member, one in answers.items() if one.status >= 300})
        if not answers:
            raise nobody()
        return max(answers.values(), key=lambda one: one.status).response()

    async def _tell(self, members: Sequence[Member], request: web.Request) -> dict[Member, Answer]:
        headers, body = _passed_on(request), await request.read()
        answers = await asyncio.gather(
            *(
                self._make_follow(member, request.method, request.rel_url.raw_path_qs, headers, body)
                for member in members
            )
        )
        return {member: answer for member, answer in zip(members, answers, strict=True) if answer is not None}

    async def _make_follow(
        self, member: Member, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Answer | None:
        """The worker's answer to a change. None if there is none: nobody knows whether that worker made the change, so
        it is ended, and the one in its place is told what holds."""
        try:
            return await member.ask(method, path, headers, body, CHANGE_SECONDS)
        except GONE:
            member.kill()
            return None

    async def _take_back(self, engine: str, kept: Kept | None, unchanged: Set[Member]) -> None:
        """Undo a change that not all workers made, in those that may have made it, and in the file of kept replicas."""
        workers, headers = self.workers, [*self.workers.admin_headers.items(), ("Content-Type", "application/json")]
        path = f"/worker/replicas/{quote(engine, safe='')}"
        async with workers.beginning:
            before = self._before[engine]  # its pod may have gone until now
            body = orjson.dumps(before._asdict(), default=sorted)
            self._set(engine, before)
            undoing = asyncio.gather(
                *(
                    self._make_follow(member, "PUT", path, headers, body)
                    for member in workers.told
                    if member not in unchanged
                )
            )
        try:
            if kept is not None:
                await self._keep(engine, kept.url)
        except Refusal as refusal:
            log.error("a change of %s was taken back, but not in the file of replicas: %s", engine, refusal)
        await undoing

    async def _keep(self, engine: str, url: str | None) -> Kept | None:
        """Make the file of replicas hold this URL for an engine, or none; what it held until now. None if there is no
        file."""
        if self.workers.kept is None:
            return None
        async with self._keeping:
            return Kept(
                await keep(self.workers.kept, "remove", engine)
                if url is None
                else await keep(self.workers.kept, "add", url)
            )

    def _engine(self, id: str) -> str:
        """The id of the engine that a replica's id belongs to, which may be one of its ranks."""
        engine, _, rank = id.rpartition("-dp")
        return engine if rank.isdecimal() and id not in self.workers.urls else id

    def _known(self, engine: str) -> Known:
        workers = self.workers
        drained = frozenset(id for id in workers.drained if self._engine(id) == engine)
        return Known(workers.urls.get(engine), drained, engine in workers.left_out)

    def _set(self, engine: str, known: Known) -> None:
        workers = self.workers
        if known.url is None:
            workers.urls.pop(engine, None)
        else:
            workers.urls[engine] = known.url
        workers.drained = {id for id in workers.drained if self._engine(id) != engine} | known.drained
        (workers.left_out.add if known.left_out else workers.left_out.discard)(engine)

    @property
    def pods_asked_of(self) -> set[str]:
        """Engines that have no URL here, so they are pods, and that operators have drained or removed."""
        workers = self.workers
        return workers.left_out | {engine for id in workers.drained if (engine := self._engine(id)) not in workers.urls}

    def _is_pod(self, engine: str) -> bool:
        """Whether workers have it because of its pod, or will once they have found that."""
        if engine in self.workers.urls:
            return False
        return engine in self.pods_asked_of or any(engine in member.pods for member in self.workers.told)

    def pod_gone(self, engine: str) -> None:
        """A worker saw it go: what operators asked of it does not hold for the next pod at that address, neither now
        nor once a change under way is taken back."""
        self._set(engine, Known(self.workers.urls.get(engine), frozenset(), False))
        if engine in self._before:
            self._before[engine] = Known(self._before[engine].url, frozenset(), False)

    # --- workers

    def _next(self) -> Member:
        answering = self.workers.answering
        if not answering:
            raise nobody()
        return answering[next(self._turns) % len(answering)]

    async def _ask(self, member: Member, request: web.Request) -> Answer:
        """What this worker says to the request. Raises Refusal if it ends meanwhile."""
        seconds = LONG_SECONDS if request.match_info.route.name == PASSED_ON else ANSWER_SECONDS
        try:
            return await member.ask(
                request.method, request.rel_url.raw_path_qs, _passed_on(request), await request.read(), seconds
            )
        except GONE:
            raise Refusal(503, "the worker that was asked has ended or is stuck; ask again", "worker_gone") from None

    async def _query(self, path: str) -> list[tuple[Member, bytes]]:
        """What all workers answer to a question of our own, but for those that end meanwhile or are stuck."""

        async def ask_one(member: Member) -> tuple[Member, bytes] | None:
            try:
                found = await member.ask("GET", path, list(self.workers.admin_headers.items()), b"", QUERY_SECONDS)
            except GONE:
                return None
            return (member, found.body) if found.status == 200 else None

        return list(filter(None, await asyncio.gather(*map(ask_one, self.workers.answering))))

    async def _status(self) -> dict[str, Any]:
        found = await self._query("/worker")
        if not found:
            raise nobody()
        return self.workers.status([(member, orjson.loads(body)) for member, body in found])


def _passed_on(request: web.Request) -> list[tuple[str, str]]:
    return [(name, value) for name, value in request.headers.items() if name.lower() not in OWN_HEADERS]


def nobody() -> Refusal:
    return Refusal(503, "no worker is ready", "no_worker")
