"""Workers as real processes: one port, one Redis, one admin side, and no death that disturbs the living.

What a gateway that starts or ends is not needed for is asked of the one that all tests here share. Each test leaves it
with two workers that are ready, and with the replicas that it began with; the last one stops it."""

import asyncio
import os
import re
import signal
import struct
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.gateway.running import Running, alive, running
from tests.gateway.test_gateways import LOAD, engines, joined, together  # noqa: F401 - `engines` is a fixture

TEXT = "The quality of mercy is not strained; it droppeth as the gentle rain from heaven. "


def two(engines, *flags, **options):
    return running("--workers", "2", "--model", "sim", "--replica-url", *engines, *flags, **options)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """While there is this file, no worker can start."""
    return tmp_path_factory.mktemp("broken") / "broken"


def breakable(broken: Path) -> dict[str, str]:
    """Surroundings in which that is so."""
    (broken.parent / "sitecustomize.py").write_text(
        f"import os, sys\nif 'gateway.workers.worker' in sys.orig_argv and os.path.exists({str(broken)!r}): os._exit(7)\n"
    )
    return {"PYTHONPATH": str(broken.parent)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines, broken):
    """Two workers with a Redis of their own."""
    async with two(engines, env=breakable(broken)) as one:
        await one.ready(2)
        await joined(one)
        yield one


class Client:
    """A connection of its own. `broken`: how often it was cut; `failures`: anything else that went wrong."""

    def __init__(self, gateway: Running, number: int):
        one_connection = httpx.Limits(max_connections=1, keepalive_expiry=None)
        self.http = httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=one_connection)
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


async def clients(stack: AsyncExitStack, gateway: Running, each: int) -> list[list[Client]]:
    """So many connections to each worker, by worker: the kernel spreads them, so more are opened until all have
    enough."""
    found: list[list[Client]] = [[] for _ in await connections(gateway)]
    for number in range(200):
        before = await connections(gateway)
        one = Client(gateway, number)
        await stack.enter_async_context(one.http)
        await one.ask("hello")
        worker = next(at for at, (now, then) in enumerate(zip(await connections(gateway), before)) if now > then)
        found[worker].append(one)
        if all(len(some) >= each for some in found):
            return found
    raise AssertionError("the kernel gave no connection to some worker")


async def connections(gateway: Running) -> list[int]:
    """Of each worker. One that does not answer within 2 s, as on a busy machine, is neither ready nor counted."""
    status = await gateway.until(lambda status: all(one["ready"] for one in status["workers"]))
    return counts(status)


def counts(status) -> list[int]:
    return [one["connections"] for one in status["workers"]]


def pids(status) -> list[int]:
    return [one["pid"] for one in status["workers"]]


def states(status) -> dict[str, str]:
    return {one["id"]: one["state"] for one in status["replicas"]}


def idle(status) -> bool:
    return not any(one["inflight"] or one["prefill_tokens"] or one["context_tokens"] for one in status["replicas"])


def failures(some: list[list[Client]]) -> list[str]:
    return [failure for group in some for one in group for failure in one.failures]


async def replaced(gateway: Running, pid: int) -> dict:
    """The status once another worker has taken the place of that process."""
    return await gateway.until(
        lambda status: [one["ready"] for one in status["workers"]] == [True, True] and pid not in pids(status)
    )


async def known(gateway: Running, text: str) -> None:
    """Wait until both workers, which answer in turn, know that some replica holds all of this prompt, and that none is
    busy: what these prompts save is as much as the wait for one that was answered a moment ago."""
    body, seen = {"model": "sim", "messages": [{"role": "user", "content": text}]}, 0
    async with asyncio.timeout(20):
        while seen < 2:
            told = (await gateway.admin.post("/explain?path=/v1/chat/completions", json=body)).json()
            whole = (told["tokens"] - 1) // told["block_size"] * told["block_size"]
            busy = any(one["load"]["requests"] for one in told["replicas"])
            seen = seen + 1 if not busy and any(one["overlap_tokens"] == whole for one in told["replicas"]) else 0


@pytest.mark.asyncio(loop_scope="module")
async def test_what_one_worker_sent_the_other_knows(gateway):
    async with AsyncExitStack() as stack:
        first, second = await clients(stack, gateway, 1)
        for number in range(3):
            text = f"{number} {TEXT * 150}"
            home = (await first[0].ask(text)).headers["x-hitherto-replica"]
            for turn in range(4):
                await known(gateway, text)
                text += TEXT * 5
                answer = await (second if turn % 2 == 0 else first)[0].ask(text)
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-hitherto-cached-tokens"]) == cached > 300
                assert answer.headers["x-hitherto-replica"] == home
        assert failures([first, second]) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_connections_spread(gateway):
    before = await connections(gateway)
    readers = [await asyncio.open_connection("127.0.0.1", gateway.client.base_url.port) for _ in range(64)]
    status = await gateway.until(lambda status: sum(counts(status)) == sum(before) + 64)
    # of 64 coins the worse side shows less once in 10^9
    assert min(now - then for now, then in zip(counts(status), before)) > 8
    for _, writer in readers:
        writer.close()
    await gateway.until(lambda status: sum(counts(status)) == sum(before))


