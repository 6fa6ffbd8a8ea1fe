"""The processes of workers as their supervisor sees them: how one is started, asked, watched and ended."""

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
GONE = (aiohttp.ClientError, OSError, TimeoutError)  # how a question to a worker fails that has ended or is stuck
OPEN = b"open\n"  # what a worker says once its admin side is open; a JSON string: why it cannot start
PACKAGES = Path(__file__).parents[2]  # the folder that has the package `gateway`
STAGE_SECONDS = 60.0  # until a worker is a step further: it may load a tokenizer on a busy machine
# A question of the supervisor's own: a worker that is stuck must not hold up what the others answer.
QUERY_SECONDS = 2.0
# Ctrl-C, service managers and terminals that close send these to all processes of a group. The supervisor alone decides
# when a worker stops.
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 1.0  # between two looks at the workers, and for how long a worker may take to answer one
# Looks in a row that a worker left unanswered. Each takes 2 s at most, so a worker that hangs is killed after 30 s.
QUIET, HANGS = 2, 15


class Answer(NamedTuple):
    """What a worker's admin side answers."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
        return web.Response(body=self.body, status=self.status, headers=headers)


class WorkerProcess:
    """One worker. It reads lines of JSON from its standard input: its settings first, then how to stop. On the same
    socket it says that its admin side is open, or why it cannot start; everything else is asked of that admin side.

    `hears_changes`: it is told each change of the replicas; `serves`: it takes clients' connections; `unanswered`: how
    many looks in a row it left unanswered; `loads`: by replica, how many requests it has there and for how many seconds
    the oldest prompt has had no answer.
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
        """Start a process that is told all of `hello` and has its admin side at `path`, where `headers` let one in.
        Raises OSError if there can be none."""
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
        """Wait until its admin side is open. Raises ConfigError if it ends before, with what it says is wrong, or if
        it takes too long, which ends it."""
        try:
            async with asyncio.timeout(STAGE_SECONDS):
                line = await asyncio.shield(self._first_line)
        except TimeoutError:
            raise self._late() from None
        if line != OPEN:
            raise await self._failed(orjson.loads(line) if line else "")

    async def take_step(self, path: str, **what: Any) -> None:
        """Have it do a step of its start. Raises ConfigError where it cannot."""
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
        """What its admin side answers. Raises one of GONE."""
        if self._admin.closed:
            raise ConnectionResetError("the worker has ended")
        async with self._admin.request(
            method, URL(path, encoded=True), headers=headers, data=body or None, allow_redirects=False, timeout=aiohttp.ClientTimeout(seconds),
            skip_auto_headers=(hdrs.CONTENT_TYPE, hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
        ) as found:  # fmt: skip
            return Answer(found.status, found.headers, await found.read())

    async def query(self, path: str, seconds: float = QUERY_SECONDS) -> bytes | None:
        """What it answers to a question of the supervisor's own; None if it has ended, is stuck or refuses."""
        try:
            answer = await self.ask("GET", path, [*self._headers.items()], b"", seconds)
        except GONE:
            return None
        return answer.body if answer.status == 200 else None

    async def ended(self) -> int:
        """Wait until the process is gone; its exit code."""
        return await asyncio.shield(self._life)

    def kill(self) -> None:
        self.process.kill()

    async def _live(self) -> int:
        try:
            self._first_line.set_result(await self._reader.readline())
            await self._reader.read()  # the process has its end of the socket for as long as it lives
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
    """The places of `count` workers; in `workers` are the processes that have one now, by its number."""

    def __init__(self, count: int):
        self.count, self.restarts = count, 0
        self.workers: dict[int, WorkerProcess] = {}

    @property
    def serving(self) -> list[WorkerProcess]:
        """The workers that take clients' connections."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.serves]

    @property
    def answering(self) -> list[WorkerProcess]:
        """Those of them that answered a moment ago."""
        return [worker for worker in self.serving if worker.unanswered < QUIET]

    @property
    def hearing(self) -> list[WorkerProcess]:
        """The workers that are told each change of the replicas."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.hears_changes]

    async def query_all(self, path: str) -> list[tuple[WorkerProcess, bytes]]:
        """What the workers answer to a question of the supervisor's own, but for those that do not."""
        return await _query(self.answering, path, QUERY_SECONDS)

    async def query_one(self, path: str) -> Any:
        """What the first worker that answers says; None if none does."""
        for worker in self.answering:
            if (found := await worker.query(path)) is not None:
                return orjson.loads(found)
        return None

    async def watch(self) -> None:
        """Look at the workers for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(counts=True)

    async def look(self, counts: bool = False) -> None:
        """Ask each worker what it has on replicas. If the look `counts`, kill those that hang: the kernel goes on
        giving them connections, and nobody else would see it.

        Looks are counted, not seconds. After this process or its machine was frozen, timers fire before sockets are
        read; however long that took, one look is missed. Only the looks of `watch` count, which follow each other:
        changes of the replicas look as well, many at the same time.
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
        """How many requests all workers have on a replica."""
        return sum(worker.loads[replica][0] for worker in self.serving if replica in worker.loads)

    def waited(self, replica: str) -> float:
        """For how many seconds the oldest prompt there has had no answer."""
        return max((worker.loads[replica][1] for worker in self.serving if replica in worker.loads), default=0.0)


async def _query(workers: Iterable[WorkerProcess], path: str, seconds: float) -> list[tuple[WorkerProcess, bytes]]:
    asked = [*workers]
    found = await asyncio.gather(*(worker.query(path, seconds) for worker in asked))
    return [(worker, body) for worker, body in zip(asked, found, strict=True) if body is not None]


def _start_process(stdin: socket.socket) -> subprocess.Popen[bytes]:
    """A worker that is born with NOT_FOR_WORKERS blocked, until it ignores them: it takes an interpreter half a second
    to get that far. asyncio's own way to start a process would let them through from the start."""
    # It imports the same package as the supervisor, whatever lies in the current directory.
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
    try:
        command = [sys.executable, "-P", "-m", "gateway.workers.worker"]
        return subprocess.Popen(command, stdin=stdin, env={**os.environ, "PYTHONPATH": path})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def decision_prefix(worker: int) -> str:
    """How the ids of a worker's decisions begin."""
    return f"{worker}-"


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
