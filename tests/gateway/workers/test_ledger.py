"""What one worker counts all know, once, however it ends."""

import asyncio
import mmap
import os

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap.memory import segment
from gateway.telemetry.metrics import Metrics
from gateway.workers.channel import LONG, Channel, pair
from gateway.workers.ledger import RECENT, Board, ControlLedger, WorkerLedger

WORKERS = 3
REPLICAS = {"a": 0, "b": 1, "c": 65}


def house(count=WORKERS):
    descriptor = segment(Board.size(count))
    board = Board(memoryview(mmap.mmap(descriptor, 0)), count)
    os.close(descriptor)
    control, workers = ControlLedger(board), [WorkerLedger(board, number) for number in range(count)]
    for ledger in (control, *workers):
        for replica, slot in REPLICAS.items():
            ledger.place(replica, slot)
    return board, control, workers


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "reserve", "first_byte", "whole", "release", "die", "again"]),
        st.integers(0, WORKERS - 1), st.sampled_from(sorted(REPLICAS)), st.integers(0, 30),
    ), max_size=60,
)  # fmt: skip


@settings(max_examples=120)
@given(st.sampled_from([2, WORKERS]), STEPS)
def test_all_see_the_sum_of_what_lives(count, steps):
    board, control, workers = house(count)
    taken = [[] for _ in workers]
    for what, who, replica, number in steps:
        who %= count
        ledger = workers[who]
        if what == "reserve":
            taken[who].append(ledger.reserve(replica, number, 2 * number, counted=bool(number % 2)))
        elif what == "die":  # and another takes its place
            board.clear(who)
            taken[who] = []
            ledger = workers[who] = WorkerLedger(board, who)
            for one, slot in REPLICAS.items():
                ledger.place(one, slot)
        elif what == "again":  # removed and added again, under the same name
            for one in (control, *workers):
                one.remove(replica)
                one.place(replica, REPLICAS[replica])
        elif taken[who]:
            one = taken[who][number % len(taken[who])]
            if what == "release":
                ledger.release(one)
            else:
                ledger.first_byte(one, now=1.0 if what == "first_byte" else None)
            if what == "whole":
                ledger.tell()
        for one in REPLICAS:
            sums = tuple(map(sum, zip(*(ledger.own(one) for ledger in workers))))
            assert control.own(one) == sums
            for ledger in workers:
                ledger.catch_up()
                load = ledger.load(one)
                assert (load.requests, load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens) == sums
    for ledger, its in zip(workers, taken):
        for one in its:
            ledger.release(one)
    assert control.total().requests == 0
    assert not any(any(board.page(worker).row(slot)) for worker in range(count) for slot in REPLICAS.values())


def test_who_missed_more_changes_than_are_remembered_reads_all():
    _, _, (first, second, _) = house()
    second.catch_up()
    held = [first.reserve("a", 1, 2) for _ in range(RECENT * 2)]
    kept = first.reserve("c", 5, 5)
    for one in held:
        first.release(one)
    second.catch_up()
    assert (second.load("a").requests, second.load("c").prefill_tokens) == (0, 5)
    first.release(kept)


def test_the_end_of_an_answer_in_one_piece_tells_of_its_first_byte():
    """Which is told by itself only if the end does not follow at once."""
    _, control, (first, second, _) = house()
    one, other, third = (first.reserve("a", 10, 20) for _ in range(3))
    first.first_byte(one)
    first.release(one)
    second.catch_up()
    assert second.load("a").prefilling == 2 and control.own("a") == (2, 2, 20, 0, 0)
    first.first_byte(other)
    first.release(third)  # whatever is told next tells of it
    assert control.own("a") == (1, 0, 0, 1, 20)
    first.release(other)
    assert control.own("a") == (0, 0, 0, 0, 0)


def test_what_redis_tells_is_not_added_to_what_siblings_tell():
    _, _, (first, second, _) = house()
    first.reserve("a", 10, 10)
    second.catch_up()
    second.others("a", (7, 0, 0, 7, 70))  # as a shared decision tells it, siblings included
    second.lose_sight()
    assert second.load("a").requests == 7
    second.others("a", (0, 0, 0, 0, 0))  # Redis is away
    second.catch_up()
    assert second.load("a").requests == 1


async def test_messages_of_any_length_pass_in_order_and_descriptors_with_them():
    near, far = pair()
    heard, ended = [], asyncio.Event()

    def on_message(message, descriptors):
        heard.append(message["n"])
        assert len(message["text"]) == message["length"]
        for one in descriptors:
            assert os.read(one, 10) == b"told"
            os.close(one)

    there = Channel(far, on_message, ended.set)
    here = Channel(near, lambda *_: None, lambda: None)
    reading, writing = os.pipe()
    for number in range(400):  # more than the socket takes at once
        length = 3 * LONG if number % 100 == 50 else 1000
        if number % 100 == 51:
            async with asyncio.timeout(60):
                while len(heard) < number:
                    await asyncio.sleep(0)
            os.write(writing, b"told")
        here.send({"n": number, "length": length, "text": "x" * length}, [reading] if number % 100 == 51 else [])
    async with asyncio.timeout(60):
        while len(heard) < 400:
            await asyncio.sleep(0)
    assert heard == [*range(400)]
    here.close()
    async with asyncio.timeout(60):
        await ended.wait()
    assert there.closed
    os.close(reading)
    os.close(writing)


def test_what_workers_count_adds_up_and_never_shrinks():
    all_of, workers = Metrics(), [Metrics(), Metrics()]
    for turn in range(3):
        for number, one in enumerate(workers):
            one.requests.inc("chat", "2xx", by=number + 1)
            one.replica_requests.inc("a", "2xx")
            one.replica_requests.inc("gone", "2xx")
            one.ttft.observe("a", 0.02 * (turn + 1))
            if turn == 1 and number == 0:  # removed and added again: it counts from zero
                one.forget("a")
                one.replica_requests.inc("a", "2xx")
            all_of.add(orjson.loads(orjson.dumps(one.take())), {"a"})
        assert all_of.requests.total() == 3 * (turn + 1)
        assert all_of.replica_requests.values == {("a", "2xx"): 2 * (turn + 1)}
    assert all_of.ttft.count("a") == 5 and workers[0].take() == {}