@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_of_all_workers_are_on_one_page(gateway):
    async with AsyncExitStack() as stack:
        first, second = await clients(stack, gateway, 1)
        page = (await gateway.admin.get("/metrics")).text
        per_worker = [await gateway.counted("hitherto_requests_total", worker=worker, status="2xx") for worker in "01"]
        assert per_worker == [one["requests"] for one in (await gateway.status())["workers"]] and min(per_worker) > 0
        assert (await gateway.status())["totals"]["requests"] == sum(per_worker)
        assert await gateway.counted("hitherto_worker_up") == 2
        assert await gateway.counted("hitherto_worker_restarts_total") == 0
        assert 'process_cpu_seconds_total{worker="1"}' in page
        assert failures([first, second]) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_15_minutes_are_of_all_workers(gateway):
    clients = [Client(gateway, number) for number in range(12)]
    answers = await asyncio.gather(*(client.ask(f"Recently. {TEXT * 9}") for client in clients))
    assert all(answer.status_code == 200 for answer in answers)
    await gateway.until(lambda status: status["totals"]["inflight"] == 0)
    lines = (await gateway.admin.get("/metrics")).text.splitlines()
    told = sum(float(line.split()[-1]) for line in lines if line.startswith("hitherto_request_seconds_count"))
    end = asyncio.get_running_loop().time() + 30
    while (recent := (await gateway.admin.get("/recent")).json())["figures"]["whole"]["requests"] < told:
        assert asyncio.get_running_loop().time() < end, recent["figures"]["whole"]
        await asyncio.sleep(0.1)
    assert recent["figures"]["whole"]["requests"] == told >= 12 and recent["decisions"]
    joined = [entry["replica"] for entry in recent["journal"] if "joined the fleet" in entry["text"]]
    assert sorted(joined) == sorted(one["id"] for one in (await gateway.status())["replicas"]), "each once"
    page = await gateway.admin.get("/")
    assert page.status_code == 200 and "page/page.js" in page.text
    assert (await gateway.admin.get("/page/page.js")).status_code == 200
    for client in clients:
        await client.http.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_admin_side_answers_for_all(gateway):
    assert (await gateway.admin.get("/livez")).text == "ok\n"
    ready = (await gateway.admin.get("/readyz")).json()
    assert ready == {"ready": True, "why_not": None, "models": dict.fromkeys(ready["models"], True)} and ready["models"]
    (name, *_) = ready["models"]
    assert (await gateway.admin.get("/readyz", params={"model": name})).status_code == 200
    assert (await gateway.admin.get("/readyz", params={"model": "another"})).status_code == 503
    assert "<title>" in (await gateway.admin.get("/")).text
    nothing = await gateway.admin.get("/worker/costs")
    assert nothing.status_code == 404 and "there is nothing at /worker/costs" in nothing.json()["error"]["message"]
    wrong = await gateway.admin.post("/replicas", json={"url": "ftp://nobody"})
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "invalid_url"
    assert (await gateway.admin.post("/replicas", content=b"{}")).status_code == 415
    assert (await gateway.admin.post("/replicas/no:1/drain", json={})).status_code == 404
    elsewhere = {"origin": "http://elsewhere.example"}
    assert (await gateway.admin.post("/replicas", json={"url": "http://h:1"}, headers=elsewhere)).status_code == 403
    assert len((await gateway.admin.get("/replicas")).json()["replicas"]) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_loaded_a_moment_ago_is_served_by_each_worker(gateway, engines):
    async with AsyncExitStack() as stack:
        both = [group[0] for group in await clients(stack, gateway, 1)]
        unknown = [await one.http.post("/v1/completions", json={"model": "sql", "prompt": "x"}) for one in both]
        assert [answer.status_code for answer in unknown] == [404, 404]
        for url in engines:
            httpx.post(url + "/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/sql"}).raise_for_status()
        try:
            answers = await asyncio.gather(*(one.ask(TEXT, model="sql") for one in both))
        finally:
            for url in engines:
                httpx.post(url + "/v1/unload_lora_adapter", json={"lora_name": "sql"}).raise_for_status()
        assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_admin_side_answers_while_a_worker_is_stuck(gateway):
    stuck = pids(await gateway.status())[0]
    os.kill(stuck, signal.SIGSTOP)
    try:
        status = await gateway.status()
        assert [one["ready"] for one in status["workers"]] == [False, True]
        async with asyncio.timeout(20):
            while await gateway.counted("hitherto_worker_up", worker="0"):
                await asyncio.sleep(0.05)
        assert await gateway.counted("hitherto_worker_up", worker="1") == 1
    finally:
        os.kill(stuck, signal.SIGCONT)
    status = await gateway.until(lambda status: all(one["ready"] for one in status["workers"]))
    assert pids(status)[0] == stuck


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_takes_its_own_clients_and_is_replaced_once_one_can_start(gateway, engines, broken):
    """Of replacements that cannot start it is said why, and none of them counts as a worker that was replaced: nobody
    was connected to it. The one that can has the replicas that operators left its sibling."""
    removed, left = (url.removeprefix("http://") for url in engines)
    added, drained = "127.0.0.1:9", "127.0.0.1:11"  # nobody listens there
    assert (await gateway.admin.delete(f"/replicas/{removed}")).json() == {"id": removed, "removed": True}
    for id in (added, drained):
        assert (await gateway.admin.post("/replicas", json={"url": f"http://{id}"})).status_code == 201
    assert (await gateway.admin.post(f"/replicas/{drained}/drain", json={})).status_code == 202
    async with AsyncExitStack() as stack:
        some = await clients(stack, gateway, 3)
        before = await gateway.status()
        ending = asyncio.Event()
        tasks = [asyncio.create_task(one.without_pause(ending)) for group in some for one in group]
        await gateway.until(lambda status: status["totals"]["requests"] > before["totals"]["requests"] + 60)
        broken.touch()
        os.kill(pids(before)[0], signal.SIGKILL)
        failed = b"could not start: a worker ended with exit code 7 while it started"
        async with asyncio.timeout(60):
            while sum(failed in line for line in gateway.log) < 2:
                await asyncio.sleep(0.02)
        broken.unlink()
        answers = sum(one.answers for group in some for one in group)
        status = await replaced(gateway, pids(before)[0])
        assert {one["id"] for one in status["replicas"]} == {added, drained, left}
        await gateway.until(lambda status: sum(one.answers for group in some for one in group) > answers + 100)
        ending.set()
        await asyncio.gather(*tasks)
        # No answer but 200. The worker takes those connections with it that it has not accepted yet, too: how many
        # tries of its clients meet it while it dies is for the kernel to say, and one between two requests meets none.
        assert failures(some[1:]) == [] and {one.broken for one in some[1]} == {0}
        assert all("ConnectError" in failure for failure in failures(some[:1])) and sum(one.broken for one in some[0])
        await gateway.until(lambda status: idle(status) and states(status)[drained] == "stopped")
        assert min(len(group) for group in await clients(stack, gateway, 1)) > 0  # the new one is given connections
        assert await gateway.counted("hitherto_worker_restarts_total") == 1
        assert sum(b"its clients' connections with it" in line for line in gateway.log) == 1
        async with asyncio.timeout(20):
            while await gateway.counted("hitherto_reservations"):
                await asyncio.sleep(0.05)
    for id in (added, drained):
        assert (await gateway.admin.delete(f"/replicas/{id}")).status_code == 200
        assert (await gateway.admin.delete(f"/replicas/{id}")).status_code == 404
    assert (await gateway.admin.post("/replicas", json={"url": f"http://{removed}"})).status_code == 201
    assert states(await gateway.ready(2)) == {removed: "ready", left: "ready"}


