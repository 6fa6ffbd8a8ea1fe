"""A replica that stops while it alone holds what is asked for: who comes next does not wait for it."""

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest

from .running import running

PROMPT = "What they have in common, and one of them alone has computed. " * 40


@pytest.fixture(scope="module")
def engines(start_engine):
    started = [start_engine(), start_engine()]
    return [engine.wait() for engine in started]


@contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("redis", (False, True), ids=("alone", "with Redis"))
@pytest.mark.parametrize("stream", (True, False), ids=("streamed", "in one piece"))
async def test_requests_do_not_queue_for_a_holder_that_has_stopped(engines, request, stream, redis):
    """Twenty one after the other: each is given 0.1 s to be answered before the next one comes. The first ones find
    out; the others are answered where their prompt has to be computed."""
    flags = ("--redis-url", request.getfixturevalue("redis_server").url) if redis else ()
    async with running("--replica-url", *(engine.url for engine in engines), "--model", "sim", *flags) as gateway:
        await gateway.ready(2)

        async def ask(number: int) -> str:
            text = f"{stream} {redis} {PROMPT} {number}"
            answer = await gateway.chat([{"role": "user", "content": text}], stream=stream)
            assert answer.status_code == 200 and (not stream or answer.text.rstrip().endswith("[DONE]"))
            return answer.headers["x-hitherto-replica"]

        [name] = {await ask(number) for number in range(5)}
        holder = next(engine for engine in engines if engine.url.endswith(name))
        asked: set[asyncio.Task[str]] = set()
        with stopped(holder.process.pid):
            for number in range(5, 25):
                task = asyncio.create_task(ask(number))
                asked.add(task)
                await asyncio.wait({task}, timeout=0.1)
            elsewhere = 0
            while asked - (answered := {task for task in asked if task.done()}) and elsewhere < len(answered):
                elsewhere = len(answered)  # a busy machine answers some later than 0.1 s, though nobody holds them up
                await asyncio.wait(asked - answered, timeout=1, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result() for task in answered}.isdisjoint({name})
            assert len(answered) >= 15, "at most five wait for it"
        assert {await task for task in asked}, "and those are answered once it goes on, or elsewhere"
