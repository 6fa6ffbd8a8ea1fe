"""A temporary gateway with its engines: `hitherto serve --launch N` as a child process.

Policies are compared on fresh engines, one stack after the other, so that no policy finds caches that another filled.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from loadgen.drive.client import Client
from loadgen.drive.engines import replicas
from loadgen.options import BadOption, Failed

READY_SECONDS = 90.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.1
_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


class StackFailed(Failed):
    """The gateway did not start; the message has the end of its log."""


class Stack:
    """A gateway and its engines, which run within `async with Stack("least_time", 4) as stack:`.

    Entry waits until all `launch` engines are ready, for at most `ready_seconds`; `base_url` and `admin` can be used
    then. HITHERTO_* variables of the environment and ./hitherto.yaml are ignored, because they belong to another
    gateway. `profile`: launch profile of the engines, a name or a file; `on_progress`: called with the number of ready
    engines. Raises BadOption or StackFailed on entry.
    """

    def __init__(
        self,
        policy: str,
        launch: int,
        profile: str = "sim",
        on_progress: Callable[[int], None] = lambda ready: None,
        model: Path | None = None,
        ready_seconds: float | None = None,
    ):
        self.policy, self.launch = policy, launch
        self.on_progress, self.ready_seconds = on_progress, ready_seconds or READY_SECONDS
        port, admin_port = free_ports(2)
        self.base_url = f"http://127.0.0.1:{port}"
        self._token = secrets.token_hex(16)  # for this gateway's admin API, whatever token the environment sets
        self.admin = Client(f"http://127.0.0.1:{admin_port}", {"Authorization": f"Bearer {self._token}"}, timeout=5)
        serve = f"-m gateway serve --host 127.0.0.1 --port {port} --cached-tokens-header --admin-port {admin_port}"
        self._argv = [sys.executable, *serve.split(), "--policy", _absolute(policy), "--launch", str(launch)]
        self._argv += ["--profile", _absolute(profile), *(["--model", str(model)] if model else [])]
        self._folder = tempfile.TemporaryDirectory(prefix="loadgen-")
        self._log = Path(self._folder.name, "gateway.log")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Stack:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HITHERTO_")}
        env["HITHERTO_ADMIN_TOKEN"] = self._token
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self._folder.name,
                preexec_fn=die_with_parent,
            )
        try:
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _until_ready(self) -> None:
        deadline = perf_counter() + self.ready_seconds
        while perf_counter() < deadline:
            if self._process.returncode is not None:
                if self._process.returncode == 2:
                    raise BadOption(f"`hitherto serve` refuses what it was given:\n{self._tail()}")
                raise StackFailed(f"`hitherto serve` ended with exit code {self._process.returncode}:\n{self._tail()}")
            states = [str(item.get("state")) for item in await replicas(self.admin)]
            self.on_progress(states.count("ready"))
            if states.count("ready") >= self.launch:
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise StackFailed(f"{self.launch} replicas were not ready within {self.ready_seconds:g} s:\n{self._tail()}")

    async def __aexit__(self, *_: object) -> None:
        self.admin.close()
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._folder.cleanup()

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"


def die_with_parent() -> None:
    """Make the kernel send this child process SIGTERM when its parent, the generator, dies in any way (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(number: int) -> list[int]:
    """Return `number` local TCP ports on which nothing listens now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _absolute(named: str) -> str:
    """Return a policy or profile given as `FILE` or `FILE:CLASS` with the file's absolute path.

    A name that is not that of an existing file is returned unchanged.
    """
    file, colon, inside = named.partition(":")
    return f"{Path(file).resolve()}{colon}{inside}" if Path(file).is_file() else named
