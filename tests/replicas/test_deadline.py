"""Deadlines count only the time in which the event loop ran."""

import asyncio
import gc
from time import sleep

import pytest
from aiohttp import web

from replicas.ask import get
from replicas.deadline import within


async def test_what_is_in_time_is_returned_and_what_fails_raises():
    assert await within(5, asyncio.sleep(0.15, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await within(5, _fails())


async def _fails():
    raise ZeroDivisionError


async def test_an_error_that_comes_together_with_a_cancellation_is_no_unretrieved_one():
    told: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def fails_when(event: asyncio.Event):
        await event.wait()
        raise ZeroDivisionError

    for later in range(4):  # iterations of the event loop between the failure and the cancellation
        event = asyncio.Event()
        task = asyncio.ensure_future(within(5, fails_when(event)))
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(later):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        task.cancelled() or task.exception()
        del task
    gc.collect()
    assert not told


async def test_what_is_late_is_cancelled():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError):
        await within(0.05, endless())
    assert ended
    task = asyncio.ensure_future(within(5, endless()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 2


async def test_a_probe_that_is_late_because_we_were_is_waited_for(serve, session):
    begun = asyncio.Event()

    async def handler(request):
        begun.set()
        await asyncio.sleep(0.05)
        return web.Response(text="fine")

    async def held_up():
        await begun.wait()
        sleep(0.6)  # the event loop, as a parser that keeps the interpreter would hold it up

    url = await serve(handler)
    answer, _ = await asyncio.gather(get(session, f"{url}/health", 0.3), held_up())
    assert (answer.status, answer.body, answer.fault) == (200, b"fine", "")
