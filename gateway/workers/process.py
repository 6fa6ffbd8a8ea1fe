"""The processes of workers, as the supervisor starts, queries, watches and ends them.

The supervisor watches by *looks*: once a second it asks each worker for its load.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import hdrs, web
from yarl import URL

from ..settings import ConfigError

log = logging.getLogger("hitherto.workers")

# Headers that belong to one connection, or that are written again for the next one.
OWN_HEADERS = frozenset(
    """
    connection keep-alive te trailer transfer-encoding upgrade expect content-length date server
    """.split()
)
GONE = (aiohttp.ClientError, OSError, TimeoutError)  # failures of a request to a worker that has ended or is stuck
OPEN = b"open\n"  # a worker's first line once its admin side is open; otherwise a JSON string: why it cannot start
PACKAGES = Path(__file__).parents[2]  # the folder that has the package `gateway`
STAGE_SECONDS = 60.0  # for one step of a worker's start: it may load a tokenizer on a busy machine
# For queries of the supervisor's own: a worker that is stuck must not delay the others' answers.
QUERY_SECONDS = 2.0
# Ctrl-C, service managers and closing terminals send these signals to all processes of a group, but only the supervisor
# decides when a worker stops.
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 1.0  # between two looks at the workers, and for a worker's answer to one
# Unanswered looks in a row after which a worker counts as quiet, and as hung. Each takes 2 s at most, so a worker that
# hangs is killed after 30 s.
QUIET, HANGS = 2, 15


class Answer(NamedTuple):
    """An answer of a worker's admin side."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
        return web.Response(body=self.body, status=self.status, headers=headers)


