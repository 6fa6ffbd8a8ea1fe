"""The supervisor of workers, without their processes."""

import asyncio
import errno
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cachemap import background
from gateway.app import Gateway
from gateway.http import server
from gateway.proxy.placement import shared as ledger
from gateway.settings import SIZES, ConfigError, Settings, load
from gateway.tenants import shared as limits
from gateway.workers import supervisor
from gateway.workers.private_redis import PrivateRedis
from gateway.workers.process import WorkerProcess
from gateway.workers.supervisor import Workers, one_workers_settings
from tests.gateway.running import counted
from tests.gateway.test_background import FAILURES

from .scripted import ScriptedWorker


def test_a_worker_has_the_time_to_flush_and_to_wait_for_a_redis_that_is_away_before_it_is_killed():
    """Its usage log is written after that: 1 s for the leases of the map, and three waits for the ledger."""
    assert supervisor.STOP_SECONDS >= server.FLUSH_SECONDS + 1.0 + 3 * ledger.PATIENCE + limits.PATIENCE


@pytest.mark.parametrize("gateway", [Gateway, Workers])
async def test_how_long_a_replica_may_be_silent_is_a_setting_of_every_kind_of_gateway(gateway):
    """An engine that compiles for a minute may block its /health for as long."""
    settings = load({"workers": 2 if gateway is Workers else 1, "hung_after_s": 90}, {}).settings
    fleet = gateway(settings).fleet
    try:
        fleet.add("http://127.0.0.1:1")
        (engine,) = fleet.engines.values()
        assert engine.limits.lost_after == 90.0
    finally:
        await fleet.stop()


async def test_a_place_that_nobody_looks_after_any_more_is_looked_after_again(monkeypatch):
    """A fault of the supervisor's own work is counted among its metrics, and before the first one, too."""
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.0)
    workers = Workers(load({"workers": 2}, {}).settings)
    workers.places.workers[0] = worker = ScriptedWorker(0)
    failed, again = asyncio.Event(), asyncio.Event()

    async def ended() -> int:
        if not failed.is_set():
            failed.set()
            raise KeyError("a bug")
        again.set()
        return await asyncio.Event().wait()

    worker.ended = ended
    workers.keep_place(0)
    failures = partial(counted, name=FAILURES, work="worker 0")
    assert failures(workers.admin._own_page().decode()) == 0
    async with asyncio.timeout(10):
        await again.wait()
    assert failures(workers.admin._own_page().decode()) == 1
    workers.places.workers.clear()
    await workers.stop(0)


async def test_nothing_is_left_of_a_start_that_a_worker_refuses(monkeypatch):
    """Neither another worker, which hangs and is not waited for, nor the engine that was launched, nor the port."""
    other, pids = ScriptedWorker(1), []

    async def start_worker(self, index):
        if index == 0:
            (engine,) = self.fleet.engines.values()
            while engine.lead.pid is None:
                await asyncio.sleep(0.01)
            pids.append(engine.lead.pid)
            raise ConfigError("a worker says so")
        self.places.workers[index] = other
        await asyncio.Event().wait()

    monkeypatch.setattr(Workers, "_start_worker", start_worker)
    given = {"workers": 2, "launch": 1, "redis_url": "unix:///nowhere", "host": "127.0.0.1", "port": 0, "admin_port": 0}
    workers = Workers(load(given, {}).settings)
    other.serves = False
    with pytest.raises(ConfigError, match="a worker says so"):
        await asyncio.wait_for(workers.start(), 60)
    assert other.killed
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", workers.port))


class Starting(ScriptedWorker):
    """A worker that serves once it is told what it begins with, and is told of a change meanwhile."""

    def tell(self, **message):
        self.told = message

    async def opened(self, seconds):
        self.missed += [
            ("POST", "/replicas/10.0.0.8:8000/drain", [], b""),
            ("DELETE", "/replicas/10.0.0.8:8000", [], b""),
        ]

    async def ask(self, method, *request):
        if method == "POST":  # which no other worker has done, as it turns out now
            with suppress(ValueError):
                self.missed.remove((method, *request[:-1]))
        return await super().ask(method, *request)