def redis_of(gateway: Running) -> int:
    """The process of the Redis that workers have of their own, the last one that was started."""
    return int(re.findall(rb"workers share a Redis of their own: process (\d+)", b"".join(gateway.log))[-1])


@pytest.mark.asyncio(loop_scope="module")
async def test_running_requests_end_before_the_workers_do_until_a_second_signal(gateway):
    """What has no byte of an answer then gets 503 from each worker. It is the last test of this gateway."""
    async with AsyncExitStack() as stack:
        first, second = await clients(stack, gateway, 3)
        status = await gateway.status()
        there = [*pids(status), redis_of(gateway)]

        def asked(tokens: int, *ones: Client) -> list[asyncio.Task]:
            fields = {"max_tokens": tokens, "ignore_eos": True}
            return [asyncio.create_task(one.ask("tell me more", **fields)) for one in ones]

        short, endless = asked(1500, first[0], second[0], second[1]), asked(30_000, first[1], second[2])
        await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) == 5)
        gateway.process.terminate()
        for pid in pids(status):
            os.kill(pid, signal.SIGTERM)  # as a service manager does, and Ctrl-C
        refused = None
        while refused is None or refused.status_code == 200:
            refused = await first[2].ask("hello")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        answers = await asyncio.gather(*short)
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [1500] * 3
        gateway.process.terminate()
        for answer in await asyncio.gather(*endless):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
            assert answer.headers["retry-after"] == "1"
        assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
        said = [line for line in gateway.log if b"0 were cut in the middle of their answers, 1 had none yet" in line]
        assert sorted(line.split()[-1] for line in said) == [b"worker=0", b"worker=1"]
        assert not any(map(alive, there))


