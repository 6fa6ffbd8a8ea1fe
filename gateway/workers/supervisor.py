"""The supervisor of workers: it starts them, replaces those that end, and has what there is one of.

That is the port, which it holds while no worker listens; the admin side; the engines that are launched, which workers
adopt by URL and watch for themselves; and the Redis that workers share, unless `--redis-url` names one. No request of a
client passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from cachemap.background import Background
from cachemap.map import LEAST_BUDGET
from replicas import Fleet
from replicas.health import Limits as HealthLimits
from replicas.launch import profile as profiles
from replicas.replica import bearer, parse_url, url_of

from ..config import ConfigError, Settings, kept_replicas, known_urls
from ..lifetime import cannot_listen, greeting, run
from ..model import launches, main_model
from ..ops import traces
from ..ops.guard import Guard
from ..ops.metrics import lines
from ..overload_fields import one_workers_admission
from ..ports import addresses, bound
from .admin import WorkersAdmin
from .combine import statuses
from .last_good import LastGood
from .member import GONE, Member, how
from .private_redis import PrivateRedis

log = logging.getLogger("hitherto.workers")

PAUSES = (0.1, 30.0)  # seconds before a worker that ended is replaced, doubling while none lives ...
SETTLED = 10.0  # ... this long
# Seconds that a worker which replaces another one waits for its first replica before it takes connections: its siblings
# have theirs.
PATIENCE = 10.0
WATCH_SECONDS = 1.0  # between two looks at the workers
HANGS = 30  # looks in a row at which a worker that listens had sent nothing since the look before: it is killed
STOP_SECONDS = 7.0  # beyond the time to drain: 2 s for the last bytes of answers, then leases, usage log and spans
QUIET = 3  # looks in a row without a message after which a worker is asked nothing and reported as down
LONGEST_SOCKET = 107  # bytes of a unix socket's path
COSTS_SECONDS = 5.0


class Workers:
    """All of them, from `start` to `stop`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        traces.receiver()  # what is wrong with it is said before anything is started
        self._last_good = LastGood(settings)
        secrets = self._last_good.secrets
        self.admin_headers = {**bearer(secrets.admin_token), "Host": "localhost"}
        self.kept = kept_replicas(settings)
        self.launches = launches(settings)
        self.urls: dict[str, str] = {}  # of the replicas there are, by id
        # By operators. Of pods, which workers find by themselves, it holds until a worker sees the pod go.
        self.drained: set[str] = set()
        self.left_out: set[str] = set()  # pods that were removed
        self.members: dict[int, Member] = {}
        self.restarts = 0
        self.fleet = Fleet(
            self._inflight,
            self._waited,
            drain_timeout=settings.drain_timeout_s,
            limits=HealthLimits(lost_after=settings.hung_after_s),
            model=settings.served_model_name,
            authorities=settings.replica_ca,
            engine_key=secrets.engine_key,
        )
        self.admin = WorkersAdmin(self, Guard((settings.admin_host, *settings.admin_allow_host), secrets.admin_token))
        self.beginning = asyncio.Lock()
        self.port = self.admin_port = 0
        self._folder = _folder()
        self._redis: PrivateRedis | None = None
        self._held: list[socket.socket] = []
        self._background = Background()
        self._following: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._made: list[asyncio.Future[None]] = []
        self._listening: list[asyncio.Future[None]] = []
        self._launched = asyncio.Event()
        self._stopping = asyncio.Event()
        self._has_admin = False
        self._begun = monotonic()

    @property
    def greeting(self) -> str:
        return f"{greeting(self.settings, self.port, self.admin_port)}; {self.settings.workers} workers"

    @property
    def live(self) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.live]

    @property
    def answering(self) -> list[Member]:
        return [member for member in self.live if member.silent <= QUIET]

    @property
    def told(self) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.told]

    # --- start and stop

    async def start(self) -> None:
        """Returns when all workers take connections; ConfigError if something is wrong with the settings, before any
        engine is started."""
        try:
            await self._start()
        except BaseException as error:
            await self.stop(0)
            if isinstance(error, profiles.ProfileError):
                raise ConfigError(f"launching: {error}") from None
            raise

    async def _start(self) -> None:
        settings = self.settings
        try:
            self._held, self.port = await hold(settings.host, settings.port)
        except OSError as error:
            raise cannot_listen(settings, error) from None
        self.admin_port = await self.admin.start(settings.admin_host, settings.admin_port)
        self._has_admin = True
        redis_url = settings.redis_url
        if redis_url is None:
            self._redis = PrivateRedis(self._folder)
            await self._redis.start()
            redis_url = self._redis.url
        for url in known_urls(settings):
            self.urls[parse_url(url).id] = url
        directory, _ = main_model(settings, self.launches)
        count, loop = settings.workers, asyncio.get_running_loop()
        each = settings.model_copy(update={
            "port": self.port, "workers": 1, "launch": 0, "pools": {}, "replica_url": (), "replica_file": None, "redis_url": redis_url,
            "model": settings.model or (str(directory) if directory else None),
            **budgets(settings, count),
        })  # fmt: skip
        told = self._last_good.settings(each.model_dump(mode="json"))
        self._following = self._last_good.follow(self._background)
        self._made = [loop.create_future() for _ in range(count)]
        self._listening = [loop.create_future() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._keep(index, told), name=f"worker {index}") for index in range(count)]
        for index, keeping in enumerate(self._tasks):
            keeping.add_done_callback(partial(self._kept, index))
        await all_of(self._made)
        for launch in self.launches:
            for replica in await self.fleet.launch(*launch):
                engine = self.fleet.engines[replica.engine]
                self.urls[replica.engine] = url_of(
                    engine.lead.url,
                    engine.watch.given,
                    engine.lead.required_model,
                    engine.lead.role,
                    engine.lead.spill,
                    engine.lead.moves_by,
                    engine.lead.bootstrap,
                    engine.lead.peer,
                )
        self._launched.set()
        await all_of(self._listening)
        self._tasks.append(asyncio.create_task(self._watch(), name="watch workers"))

    async def stop(self, seconds: float) -> None:
        """Workers refuse new requests and end those they have for up to `seconds`; then everything that was started
        ends."""
        self._stopping.set()
        self._launched.set()  # no worker is to wait for engines any more
        for member in self.members.values():
            if member.live:
                member.tell(drain=seconds)
            else:
                member.kill()
        for task in self._tasks:
            if task.get_name() == "watch workers":
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds + STOP_SECONDS)
            for member in self.members.values() if late else ():
                member.kill()
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        self._last_good.close()
        await self.fleet.stop()
        if self._redis is not None:
            await self._redis.stop()
        if self._has_admin:
            await self.admin.stop()
        for one in self._held:
            one.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def hurry(self) -> None:
        """Let running requests have no more time, while it stops."""
        for member in self.members.values():
            member.tell(hurry=True)

    # --- workers

    async def _keep(self, index: int, settings: dict[str, Any]) -> None:
        """One worker after another in this place, as long as the supervisor lives."""
        pause, patience = PAUSES[0], 0.0
        while not self._stopping.is_set():
            costs = await self._learned("/worker/costs")
            try:
                member = self.members[index] = await Member.start(
                    index,
                    self._folder / f"worker-{index}.sock",
                    {"settings": settings, "costs": costs, **self._last_good.told()},
                    self._last_good.descriptors,
                )
            except OSError as error:
                if self._fail_start(
                    index, ConfigError(f"--workers: worker {index} cannot be started: {error.strerror or error}")
                ):
                    return
                log.error("worker %d cannot be started: %s", index, error)
                await self._rest(PAUSES[1])
                continue
            wrong = await self._bring_up(member, patience)
            code = await member.ended()
            del self.members[index]
            if self._stopping.is_set():
                return
            if wrong is not None and self._fail_start(index, wrong):
                return
            if monotonic() - member.begun > SETTLED:
                pause = PAUSES[0]
            if wrong is not None:
                log.error("worker %d (process %d) could not start: %s; another one is tried in %g s",
                          index, member.process.pid, wrong, pause)  # fmt: skip
            else:
                log.warning("worker %d (process %d) ended with %s, and its clients' connections with it; another one is started in %g s",
                            index, member.process.pid, how(code), pause)  # fmt: skip
                self.restarts += 1
            await self._rest(pause)
            pause, patience = min(2 * pause, PAUSES[1]), PATIENCE

    def _kept(self, index: int, keeping: asyncio.Task[None]) -> None:
        """Nobody waits for a task of `_keep` before the gateway stops."""
        if keeping.cancelled() or (error := keeping.exception()) is None:
            return
        log.error("worker %d: its place stays empty until the gateway is started again: %r", index, error, exc_info=error)  # fmt: skip
        self._fail_start(index, error)

    def _fail_start(self, index: int, error: BaseException) -> bool:
        """Let `start` raise this; False where it is over."""
        if self._listening[index].done():
            return False
        (self._listening if self._made[index].done() else self._made)[index].set_exception(error)
        return True

    async def _rest(self, seconds: float) -> None:
        """Wait, but no longer than until the supervisor is told to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _bring_up(self, member: Member, patience: float) -> ConfigError | None:
        """Until it takes connections; why it never did."""
        try:
            await member.has("made")
            settle(self._made[member.index])
            member.on_gone = self.admin.pod_gone
            await self._launched.wait()
            names = await self._learned("/worker/names")
            async with self.beginning:
                member.tell(
                    urls=list(self.urls.values()),
                    drained=sorted(self.drained),
                    left_out=sorted(self.left_out),
                    asked_of=sorted(self.admin.pods_asked_of),
                    names=names,
                    patience=patience,
                )
                await member.has("begun")
                member.told = True
            await member.has("listens")
        except ConfigError as error:
            return error
        member.live = True
        if self._stopping.is_set():
            member.tell(drain=0.0)
        if self._listening[member.index].done():
            log.info("worker %d (process %d) has taken its place", member.index, member.process.pid)
        settle(self._listening[member.index])
        return None

    async def _learned(self, path: str) -> dict[str, Any] | None:
        """What a sibling has learned, for a worker that is new; None if there is no sibling, or it does not say."""
        for member in self.answering:
            try:
                found = await member.ask("GET", path, list(self.admin_headers.items()), b"", COSTS_SECONDS)
            except GONE:
                continue
            if found.status == 200:
                return orjson.loads(found.body)
        return None

    async def _watch(self) -> None:
        """Kill workers that are stuck: the kernel goes on giving them connections, and nobody else would see it.

        Silence is counted in looks, not in seconds. After this process or its machine was frozen, the timer fires
        before the messages that wait in the sockets are read; however long that took, it counts as one look.
        """
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for member in self.live:
                member.silent += 1
                if member.silent > HANGS:
                    log.error(
                        "worker %d (process %d) has said nothing for %g s and is killed",
                        member.index,
                        member.process.pid,
                        HANGS * WATCH_SECONDS,
                    )
                    member.kill()

    # --- of engines that are launched

    def _inflight(self, replica: str) -> int:
        return sum(member.loads[replica][0] for member in self.told if replica in member.loads)

    def _waited(self, replica: str) -> float:
        return max((member.loads[replica][1] for member in self.told if replica in member.loads), default=0.0)

    async def up_to_date(self) -> None:
        """Wait until each worker has said anew what it has on replicas: twice, since one message may be on its way."""
        before = {member: member.beats for member in self.live}
        deadline = monotonic() + COSTS_SECONDS
        while monotonic() < deadline and any(
            member.live and member.beats < beats + 2 for member, beats in before.items()
        ):
            await asyncio.sleep(0.02)

    # --- what the admin side asks

    def status(self, found: Sequence[tuple[Member, dict[str, Any]]]) -> dict[str, Any]:
        said = {member.index: told for member, told in found}
        workers = [self._worker(member, said.get(member.index)) for _, member in sorted(self.members.items())]
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
            for id, one in self.fleet.replicas.items()
        }
        return statuses(
            [{**told, "worker": member.index} for member, told in found],
            launched,
            self.settings.shadow,
            {
                "uptime_seconds": round(monotonic() - self._begun, 3),
                "workers": workers,
                "background_failures": self._background.recent(),
            },
        )

    def _worker(self, member: Member, said: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "worker": member.index,
            "pid": member.process.pid,
            "ready": bool(member.live and said and said["status"]["ready"]),
            "connections": said["connections"] if said else 0,
            "requests": said["status"]["totals"]["requests"] if said else 0,
            "up_seconds": round(monotonic() - member.begun, 3),
        }

    def metrics(self) -> bytes:
        """The supervisor's own part of the page."""
        up = {str(index): 0.0 for index in range(self.settings.workers)} | {
            str(member.index): 1.0 for member in self.answering
        }
        reading = {
            "worker_up": up,
            "worker_restarts": self.restarts,
            "replica_restarts": {id: one.restarts for id, one in self.fleet.replicas.items()},
            "background_failures": self._background.counts,
        }
        return "".join(lines(reading)).encode()


