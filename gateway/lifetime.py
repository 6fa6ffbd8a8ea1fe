"""The lifetime of a service: start, serve until a signal, let running requests end, stop.

A service is a single gateway, or the supervisor of workers (several gateway processes that share a port).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from replicas import TAKES_TRAFFIC, Fleet, ports
from replicas.launch.profile import ProfileError
from replicas.names import bracketed

from . import __version__, threads
from .http.room import FEWEST_FILES, too_few
from .http.server import allow_many_connections
from .ops import log as lines
from .settings import ConfigError, Settings
from .settings.warnings import find_warnings

log = logging.getLogger("hitherto")


AWAITED_SECONDS = 15.0  # seconds until replicas that are not ready yet are logged; doubles after each time


class Service(Protocol):
    """A service that runs until a signal: a gateway, or the supervisor of workers."""

    fleet: Fleet

    @property
    def greeting(self) -> str:
        """The line that is logged once the service serves."""

    async def start(self) -> None: ...

    async def stop(self, seconds: float) -> None:
        """Refuse new requests, give running ones up to `seconds` to end, then stop everything that was started."""

    def hurry(self) -> None:
        """Cut short the time that running requests still have while the service stops."""


def run(settings: Settings, make: Callable[[], Service], started: Callable[[], None] = lambda: None) -> int:
    """Run a service until a signal and return the exit code. Raises ConfigError before anything is started.

    `make`: returns the new service; called inside the event loop. `started`: called once the service accepts requests.
    """
    threads.share_one_heap()
    allow_many_connections()
    outbox = lines.setup(settings.log_level)
    if few := too_few(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        log.warning("open files: %s. Raise the limit to %d at least (LimitNOFILE, `ulimit -Hn`)", few, FEWEST_FILES)
    try:
        threads.run(_serve(settings, make, started))
    finally:
        outbox.close()
    threads.end_process(0)
    return 0


async def _serve(settings: Settings, make: Callable[[], Service], started: Callable[[], None]) -> None:
    service = make()
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    stops_on_hangup = any(map(os.isatty, (0, 2)))  # checked now: after a terminal is closed, isatty is False
    starting = asyncio.ensure_future(service.start())

    def stop() -> None:
        signalled.set()  # cancelling does nothing if the start has just ended
        starting.cancel()

    on_signal(loop, stop)
    on_hangup(loop, stop if stops_on_hangup else _ignore_hangup)
    try:
        await starting
    except asyncio.CancelledError:
        return log.info("stopped by a signal while it started")
    except ProfileError as error:
        raise ConfigError(f"launching: {error}") from None
    log.info("%s", service.greeting)
    for warning in find_warnings(settings):
        log.warning("%s", warning)
    started()
    telling = asyncio.ensure_future(tell_awaited(service.fleet))
    await signalled.wait()
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
    log.info(
        "stopping: new requests are refused, running and waiting ones get %g s; a second signal ends them",
        settings.drain_timeout_s,
    )
    stopping = asyncio.ensure_future(service.stop(settings.drain_timeout_s))
    on_signal(loop, service.hurry)
    on_hangup(loop, lambda: None)  # a closing terminal sends two: its own and its shell's
    await stopping


async def tell_awaited(fleet: Fleet, seconds: float = AWAITED_SECONDS) -> None:
    """Log which of the replicas known at the start are not ready yet, until all of them are.

    `seconds`: the time before the first log line, which doubles after each.
    """
    given = [*fleet.engines]
    while True:
        await asyncio.sleep(seconds)
        left = [fleet.engines[id] for id in given if id in fleet.engines]
        unready = [one for one in left if one.lead.state not in TAKES_TRAFFIC]
        if not unready:
            return
        found = []
        for one in unready:
            said = (fleet.logs(one.lead.id)[-1:] if one.lead.managed else []) or [one.lead.reason]
            found.append(f"{one.lead.id} is {one.lead.state}: {said[0][:300]}")
        log.info("%d of %d replicas ready; %s", len(left) - len(unready), len(left), "; ".join(found))
        seconds *= 2


def on_signal(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, then)


def on_hangup(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    """Call `then` on SIGHUP, unless the process was started with SIGHUP ignored, as by nohup."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, then)


def _ignore_hangup() -> None:
    log.info(
        "SIGHUP is ignored: settings are read at the start alone; API keys and TLS certificates are read again by "
        "themselves when their files change"
    )


def greeting(settings: Settings, port: int, admin_port: int) -> str:
    scheme = "https" if settings.tls_cert else "http"
    return (f"hitherto {__version__} serves {scheme}://{bracketed(settings.host)}:{port}, policy {settings.policy}; "
            f"admin side http://{bracketed(settings.admin_host)}:{admin_port}")  # fmt: skip


def cannot_listen(settings: Settings, error: OSError) -> ConfigError:
    return ConfigError(ports.cannot_listen(settings.host, settings.port, error))
