"""Two workers as real processes: clients spread evenly, one map, one ledger, and no death disturbs the living."""

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
from contextlib import AsyncExitStack

import httpx
import pytest

from gateway.config import ConfigError, load
from tests.gateway.running import Running, alive, running
from tests.gateway.test_gateways import LOAD, joined, together

TEXT = "The quality of mercy is not strained; it droppeth as the gentle rain from heaven. "


@pytest.fixture(scope="module")
def engines():
    """URLs of two simulated engines, the second one without events."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "replicas.simulated", "--port", "0", "--speedup", "10", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for flags in ((), ("--no-events",))
    ]  # fmt: skip
    urls = []
    for one in processes:
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", line := one.stdout.readline())):
            assert line, "the simulated engine ended"
        urls.append(found[0])
    yield urls
    for one in processes:
        one.kill()
        one.wait()
        one.stdout.close()


def two(engines, *flags):
    return running("--workers", "2", "--model", "sim", "--replica-url", *engines, *flags)


class Client:
    """A connection of its own. `broken`: how often it was cut; `failures`: anything else that went wrong."""

    def __init__(self, gateway: Running, number: int):
        self.http = httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=httpx.Limits(max_connections=1))
        self.number, self.answers, self.broken, self.failures = number, 0, 0, []

    async def ask(self, text: str, **fields) -> httpx.Response | None:
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        try:
            answer = await self.http.post("/v1/chat/completions", json=body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            self.broken += 1
            return None
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return None
        self.answers += 1
        if answer.status_code != 200:
            self.failures.append(answer.text)
        return answer

    async def without_pause(self, ending: asyncio.Event) -> None:
        while not ending.is_set():
            await self.ask(f"{self.number} {self.answers} " + TEXT * 8)


async def clients(stack: AsyncExitStack, gateway: Running, count: int) -> list[Client]:
    """One after the other, so that each is counted before the next one comes."""
    found = [Client(gateway, number) for number in range(count)]
    for one in found:
        await stack.enter_async_context(one.http)
        await one.ask("hello")
    return found


def connections(status) -> list[int]:
    return [one["connections"] for one in status["workers"]]


def idle(status) -> bool:
    return not any(one["inflight"] or one["prefill_tokens"] or one["context_tokens"] for one in status["replicas"])


async def test_what_one_worker_sent_the_other_knows(engines):
    """As one process knows it: each turn comes over another worker, and every prediction is what the engine had."""
    async with two(engines, "--policy", "round_robin", "--shadow", "least_time") as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        some = await clients(stack, gateway, 4)
        assert connections(await gateway.status()) == [2, 2]
        found = {engine: [] for engine in engines}
        for number in range(4):
            text = f"{number} {TEXT * 20}"
            for turn in range(6):
                answer = await some[(number + turn) % 4].ask(text)
                predicted, cached = int(answer.headers["x-hitherto-cached-tokens"]), answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                found["http://" + answer.headers["x-hitherto-replica"]].append((predicted, cached))
                text += TEXT * 5
        assert [one.failures for one in some] == [[]] * 4
        for turns in found.values():  # by its events, and modelled
            assert len(turns) == 12 and sum(cached for _, cached in turns) > 2000
            assert all(predicted == cached for predicted, cached in turns)
        status = await gateway.until(lambda status: idle(status) and sum(one["requests"] for one in status["workers"]) == 28)
        assert [one["requests"] for one in status["workers"]] == [14, 14]
        assert status["totals"]["requests"] == 28
        (shadow,) = status["shadow"]
        assert shadow["decisions"] == 28 and shadow["saved_prefill_tokens"] > 0


async def test_a_killed_worker_takes_its_own_clients_and_is_replaced(engines):
    async with two(engines) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        some = await clients(stack, gateway, 8)
        before = await gateway.status()
        assert connections(before) == [4, 4]
        ending = asyncio.Event()
        tasks = [asyncio.create_task(one.without_pause(ending)) for one in some]
        await gateway.until(lambda status: status["totals"]["requests"] > 60)
        os.kill(before["workers"][0]["pid"], signal.SIGKILL)
        answers = sum(one.answers for one in some)
        await gateway.until(lambda status: [one["ready"] for one in status["workers"]] == [True, True] and status["workers"][0]["pid"] != before["workers"][0]["pid"])
        await gateway.until(lambda status: sum(one.answers for one in some) > answers + 100)
        ending.set()
        await asyncio.gather(*tasks)
        assert [one.failures for one in some] == [[]] * 8  # no connection was refused, no answer but 200
        assert sorted(one.broken for one in some) == [0, 0, 0, 0, 1, 1, 1, 1]
        status = await gateway.until(idle)
        assert sum(connections(status)) == 8
        await clients(stack, gateway, 8)
        assert connections(await gateway.status()) == [8, 8]  # the new one was given those that came
        page = (await gateway.admin.get("/metrics")).text
        assert "hitherto_worker_restarts_total 1.0" in page and "hitherto_reservations 0.0" in page


async def test_a_worker_in_anothers_place_goes_on_from_what_its_sibling_learned(engines):
    async def seconds() -> dict[str, float]:
        """Of computing a prompt on each replica, as one worker predicts them; the workers take turns."""
        body = {"model": "sim", "messages": [{"role": "user", "content": f"nobody has seen this {TEXT * 8}"}]}
        answer = await gateway.admin.post("/explain?path=/v1/chat/completions", json=body)
        return {one["id"]: one["terms"]["prefill"] for one in answer.json()["replicas"]}

    async with two(engines) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        unlearned = await seconds()
        for one in await clients(stack, gateway, 2):
            for turn in range(20):
                await one.ask(f"{one.number} {turn} " + TEXT * (1 + turn), stream=True)
        before = await gateway.until(idle)
        os.kill(before["workers"][0]["pid"], signal.SIGKILL)
        await gateway.until(lambda status: [one["ready"] for one in status["workers"]] == [True, True] and status["workers"][0]["pid"] != before["workers"][0]["pid"])
        one, other = await seconds(), await seconds()
        # Not to the digit: each worker lets a replica that is passed over be thought quicker again, by its own clock.
        assert one == pytest.approx(other, rel=0.3)
        assert unlearned != pytest.approx(other, rel=0.3)


async def test_nothing_outlives_a_killed_control_process():
    async with running("--workers", "2", "--launch", "1") as gateway:
        status = await gateway.ready(1)
        pids = [one["pid"] for one in (*status["workers"], *status["replicas"])]
        gateway.process.kill()
        async with asyncio.timeout(10):
            while any(map(alive, pids)):
                await asyncio.sleep(0.02)


async def test_running_requests_end_before_the_workers_do(engines):
    async with two(engines[:1]) as gateway, AsyncExitStack() as stack:
        await gateway.ready(1)
        some = await clients(stack, gateway, 4)
        pids = [one["pid"] for one in (await gateway.status())["workers"]]
        running_ones = [asyncio.create_task(one.ask("tell me more", max_tokens=1500, ignore_eos=True)) for one in some[:3]]
        await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) == 3)
        gateway.process.terminate()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a service manager does, and Ctrl-C
        refused = None
        while refused is None or refused.status_code == 200:
            refused = await some[3].ask("hello")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        answers = await asyncio.gather(*running_ones)
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [1500] * 3
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        assert not any(map(alive, pids))


async def test_an_adapter_loaded_a_moment_ago_is_served_by_each_worker(engines):
    async with two(engines) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        both = await clients(stack, gateway, 2)
        unknown = [await one.http.post("/v1/completions", json={"model": "sql", "prompt": "x"}) for one in both]
        assert [answer.status_code for answer in unknown] == [404, 404]
        for url in engines:
            httpx.post(url + "/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/sql"}).raise_for_status()
        try:
            known = await asyncio.gather(*(one.ask(TEXT, model="sql") for one in both))
        finally:
            for url in engines:
                httpx.post(url + "/v1/unload_lora_adapter", json={"lora_name": "sql"}).raise_for_status()
        assert [answer.status_code for answer in known] == [200, 200]


async def test_with_redis_each_worker_counts_in_the_ledger_of_all_gateways(engines, redis_server):
    async with two(engines, "--redis-url", redis_server.url, "--shadow", "round_robin") as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        await joined(gateway)
        some = await clients(stack, gateway, 4)
        async with asyncio.timeout(20):  # on a busy machine a whole burst may be late for Redis; never all of them
            while not await gateway.counted("hitherto_shared_decisions_total", outcome="shared"):
                before = sum(one.answers for one in some)
                await asyncio.gather(*(one.ask(f"{before + number} {TEXT * 20}") for number, one in enumerate(some * 5)))
        asked = sum(one.answers for one in some)
        status = await gateway.until(lambda status: idle(status) and status["totals"]["requests"] == asked)
        assert status["shadow"][0]["decisions"] == asked
        client = redis_server.client()
        async with asyncio.timeout(10):
            while any(map(any, together(client).values())):
                await asyncio.sleep(0.05)
        assert await gateway.counted("hitherto_background_failures_total", work="shared ledger: heartbeat") == 0
        assert await gateway.counted("hitherto_ledger_repairs_total") == 0
        client.hset(LOAD, "10.0.0.7:8000", struct.pack("<5d", 7, 0, 0, 0, 0))
        async with asyncio.timeout(10):
            while not await gateway.counted("hitherto_ledger_repairs_total", what="sum"):
                await asyncio.sleep(0.05)
        assert [one.failures for one in some] == [[]] * 4


async def test_a_worker_that_cannot_start_is_said_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif 'gateway.workers.worker' in sys.orig_argv: os._exit(7)\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "--workers", "2", "--launch", "1", "--port", "0", "--admin-port", "0",
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2 and b"a worker ended with exit code 7 while it started" in said


@pytest.mark.parametrize("count", ["0", "-1", "many", "65"])
def test_how_many_there_can_be_is_said_before_anything_starts(count):
    with pytest.raises(ConfigError, match=rf"flag --workers: workers: '{count}' is not valid"):
        load({"workers": count}, {})