async def all_of(futures: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all; raise what the first of those that failed failed with."""
    for error in filter(None, await asyncio.gather(*futures, return_exceptions=True)):
        raise error


def budgets(settings: Settings, count: int) -> dict[str, Any]:
    """What one of so many workers has of what is given to all: memory, and the queue's bounds."""
    return {
        "cache_budget": max(LEAST_BUDGET, settings.cache_budget // count),
        "request_budget": settings.request_budget // count or 1,
        "continue_budget": settings.continue_budget // count or 1,
        "admission": one_workers_admission(settings, count),
    }


def settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def hold(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Sockets that keep a port for workers, on every address of the host, without listening there. OSError if it is
    taken: another process of this user could listen there as well, and would get a part of the connections."""
    held: list[socket.socket] = []
    try:
        for kind, *_, address in await asyncio.to_thread(addresses, host, port):
            if port:
                bound(kind, (address[0], port, *address[2:]), shared=False).close()
            held.append(bound(kind, (address[0], port, *address[2:]), shared=True))
            port = held[-1].getsockname()[1]
    except BaseException:
        for one in held:
            one.close()
        raise
    return held, port


def _folder() -> Path:
    """Where sockets are that only this user may connect to."""
    try:
        place = tempfile.gettempdir()
        fits = len(os.fsencode(place) + b"/hitherto-12345678/worker-63.sock") <= LONGEST_SOCKET
        return Path(tempfile.mkdtemp(prefix="hitherto-", dir=place if fits else "/tmp"))
    except OSError as error:
        raise ConfigError(
            f"--workers: workers need a folder for their sockets, and none can be made: {error.strerror or error}. Set TMPDIR to one that can be written"
        ) from None


def serve(settings: Settings) -> int:
    """Run workers until a signal; returns the exit code. Raises ConfigError before anything is started."""
    return run(settings, lambda: Workers(settings))
