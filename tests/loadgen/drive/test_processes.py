"""A load spread over processes is the same load, and what they learned is put together."""

import asyncio
import os
import signal

import pytest

from loadgen.drive.processes import Processes, ProcessFailed, Share
from loadgen.drive.run import Asking
from loadgen.report.summary import summarise
from loadgen.workload.conversations import Conversation, Turn, Workload, span


def work(number: int, gap: float = 0.002) -> Workload:
    message = {"role": "user", "content": (span(1, 5),)}
    return Workload(
        [Conversation(f"c{index}", [Turn([message], 4)]) for index in range(number)],
        [index * gap for index in range(number)],
    )


def share(url: str, load: Workload, **bounds) -> Share:
    return Share(load, url, {"x-team": "a"}, 10.0, Asking("m", salt=3), **bounds)


def test_bounds_are_split_and_nothing_is_lost():
    parts = share("http://h", work(10), max_concurrency=5, users=None).split(3)
    assert [len(part.load.conversations) for part in parts] == [4, 3, 3]
    assert sorted(one.id for part in parts for one in part.load.conversations) == sorted(
        f"c{index}" for index in range(10)
    )
    assert [part.max_concurrency for part in parts] == [2, 2, 1]
    assert [part.users for part in share("http://h", work(10), users=2).split(4)] == [1, 1]
    assert len(share("http://h", work(2)).split(4)) == 2 and len(share("http://h", work(0)).split(4)) == 1


async def test_two_processes_send_the_whole_load(engine, wire):
    async with engine(wire.answer()) as server:
        run = Processes(share(server.url, work(12)), 2)
        async with asyncio.timeout(30):
            await run.go()
        assert sorted(record.conversation for record in run.done) == sorted(f"c{index}" for index in range(12))
        assert len({request.raw for request in server.requests}) == 1  # the same names, the same words, in each
        assert all(request.headers["x-team"] == "a" for request in server.requests)
        assert all(record.due == pytest.approx(run.began + 0.002 * int(record.conversation[1:])) for record in run.done)
        report = summarise(run)
        assert (report["requests"], report["completed"], report["not_sent"]) == (12, 12, 0)
        assert report["generator"]["processes"] == 2 and report["generator"]["connections"] >= 2
        assert report["generator"]["cpu_share"] > 0 and len(run.inflight) == 0


async def test_stopping_stops_all_and_keeps_what_is_known(engine, wire):
    """Four are answered and others held, in both processes; what is due in an hour is never sent."""
    held = asyncio.Event()

    async def respond(request, writer):
        if len(server.requests) > 4:
            if server.inflight == 4:
                held.set()
            await asyncio.Event().wait()
        writer.write(wire.answer())

    load = work(8, 0.0)
    load.conversations += work(2).conversations
    load.starts += [3600.0] * 2
    async with engine(respond) as server:
        run = Processes(share(server.url, load), 2)
        going = asyncio.create_task(run.go())
        async with asyncio.timeout(30):
            await held.wait()
            while len(run.done) < 4:
                await asyncio.sleep(0.01)
            run.stop()
            await going
        assert (len(run.done), run.not_sent, run.interrupted) == (4, 6, True)


async def test_a_process_that_dies_is_told(engine, wire):
    async def respond(request, writer):
        os.kill(run._children[0].pid, signal.SIGKILL)
        await asyncio.Event().wait()

    async with engine(respond) as server:
        run = Processes(share(server.url, work(4)), 2)
        async with asyncio.timeout(30):
            with pytest.raises(ProcessFailed, match="exit code -9"):
                await run.go()
        assert all(child.returncode is not None for child in run._children)
