"""Real processes and servers for the tests of this room; none of them outlives its test."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import aiohttp
import orjson
import pytest
from aiohttp import web

from replicas import Fleet, watch
from replicas.engines.simulated.profile import SimProfile
from replicas.health import Limits
from replicas.launch.command import Command
from replicas.launch.supervisor import Backoff
from replicas.names import bracketed

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


def answering(pages: dict, asked: list | None = None):
    """A handler that answers each path with its page: a text, an object for JSON, a status, or a function that
    returns one of these. "*": all other paths, which are 404 else. `asked` gets the paths."""

    async def handler(request):
        if asked is not None:
            asked.append(request.path)
        page = pages.get(request.path, pages.get("*", 404))
        page = page() if callable(page) else page
        if isinstance(page, int):
            return web.Response(status=page)
        return web.json_response(page) if isinstance(page, dict) else web.Response(text=page)

    return handler


@pytest.fixture
def engine(serve):
    """`start(port=0, ...)` serves an engine's pages; `start.pages` may be changed, `start.html()` makes all of them
    the page of some other server. While `start.hold` is not set, nothing is answered. `start.closes`: each connection
    is closed after an answer, "announced" or "silently"."""
    pages, asked = {}, []
    answer_of = answering(pages, asked)

    async def handler(request):
        answer = await answer_of(request)
        await start.hold.wait()
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

    start.pages, start.html, start.stop, start.asked = pages, html, lambda: serve.stop(), asked
    start.hold = asyncio.Event()
    start.hold.set()
    start.closes = ""
    return start


@pytest.fixture
async def core(serve):
    """An engine that computes. `health` is the status that it answers to probes; `answer`, a status and an object, what
    it answers to prompts, once `wakes` is set; `running` and `generated` are in its /metrics, and `generated` grows
    with each look at them while `moves`."""
    told = SimpleNamespace(health=200, answer=(200, {}), running=1, generated=7, moves=True, wakes=asyncio.Event())
    told.wakes.set()

    def metrics():
        told.generated += told.moves
        counts = f"vllm:num_requests_running {told.running}\nvllm:generation_tokens_total {told.generated}\n"
        return f"process_start_time_seconds 1\n{counts}"

    models = {"data": [{"id": "m"}]}
    pages = answering({"/health": lambda: told.health, "/metrics": metrics, "/v1/models": models, "*": {}})

    async def handler(request):
        if request.method != "POST":
            return await pages(request)
        await told.wakes.wait()
        return web.Response(status=told.answer[0], body=orjson.dumps(told.answer[1]))

    told.url = await serve(handler)
    return told


@pytest.fixture
def impatient(monkeypatch):
    """Look at everything often, wait for nothing long, and start what ended again at once."""
    monkeypatch.setattr(watch, "FACTS", 0.2)
    monkeypatch.setattr(watch, "SHORT_DEADLINE", 0.3)
    monkeypatch.setattr(watch, "DEADLINE", 0.5)
    monkeypatch.setattr(Backoff, "FIRST", 0.2)


@pytest.fixture
async def fleets():
    """`make(**fields)` -> a fleet, which is stopped after the test."""
    made = []

    def make(interval=0.1, **fields):
        made.append(Fleet(interval=interval, **fields))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.stop()


@pytest.fixture
def seldom(fleets):
    """A fleet that looks at an engine when it is asked to, and else once an hour."""
    return fleets(3600.0, limits=Limits(fall=1000))


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
async def fleet(fleets):
    """Quick to judge: looks every 0.1 s, gives a hung engine up after 1 s."""
    fleet = fleets(drain_timeout=1.0, limits=Limits(fall=2, lost_after=1.0))
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
    """serve(handler) -> URL of a server that gives every request to `handler`; `serve.stop` stops the latest one."""
    runners = []

    async def start(handler, port=0, host="127.0.0.1", tls=None):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        start.stop = runner.cleanup
        return f"http://{bracketed(host)}:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
