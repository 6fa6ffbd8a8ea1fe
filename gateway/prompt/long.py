"""Threads that prepare long prompts, while the event loop serves others."""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

from .pipeline import OFFLOAD_THREADS

# Bytes. Larger bodies are prepared one at a time, which leaves a thread for all others: 64 MiB take seconds.
LARGE = 256 * 1024
# A body waits for smaller ones that come later, but no longer than this: 50 kB for 50 ms, 64 MiB for a minute. That is
# the time that it takes with the slower of the two tokenizers.
PATIENCE = 1e-6  # seconds a byte

# A body that waits for a thread: its deadline (loop time), a serial number, and [work, future], empty once cancelled.
Waiting = tuple[float, int, list[Any]]
T = TypeVar("T")


class LongPrompts:
    """A thread pool that prepares long prompts by deadline, but only one body above LARGE at a time.

    A body's deadline is its arrival plus PATIENCE for each of its bytes. The pool serves prompts alone, so that other
    work in threads never waits for them.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, "prepare")
        self._free = OFFLOAD_THREADS
        self._larger = False  # a body above LARGE is being prepared
        self._numbers = count()
        # Heaps of bodies up to LARGE, and above.
        self._waiting: tuple[list[Waiting], list[Waiting]] = [], []

    def submit(self, size: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread and return its result as a future; `size` is the body's size in bytes.

        If the future is cancelled before a thread is free, `work` does not run and is freed.
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