async def test_engines_and_redis_are_started_once_and_again_when_they_die_and_outlive_no_supervisor():
    async with running("--workers", "2", "--launch", "1") as gateway:
        (engine,) = (await gateway.ready(1))["replicas"]
        redis = redis_of(gateway)
        assert engine["managed"]
        os.kill(redis, signal.SIGKILL)
        for number in range(20):
            assert (await gateway.chat([{"role": "user", "content": f"{number} {TEXT}"}])).status_code == 200
        os.kill(engine["pid"], signal.SIGKILL)
        await gateway.until(lambda status: [one["restarts"] for one in status["replicas"]] == [1])
        again = (await gateway.ready(1))["replicas"][0]["pid"]
        await joined(gateway, 60)
        assert redis_of(gateway) != redis and await gateway.counted("hitherto_replica_restarts_total") == 1
        drained = await gateway.admin.post(f"/replicas/{engine['id']}/drain", json={})
        assert drained.status_code == 202
        await gateway.until(lambda status: states(status) == {engine["id"]: "stopped"} and not alive(again))
        assert (await gateway.admin.post("/replicas", json={"url": engine["url"]})).status_code == 200
        status = await gateway.until(lambda status: status["replicas"][0]["pid"])
        there = [*pids(status), status["replicas"][0]["pid"], redis_of(gateway)]
        folder = Path(status["map"]["redis"]["place"].partition(" ")[0]).parent
        assert all(map(alive, there)) and again not in there and folder.stat().st_mode & 0o777 == 0o700
        gateway.process.kill()
        async with asyncio.timeout(20):
            while any(map(alive, there)) or folder.exists():
                await asyncio.sleep(0.02)


async def test_a_redis_that_is_named_counts_for_all_workers_and_no_other_is_started(engines, redis_server, tmp_path):
    """With the classes of the documents, of which as many requests go to each worker."""
    docs = Path(__file__).parents[3] / "docs" / "admission.md"
    file = tmp_path / "hitherto.yaml"
    file.write_text(re.search(r"```yaml\n(slo:.*?)```", docs.read_text(), re.S)[1])
    flags = ("--redis-url", redis_server.url, "--shadow", "round_robin", "--config", str(file))
    async with two(engines, *flags) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        await joined(gateway)
        groups = await clients(stack, gateway, 2)
        for one in [group[0] for group in groups]:
            before = await admitted(gateway)
            for tier, count in (("premium", 3), ("", 2)):
                one.http.headers["x-customer-tier"] = tier
                for number in range(count):
                    await one.ask(f"{number} {TEXT}")
            assert await admitted(gateway) - before == Counter(premium=3, free=2)
            assert not one.failures and not one.broken
        for name in ("premium", "standard", "free"):
            assert await gateway.counted("hitherto_queued_requests", **{"class": name}) == 0
        some = [one for group in groups for one in group]
        async with asyncio.timeout(20):  # on a busy machine a whole burst may be late for Redis; never all of them
            while not await gateway.counted("hitherto_shared_decisions_total", outcome="shared"):
                before = sum(one.answers for one in some)
                await asyncio.gather(
                    *(one.ask(f"{before + number} {TEXT * 20}") for number, one in enumerate(some * 5))
                )
        asked = sum(one.answers for one in some)
        status = await gateway.until(lambda status: idle(status) and status["totals"]["requests"] == asked)
        assert status["shadow"][0]["decisions"] == asked
        client = redis_server.client()
        async with asyncio.timeout(10):
            while any(map(any, together(client).values())):
                await asyncio.sleep(0.05)
        client.hset(LOAD, "10.0.0.7:8000", struct.pack("<5d", 7, 0, 0, 0, 0))
        async with asyncio.timeout(10):
            while not await gateway.counted("hitherto_ledger_repairs_total", what="sum"):
                await asyncio.sleep(0.05)
        assert failures([some]) == [] and b"a Redis of their own" not in b"".join(gateway.log)


async def admitted(gateway: Running) -> Counter[str]:
    """How many requests of each class were sent, by all workers together."""
    return Counter({each["class"]: each["admitted"] for each in (await gateway.status())["admission"]})
