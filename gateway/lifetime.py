"""From the settings to a signal: start, serve, let running requests end, stop. Alike for one gateway and for its
workers' supervisor."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Protocol

import uvloop

from replicas.names import bracketed

from . import __version__
from .config import ConfigError, Settings
from .http.server import allow_many_connections
from .memory import share_one_heap
from .ops import log as lines

log = logging.getLogger("hitherto")


class Service(Protocol):
    """What runs until a signal comes."""

    @property
    def greeting(self) -> str:
        """What is logged once it serves."""

    async def start(self) -> None: ...

    async def stop(self, seconds: float) -> None:
        """Refuse new requests, let running ones end for up to `seconds`, then stop everything that was started."""

    async def cut(self) -> None:
        """Close every client's connection now."""


def run(settings: Settings, make: Callable[[], Service], started: Callable[[], None] = lambda: None) -> int:
    """Serve until a signal; returns the exit code. Raises ConfigError before anything is started. `started` is called
    once it serves."""
    share_one_heap()
    allow_many_connections()
    outbox = lines.setup(settings.log_level)
    try:
        uvloop.run(_serve(settings, make, started))
    finally:
        outbox.close()
    return 0


async def _serve(settings: Settings, make: Callable[[], Service], started: Callable[[], None]) -> None:
    service = make()
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    starting = asyncio.ensure_future(service.start())
    on_signal(loop, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        return log.info("stopped by a signal while it started")
    on_signal(loop, signalled.set)
    log.info("%s", service.greeting)
    started()
    await signalled.wait()
    log.info(
        "stopping: new requests are refused, running ones get %g s; a second signal cuts them", settings.drain_timeout_s
    )
    stopping = asyncio.ensure_future(service.stop(settings.drain_timeout_s))
    on_signal(loop, lambda: asyncio.ensure_future(service.cut()))
    await stopping


def on_signal(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, then)


def greeting(settings: Settings, port: int, admin_port: int) -> str:
    scheme = "https" if settings.tls_cert else "http"
    return (f"hitherto {__version__} serves {scheme}://{bracketed(settings.host)}:{port}, policy {settings.policy}; "
            f"admin side http://{bracketed(settings.admin_host)}:{admin_port}")  # fmt: skip


def cannot_listen(settings: Settings, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}. "
                       "Stop what holds the port, or give another with --port (and --host)")  # fmt: skip
