"""The processes of workers, as the supervisor starts, queries, watches and ends them.

Once a second, the supervisor asks each worker for its load. Such a query is called a *look*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
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

# Headers that are not passed on: they belong to one connection, or are written again for the next one.
OWN_HEADERS = frozenset(
    "connection keep-alive te trailer transfer-encoding upgrade expect content-length date server".split()
)
GONE = (aiohttp.ClientError, OSError, TimeoutError)  # failures of a request to a worker that has ended or is stuck
# The line that a worker writes once it accepts connections. If it cannot start, it writes FAILED and the reason as a
# JSON string.
OPEN = b"open\n"
FAILED = b"failed "
PACKAGES = Path(__file__).parents[2]  # the folder that has the package `gateway`
START_SECONDS = 180.0  # for a worker's start: it may load a tokenizer on a busy machine
# For the supervisor's own queries: a worker that is stuck must not delay the answers of the others.
QUERY_SECONDS = 2.0
LOOK_SECONDS = 1.0  # between two looks at the workers, and the time limit for a worker's answer to one
# Unanswered looks in a row after which a worker counts as quiet, and after which it counts as hung. A look takes 2 s at
# most, so a worker that hangs is killed after 30 s.
QUIET, HANGS = 2, 15

Change = tuple[str, str, list[tuple[str, str]], bytes]  # a request: method, path, headers and body


class Answer(NamedTuple):
    """An HTTP answer of a worker's admin API."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
        return web.Response(body=self.body, status=self.status, headers=headers)


