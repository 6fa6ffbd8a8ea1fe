"""Threads that never come back: the process serves, and ends."""

import asyncio
import subprocess
import sys
import threading

import pytest

from gateway import threads

ENDS = """
import asyncio, threading
from gateway import threads

threads.LAST_SECONDS = 0.0

async def main():
    begun = threading.Event()
    hangs = lambda: begun.set() or threading.Event().wait()
    task = asyncio.create_task({work})
    await asyncio.to_thread(begun.wait)
    print("stopped")
    return 3

threads.end_process(threads.run(main()))
"""


@pytest.mark.parametrize(
    "work", ["asyncio.to_thread(hangs)", "threads.FolderThreads(1, 60.0).run('folder', '', hangs)"]
)
def test_a_process_ends_whatever_its_threads_do(work):
    done = subprocess.run([sys.executable, "-c", ENDS.format(work=work)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "stopped\n"), done.stderr


async def test_work_that_raises_what_is_no_exception_fails():
    class Panic(BaseException):
        pass

    def work():
        raise Panic("index out of range")

    with pytest.raises(RuntimeError, match="Panic: index out of range"):
        await threads.FolderThreads(1, 60.0).run("folder", "", work)


async def test_a_folder_is_refused_when_too_many_others_do_not_answer(monkeypatch):
    monkeypatch.setattr(threads, "MOST_LATE", 1)
    gate, few = threading.Event(), threads.FolderThreads(1, 0.01)
    try:
        for folder, why in (
            ("a", "reading a takes longer than 0.01 s$"),
            ("a", "has not ended yet"),
            ("b", "other folders"),
        ):
            with pytest.raises(threads.SlowFolder, match=why):
                await few.run(folder, "", gate.wait)
    finally:
        gate.set()


async def test_work_whose_caller_is_cancelled_is_late_only_once_its_time_is_over():
    """An engine that restarts while the model is loaded for it must get the model, not a complaint about the folder."""
    gate, begun, loading = threading.Event(), threading.Event(), threads.FolderThreads(2, 60.0)
    first = asyncio.create_task(loading.run("folder", "", lambda: begun.set() or gate.wait()))
    await asyncio.to_thread(begun.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    try:
        assert await loading.run("folder", "", lambda: "loaded") == "loaded"
    finally:
        gate.set()
