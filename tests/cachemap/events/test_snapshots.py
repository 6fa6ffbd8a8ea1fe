"""Snapshots of what an engine holds, from a server that follows vLLM's proposal for them."""

import asyncio
import contextlib
import time

import msgspec
import pytest
import zmq

from cachemap import CacheMap, EventIntake
from cachemap.events import intake as intake_module

from ..publisher import BLOCK, Publisher, decode, removed
from .test_intake import HASHES, blocks, until

A, B = b"a" * 16, b"b" * 16


def batch(*events) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


class Snapshots(Publisher):
    """`answer`: sequence number, publisher id and batches of the next answers, which wait for `may_answer`."""

    def __init__(self, **options):
        super().__init__(id=A, **options)
        self._snapshots = self._context.socket(zmq.ROUTER)
        self._snapshots.setsockopt(zmq.LINGER, 0)
        self.snapshot = f"tcp://127.0.0.1:{self._snapshots.bind_to_random_port('tcp://127.0.0.1')}"
        self.answer: tuple[int, bytes, list[bytes]] = (-1, A, [])
        self.wanted, self.may_answer = 0, asyncio.Event()
        self.may_answer.set()

    async def serve_snapshots(self):
        while True:
            peer, *asked = await self._snapshots.recv_multipart()
            assert asked == [b"snapshot"]
            self.wanted += 1
            await self.may_answer.wait()
            number, id, chunks = self.answer
            await self._snapshots.send_multipart([peer, number.to_bytes(8, "big", signed=True), id, *chunks])


@contextlib.asynccontextmanager
async def house(*, replay=True, **options):
    publisher = Snapshots(**options)
    publisher.serve_replay()
    serving = asyncio.ensure_future(publisher.serve_snapshots())
    table = CacheMap(1 << 20)
    intake = EventIntake(
        table, table.attach("r", None, True), endpoint=publisher.endpoint, replay=publisher.replay if replay else None,
        snapshot=publisher.snapshot, decode=decode, model="m", block_size=BLOCK,
    )  # fmt: skip
    running = []

    def follow():
        running.append(asyncio.ensure_future(intake.run()))

    try:
        yield publisher, table, intake, follow
    finally:
        for task in (serving, *running):
            task.cancel()
        await asyncio.gather(serving, *running, return_exceptions=True)
        await publisher.close()


def held(table):
    return table.match(HASHES, 0.0).confirmed[0]


async def test_what_the_record_no_longer_has_is_in_the_snapshot():
    async with house(kept=1) as (publisher, table, intake, follow):
        for start in range(0, 8, 2):
            await publisher.publish(blocks(start, start + 2))
        publisher.answer = (4, A, [batch(blocks(0, 6)), batch(blocks(6, 9), removed(108))])
        follow()
        await publisher.subscribed()
        await publisher.publish()  # as it does each second
        await until(lambda: held(table) == 8)
        assert (intake.last_seq, publisher.asked, intake.unreplayed) == (4, [], False)
        await publisher.publish(blocks(8, 10))
        await until(lambda: held(table) == 10)
        assert intake.gaps == 0


async def test_what_comes_while_a_snapshot_is_made_is_applied_behind_it():
    async with house(replay=False) as (publisher, table, intake, follow):
        publisher.next, publisher.answer = 5, (5, A, [batch(blocks(0, 4))])
        publisher.may_answer.clear()
        follow()
        await publisher.subscribed()
        await publisher.publish()
        await until(lambda: publisher.wanted == 1)
        await publisher.publish(blocks(4, 6))
        await publisher.publish(blocks(6, 7))
        await until(lambda: intake.last_seq == 7)
        publisher.may_answer.set()
        await until(lambda: held(table) == 7)
        assert (intake.last_seq, intake.gaps) == (7, 0)


async def test_of_what_comes_while_a_snapshot_is_made_only_so_many_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(intake_module, "MOST_SINCE_BYTES", 1)
    async with house() as (publisher, table, intake, follow):
        publisher.next, publisher.answer = 5, (5, A, [batch(blocks(0, 4))])
        publisher.may_answer.clear()
        follow()
        await publisher.subscribed()
        await publisher.publish()
        await until(lambda: publisher.wanted == 1)
        for number in range(4, 8):
            await publisher.publish(blocks(number, number + 1))
            await until(lambda last=number + 2: intake.last_seq == last)
        publisher.may_answer.set()
        await until(lambda: held(table) == 8)
        assert publisher.asked == [7], "what was not kept is in the engine's record"


@pytest.mark.parametrize("answer", [(-1, A, []), (-2, A, []), (3, B, [batch(blocks(0, 4))]), (3, A, [b"no batch"])])
async def test_without_a_snapshot_to_use_the_record_is_replayed(answer):
    async with house() as (publisher, table, intake, follow):
        await publisher.publish(blocks(0, 6))
        publisher.answer = answer
        follow()
        await publisher.subscribed()
        await publisher.publish()
        await until(lambda: held(table) == 6 and not intake.unreplayed)
        assert publisher.wanted and publisher.asked == [0]


async def test_batches_that_are_lost_and_cannot_be_replayed_are_in_the_next_snapshot():
    async with house(replay=False) as (publisher, table, intake, follow):
        publisher.answer = (0, A, [])
        follow()
        await publisher.subscribed()
        await publisher.publish()
        await until(lambda: not intake.unreplayed)
        publisher.answer = (2, A, [batch(blocks(0, 8))])
        await publisher.publish(blocks(0, 8), lose=True)
        await publisher.publish()
        await until(lambda: held(table) == 8)
        assert (intake.gaps, intake.last_seq) == (1, 2)


async def test_another_process_snapshot_replaces_what_the_last_one_held():
    async with house(replay=False) as (publisher, table, intake, follow):
        publisher.answer = (0, A, [batch(blocks(0, 8))])
        follow()
        await publisher.subscribed()
        await publisher.publish()
        await until(lambda: held(table) == 8)
        publisher.id, publisher.answer = B, (1, B, [batch(blocks(0, 3))])
        await publisher.publish()
        await until(lambda: held(table) == 3 and not intake.unreplayed)