async def test_a_worker_begins_with_what_a_sibling_knows_and_makes_the_changes_that_it_missed(monkeypatch):
    """And with the secrets that the supervisor read at the start."""
    workers = Workers(load({"workers": 2}, {"HITHERTO_ADMIN_TOKEN": "a-secret-of-the-admin-side"}).settings)
    workers._each = {}
    known = {"urls": {"10.0.0.8:8000": "http://10.0.0.8:8000"}, "costs": {"learned": 1}}
    workers.places.workers[0] = ScriptedWorker(0, known=known)
    starting = Starting(1, "http://10.0.0.8:8000")
    starting.serves = False

    async def start(index, path, headers):
        return starting

    monkeypatch.setattr(WorkerProcess, "start", start)
    await workers._start_worker(1)
    assert (starting.told["known"], starting.told["secrets"]) == (known, ["a-secret-of-the-admin-side", None])
    assert starting.serves and starting.replicas == {}

    async def fail(index, path, headers):
        raise OSError(errno.EAGAIN, "no process can be had")

    monkeypatch.setattr(WorkerProcess, "start", fail)
    with pytest.raises(ConfigError, match="worker 1 cannot be started: no process can be had"):
        await workers._start_worker(1)
    workers.places.workers.clear()
    await workers.stop(0)


async def test_a_port_that_other_workers_have_is_not_shared_with_them():
    """The kernel would give each some of the connections."""
    held, port = await supervisor.hold("127.0.0.1", 0)
    held[0].listen()  # as a worker does
    workers = Workers(load({"workers": 2, "host": "127.0.0.1", "port": port}, {}).settings)
    with pytest.raises(ConfigError, match="Stop what holds the port, or give another with --port"):
        await workers.start()
    for one in held:
        one.close()


@pytest.mark.parametrize("count", ["0", "-1", "many", "65"])
def test_how_many_there_can_be_is_said_before_anything_starts(count):
    with pytest.raises(ConfigError, match=rf"flag --workers: '{count}' is not a whole number"):
        load({"workers": count}, {})


def test_no_redis_server_at_hand_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as none:
        PrivateRedis(tmp_path)
    assert str(none.value) == (
        "--workers: workers share a Redis, and there is no redis-server on the PATH. Install redis-server (Debian: apt-get install "
        "redis-server), or pip install 'hitherto[redis-server]', or name a Redis with --redis-url"
    )
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    old.chmod(0o700)
    with pytest.raises(ConfigError, match=f"{old} is Redis 6.0, and 6.2 is the oldest that will do. Install"):
        PrivateRedis(tmp_path)


@pytest.mark.parametrize("name", ["x", "\u00e9"])
@pytest.mark.parametrize("length", [60, 75, 79])
def test_the_path_of_a_workers_socket_is_short_enough(monkeypatch, name, length):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        place = Path(base, name * (length - len(base) - 1))
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = supervisor._folder()
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(folder / "worker-63.sock"))
        finally:
            shutil.rmtree(folder)


async def test_stopping_does_not_wait_until_a_worker_would_be_replaced(monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSES", (600.0, 600.0))
    workers = Workers(load({"workers": 2}, {}).settings)
    one = workers.places.workers[0] = ScriptedWorker(0)
    ended = asyncio.get_running_loop().create_future()
    one.ended = lambda: ended
    workers.keep_place(0)
    ended.set_result(-9)
    while not workers.places.restarts:
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await workers.stop(0)


@pytest.mark.parametrize(
    "given, each",
    [
        ({}, None),
        ({"slo": "ttft=2s"}, {"max_requests": 2500, "max_bytes": "64MiB"}),
        (
            {"admission": {"when_full": "reject", "max_requests": 2, "max_bytes": "100KiB"}},
            {"when_full": ["reject"], "max_requests": 1, "max_bytes": "25KiB"},
        ),
    ],
)
def test_workers_share_every_budget_and_the_bounds_of_the_queue(given, each):
    """Each has a queue of its own. Where nobody asked for one there is none in a worker either."""
    settings = load({"workers": 4, **given}, {}).settings
    found = Settings.model_validate(one_workers_settings(settings, 0, "unix:///nowhere"))
    assert found.to_dict()["admission"] == each
    budgets = [name for name in SIZES if name.endswith("_budget")]
    assert [getattr(found, name) for name in budgets] == [getattr(settings, name) // 4 for name in budgets]
