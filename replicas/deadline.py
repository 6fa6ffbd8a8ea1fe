"""Deadlines that count only the time in which the event loop ran.

While the loop is blocked (by a long call, a thread that holds the interpreter lock, a machine with too few cores, a
stopped process) no answer is read. Afterwards the loop runs timers before it reads sockets, so with an ordinary
deadline an answer that has already arrived would count as late.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# Seconds of one wait. If the event loop was blocked during a wait, the wait still counts as only this long.
SLICE = 0.1


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise TimeoutError after `seconds` in which the event loop ran."""
    task = asyncio.ensure_future(work)
    try:
        while seconds > 0 and not task.done():
            await asyncio.wait((task,), timeout=min(SLICE, seconds))
            seconds -= SLICE
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        # Retrieve the error if we were cancelled or gave up just as the work failed; asyncio would log it otherwise.
        if not task.cancelled():
            task.exception()
        # The task holds the error, whose traceback holds this frame: a reference cycle that would keep all of it alive.
        del task


async def set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait until `event` is set, for at most `seconds`; return whether it is set."""
    try:
        # Not `wait_for`: in Python 3.11 it swallows a cancellation that arrives together with the event.
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
