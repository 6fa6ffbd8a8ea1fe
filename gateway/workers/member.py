"""One worker as the supervisor knows it: a process, a socket with a line of JSON for each message, and its admin
side."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import hdrs, web
from yarl import URL

from ..config import ConfigError

# What belongs to one connection, or is made anew for the next.
OWN_HEADERS = frozenset(
    """
    connection keep-alive te trailer transfer-encoding upgrade expect content-length date server
    """.split()
)
GONE = (aiohttp.ClientError, OSError, TimeoutError)  # how a question to a worker fails that has ended or is stuck
PACKAGES = Path(__file__).parents[2]  # the folder that has the package `gateway`
STAGE_SECONDS = 60.0  # until a worker is a step further: it may load a tokenizer on a busy machine
# Ctrl-C, service managers and terminals that close send these to all processes of a group; when a worker is to stop is
# the supervisor's to say.
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST = 1 << 22  # bytes of one message: loads of 50,000 replicas


class Answer(NamedTuple):
    """What a worker's admin side says."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
        return web.Response(body=self.body, status=self.status, headers=headers)


class Member:
    """`live` while it listens; `told` once it knows the replicas that there are; `silent` is how often the supervisor
    has looked since its last message; `loads` is what it has on replicas: how many requests, and for how long the
    oldest prompt has had no answer; `pods` are the engines that it has because of their pods."""

    def __init__(
        self,
        index: int,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: Path,
    ):
        self.index, self.process = index, process
        self._reader, self._writer = reader, writer
        self.begun = monotonic()
        self.live = self.told = False
        self.loads: dict[str, tuple[int, float]] = {}
        self.pods: set[str] = set()
        self.silent = self.beats = 0
        self.on_gone: Callable[[str], None] = lambda engine: None  # told engines whose pods are gone
        self.admin = aiohttp.ClientSession(
            "http://worker", connector=aiohttp.UnixConnector(str(path)), auto_decompress=False
        )
        self._said: set[str] = set()
        self._wrong = ""
        self._news = asyncio.Event()
        self._listening = asyncio.create_task(self._listen(), name=f"hear worker {index}")

    @classmethod
    async def start(cls, index: int, path: Path, hello: dict[str, Any], descriptors: Sequence[int] = ()) -> Member:
        """A process of its own, with its admin side at `path`, which inherits these descriptors and is told all of
        `hello`. OSError if there can be none."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _start_process(theirs, descriptors)
                reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST)
            except BaseException:
                ours.close()
                raise
        path.unlink(missing_ok=True)
        self = cls(index, process, reader, writer, path)
        self.tell(index=index, socket=str(path), **hello)
        return self

    def tell(self, **message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(orjson.dumps(message) + b"\n")

    async def has(self, stage: str) -> None:
        """Wait until it says that it is so far: `made`, `begun`, `listens`. ConfigError if it ends before, or is ended
        since it takes too long."""
        try:
            async with asyncio.timeout(STAGE_SECONDS):
                while stage not in self._said:
                    if self._listening.done():
                        code = await asyncio.to_thread(self.process.wait)
                        raise ConfigError(
                            self._wrong or f"a worker ended with {how(code)} while it started; its own lines say why"
                        )
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self.kill()
            raise ConfigError(f"a worker was not ready within {STAGE_SECONDS:g} s") from None

    async def ended(self) -> int:
        """Wait until the process is gone; its exit code."""
        await asyncio.wait((self._listening,))  # the process has its end of the socket for as long as it lives
        code = await asyncio.to_thread(self.process.wait)
        self.live = self.told = False
        self._writer.close()
        await self.admin.close()
        return code

    def kill(self) -> None:
        self.process.kill()

    async def ask(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, seconds: float
    ) -> Answer:
        """What its admin side answers. Raises one of GONE."""
        if self.admin.closed:
            raise ConnectionResetError("the worker has ended")
        async with self.admin.request(
            method, URL(path, encoded=True), headers=headers, data=body or None, allow_redirects=False, timeout=aiohttp.ClientTimeout(seconds),
            skip_auto_headers=(hdrs.CONTENT_TYPE, hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
        ) as found:  # fmt: skip
            return Answer(found.status, found.headers, await found.read())

    def _pod_changed(self, engine: str, there: bool) -> None:
        if there:
            self.pods.add(engine)
        else:
            self.pods.discard(engine)
            self.on_gone(engine)

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                message = orjson.loads(line)
                self.silent = 0
                self._wrong = message.get("wrong", self._wrong)
                if "loads" in message:
                    self.loads, self.beats = message["loads"], self.beats + 1
                for engine, there in message.get("pods", ()):
                    self._pod_changed(engine, there)
                self._said |= message.keys()
                self._news.set()
        except OSError:
            pass
        finally:
            self.live = False
            self.kill()  # what cannot be told to stop is of no use; mostly it has ended
            asyncio.get_running_loop().call_soon(self._news.set)  # once this task is done


def _start_process(stdin: socket.socket, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """A worker that is born with NOT_FOR_WORKERS blocked, until it ignores them: it takes an interpreter half a second
    to get that far. asyncio's own way to start a process would let them through from the start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
    try:
        command = [sys.executable, "-P", "-m", "gateway.workers.worker"]
        return subprocess.Popen(command, stdin=stdin, env=_environment(), pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """The supervisor's own, in which a worker imports the same package as the supervisor, whatever lies in the current
    directory."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))}


def how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
