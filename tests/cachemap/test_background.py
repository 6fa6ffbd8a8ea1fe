"""Background work goes on after a fault, and every fault is counted."""

import asyncio
import logging

import pytest

from cachemap import background
from cachemap.background import Background


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.001)


async def test_work_that_fails_is_started_again_counted_and_logged_once(caplog):
    loops, begun, heard = Background(), [], []
    done = asyncio.Event()

    async def work():
        begun.append(1)
        if len(begun) == 4:
            done.set()
            await asyncio.Event().wait()
        raise KeyError(f"number {len(begun)}")

    task = loops.spawn("digging", work, on_failure=lambda: heard.append(1))
    assert loops.failures["digging"].count == 0 and loops.recent() == {}  # there is a series before the first failure
    with caplog.at_level(logging.ERROR):
        await done.wait()
    assert len(heard) == 3 and sum(record.exc_info is not None for record in caplog.records) == 1
    assert loops.recent()["digging"]["failures"] == 3 and "number 3" in loops.recent()["digging"]["last"]
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_fault_of_the_clean_up_after_a_fault_does_not_end_the_work_either():
    loops, begun = Background(), asyncio.Queue()

    async def work():
        begun.put_nowait(1)
        raise ValueError

    def clean_up():
        raise OSError("and this as well")

    task = loops.spawn("digging", work, on_failure=clean_up)
    await begun.get()
    await begun.get()
    assert "OSError" in loops.recent()["digging"]["last"]
    task.cancel()
    await asyncio.wait([task])
