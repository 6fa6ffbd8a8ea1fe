"""The supervisor in this very process, so that a test can freeze it and set its clocks; on the gateway's event loop,
whose timers run before sockets are read."""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from gateway.app import Gateway
from gateway.config import SIZES, load
from gateway.http import server
from gateway.proxy import shared as ledger
from gateway.tenants import shared as limits
from gateway.workers import supervisor
from gateway.workers.member import GONE, Member
from gateway.workers.supervisor import Workers, budgets
from tests.gateway.running import counted
from tests.gateway.test_background import FAILURES
from tests.gateway.test_tenants import line


@asynccontextmanager
async def watched(folder: Path):
    """A worker that takes connections, as far as its supervisor can tell, and the worker's end of their socket; the
    supervisor watches."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    member = Member(0, process, *await asyncio.open_connection(sock=ours), folder / "socket")
    member.live = True
    workers = Workers(load({"workers": 2}, {}).settings)
    workers.members[0] = member
    watching = asyncio.create_task(workers._watch())
    with process.stdin:
        try:
            yield member, theirs
        finally:
            watching.cancel()
            member.kill()
            theirs.close()
            await member.ended()
            await workers.stop(0)


def test_a_worker_has_the_time_to_flush_and_to_wait_for_a_redis_that_is_away_before_it_is_killed():
    """Its usage log is written after that: 1 s for the leases of the map, and three waits for the ledger."""
    assert supervisor.STOP_SECONDS >= server.FLUSH_SECONDS + 1.0 + 3 * ledger.PATIENCE + limits.PATIENCE


class Freezes(asyncio.Protocol):
    """Stops the process while the loop reads its sockets, as SIGSTOP does: the next that the loop does are timers."""

    def data_received(self, data: bytes) -> None:
        time.sleep(1.5)


def test_a_supervisor_that_was_frozen_kills_no_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "HANGS", 1)

    async def scenario() -> None:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.01):
                with suppress(OSError):  # one that was killed is not read from any more
                    end.send(b'{"loads":{}}\n', socket.MSG_DONTWAIT)

        async with watched(tmp_path) as (member, end):
            beating = threading.Thread(target=beat)
            beating.start()
            try:
                async with asyncio.timeout(20):
                    while not member.beats:
                        await asyncio.sleep(0.01)
                    freezing, sender = socket.socketpair()
                    transport, _ = await asyncio.get_running_loop().create_unix_connection(Freezes, sock=freezing)
                    sender.send(b"!")
                    while member.live and member.beats < 250:
                        await asyncio.sleep(0.01)
                assert member.live and member.process.poll() is None
                transport.close()
                sender.close()
            finally:
                ended.set()
                beating.join()

    uvloop.run(scenario())


def test_a_worker_that_says_nothing_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.01)

    async def scenario() -> None:
        async with watched(tmp_path) as (member, _), asyncio.timeout(20):
            assert await asyncio.to_thread(member.process.wait) == -9

    uvloop.run(scenario())


async def test_a_worker_that_has_ended_is_gone_for_whoever_asks_it_a_moment_later(tmp_path):
    """As one in another one's place asks for costs while a sibling ends."""
    async with watched(tmp_path) as (member, end):
        end.close()
        await member.ended()
        with pytest.raises(GONE):
            await member.ask("GET", "/worker/costs", [], b"", 1.0)


@pytest.mark.parametrize("gateway", [Gateway, Workers])
async def test_how_long_a_replica_may_be_silent_is_a_setting_of_every_kind_of_gateway(gateway):
    """An engine that compiles for a minute may block its /health for as long."""
    settings = load({"workers": 2 if gateway is Workers else 1, "hung_after_s": 90}, {}).settings
    fleet = gateway(settings).fleet
    try:
        fleet.add("http://127.0.0.1:1")
        (engine,) = fleet.engines.values()
        assert engine.watch.limits.lost_after == 90.0
    finally:
        await fleet.stop()


async def test_a_place_that_nobody_looks_after_any_more_is_told(monkeypatch, caplog):
    workers = Workers(load({"workers": 2, "redis_url": "unix:///nowhere", "port": 0, "admin_port": 0}, {}).settings)

    async def fails(self, path):
        raise KeyError("a bug")

    monkeypatch.setattr(Workers, "_learned", fails)
    async with asyncio.timeout(10):
        with pytest.raises(KeyError):
            await workers.start()
    assert "worker 1: its place stays empty" in caplog.text and "KeyError: 'a bug'" in caplog.text


async def test_a_fault_of_the_supervisors_own_work_is_counted_among_its_metrics(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(line("one"))
    workers = Workers(load({"workers": 2, "api_keys": str(keys)}, {}).settings)
    following = workers._last_good.follow(workers._background)
    work = {"work": "copies for workers: api_keys"}
    try:
        assert counted(workers.metrics().decode(), FAILURES, **work) == 0  # before the first failure, too
        workers._background.failed(work["work"], OSError("no memory"))
        assert counted(workers.metrics().decode(), FAILURES, **work) == 1
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await workers.stop(0)


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


async def test_stopping_does_not_wait_until_a_worker_would_be_replaced():
    workers = Workers(load({"workers": 2}, {}).settings)
    resting = asyncio.create_task(workers._rest(60.0))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await workers.stop(0)
        await resting


def test_workers_share_every_budget():
    settings = load({"workers": 4}, {}).settings
    each = budgets(settings, 4)
    assert each.pop("admission") is None
    assert each == {name: getattr(settings, name) // 4 for name in SIZES if name.endswith("_budget")}


@pytest.mark.parametrize(
    "given, each",
    [
        ({}, None),
        ({"slo": "ttft=2s"}, {"max_requests": 2500, "max_bytes": 64 * 2**20}),
        (
            {"admission": {"when_full": "reject", "max_requests": 2, "max_bytes": "100KiB"}},
            {"when_full": "reject", "max_requests": 1, "max_bytes": 25 * 2**10},
        ),
    ],
)
def test_workers_share_the_bounds_of_the_queue(given, each):
    """Each has a queue of its own. Where nobody asked for one there is none in a worker either."""
    settings = load({"workers": 4, **given}, {}).settings
    assert budgets(settings, 4)["admission"] == each
