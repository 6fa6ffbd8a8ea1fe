"""Threads: their one heap, and those whose work may never end, as reading a folder on a network mount.

Asyncio's own pool has few threads, which all parts of the process share, and its end is waited for. So folders that
engines name are read in threads of their own, and the process ends whether any thread does or not.
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
MOST_LATE = 16  # threads that have taken longer than their time and have not ended
LAST_SECONDS = 5.0  # for work that has nothing to do with folders, such as writing a file, when the process ends
_FOLDER, _OTHER = "folder", "other work"  # the beginnings of threads' names


M_ARENA_MAX = -8  # from glibc's <malloc.h>


def share_one_heap() -> None:
    """Make all threads allocate from one heap. Call it before the first thread starts; without glibc it does nothing.

    glibc gives threads heaps of their own and keeps the memory freed in them: after 20 uploads of 60 MB a gateway of
    200 MB kept 600 MB more for good; with one heap it is at 240 MB within seconds. Small objects are not affected:
    Python has its own allocator for them, and glibc a cache per thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


class SlowFolder(Exception):
    """Raised for work on a folder that has taken longer than its time; the message names the folder."""


class FolderThreads:
    """A number of threads for work on folders, `at_once` at a time, each of which may take `seconds`.

    Work that takes longer fails, and its thread no longer counts as one of these. There may be MOST_LATE such
    threads; until one ends, further work for its folder or engine fails at once.
    """

    def __init__(self, at_once: int, seconds: float):
        self._gate, self._seconds = asyncio.Semaphore(at_once), seconds
        self._late: dict[frozenset[str], str] = {}  # why it failed, by the folder and the engine

    async def run(self, folder: object, engine: str, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns for `args`. Raises what it raises, or SlowFolder.

        `engine`: the engine that names the folder, "" where it does not matter.
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
    """Call `function` in a thread of its own, which the end of the process does not wait for."""
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
    """Asyncio's pool of threads, whose end is not waited for: an operator's files may be on such a mount too."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in an event loop of its own, which does not wait for threads once it has returned."""

    async def in_pool() -> T:
        asyncio.get_running_loop().set_default_executor(_Pool(thread_name_prefix=_OTHER))
        return await main

    return uvloop.run(in_pool())


def end_process(code: int) -> None:
    """End the process at once if threads are still at work, which the interpreter would wait for.

    It must not end beside one that is inside a library in Rust either: that aborts the process.
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
