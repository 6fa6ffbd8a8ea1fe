"""Real processes and servers for the tests of this room; none of them outlives its test."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic

import aiohttp
import pytest
from aiohttp import web

from replicas import Fleet
from replicas.engines.simulated.profile import SimProfile
from replicas.health import Limits
from replicas.launch.command import Command

FAKE = Path(__file__).with_name("fake_engine.py")


def _alive(pid: int) -> bool:
    """A zombie is dead: in a container nobody may collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def alive():
    return _alive


@pytest.fixture
def until():
    async def until(condition, what="", deadline=20.0):
        """Wait for a condition; its value. Fails with `what()` or `what` after the deadline."""
        end = monotonic() + deadline
        while not (value := condition()):
            assert monotonic() < end, what() if callable(what) else what or "condition never held"
            await asyncio.sleep(0.01)
        return value

    return until


@pytest.fixture
def fake_engine_argv():
    return lambda *flags: [sys.executable, "-I", "-S", str(FAKE), *flags]


@pytest.fixture
def fake_profile(fake_engine_argv):
    """A profile whose engine is fake_engine.py with the given flags."""

    def make(*flags: str, **fields):
        class Fake(SimProfile):
            def command(self, host, ports, model):
                return Command(fake_engine_argv("--port", str(ports.http), *flags), {})

        return Fake(engine="sim", **fields)

    return make


@pytest.fixture
async def fleet():
    """Quick to judge: looks every 0.1 s, gives a hung engine up after 1 s."""
    fleet = Fleet(interval=0.1, drain_timeout=1.0, limits=Limits(fall=2, lost_after=1.0))
    fleet.seen = []  # every change: (id, old, new)
    fleet.on_change.append(lambda replica, old, new: fleet.seen.append((replica.id, old, new)))
    yield fleet
    pids = [replica.pid for replica in fleet.replicas.values() if replica.pid]
    for pid in pids:
        if _alive(pid):
            os.kill(pid, signal.SIGCONT)
    await fleet.stop()
    assert not [pid for pid in pids if _alive(pid)], "orphans"


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def serve():
    """serve(handler) -> URL of a server that gives every request to `handler`."""
    runners = []

    async def start(handler, port=0):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        start.stop = runner.cleanup
        return f"http://{host}:{bound}"

    yield start
    for runner in runners:
        await runner.cleanup()
