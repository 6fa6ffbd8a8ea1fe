"""Threads for work that may never end, such as reading a folder on a dead network mount, and one heap for all threads.

Asyncio's own pool has few threads, which all parts of the process share, and the process waits for them when it ends.
Folders that engines name are therefore read in threads of their own, and the process ends even if such a thread hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
MOST_LATE = 16  # threads at most that may be at work beyond their time
LAST_SECONDS = 5.0  # that the ending process waits for work other than on folders, such as writing a file
_FOLDER, _OTHER = "folder", "other work"  # the beginnings of threads' names


M_ARENA_MAX = -8  # from glibc's <malloc.h>


def share_one_heap() -> None:
    """Make all threads allocate from one heap. Call this before the first thread starts; without glibc it does nothing.

    glibc gives threads heaps of their own, and keeps the memory that is freed in them. After 20 uploads of 60 MB, a
    gateway of 200 MB kept 600 MB more for good; with one heap it is back at 240 MB within seconds. Small objects are
    not affected: Python has its own allocator for them, and glibc a cache per thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


class SlowFolder(Exception):
    """Raised for work on a folder that has taken longer than its time; the message names the folder."""


class FolderThreads:
    """Threads for work on folders: `at_once` at a time, each with a time limit of `seconds`.

    Work that exceeds the limit fails. Its thread cannot be stopped, but no longer counts toward `at_once`. Until that
    thread ends, further work for the same folder or engine fails at once. While MOST_LATE threads exceed the limit, all
    new work fails.
    """

    def __init__(self, at_once: int, seconds: float):
        self._gate, self._seconds = asyncio.Semaphore(at_once), seconds
        self._late: dict[frozenset[str], str] = {}  # why it failed, by the folder and the engine

    async def run(self, folder: object, engine: str, function: Callable[..., T], *args: Any) -> T:
        """Call `function` with `args` in a thread, and return its result.

        `folder`: the folder that the function works on. `engine`: the engine that names the folder, "" if it does not
        matter. Raises what the function raises. Raises SlowFolder if the function takes too long, or at once if earlier
        work for the same folder or engine still hangs.
        """
        names = frozenset(filter(None, (str(folder), engine)))
        async with self._gate:
            if why := next((why for late, why in self._late.items() if late & names), ""):
                raise SlowFolder(f"{why}, and has not ended yet")
            if len(self._late) >= MOST_LATE:
                some = next(iter(self._late.values()))
                raise SlowFolder(
                    f"{len(self._late)} other folders are being read and do not answer, one of them: {some}"
                )
            work = _in_thread(f"{_FOLDER} {folder}", partial(function, *args))
            # If the caller is cancelled, the thread goes on, and is late once its time is over, not before.
            return await asyncio.shield(self._in_time(names, folder, work))

    async def _in_time(self, names: frozenset[str], folder: object, work: asyncio.Future[T]) -> T:
        await asyncio.wait({work}, timeout=self._seconds)
        if not work.done():
            self._late[names] = f"reading {folder} takes longer than {self._seconds:g} s"
            work.add_done_callback(lambda ended: self._late.pop(names, None) and ended.exception())
            raise SlowFolder(self._late[names])
        return await work


def _in_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Call `function` in a thread of its own, and return a future of its result.

    The process does not wait for the thread when it ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            report, result = ended.set_result, function()
        except BaseException as raised:  # a library in Rust raises panics that are no Exception
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            report, result = ended.set_exception, error
        with suppress(RuntimeError):  # the event loop may be closed
            loop.call_soon_threadsafe(report, result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return ended


class _Pool(ThreadPoolExecutor):
    """A thread pool for asyncio whose shutdown waits for no thread.

    A thread may hang for good: the operator's files may be on a dead network mount too.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a new event loop and return its result, without waiting for threads that are at work."""

    async def in_pool() -> T:
        asyncio.get_running_loop().set_default_executor(_Pool(thread_name_prefix=_OTHER))
        return await main

    return uvloop.run(in_pool())


def end_process(code: int) -> None:
    """End the process now, with the exit code `code`, if threads are still at work; otherwise return.

    Threads of asyncio's pool first get LAST_SECONDS to end; threads that read folders get no time. The interpreter's
    own exit would wait for the threads, and a thread inside a Rust library would make it abort the process.
    """
    deadline = monotonic() + LAST_SECONDS
    threads = threading.enumerate()
    for one in threads:
        if one.name.startswith(_OTHER):
            one.join(max(0.0, deadline - monotonic()))
    if any(one.is_alive() and one.name.startswith((_FOLDER, _OTHER)) for one in threads):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
