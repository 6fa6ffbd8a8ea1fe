"""A cancellation that comes together with what a task waits for ends the task all the same.

`asyncio.wait_for` of Python 3.11 swallows one that comes between the end of what it waits for and its own: the task
goes on, and whoever stops it waits for ever. Each place that waits for an event with a deadline is tried, with the
cancellation so many iterations of the event loop after the event.
"""

import asyncio
import contextlib

import pytest

from cachemap.background import Background
from cachemap.events.zmtp import Inbox
from replicas.deadline import within
from replicas.fleet import Fleet
from replicas.lifecycle import Event, State
from replicas.replica import Replica
from replicas.watch import Watch

LATER = range(5)  # iterations: more than any of these needs from the event to its end


async def ends(task: asyncio.Task) -> bool:
    """Whether it ends by itself, without any time going by."""
    for _ in range(50):
        await asyncio.sleep(0)
    return task.done()


async def cancelled(work, happens, later: int) -> bool:
    """Whether a task that does `work` ends when it is cancelled so much later than `happens`."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    happens()
    for _ in range(later):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await ends(task)
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=0.05)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_this_test_sees_a_swallowed_cancellation():
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await event.wait()
        await for_ever()

    event = asyncio.Event()
    assert not await cancelled(swallow(), lambda: None, 0)


@pytest.mark.parametrize("later", LATER)
async def test_a_deadline(later):
    async def work() -> None:
        await within(5, event.wait())
        await for_ever()

    event = asyncio.Event()
    assert await cancelled(work(), event.set, later)


@pytest.mark.parametrize("later", LATER)
async def test_the_watcher_of_a_replica_that_is_nudged(later):
    replica = Replica("10.0.0.7:8000", "http://10.0.0.7:8000", "10.0.0.7", 8000)
    replica.apply(Event.STOPPED, "not asked while a test looks", 0.0)
    assert replica.state is State.STOPPED
    watch = Watch(replica, Fleet())
    assert await cancelled(watch.run(), watch.nudge, later)


@pytest.mark.parametrize("later", LATER)
async def test_who_waits_for_an_engines_events(later):
    async def work() -> None:
        await inbox.changed(5)
        await for_ever()

    inbox = Inbox("SUB", "ipc:///nobody")
    try:
        assert await cancelled(work(), inbox.wake, later)
    finally:
        inbox.close()


async def test_background_work_whose_client_library_swallows_it(monkeypatch):
    """redis-py uses wait_for, so what did not end by a cancellation is at least not begun again."""

    async def work() -> None:
        begun.append(True)
        try:
            await for_ever()
        except asyncio.CancelledError:
            if len(begun) == 1:
                raise ConnectionError from None
            raise

    monkeypatch.setattr("cachemap.background.PAUSE_SECONDS", 0.0)
    begun: list[bool] = []
    assert await cancelled(Background().spawn("reading", work), lambda: None, 0) and len(begun) == 1
