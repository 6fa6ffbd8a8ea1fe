"""A worker's own part, in this very process, with a supervisor's end of its socket."""

import asyncio
import socket

import orjson
import pytest

from gateway.config import load
from gateway.workers import worker
from gateway.workers.worker import Worker


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
    one._pod_gone("10.0.0.7:8000")
    one._pod_changed("10.0.0.7:8000", True)
    await asyncio.sleep(0)
    assert one._pods, "the socket is full"
    read(supervisor)
    beating = asyncio.create_task(one._beat())
    while one._pods:
        await asyncio.sleep(0)
    one._pod_gone("10.0.0.7:8000")
    while one._pods:
        await asyncio.sleep(0)
    beating.cancel()
    told = [pods for message in read(supervisor) if (pods := message.get("pods"))]
    assert told == [[["10.0.0.7:8000", False], ["10.0.0.7:8000", True]], [["10.0.0.7:8000", False]]]