class WorkerProcess:
    """The supervisor's handle of one worker process.

    The worker reads lines of JSON from its standard input, a socket: its settings first, then how to stop. On the same
    socket it reports that its admin side is open, or why it cannot start; everything else goes through that admin side.

    `hears_changes`: the worker is sent each change of the replicas.
    `serves`: it accepts clients' connections.
    `unanswered`: the number of looks in a row that it has not answered.
    `loads`: by replica, the number of its requests there, and the seconds for which the oldest has had no answer.
    """

    def __init__(
        self,
        index: int,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: Path,
        headers: Mapping[str, str],
    ):
        self.index, self.process = index, process
        self._reader, self._writer, self._headers = reader, writer, headers
        self.begun = monotonic()
        self.serves = self.hears_changes = False
        self.unanswered = 0
        self.loads: dict[str, tuple[int, float]] = {}
        self._admin = aiohttp.ClientSession(
            "http://worker", connector=aiohttp.UnixConnector(str(path)), auto_decompress=False
        )
        self._first_line: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name=f"worker {index}")

    @classmethod
    async def start(cls, index: int, path: Path, hello: dict[str, Any], headers: Mapping[str, str]) -> WorkerProcess:
        """Start a process, send it `hello`, and return its handle. Raises OSError if it cannot be started.

        `index`: the worker's number. `path`: the unix socket of its admin side. `headers`: the credentials for it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _start_process(theirs)
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        path.unlink(missing_ok=True)
        self = cls(index, process, reader, writer, path, headers)
        self.tell(index=index, socket=str(path), **hello)
        return self

    def tell(self, **message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(orjson.dumps(message) + b"\n")

    async def admin_open(self) -> None:
        """Wait until the admin side is open.

        Raises ConfigError, with the worker's reason, if the worker ends before. If it takes too long, it is killed, and
        ConfigError is raised as well.
        """
        try:
            async with asyncio.timeout(STAGE_SECONDS):
                line = await asyncio.shield(self._first_line)
        except TimeoutError:
            raise self._late() from None
        if line != OPEN:
            raise await self._failed(orjson.loads(line) if line else "")

    async def take_step(self, path: str, **what: Any) -> None:
        """Have the worker take the step of its start at this path of its admin side. Raises ConfigError if it fails.

        `what`: the members of the request's JSON body.
        """
        try:
            headers = [*self._headers.items(), ("Content-Type", "application/json")]
            answer = await self.ask("POST", path, headers, orjson.dumps(what), STAGE_SECONDS)
        except TimeoutError:
            raise self._late() from None
        except GONE:
            raise await self._failed() from None
        if answer.status != 200:
            raise await self._failed(orjson.loads(answer.body)["error"]["message"])

    def _late(self) -> ConfigError:
        self.kill()
        return ConfigError(f"a worker was not ready within {STAGE_SECONDS:g} s")

    async def _failed(self, why: str = "") -> ConfigError:
        self.kill()
        code = await self.ended()
        return ConfigError(why or f"a worker ended with {how(code)} while it started; its own lines say why")

    async def ask(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, seconds: float
    ) -> Answer:
        """Return the answer of the worker's admin side. Raises one of GONE."""
        if self._admin.closed:
            raise ConnectionResetError("the worker has ended")
        async with self._admin.request(
            method, URL(path, encoded=True), headers=headers, data=body or None, allow_redirects=False, timeout=aiohttp.ClientTimeout(seconds),
            skip_auto_headers=(hdrs.CONTENT_TYPE, hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
        ) as found:  # fmt: skip
            return Answer(found.status, found.headers, await found.read())

    async def query(self, path: str, seconds: float = QUERY_SECONDS) -> bytes | None:
        """Return the answer to a query of the supervisor's own; None if the worker has ended, is stuck or refuses."""
        try:
            answer = await self.ask("GET", path, [*self._headers.items()], b"", seconds)
        except GONE:
            return None
        return answer.body if answer.status == 200 else None

    async def ended(self) -> int:
        """Wait until the process is gone, and return its exit code."""
        return await asyncio.shield(self._life)

    def kill(self) -> None:
        self.process.kill()

    async def _live(self) -> int:
        try:
            self._first_line.set_result(await self._reader.readline())
            await self._reader.read()  # returns when the process ends and its end of the socket is closed
        except (OSError, ValueError):  # ValueError: the first line is longer than a reader takes
            pass
        if not self._first_line.done():
            self._first_line.set_result(b"")
        self.serves = self.hears_changes = False
        self.kill()  # a worker that cannot be told to stop is of no use; usually it has ended
        code = await asyncio.to_thread(self.process.wait)
        self._writer.close()
        await self._admin.close()
        return code


class Places:
    """The workers by number: each number is a place in which a worker that ends is replaced by another.

    `count`: the number of places; `workers`: the process in each place now; `restarts`: of workers, in all places.
    """

    def __init__(self, count: int):
        self.count, self.restarts = count, 0
        self.workers: dict[int, WorkerProcess] = {}

    @property
    def serving(self) -> list[WorkerProcess]:
        """The workers that accept clients' connections."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.serves]

    @property
    def answering(self) -> list[WorkerProcess]:
        """The serving workers that have answered at least one of the last QUIET looks."""
        return [worker for worker in self.serving if worker.unanswered < QUIET]

    @property
    def hearing(self) -> list[WorkerProcess]:
        """The workers that are sent each change of the replicas."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.hears_changes]

    async def query_all(self, path: str) -> list[tuple[WorkerProcess, bytes]]:
        """Return the workers that answer a query of the supervisor's own, each with its answer."""
        return await _query(self.answering, path, QUERY_SECONDS)

    async def query_one(self, path: str) -> Any:
        """Return the answer of the first worker that answers; None if none does."""
        for worker in self.answering:
            if (found := await worker.query(path)) is not None:
                return orjson.loads(found)
        return None

    async def watch(self) -> None:
        """Look at the workers once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(counts=True)

    async def look(self, counts: bool = False) -> None:
        """Ask each worker for its load of the replicas.

        If the look `counts`, kill the workers that have not answered the last HANGS looks: the kernel keeps giving them
        connections, and nothing else would notice.

        Looks are counted, not seconds: after this process or its machine was frozen, timers fire before sockets are
        read, but however long the freeze was, only one look is missed. Only the looks of `watch` count, because they
        follow one another; changes of the replicas look at the workers as well, many at the same time.
        """
        asked = self.serving
        answers = dict(await _query(asked, "/worker/loads", LOOK_SECONDS))
        for worker in asked:
            if worker in answers:
                worker.unanswered, worker.loads = 0, orjson.loads(answers[worker])
                continue
            worker.unanswered += counts
            if counts and worker.unanswered == HANGS:
                log.error("worker %d (process %d) has not answered for %g s and is killed",
                          worker.index, worker.process.pid, 2 * HANGS * LOOK_SECONDS)  # fmt: skip
                worker.kill()

    def inflight(self, replica: str) -> int:
        """Return the number of requests that all workers have on a replica."""
        return sum(worker.loads[replica][0] for worker in self.serving if replica in worker.loads)

    def waited(self, replica: str) -> float:
        """Return for how many seconds the oldest request of all workers on a replica has had no answer."""
        return max((worker.loads[replica][1] for worker in self.serving if replica in worker.loads), default=0.0)


async def _query(workers: Iterable[WorkerProcess], path: str, seconds: float) -> list[tuple[WorkerProcess, bytes]]:
    asked = [*workers]
    found = await asyncio.gather(*(worker.query(path, seconds) for worker in asked))
    return [(worker, body) for worker, body in zip(asked, found, strict=True) if body is not None]


def _start_process(stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker with the signals NOT_FOR_WORKERS blocked; half a second later it ignores them by itself.

    asyncio's own way to start a process would let these signals through from the start.
    """
    # The worker imports the same package as the supervisor, whatever is in the current directory.
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
    try:
        command = [sys.executable, "-P", "-m", "gateway.workers.worker"]
        return subprocess.Popen(command, stdin=stdin, env={**os.environ, "PYTHONPATH": path})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def decision_prefix(worker: int) -> str:
    """Return the beginning of the ids of a worker's decisions."""
    return f"{worker}-"


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
