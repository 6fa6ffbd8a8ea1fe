"""A real gateway process with real engines below it, for tests that need the whole house."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import asynccontextmanager, contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from .. import prestarted

SERVES = re.compile(rb"serves https?://[^:]+:(\d+), .* admin side http://[^:]+:(\d+)")


def counted(page: str, name: str, **labels: str) -> float:
    """The sum of the series of that name with these labels on a page of metrics, where there must be one."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    assert found, f"there is no {name} with {labels}"
    return sum(found)


def reported(answer: httpx.Response) -> int:
    """The cached tokens of an answer as the engine reports them."""
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def predicted(answer: httpx.Response) -> int:
    """The cached tokens of an answer as the gateway predicted them."""
    return int(answer.headers["x-hitherto-cached-tokens"])


async def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `true()` is true, or what it returns is once that is awaited."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := true()) else found):
            await asyncio.sleep(0.02)


@contextmanager
def stopped(*pids: int):
    """Processes that do not run until the end of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Running:
    def __init__(
        self,
        process: asyncio.subprocess.Process | prestarted.AsyncPrestarted,
        port: int,
        admin_port: int,
        log: list[bytes],
    ):
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=30)
        self.admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=30)

    async def chat(self, messages, **fields) -> httpx.Response:
        return await self.client.post(
            "/v1/chat/completions", json={"model": "sim", "messages": messages, "max_tokens": 4, **fields}
        )

    async def status(self) -> dict:
        return (await self.admin.get("/status")).json()

    async def counted(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels; all of them are on the page from the start."""
        return counted((await self.admin.get("/metrics")).text, name, **labels)

    async def counts(self, number: float, name: str, **labels: str) -> None:
        """Wait until the sum of a metric's series with these labels is that."""
        async with asyncio.timeout(60):
            while await self.counted(name, **labels) != number:
                await asyncio.sleep(0.02)

    async def any_counted(self, name: str, label: str, values: Collection[str]) -> float:
        """The sum of a metric's series whose label has one of these values."""
        page = (await self.admin.get("/metrics")).text
        return sum(counted(page, name, **{label: value}) for value in values)

    async def until(self, true, seconds: float = 180) -> dict:
        """Wait until `true(status)`; returns that status."""
        end = asyncio.get_running_loop().time() + seconds
        while not true(status := await self.status()):
            assert asyncio.get_running_loop().time() < end, f"did not become true in time: {status}"
            await asyncio.sleep(0.05)
        return status

    async def ready(self, count: int) -> dict:
        return await self.until(lambda status: sum(one["state"] == "ready" for one in status["replicas"]) >= count)

    async def ready_for_legs(self, count: int, variants: int = 1) -> dict:
        """Wait until `count` replicas are ready, and the tokenizer of each model is loaded for all of its replicas, of
        which there are so many unlike kinds. Its files are looked for per replica, once that is ready: while only some
        replicas have theirs, the model has more variants, and a request that may stay whole gets no two legs across
        them."""
        await self.ready(count)
        return await self.until(
            lambda status: not status["loading"] and all(one["variants"] == variants for one in status["spaces"])
        )


@asynccontextmanager
async def running(*args: str, env: Mapping[str, str] = {}, module: str = "gateway", forked: bool = False):
    """`hitherto serve ARGS` on free ports, which tells what it predicted; ended with SIGTERM, and every process it made
    with it. `forked`: it may share its seed of hashes with other processes although it uses Redis, because another
    gateway of the test has a seed of its own."""
    command = ["serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--cached-tokens-header", *args]
    # Those that agree with each other through Redis show that they do so with unlike seeds of hashes.
    own_seed = "--workers" in args or ("--redis-url" in args and not forked)
    if not env and not own_seed and prestarted.can_start():
        process = await prestarted.start(module, *command)
    else:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, **env}
        )
    log: list[bytes] = []
    found: asyncio.Future = asyncio.get_running_loop().create_future()

    async def read() -> None:
        async for line in process.stderr:
            log.append(line)
            if (match := SERVES.search(line)) and not found.done():
                found.set_result((int(match[1]), int(match[2])))
        if not found.done():
            found.set_exception(AssertionError(f"the gateway ended: {b''.join(log).decode()}"))

    reader = asyncio.create_task(read())
    try:
        # 1 s, but for machines that are busy with other things: a minute was too short for workers
        ports = await asyncio.wait_for(asyncio.shield(found), 180)
        gateway = Running(process, *ports, log)
        async with gateway.client, gateway.admin:
            yield gateway
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 15)
            except TimeoutError:
                process.kill()
                await process.wait()
        await reader


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
