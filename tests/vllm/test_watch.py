"""Real vLLM killed, hung, unable to start or not what it should be: what the gateway says, and what clients notice.

Engines of the gateway's own are started here and hurt one after the other, under four clients that never pause; the
engines that others share are only stopped for a while, and well again when a test ends.
"""

import asyncio
import itertools
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from replicas import Fleet, State
from replicas.launch import profile

from ..gateway.running import Running, alive, stopped
from .engines import block_size, dtype, folder, gateway

BACK = 240  # seconds for a restart: 15 alone, a minute and more on a machine that is busy with other things
PROMPT = "The watch is long and the night is cold, said number "


def launch_profile(**fields) -> str:
    """A profile file's text: the shipped one for CPUs, with the tests' vLLM and a small cache."""
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    given = {
        "engine": "vllm", "device": "cpu", "executable": str(folder() / "bin" / "vllm"), "dtype": dtype(), "block_size": block_size(),
        "max_model_len": 2048, "kv_cache_memory_bytes": "16M", "enforce_eager": True, "distributed_executor_backend": "uni", "env": env,
    }  # fmt: skip
    return json.dumps(given | fields)


def below(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    children = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return [pid, *itertools.chain.from_iterable(map(below, children))]


def core_of(pid: int) -> int:
    """The process of an engine that computes."""
    return next(one for one in below(pid) if Path(f"/proc/{one}/cmdline").read_text().startswith("VLLM::EngineCore"))


class Load:
    """Four clients, each with one request at a time; every other one is streamed if `streams`. They pause for 0.1 s
    between two: without it they take the cores that an engine needs for its start (140 s instead of 40)."""

    def __init__(self, one: Running, model: str, streams: bool = True, clients: int = 4):
        self.url, self.model, self.streams = one.url, model, streams
        self.asked = [0] * clients  # requests that ended, of each client
        self.answered: list[str] = []  # the replicas that did, in order
        self.cut = 0  # streams that broke off and said so
        self.failed: list[str] = []  # had not begun to be answered

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(len(self.asked))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, client_number: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            while True:
                try:
                    await self._ask(client, client_number)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                self.asked[client_number] += 1
                await asyncio.sleep(0.1)

    async def _ask(self, client: httpx.AsyncClient, client_number: int) -> None:
        number = self.asked[client_number]
        streams = self.streams and (client_number + number) % 2 == 0
        body = {"model": self.model, "prompt": f"{PROMPT}{client_number}.{number}", "max_tokens": 16}
        answer = await client.post("/v1/completions", json=body | {"ignore_eos": True, "stream": streams})
        if answer.status_code != 200:
            self.failed.append(f"{answer.status_code} {answer.text}")
        elif streams and "[DONE]" not in answer.text:
            assert "the answer broke off" in answer.text, answer.text
            self.cut += 1
        else:
            self.answered.append(answer.headers["x-hitherto-replica"])

    async def all_move_on(self, seconds: float = 60) -> None:
        """Wait until each client has asked and been answered once more."""
        before = list(self.asked)
        async with asyncio.timeout(seconds):
            while any(now == then for now, then in zip(self.asked, before)):
                await asyncio.sleep(0.05)

    async def gets(self, *replicas: str, count: int = 10) -> None:
        """Wait until each of these replicas has answered so many more."""
        before = len(self.answered)
        async with asyncio.timeout(120):
            while any(self.answered[before:].count(one) < count for one in replicas):
                await asyncio.sleep(0.05)


def state_of(status: dict, id: str) -> dict:
    return next(replica for replica in status["replicas"] if replica["id"] == id)


async def becomes(one: Running, id: str, *states: str, seconds: float = 60) -> dict:
    status = await one.until(lambda status: state_of(status, id)["state"] in states, seconds)
    return state_of(status, id)


# Engines of the gateway's own


@pytest.fixture
async def launched(model, tmp_path):
    """A gateway with two engines of its own, both ready."""
    (file := tmp_path / "watched.yaml").write_text(launch_profile())
    async with gateway(launch=2, profile=file, model=model, ready=False) as one:
        await one.until(lambda status: sum(replica["state"] == "ready" for replica in status["replicas"]) == 2, BACK)
        yield one


@pytest.mark.timeout(900)
async def test_own_engines_that_die_or_hang_come_back_and_no_request_fails(launched):
    status = await launched.status()
    id, other = (replica["id"] for replica in status["replicas"])
    faults = [
        (signal.SIGKILL, "server", "killed by SIGKILL"),
        (signal.SIGKILL, "core", "one of its processes was killed or crashed"),
        (signal.SIGSTOP, "server", "though its process is alive: it hangs, so it was killed"),
    ]
    async with Load(launched, status["models"][0]) as load:
        for number, whom, reason in faults:
            await load.gets(id, other)
            before = state_of(await launched.status(), id)
            processes = below(before["pid"])
            os.kill(core_of(before["pid"]) if whom == "core" else before["pid"], number)
            await becomes(launched, id, "degraded", "failed")
            await load.gets(other)
            await launched.until(lambda status: state_of(status, id)["restarts"] > before["restarts"], 60)
            said = b"".join(launched.log).decode()
            assert reason in said, said
            assert not [pid for pid in processes if alive(pid)]
            if number == signal.SIGSTOP:
                await load.all_move_on()
            else:  # what follows the last is a start like the others: the gateway will be killed in the midst of it
                await becomes(launched, id, "ready", seconds=BACK)
                await load.gets(id)
            assert not load.failed, (reason, load.failed)
    assert load.cut <= 4 * len(faults)  # those that had begun, one a client at most
    processes = below(launched.process.pid)
    assert len(processes) >= 1 + 2 * 3  # itself, and of each engine the keeper, the server and the core
    launched.process.kill()
    async with asyncio.timeout(20):  # its engines are killed, too
        while any(alive(pid) for pid in processes[1:]):
            await asyncio.sleep(0.05)


# Starts that fail


@pytest.mark.timeout(900)
async def test_starts_that_fail_say_why_in_vllms_own_words_and_what_to_do(model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    cases = [
        (model, {"extra_args": ["--no-such-flag"]}, "extra_args", "unrecognized arguments: --no-such-flag"),
        (bare, {}, "check --model", f"Cannot find any model weights with `{bare}`"),
        (model, {"kv_cache_memory_bytes": "900G"}, "kv_cache_memory_bytes", "less than requested memory for kv"),
        (model, {"start_timeout_s": 2}, "raise start_timeout_s in the profile", "not ready 2 s after its start"),
        (model, {"executable": "/nowhere/vllm"}, "`executable`", "No such file or directory: /nowhere/vllm"),
    ]
    fleet = Fleet()
    await fleet.start()
    try:
        for directory, fields, remedy, words in cases:
            (replica,) = await fleet.launch(1, profile.parse(launch_profile(**fields)), directory, "tiny")
            end = time.monotonic() + BACK
            while replica.state is not State.FAILED:
                assert replica.state is State.STARTING and time.monotonic() < end, (replica.state, replica.reason)
                await asyncio.sleep(0.05)
            assert all(one in replica.reason for one in (remedy, words, "next start in")), replica.reason
            await fleet.remove(replica.id)
    finally:
        await fleet.stop()


# Engines that run already


@pytest.mark.parametrize(
    ("whom", "word"), [("server", "did not answer within"), ("core", "answers /health, but has computed nothing for")]
)
async def test_an_adopted_engine_that_hangs_is_passed_over_until_it_goes_on(engines, whom, word):
    """Its API server, or the process that computes: then /health is answered all the time."""
    async with gateway(*engines) as one, Load(one, "tiny", streams=False) as load:
        ill, well = (engine.id for engine in engines)
        await load.gets(ill, well)
        with stopped(core_of(engines[0].pid) if whom == "core" else engines[0].pid):
            found = await becomes(one, ill, "degraded", "failed")
            assert word in found["reason"], found["reason"]
            await load.gets(well, count=20)
            await load.all_move_on()  # also those that were with the ill one and had no first byte
            assert not load.failed
        await becomes(one, ill, "ready")
        await load.gets(ill)
        assert not load.failed


async def test_an_adopted_engine_with_another_model_gets_no_traffic(engine):
    async with gateway(engine, ready=False, served_model_name="other") as one:
        await becomes(one, engine.id, "warming")
        status = await one.until(lambda status: "serves tiny" in state_of(status, engine.id)["reason"])
        assert "not 'other': another server is on this port" in state_of(status, engine.id)["reason"]
        answer = await one.client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert answer.status_code == 503 and "serves tiny" in answer.text
