"""A fault of the gateway's own background work, as an operator sees it."""

import asyncio
import threading

import httpx
import pytest

from cachemap import background
from gateway import app
from gateway.app import CARE, Gateway
from gateway.settings import Settings
from replicas.replica import Replica
from replicas.simulated.model import sim_model_dir

from .running import counted

FAILURES = "hitherto_background_failures_total"


@pytest.fixture
async def gateway():
    url = "http://127.0.0.1:1"  # nobody listens there, so it is never ready and nothing is asked of it
    one = Gateway(Settings(host="127.0.0.1", port=0, admin_port=0, replica_url=(url,), model=str(sim_model_dir())))
    yield one
    await one.stop(0)


async def test_background_work_that_fails_is_counted_on_the_admin_sides_pages(gateway, monkeypatch, caplog):
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.001)
    care, may_fail, works_again = gateway._care, asyncio.Event(), asyncio.Event()
    faults = [KeyError("one"), OSError("two")]

    async def fails_twice():
        await may_fail.wait()
        if faults:
            raise faults.pop(0)
        works_again.set()
        await care()

    monkeypatch.setattr(gateway, "_care", fails_twice)
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}", timeout=10) as admin:
        page = (await admin.get("/metrics")).text
        assert counted(page, FAILURES, work=CARE) == 0, "the series is there before the first failure"
        assert (await admin.get("/status")).json()["background_failures"] == {}
        may_fail.set()
        await works_again.wait()
        page = (await admin.get("/metrics")).text
        assert counted(page, FAILURES, work=CARE) == counted(page, FAILURES) == 2
        told = (await admin.get("/status")).json()["background_failures"]
        assert told[CARE]["failures"] == 2 and told[CARE]["last"] == "OSError: two"
    assert "KeyError: 'one'" in caplog.text


async def test_a_replica_that_is_back_while_others_are_forgotten_is_kept(gateway, monkeypatch):
    monkeypatch.setattr(app, "CARE_SECONDS", 0.0)
    await gateway.start()
    replicas = gateway.fleet.replicas
    for port in (1, 2, 3):
        replica = replicas[f"h:{port}"] = Replica(f"h:{port}", "http://h", "h", port)
        gateway._meet(replica)
    back, forget, forgotten = Replica("h:2", "http://h", "h", 2), gateway._forget, asyncio.Event()

    def forget_and_meet(backend):
        forget(backend)
        if backend.id == "h:1":
            replicas["h:2"] = back
            gateway._meet(back)
        if backend.id == "h:3":
            forgotten.set()

    monkeypatch.setattr(gateway, "_forget", forget_and_meet)
    for port in (1, 2, 3):
        del replicas[f"h:{port}"]
    await forgotten.wait()
    assert [one.replica for one in gateway.proxy.backends.values()] == [back]


async def test_the_usage_log_is_complete_before_engines_are_waited_for(tmp_path):
    """They may take longer than whoever ends the gateway waits."""
    file, complete = tmp_path / "usage", []
    settings = Settings(
        host="127.0.0.1", port=0, admin_port=0, replica_url=("http://127.0.0.1:1",), model=str(sim_model_dir()), usage_log=file
    )  # fmt: skip
    one = Gateway(settings)
    await one.start()
    stop_engines = one.fleet.stop

    async def stop():
        complete.append("usage log" not in {thread.name for thread in threading.enumerate()})
        await stop_engines()

    one.fleet.stop = stop
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.port}") as client:
        answer = await client.post("/v1/completions", json={"model": "sim", "prompt": "x"})
    assert answer.status_code == 503
    await one.stop(0)
    assert complete == [True] and len(file.read_text().splitlines()) == 1