class WorkerProcess:
    """The supervisor's handle of one worker process.

    The worker reads lines of JSON from its standard input: first the settings and replicas with which it begins, later
    the order to stop. It ends when its standard input is closed.

    `serves`: whether the worker accepts clients' connections.
    `unanswered`: how many of the supervisor's latest looks (queries once a second) the worker has not answered.
    `missed`: changes of the replicas that came while the worker started; it makes them before it accepts connections.
    `loads`: by replica's id, the number of the worker's requests there, and for how many seconds the oldest of them has
    had no answer.
    """

    def __init__(self, index: int, process: Process, path: Path, headers: Mapping[str, str]):
        self.index, self.process, self._headers = index, process, headers
        self.begun, self.serves, self.unanswered = monotonic(), False, 0
        self.missed: list[Change] = []
        self.loads: dict[str, tuple[int, float]] = {}
        connector = aiohttp.UnixConnector(str(path))
        self._admin = aiohttp.ClientSession("http://worker", connector=connector, auto_decompress=False)

    @classmethod
    async def start(cls, index: int, path: Path, headers: Mapping[str, str]) -> WorkerProcess:
        """Start a worker process and return its handle. Raises OSError if the process cannot be started.

        The worker then waits for its first message (`tell`). `index`: the worker's number. `path`: the unix socket of
        its admin API. `headers`: the credentials for the admin API.
        """
        # The worker imports the same package as the supervisor, whatever is in the current directory. In a session of
        # its own it gets no signal of a terminal: only the supervisor decides when a worker stops.
        packages = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "gateway.workers.worker",
            stdin=PIPE, stdout=PIPE, env={**os.environ, "PYTHONPATH": packages}, start_new_session=True,
        )  # fmt: skip
        return cls(index, process, path, headers)

    def tell(self, **message: Any) -> None:
        if (end := self.process.stdin) is not None and not end.is_closing():
            end.write(orjson.dumps(message) + b"\n")

    async def opened(self, seconds: float) -> None:
        """Wait until the worker accepts connections.

        Raises ConfigError, with the worker's reason, if the worker ends before that. A worker that takes longer than
        `seconds` is killed, and ConfigError is raised as well.
        """
        assert self.process.stdout is not None
        line, why = b"", ""
        try:
            async with asyncio.timeout(seconds):
                while (line := await self.process.stdout.readline()) and not line.startswith((OPEN, FAILED)):
                    pass  # skip what an import has printed
                if not line:
                    await self.process.wait()
        except TimeoutError:
            why = f"a worker was not ready within {seconds:g} s"
        if line == OPEN:
            return
        if line.startswith(FAILED):
            why = orjson.loads(line.removeprefix(FAILED))
        if why:
            self.kill()  # it has nothing left to do, or hangs
        code = await self.ended()
        raise ConfigError(why or f"a worker ended with {how(code)} while it started; its own lines say why")

    async def ask(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, seconds: float
    ) -> Answer:
        """Send a request to the worker's admin API and return the answer.

        `seconds`: the time limit. If the worker has ended or gives no answer in time, raises ClientError (aiohttp),
        OSError or TimeoutError, which GONE lists.
        """
        if self._admin.closed:
            raise ConnectionResetError("the worker has ended")
        async with self._admin.request(
            method, URL(path, encoded=True), headers=headers, data=body or None, allow_redirects=False, timeout=aiohttp.ClientTimeout(seconds),
            skip_auto_headers=(hdrs.CONTENT_TYPE, hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
        ) as found:  # fmt: skip
            return Answer(found.status, found.headers, await found.read())

    async def query(self, path: str, seconds: float = QUERY_SECONDS) -> bytes | None:
        """Return the body of the worker's answer to a GET request with the supervisor's own credentials.

        Returns None if the worker has ended, gives no answer within `seconds`, or refuses.
        """
        try:
            answer = await self.ask("GET", path, [*self._headers.items()], b"", seconds)
        except GONE:
            return None
        return answer.body if answer.status == 200 else None

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit code (negative: a signal's number)."""
        code = await self.process.wait()
        self.serves = False
        await self._admin.close()
        return code

    async def stop(self, seconds: float, more: float) -> None:
        """Stop the worker: give its running requests up to `seconds` to end, and return once its process has ended.

        The process is killed if it takes `more` seconds longer, or at once if it does not serve yet.
        """
        if self.serves:
            self.tell(stop=seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), seconds + more)
        self.kill()
        await self.ended()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


class Places:
    """The worker processes, each in a numbered place. If a worker ends, another one takes its place.

    `count`: the number of places. `workers`: the present process in each place. `restarts`: the number of workers that
    were replaced, in all places together.
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
        """The workers that accept connections and have answered one of the supervisor's last QUIET (2) looks."""
        return [worker for worker in self.serving if worker.unanswered < QUIET]

    async def query_all(self, path: str) -> list[tuple[WorkerProcess, bytes]]:
        """Send a GET request to the workers in `answering`; return those that answer, each with the answer's body."""
        return await _query(self.answering, path, QUERY_SECONDS)

    async def watch(self) -> None:
        """Look at all workers once a second, and kill those that hang; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(counts=True)

    async def look(self, counts: bool = False) -> None:
        """Ask each worker for the load that it puts on each replica, and update `WorkerProcess.loads`.

        `counts`: whether this look can show that a worker hangs. A worker that has missed HANGS of these looks in a row
        is killed: the kernel would go on giving it connections, and nothing else would notice.

        A hang is measured in looks, not in seconds, because a freeze of this process or its machine must not count as
        one. After a freeze, timers fire before sockets are read, so one look is missed, however long the freeze was.
        Only the looks of `watch` count, since each begins after the one before has ended. Looks after a change of the
        replicas may run at the same time, so one freeze could make many of them fail.
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
        """Return the number of requests that all workers together have on a replica."""
        return sum(worker.loads[replica][0] for worker in self.serving if replica in worker.loads)

    def waited(self, replica: str) -> float:
        """Return for how many seconds the longest waiting request of all workers on a replica has had no answer."""
        return max((worker.loads[replica][1] for worker in self.serving if replica in worker.loads), default=0.0)


async def _query(workers: Iterable[WorkerProcess], path: str, seconds: float) -> list[tuple[WorkerProcess, bytes]]:
    asked = [*workers]
    found = await asyncio.gather(*(worker.query(path, seconds) for worker in asked))
    return [(worker, body) for worker, body in zip(asked, found, strict=True) if body is not None]


def decision_prefix(worker: int) -> str:
    """Return the prefix of the ids that this worker gives to its placements for other proxies (`/decide`)."""
    return f"{worker}-"


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
