"""The processes of workers, as the supervisor starts, queries, watches and ends them.

The supervisor watches by *looks*: once a second it asks each worker for its load.
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

# Headers that belong to one connection, or that are written again for the next one.
OWN_HEADERS = frozenset(
    "connection keep-alive te trailer transfer-encoding upgrade expect content-length date server".split()
)
GONE = (aiohttp.ClientError, OSError, TimeoutError)  # failures of a request to a worker that has ended or is stuck
OPEN = (
    b"open\n"  # what a worker writes once it accepts connections; else FAILED, and a JSON string: why it cannot start
)
FAILED = b"failed "
PACKAGES = Path(__file__).parents[2]  # the folder that has the package `gateway`
START_SECONDS = 180.0  # for a worker's start: it may load a tokenizer on a busy machine
# For queries of the supervisor's own: a worker that is stuck must not delay the others' answers.
QUERY_SECONDS = 2.0
LOOK_SECONDS = 1.0  # between two looks at the workers, and for a worker's answer to one
# Unanswered looks in a row after which a worker counts as quiet, and as hung. Each takes 2 s at most, so a worker that
# hangs is killed after 30 s.
QUIET, HANGS = 2, 15

Change = tuple[str, str, list[tuple[str, str]], bytes]  # a request: method, path, headers and body


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

    The worker reads lines of JSON from its standard input: first what it begins with, then how to stop. It ends when
    its standard input does.
    `serves`: whether it accepts connections. `unanswered`: the number of looks in a row that it has not answered.
    `missed`: changes of the replicas that came before it served, to be made when it does.
    `loads`: by replica, the number of its requests there, and the seconds for which the oldest has had no answer.
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
        """Start a process, which waits for its first line, and return its handle. Raises OSError if that fails.

        `index`: the worker's number. `path`: the unix socket of its admin side. `headers`: the credentials for it.
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

        Raises ConfigError, with the worker's reason, if it ends before. If it takes longer than `seconds`, it is
        killed, and ConfigError is raised as well.
        """
        assert self.process.stdout is not None
        line, why = b"", ""
        try:
            async with asyncio.timeout(seconds):
                while (line := await self.process.stdout.readline()) and not line.startswith((OPEN, FAILED)):
                    pass  # printed by an import
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
        code = await self.process.wait()
        self.serves = False
        await self._admin.close()
        return code

    async def stop(self, seconds: float, more: float) -> None:
        """Have the worker drain for up to `seconds`, and kill it if it takes `more` seconds longer, or never served."""
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

    async def query_all(self, path: str) -> list[tuple[WorkerProcess, bytes]]:
        """Return the workers that answer a query of the supervisor's own, each with its answer."""
        return await _query(self.answering, path, QUERY_SECONDS)

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


def decision_prefix(worker: int) -> str:
    """Return the beginning of the ids of a worker's decisions."""
    return f"{worker}-"


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
