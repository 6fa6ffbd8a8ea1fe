"""Threads whose work may never end, as reading a folder on a network mount that does not answer.

Asyncio's own pool has few threads, which all parts of the process share, and its end is waited for. So folders that
engines name are read in threads of their own, and the process ends whether any thread does or not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
MOST_LATE = 16  # threads that have taken longer than their time and have not ended
LAST_SECONDS = 5.0  # for work that has nothing to do with folders, such as writing a file, when the process ends
_FOLDER, _OTHER = "folder", "other work"  # the beginnings of threads' names


class SlowFolder(Exception):
    """Raised for work on a folder that has taken longer than its time; the message names the folder."""


class _Job:
    def __init__(self, names: frozenset[str], ended: asyncio.Future[Any]):
        self.names, self.ended, self.late = names, ended, ""


class FolderThreads:
    """A number of threads for work on folders, `at_once` at a time, each of which may take `seconds`.

    Work that takes longer fails, and its thread no longer counts as one of these. There are up to MOST_LATE such
    threads, and one for each folder and each engine: until it ends, further work for the same fails at once.
    """

    def __init__(self, at_once: int, seconds: float):
        self._at_once, self._seconds = at_once, seconds
        self._jobs: set[_Job] = set()
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self, folder: object, engine: str, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns for `args`. Raises what it raises, or SlowFolder.

        `engine`: the engine that names the folder, "" where it does not matter.
        """
        loop, names = asyncio.get_running_loop(), frozenset(filter(None, (str(folder), engine)))
        while self._must_wait(names):
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        job = _Job(names, loop.create_future())
        self._jobs.add(job)
        timer = loop.call_later(
            self._seconds, self._is_late, job, f"reading {folder} takes longer than {self._seconds:g} s"
        )

        def ended(result: T | None, error: BaseException | None) -> None:
            timer.cancel()
            self._jobs.discard(job)
            if not job.ended.done():
                job.ended.set_result((result, error))
            self._wake()

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except BaseException as raised:  # a library in Rust raises panics that are no Exception
                error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the event loop may be closed
                loop.call_soon_threadsafe(ended, result, error)

        try:
            threading.Thread(target=work, name=f"{_FOLDER} {folder}", daemon=True).start()
        except RuntimeError as error:  # the system has no thread to give
            ended(None, error)
        result, error = await job.ended
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _must_wait(self, names: frozenset[str]) -> bool:
        """Return whether other work has to end first. Raises SlowFolder if that may never be."""
        late = [one for one in self._jobs if one.late]
        if why := next((one.late for one in late if one.names & names), ""):
            raise SlowFolder(f"{why}, and has not ended yet")
        if len(late) >= MOST_LATE:
            raise SlowFolder(f"{len(late)} other folders are being read and do not answer, one of them: {late[0].late}")
        return len(self._jobs) - len(late) >= self._at_once or any(one.names & names for one in self._jobs)

    def _is_late(self, job: _Job, why: str) -> None:
        job.late = why
        if not job.ended.done():
            job.ended.set_result((None, SlowFolder(why)))
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


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
