"""The supervisor of workers: it starts them, replaces those that end, and owns what all workers have in common.

It owns four things:

    the port            which it reserves while no worker listens
    the admin API       which answers for all workers
    launched engines    which each worker adds by URL and watches for itself
    a Redis server      through which workers share state, unless `--redis-url` names one

No client's request passes through the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from cachemap.background import Background
from cachemap.map import LEAST_BUDGET
from replicas import Fleet
from replicas.health import Limits as HealthLimits
from replicas.kept import KeptReplicas
from replicas.replica import bearer, parse_url

from ..lifetime import cannot_listen, greeting, run
from ..model import launches, main_model
from ..ops import traces
from ..ops.guard import Guard
from ..ports import addresses, bound
from ..settings import ConfigError, Settings, known_urls, read_secrets
from ..settings.overload import Admission
from .admin import WorkersAdmin, have_follow
from .private_redis import PrivateRedis
from .process import START_SECONDS, Places, WorkerProcess, how

log = logging.getLogger("hitherto.workers")

PAUSES = (0.1, 30.0)  # seconds before a worker is replaced: the first pause, which doubles, and the longest
SETTLED = 10.0  # seconds; a worker that ran for longer resets the pause to the first
# Seconds that a replacement waits for its first replica before it accepts connections; its siblings have replicas.
PATIENCE = 10.0
STOP_SECONDS = 7.0  # beyond the time to drain: 2 s for the last bytes of answers, then leases, usage log and spans
LONGEST_SOCKET = 107  # bytes of a unix socket's path


class Workers:
    """The supervisor's service: all workers with their engines, Redis and admin API, from `start` to `stop`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        traces.receiver()  # reports wrong settings of traces before anything is started
        self._secrets = read_secrets(settings)
        self._headers = {**bearer(self._secrets.admin_token), "Host": "localhost"}  # for the workers' admin APIs
        self._launches = launches(settings)
        self.places = Places(settings.workers)
        self._background = Background()
        self.fleet = Fleet(
            self.places.inflight,
            self.places.waited,
            drain_timeout=settings.drain_timeout_s,
            limits=HealthLimits(lost_after=settings.hung_after_s),
            model=settings.served_model_name,
            authorities=settings.replica_ca,
            engine_key=self._secrets.engine_key,
        )
        self.admin = WorkersAdmin(
            self.places,
            self.fleet,
            settings.replica_file and KeptReplicas(settings.replica_file),
            self._background,
            settings.shadow,
            Guard((settings.admin_host, *settings.admin_allow_host), self._secrets.admin_token),
        )
        self.port = self.admin_port = 0
        self._folder = _folder()
        self._redis: PrivateRedis | None = None
        self._held: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def greeting(self) -> str:
        return f"{greeting(self.settings, self.port, self.admin_port)}; {self.settings.workers} workers"

    # --- start and stop

    async def start(self) -> None:
        """Start Redis, engines and workers, and return once all workers accept connections.

        Raises ConfigError if anything cannot be started. If one worker cannot, all others are ended, even if they hang.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def _start(self) -> None:
        settings = self.settings
        try:
            self._held, self.port = await hold(settings.host, settings.port)
        except OSError as error:
            raise cannot_listen(settings, error) from None
        self.admin_port = await self.admin.start(settings.admin_host, settings.admin_port)
        redis_url = settings.redis_url
        if redis_url is None:
            self._redis = PrivateRedis(self._folder)
            await self._redis.start()
            redis_url = self._redis.url
        self._each = one_workers_settings(settings, self.port, redis_url)
        directory, _ = main_model(settings, self._launches)
        if not settings.model and directory:
            self._each["model"] = str(directory)
        self.admin.given({parse_url(url).id: url for url in known_urls(settings)})
        for launch in self._launches:
            engines = {one.engine: self.fleet.engines[one.engine] for one in await self.fleet.launch(*launch)}
            self.admin.given({id: engine.url for id, engine in engines.items()})
        try:
            async with asyncio.TaskGroup() as starting:
                for index in range(settings.workers):
                    starting.create_task(self._start_worker(index))
        except ExceptionGroup as refused:
            raise refused.exceptions[0] from None
        for index in range(settings.workers):
            self.keep_place(index)
        self._tasks.append(self._background.spawn("watch workers", self.places.watch))

    async def stop(self, seconds: float) -> None:
        """Let workers refuse new requests and finish running ones for up to `seconds`, then end everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop(seconds, STOP_SECONDS) for worker in self.places.workers.values()))
        await self.fleet.stop()
        if self._redis is not None:
            await self._redis.stop()
        if self.admin_port:
            await self.admin.stop()
        for one in self._held:
            one.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def hurry(self) -> None:
        """Tell the workers to cut short the time for running requests, while `stop` is waiting for them."""
        for worker in self.places.workers.values():
            worker.tell(hurry=True)

    # --- workers

    async def _start_worker(self, index: int, patience: float = 0.0) -> WorkerProcess:
        """Start the worker with the number `index`, and return it once it accepts connections.

        `patience`: for how many seconds at most the worker waits for a ready replica before it accepts connections.
        Raises ConfigError if the worker cannot be started.
        """
        path = self._folder / f"worker-{index}.sock"
        try:
            worker = self.places.workers[index] = await WorkerProcess.start(index, path, self._headers)
        except OSError as error:
            raise ConfigError(f"--workers: worker {index} cannot be started: {error.strerror or error}") from None
        # From here on, changes of the replicas that the worker misses are kept for it (`missed`), so none is lost
        # between a sibling's answer and the moment when the worker serves.
        known = await self.admin.known()
        worker.tell(
            index=index, socket=str(path), settings=self._each, secrets=[*self._secrets], patience=patience, known=known
        )
        await worker.opened(START_SECONDS + patience)
        while worker.missed:  # `WorkersAdmin` may meanwhile take one back, or add another
            await have_follow(worker, worker.missed.pop(0))
        worker.serves = True
        return worker

    def keep_place(self, index: int) -> asyncio.Task[None]:
        """Start a background task that replaces the worker with this number whenever it ends; return the task."""
        task = self._background.spawn(f"worker {index}", partial(self._keep, index))
        self._tasks.append(task)
        return task

    async def _keep(self, index: int) -> None:
        """Replace the worker with the number `index` whenever it ends, until cancelled.

        A replacement starts after a pause. PAUSES has the first and the longest pause in seconds: the pause doubles
        each time, and is the first one again after a worker that ran for more than SETTLED seconds.
        """
        pause = PAUSES[0]
        while True:
            worker = self.places.workers[index]
            code = await worker.ended()
            if monotonic() - worker.begun > SETTLED:
                pause = PAUSES[0]
            log.warning("worker %d (process %d) ended with %s, and its clients' connections with it; another one is started in %g s",
                        index, worker.process.pid, how(code), pause)  # fmt: skip
            self.places.restarts += 1
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
                try:
                    worker = await self._start_worker(index, PATIENCE)
                    break
                except ConfigError as error:
                    log.error("worker %d could not start: %s; another one is tried in %g s", index, error, pause)
            log.info("worker %d (process %d) has taken its place", index, worker.process.pid)


