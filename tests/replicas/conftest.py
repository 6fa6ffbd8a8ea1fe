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
def comes(until):
    """Wait for a replica's state; fails with where the replica is stuck."""

    async def comes(replica, state, deadline=20.0):
        await until(lambda: replica.state is state, lambda: f"still {replica.state}: {replica.reason}", deadline)
        return replica

    return comes


@pytest.fixture
def engine(serve):
    """`start(port=0, ...)` serves an engine's pages; `start.pages` may be changed, `start.html()` makes all of them
    the page of some other server. While `start.hold` is not set, nothing is answered. `start.closes`: each connection
    is closed after an answer, "announced" or "silently"."""
    pages = {}

    async def handler(request):
        start.asked.append(request.path)
        await start.hold.wait()
        page = pages.get(request.path, pages.get("*"))
        if page is None:
            answer = web.Response(status=404)
        else:
            answer = web.json_response(page) if isinstance(page, dict) else web.Response(text=page)
        if start.closes == "announced":
            answer.force_close()
        elif start.closes == "silently":
            await answer.prepare(request)
            await answer.write_eof()
            request.transport.close()
        return answer

    async def start(port=0, started="1.0", models=("m",), version="0.32.0", running=True):
        pages.pop("*", None)
        listed = {"data": [{"id": name} for name in models]}
        pages.update({"/health": "", "/v1/models": listed, "/version": {"version": version}})
        began = f"process_start_time_seconds {started}\n" if started else ""
        pages["/metrics"] = began + "vllm:num_requests_running 0.0\n" * running
        return await serve(handler, port)

    def html():
        pages.clear()
        pages["*"] = "<html>It works!</html>"

    start.pages, start.html, start.stop, start.asked = pages, html, lambda: serve.stop(), []
    start.hold = asyncio.Event()
    start.hold.set()
    start.closes = ""
    return start


@pytest.fixture
async def seldom():
    """A fleet that looks at an engine when it is asked to, and else once an hour."""
    fleet = Fleet(interval=3600.0, limits=Limits(fall=1000))
    yield fleet
    await fleet.stop()


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
