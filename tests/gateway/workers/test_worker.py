"""A worker's own part, in this very process, with a supervisor's end of its socket."""

import asyncio
import socket
from urllib.parse import quote

import aiohttp
import orjson
import pytest

from gateway.config import load
from gateway.workers import worker
from gateway.workers.worker import Worker
from replicas import State
from replicas.pods import Pod

ENGINE = "10.0.0.7:8000"


@pytest.fixture
async def pair(tmp_path):
    """A worker that is not begun, and the supervisor's end."""
    discover = {"selector": "app=vllm", "namespace": "x", "api": "http://127.0.0.1:1"}
    settings = load({"port": 0, "discover": discover}, {}).settings.model_dump(mode="json")
    hello = {"index": 0, "socket": str(tmp_path / "socket"), "settings": settings, "costs": None}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = Worker(theirs, {**hello, "secrets": (None, None), "copies": {}})
        await one.gateway.admin.start_at(tmp_path / "socket")
        yield one, ours
        await one.gateway.stop(0)


def read(end: socket.socket) -> list[dict]:
    """All messages that wait there."""
    data = b""
    while True:
        try:
            data += end.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return [orjson.loads(line) for line in data.splitlines()]


async def test_a_supervisor_that_reads_nothing_for_a_while_is_told_of_each_pod_all_the_same(pair, monkeypatch):
    one, supervisor = pair
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0.0)
    while one._say(loads={}):
        pass
    one._pod_gone(ENGINE)
    one._pod_changed(ENGINE, True)
    await asyncio.sleep(0)
    assert one._pods, "the socket is full"
    read(supervisor)
    beating = asyncio.create_task(one._beat())
    while one._pods:
        await asyncio.sleep(0)
    one._pod_gone(ENGINE)
    while one._pods:
        await asyncio.sleep(0)
    beating.cancel()
    told = [pods for message in read(supervisor) if (pods := message.get("pods"))]
    assert told == [[[ENGINE, False], [ENGINE, True]], [[ENGINE, False]]]


def pods(*ips: str) -> list[Pod]:
    return [Pod(ip, ip, {"app": "vllm"}) for ip in ips]


async def take_back(one: Worker, *drained: str, left_out: bool = False) -> None:
    """As the supervisor asks for it."""
    before = {"url": None, "drained": drained, "left_out": left_out}
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(one._socket))) as client:
        async with client.put(f"/worker/replicas/{quote(ENGINE, safe='')}", json=before) as answer:
            assert answer.status == 200


async def test_a_pod_is_what_it_was_before_a_change_that_a_sibling_refused(pair):
    one, _ = pair
    fleet, discovery = one.gateway.fleet, one.gateway.discovery
    discovery.changed(pods("10.0.0.7"))
    await fleet.remove(ENGINE)
    await take_back(one)
    assert fleet.replicas[ENGINE].state is State.STARTING
    await take_back(one, ENGINE)
    assert fleet.replicas[ENGINE].state in (State.DRAINING, State.STOPPED)
    await take_back(one, left_out=True)
    assert not fleet.engines
    await take_back(one)
    discovery.changed([])
    await fleet.quiet(ENGINE)
    assert not fleet.engines, "it goes with its pod"
    await take_back(one)
    assert not fleet.engines, "and does not come back without one"


@pytest.mark.parametrize("left_out", [False, True])
async def test_what_it_was_before_is_kept_for_a_pod_that_is_not_known_yet(pair, left_out):
    one, _ = pair
    fleet, discovery = one.gateway.fleet, one.gateway.discovery
    discovery.resume([] if left_out else [ENGINE], [])
    one._drained = {ENGINE}
    await take_back(one, f"{ENGINE}-dp1", left_out=left_out)
    discovery.changed(pods("10.0.0.7"))
    assert (ENGINE in fleet.engines) != left_out
    await take_back(one, f"{ENGINE}-dp1")
    assert one._drained == {f"{ENGINE}-dp1"} and ENGINE in fleet.engines
