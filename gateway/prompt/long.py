"""A thread pool that renders and tokenizes long prompts, while the event loop serves other requests."""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

from .pipeline import OFFLOAD_THREADS

# Bytes. Bodies above this size are prepared one at a time, which leaves a thread for all others: 64 MiB take seconds.
LARGE = 256 * 1024
# Seconds a byte. Smaller bodies that arrive later overtake a body, but only for this time: 50 ms for a body of 50 kB, a
# minute for one of 64 MiB. The slower of the two tokenizers takes as long for such a body.
PATIENCE = 1e-6

# A body that waits for a thread: its deadline (event-loop time in seconds), a serial number, and the list [work,
# future], which is empty once the future was cancelled.
Waiting = tuple[float, int, list[Any]]
T = TypeVar("T")


class LongPrompts:
    """A thread pool that prepares long prompts, earliest deadline first, and only one body above 256 KiB at a time.

    A body's deadline is its arrival plus a microsecond (PATIENCE) for each of its bytes. The pool is used for prompts
    only, so that other work in threads never waits for prompts.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, "prepare")
        self._free = OFFLOAD_THREADS
        self._larger = False  # a body above LARGE is being prepared
        self._numbers = count()
        # The bodies that wait for a thread, as two heaps: those up to LARGE, and those above.
        self._waiting: tuple[list[Waiting], list[Waiting]] = [], []

    def submit(self, size: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work` for a thread and return a future of its result; `size` is the size of the request body in bytes.

        If the future is cancelled before a thread is free, `work` is dropped without being run.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        entry = [work, future]
        future.add_done_callback(lambda _: entry.clear())
        heapq.heappush(self._waiting[size > LARGE], (loop.time() + PATIENCE * size, next(self._numbers), entry))
        self._start()
        return future

    def _start(self) -> None:
        lesser, larger = self._waiting
        while self._free and (lesser or (larger and not self._larger)):
            large = bool(larger) and not self._larger and (not lesser or larger[0] < lesser[0])
            *_, entry = heapq.heappop(larger if large else lesser)
            if not entry or entry[1].cancelled():
                continue
            work, future = entry
            thread = asyncio.get_running_loop().run_in_executor(self._threads, work)
            self._free -= 1
            self._larger |= large
            thread.add_done_callback(functools.partial(self._done, future, large))

    def _done(self, future: asyncio.Future[Any], large: bool, thread: asyncio.Future[Any]) -> None:
        self._free += 1
        if large:
            self._larger = False
        self._start()
        if future.cancelled():
            return
        if (error := thread.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(thread.result())
