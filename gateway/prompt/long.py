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

# Bytes of a body above which one at a time is prepared, so that a thread is left for all others: 64 MiB take seconds.
LARGE = 256 * 1024
# A body waits for smaller ones that come later, but no longer than this: 50 kB for 50 ms, 64 MiB for a minute. It is
# what they take with the slower of the two tokenizers.
PATIENCE = 1e-6  # seconds a byte

# A body that waits for a thread: when its patience ends, a number, and [work, its future], empty once cancelled.
Waiting = tuple[float, int, list[Any]]
T = TypeVar("T")


class LongPrompts:
    """Threads that prepare long prompts, those first whose patience ends first, and of the largest ones one at a time.

    They are of its own: what others do in threads must not wait for prompts.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(OFFLOAD_THREADS, "prepare")
        self._free = OFFLOAD_THREADS
        self._larger = False  # one that is LARGE is being prepared
        self._numbers = count()
        # Heaps: up to LARGE, and above.
        self._waiting: tuple[list[Waiting], list[Waiting]] = [], []

    def submit(self, size: int, work: Callable[[], T]) -> asyncio.Future[T]:
        """The result of `work`, which runs in a thread. Cancelled before its turn it does not run, and is let go."""
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
