"""One admin side for all workers. Each has one of its own, on a unix socket; this one asks them.

    /metrics                    all workers' series, each with the label `worker`
    /status, /replicas, /readyz all workers' in one: counts added up, the least ready view of each replica, ready when all are
    POST /replicas, DELETE, drain   told to all; a worker that takes another one's place is told what holds then
    /decide/ID/...              the worker that made the decision, which its id begins with
    anything else               one worker, in turn

What is asked is passed on with its headers, so the answer, a refusal included, is the worker's own.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import orjson
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST

from replicas import Fleet
from replicas.kept import KeptReplicas
from replicas.replica import parse_url

from ..ops.guard import PASSED_ON, Guard, Refusal
from ..ops.admin import keep
from ..ops.side import Side, answer
from .combine import pages
from .member import GONE, OWN_HEADERS, Answer, Member

QUERY_SECONDS = 2.0  # for a question of our own, asked of all workers: one that is stuck must not hold up what the others say
ANSWER_SECONDS = 30.0
LONG_SECONDS = 660.0  # an engine may take its time, and a drain too: the worker knows until when


def decision_prefix(worker: int) -> str:
    """How the ids of a worker's decisions begin."""
    return f"{worker}-"


class Workers(Protocol):
    """What this needs of the supervisor."""

    fleet: Fleet
    kept: KeptReplicas | None
    urls: dict[str, str]
    drained: set[str]
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


class WorkersAdmin(Side):
    def __init__(self, workers: Workers, guard: Guard) -> None:
        super().__init__(guard)
        self.workers = workers
        self._turns = count()
        self._keeping = asyncio.Lock()  # one change of the file of replicas at a time
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by replica: all workers hear of changes in one order

    async def livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        status = await self._status()
        why_not = status["why_not"]
        if why_not and not self.guard.knows_token(request):
            why_not = "ask with the admin token to be told"
        return answer({"ready": status["ready"], "why_not": why_not}, 200 if status["ready"] else 503)

    async def status(self, request: web.Request) -> web.Response:
        return answer(await self._status())

    async def list(self, request: web.Request) -> web.Response:
        return answer({"replicas": (await self._status())["replicas"]})

    async def metrics(self, request: web.Request) -> web.Response:
        found = await self._query("/metrics")
        page = pages({str(member.index): page for member, page in found}, self.workers.metrics())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def add(self, request: web.Request) -> web.Response:
        workers = self.workers
        try:
            url = orjson.loads(await request.read())["url"]
            id = parse_url(url).id
        except (ValueError, KeyError, TypeError, AttributeError):
            return await self.pass_on(request)  # the answer says what is wrong
        async with self._changing[id]:
            await self._keep("add", url)
            async with workers.beginning:
                before = workers.urls.get(id), set(workers.drained)
                workers.urls.setdefault(id, url)
                workers.drained -= {one for one in workers.drained if one == id or one.startswith(f"{id}-dp")}
                telling = self._tell_all(request)
            told = await telling
            if told.status >= 300:
                workers.urls = {**workers.urls, id: before[0]} if before[0] else {one: other for one, other in workers.urls.items() if one != id}
                workers.drained |= before[1]
            elif id in workers.fleet.engines:  # launched here, and stopped perhaps
                workers.fleet.add(url)
        return told.response()

    async def drain(self, request: web.Request) -> web.Response:
        """Answers at once; the replica's state tells when it is done."""
        workers, id = self.workers, request.match_info["id"]
        async with self._changing[id]:
            async with workers.beginning:
                workers.drained.add(id)
                telling = self._tell_all(request)
            told = await telling
            if told.status >= 300:
                workers.drained.discard(id)
            elif id in workers.fleet.engines or id in workers.fleet.replicas:
                await workers.up_to_date()
                workers.fleet.drain(id)
        return told.response()

    async def remove(self, request: web.Request) -> web.Response:
        """Answers when it is done; a client that does not wait changes nothing."""
        return await asyncio.shield(self._remove(request))

    async def _remove(self, request: web.Request) -> web.Response:
        workers, id = self.workers, request.match_info["id"]
        async with self._changing[id]:
            if id in workers.urls:
                await self._keep("remove", id)
            async with workers.beginning:
                url = workers.urls.pop(id, None)
                telling = self._tell_all(request)
            told = await telling
            if told.status >= 300 and url is not None:
                workers.urls[id] = url
            if told.status < 300:
                workers.drained -= {one for one in workers.drained if one == id or one.startswith(f"{id}-dp")}
                if id in workers.fleet.engines:
                    await workers.fleet.remove(id)
        return told.response()

    async def report(self, request: web.Request) -> web.Response:
        """Of a decision. What a worker counted goes with it, so any other one rightly says that there is no such decision."""
        id = request.match_info["id"]
        whose = next((member for member in self.workers.live if id.startswith(decision_prefix(member.index))), None)
        return (await self._ask(whose or self._next(), request)).response()

    async def pass_on(self, request: web.Request) -> web.Response:
        return (await self._ask(self._next(), request)).response()

    # What one worker answers for all of them, and what the worker that decided is told.
    status_page = ask_engine = explain = decide = pass_on
    first_byte = done = report

    async def _keep(self, change: str, what: str) -> None:
        async with self._keeping:
            await keep(self.workers.kept, change, what)

    # --- workers

    def _next(self) -> Member:
        answering = self.workers.answering
        if not answering:
            raise nobody()
        return answering[next(self._turns) % len(answering)]

    async def _ask(self, member: Member, request: web.Request) -> Answer:
        """What this worker says to the request. Raises Refusal if it ends meanwhile."""
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in OWN_HEADERS]
        long = request.method == hdrs.METH_DELETE or request.match_info.route.name == PASSED_ON
        seconds = LONG_SECONDS if long else ANSWER_SECONDS
        try:
            return await member.ask(request.method, request.rel_url.raw_path_qs, headers, await request.read(), seconds)
        except GONE:
            raise Refusal(503, "the worker that was asked has ended or is stuck; ask again", "worker_gone") from None

    def _tell_all(self, request: web.Request) -> asyncio.Task[Answer]:
        """Tell those that are there now; the worst of their answers. Whoever ends meanwhile is replaced by one that knows."""
        members = self.workers.told

        async def tell_one(member: Member) -> Answer | None:
            try:
                return await self._ask(member, request)
            except Refusal:
                return None

        async def tell() -> Answer:
            await request.read()  # by one, for all: two cannot wait for it
            answers = list(filter(None, await asyncio.gather(*map(tell_one, members))))
            if not answers:
                raise nobody()
            return max(answers, key=lambda one: one.status)

        return asyncio.ensure_future(tell())

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


def nobody() -> Refusal:
    return Refusal(503, "no worker is ready", "no_worker")