def one_workers_settings(settings: Settings, port: int, redis_url: str) -> dict[str, Any]:
    """Return the settings of one worker as JSON data, made from those of all workers.

    `port`: the port that all workers share. `redis_url`: their Redis. The memory budgets are divided by the number of
    workers. So are the bounds of the queue of waiting requests, since each worker has a queue of its own.
    """
    count, queue = settings.workers, settings.admission or Admission()
    each = settings.model_copy(update={
        "port": port, "redis_url": redis_url, "workers": 1,
        "launch": 0, "pools": {}, "replica_url": (), "replica_file": None,
        "cache_budget": max(LEAST_BUDGET, settings.cache_budget // count),
        "request_budget": settings.request_budget // count or 1,
        "continue_budget": settings.continue_budget // count or 1,
        "admission": queue.of_one_worker(count) if settings.has_overload else None,
    })  # fmt: skip
    return each.to_dict()


async def hold(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Reserve a port on every address of the host; return the bound sockets, which do not listen, and the port.

    `port`: 0 for any free port. Raises OSError if another process listens on the port. Workers could share it with a
    process of the same user, but that process would then get a part of the clients' connections.
    """
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
    """Create a folder for sockets that only this user may enter. Raises ConfigError."""
    try:
        place = tempfile.gettempdir()
        fits = len(os.fsencode(place) + b"/hitherto-12345678/worker-63.sock") <= LONGEST_SOCKET
        return Path(tempfile.mkdtemp(prefix="hitherto-", dir=place if fits else "/tmp"))
    except OSError as error:
        raise ConfigError(
            f"--workers: workers need a folder for their sockets, and none can be made: {error.strerror or error}. Set TMPDIR to one that can be written"
        ) from None


def serve(settings: Settings) -> int:
    """Run workers until a signal, and return the exit code. Raises ConfigError before anything is started."""
    return run(settings, lambda: Workers(settings))
