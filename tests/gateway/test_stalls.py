"""A replica that stops while it alone holds what is asked for: who comes next does not wait for it."""

import asyncio

import pytest

from .running import Running, running, stopped

PROMPT = "What they have in common, and one of them alone has computed. " * 40


@pytest.fixture(scope="module")
def engines(start_engine):
    started = [start_engine(), start_engine()]
    return [engine.wait() for engine in started]


def gateway_before(engines, *flags: str):
    return running("--replica-url", *(engine.url for engine in engines), "--model", "sim", *flags)


async def asked(gateway: Running, text: str, stream: bool = True, **fields) -> str:
    """Which replica answered."""
    answer = await gateway.chat([{"role": "user", "content": text}], stream=stream, **fields)
    assert answer.status_code == 200 and (not stream or answer.text.rstrip().endswith("[DONE]"))
    return answer.headers["x-hitherto-replica"]


def named(engines, name: str):
    return next(engine for engine in engines if engine.url.endswith(name))


async def one_after_the_other(
    gateway: Running, texts: list[str], seconds: float, **fields
) -> tuple[set[asyncio.Task[str]], set[asyncio.Task[str]]]:
    """Each is given `seconds` to be answered before the next one comes. Returns all, and those that were answered."""
    sent: set[asyncio.Task[str]] = set()
    for text in texts:
        task = asyncio.create_task(asked(gateway, text, **fields))
        sent.add(task)
        await asyncio.wait({task}, timeout=seconds)
    elsewhere = 0
    while sent - (answered := {task for task in sent if task.done()}) and elsewhere < len(answered):
        elsewhere = len(answered)  # a busy machine answers some later than that, though nobody holds them up
        await asyncio.wait(sent - answered, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    return sent, answered


@pytest.mark.parametrize("redis", (False, True), ids=("alone", "with Redis"))
@pytest.mark.parametrize("stream", (True, False), ids=("streamed", "in one piece"))
async def test_requests_do_not_queue_for_a_holder_that_has_stopped(engines, request, stream, redis):
    """The first ones find out; the others are answered where their prompt has to be computed."""
    flags = ("--redis-url", request.getfixturevalue("redis_server").url) if redis else ()
    async with gateway_before(engines, *flags) as gateway:
        await gateway.ready(2)
        texts = [f"{stream} {redis} {PROMPT} {number}" for number in range(25)]
        [name] = {await asked(gateway, text, stream) for text in texts[:5]}
        with stopped(named(engines, name).process.pid):
            sent, answered = await one_after_the_other(gateway, texts[5:], 0.1, stream=stream)
            assert {task.result() for task in answered}.isdisjoint({name})
            assert len(answered) >= 15, "at most five wait for it"
        assert {await task for task in sent}, "and those are answered once it goes on, or elsewhere"
