"""Deadlines that count only the time in which the event loop ran.

While the loop is held up (a long call, a thread that keeps the interpreter, a machine with too few cores, a stopped
process) no answer is read, and when it goes on its timers come before its sockets: an answer that lies there would be
taken for late.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# Waited for at a time. However long the loop was held up within one, it counts as one.
SLICE = 0.1


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. After `seconds` in which the loop ran it is cancelled, and TimeoutError raised."""
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
        # whoever was cancelled, or given up, just as the work failed does not ask for its error
        if not task.cancelled():
            task.exception()
        # it holds the error, whose traceback holds this frame: a cycle, and all that waits for the error in it
        del task
