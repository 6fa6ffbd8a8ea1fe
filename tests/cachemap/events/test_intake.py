"""Event intake over real sockets: what arrives, what is lost, what comes again."""

import asyncio
import contextlib
import socket
from array import array
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
import zmq
import zmq.asyncio

import cachemap.events.intake
import cachemap.events.sockets
import cachemap.events.zmtp
from cachemap import CacheMap, EventIntake, chain_seed, hash_blocks
from cachemap.events.zmtp import MOST_FRAME, Inbox, connected

from ..cluster.gateways import until
from ..publisher import BLOCK, CLEARED, Publisher, decode, publishing, removed, stored

TOKENS = list(range(BLOCK * 12))
HASHES = hash_blocks(array("I", TOKENS).tobytes(), BLOCK, chain_seed("m", BLOCK))


def blocks(start, stop):
    """Return a BlockStored event for blocks `start` to `stop` of the prompt; keys are 100 + index."""
    keys = [100 + i for i in range(start, stop)]
    tokens = TOKENS[start * BLOCK : stop * BLOCK]
    return stored(keys, tokens, 99 + start if start else None)


@contextlib.asynccontextmanager
async def following(publisher, *, replay=True, answers=True, **options):
    """Yield a map whose slot 0 follows the publisher, the intake, and the changes that it reports."""
    changes = []
    options["on_change"] = lambda *change: changes.append(change)
    async with hearing(publisher.endpoint, publisher.replay if replay else None, None, **options) as (table, intake):
        await publisher.subscribed()
        if replay and answers:
            await until(lambda: publisher.asked)
        yield table, intake, changes


def held(table):
    return table.match(HASHES, 0.0).confirmed[0]


async def test_blocks_stored_removed_and_cleared_reach_the_map():
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        await publisher.publish(blocks(0, 4), blocks(4, 6))
        await until(lambda: held(table) == 6)
        await publisher.publish(blocks(6, 12))
        await until(lambda: held(table) == 12)
        await publisher.publish(removed(111), removed(110))
        await until(lambda: held(table) == 10)
        assert (intake.blocks_stored, intake.blocks_removed, intake.batches) == (12, 2, 3)
        assert intake.state == "live" and intake.last_seq == 2
        await publisher.publish(CLEARED)
        await until(lambda: held(table) == 0)
        assert [state for state, _ in changes] == ["live"]


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_what_was_published_before_connecting_is_replayed(topic_in_replay):
    async with publishing(topic_in_replay=topic_in_replay) as publisher:
        await publisher.publish(blocks(0, 8))
        await publisher.publish(removed(107))
        async with following(publisher) as (table, intake, _):
            await until(lambda: intake.state == "live")
            assert held(table) == 7 and intake.replayed == 2 and publisher.asked == [0]


async def test_a_replay_of_thousands_of_batches_loses_none():
    async with publishing() as publisher:
        for _ in range(4000):
            await publisher.publish(blocks(0, 1))
        await publisher.publish(blocks(1, 12))
        async with following(publisher) as (table, intake, _):
            await until(lambda: intake.state == "live")
            assert intake.replayed == 4001 and held(table) == 12


async def test_a_gap_is_replayed_and_the_batch_after_it_applied_once():
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        await publisher.publish(blocks(0, 4))
        await until(lambda: held(table) == 4)
        await publisher.publish(blocks(4, 8), lose=True)
        await publisher.publish(blocks(8, 12))
        await until(lambda: held(table) == 12 and intake.state == "live")
        assert publisher.asked == [0, 1]
        assert intake.gaps == 1 and intake.last_seq == 2 and intake.batches == 3
        assert [state for state, _ in changes] == ["live", "gap", "live"]


async def test_a_gap_beyond_the_record_clears_the_replica_and_says_so():
    async with publishing(kept=2) as publisher, following(publisher) as (table, intake, changes):
        await publisher.publish(blocks(0, 4))
        await until(lambda: held(table) == 4)
        for _ in range(4):
            await publisher.publish(removed(999), lose=True)
        await publisher.publish(blocks(0, 2))
        await until(lambda: intake.last_seq == 5 and intake.state == "live")
        assert held(table) == 2
        assert any("cannot be replayed: cleared" in reason for _, reason in changes)


async def test_a_gap_without_a_replay_socket_clears_and_goes_on():
    async with publishing() as publisher, following(publisher, replay=False) as (table, intake, changes):
        await publisher.publish(blocks(0, 4))
        await until(lambda: held(table) == 4)
        await publisher.publish(removed(103), lose=True)
        await publisher.publish(blocks(4, 6), blocks(0, 1))
        await until(lambda: intake.last_seq == 2)
        assert held(table) == 1 and intake.orphans == 2 and intake.state == "live"
        assert any("cleared" in reason for _, reason in changes)


async def test_a_restarted_engine_voids_what_its_predecessor_held():
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        for i in range(3):
            await publisher.publish(blocks(4 * i, 4 * i + 4))
        await until(lambda: held(table) == 12)
        publisher.restart()
        await publisher.publish(blocks(0, 2), lose=True)  # before the subscriber is back
        await publisher.publish(blocks(2, 3))
        await until(lambda: intake.last_seq == 1 and held(table) == 3)  # the rest comes with the replay
        assert ("gap", "the engine restarted: cleared") in changes


def numbers_go_back(publisher, times):
    publisher.next = times % 2


def numbers_jump(publisher, times):
    publisher.next += 5


@pytest.mark.parametrize("disorder", [numbers_go_back, numbers_jump])
async def test_an_engine_that_starts_again_all_the_time_is_followed_now_and_then(disorder):
    """Each message cost a start from nothing and a line of the log: 1,570 a second held up all other replicas."""
    times, taken = 100, 0
    async with publishing() as publisher, following(publisher, replay=False) as (table, intake, changes):
        take = intake._take

        async def counted(messages):
            nonlocal taken
            await take(messages)
            taken += len(messages)

        with patch.object(intake, "_take", counted):
            with patch.object(cachemap.events.intake, "RECOVERY_SECONDS", 1e9):
                for number in range(times):
                    disorder(publisher, number)
                    await publisher.publish(blocks(0, 4))
                await until(lambda: taken == times)
            assert intake.state == "unobserved" and held(table) == 0
            assert len(changes) < 3 * cachemap.events.intake.RECOVERIES and "more often" in intake.reason
            with patch.object(cachemap.events.intake, "RECOVERY_SECONDS", 1e-9):
                await publisher.publish(blocks(0, 4))
                await until(lambda: held(table) == 4)
            assert intake.state == "live"


async def exhaust(publisher, intake):
    """Lose every other batch until the intake has no recovery left."""
    with patch.object(cachemap.events.intake, "RECOVERY_SECONDS", 1e9):
        while intake.state != "unobserved":
            await publisher.publish(blocks(0, 2), lose=True)
            await publisher.publish(blocks(2, 4))
            await until(lambda: intake.state == "unobserved" or intake.last_seq == publisher.next - 1)


async def test_an_engine_that_lost_too_many_batches_is_followed_again_though_it_falls_silent():
    """Its blocks stayed unknown until it stored a new one, which an engine that nobody asks never does."""
    async with publishing() as publisher, following(publisher) as (table, intake, _):
        await exhaust(publisher, intake)
        assert held(table) == 0 and "more often" in intake.reason
        with patch.object(cachemap.events.intake, "RECOVERY_SECONDS", 1e-9):
            await until(lambda: held(table) == 4)
        assert intake.state == "live"


async def test_gaps_of_the_time_before_another_gateway_led_start_nothing_again():
    async with publishing() as publisher:
        async with following(publisher) as (_, intake, _):
            await exhaust(publisher, intake)
        async with following(publisher) as (_, other, _):
            await until(lambda: other.state == "live")
        asked = len(publisher.asked)
        intake.resume(*other.position, True)
        with patch.object(cachemap.events.intake, "RECOVERY_SECONDS", 1e-9):
            task = asyncio.create_task(intake.run())
            await until(lambda: intake.state == "live")
            await publisher.publish(blocks(4, 6))
            await until(lambda: intake.last_seq == publisher.next - 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert 0 not in publisher.asked[asked:]  # which would be everything


@pytest.mark.parametrize("event", ["gap", "gap that cannot be replayed", "restart"])
async def test_a_silent_engine_stays_unobserved_until_it_stores_a_block(event):
    """It was called live after a gap, while the map went on modelling its cache and dropped what it stored."""
    with patch.object(cachemap.events.intake, "SILENT_SECONDS", 0.0):
        async with publishing() as publisher, following(publisher) as (table, intake, _):
            await publisher.publish(blocks(0, 4))
            await until(lambda: held(table) == 4)
            for _ in range(cachemap.events.intake.SILENT_REQUESTS):
                intake.request_finished(3)
            assert intake.state == "unobserved"
            if event == "restart":
                publisher.restart()
            else:
                await publisher.publish(blocks(4, 8), lose=True)
            if event == "gap that cannot be replayed":
                publisher.record.clear()
            await publisher.publish(removed(999))
            await until(lambda: intake.last_seq == publisher.next - 1)
            assert intake.state == "unobserved"
            await publisher.publish(blocks(0, 12))
            await until(lambda: intake.state == "live" and held(table) == 12)


async def test_late_and_repeated_batches_change_nothing():
    async with publishing() as publisher, following(publisher) as (table, intake, _):
        await publisher.publish(blocks(0, 4))
        await publisher.publish(removed(103))
        await until(lambda: intake.last_seq == 1)
        old = publisher.record[0]
        await publisher.publish_raw([b"kv", (0).to_bytes(8, "big"), old])
        await publisher.publish(removed(102))
        await until(lambda: intake.last_seq == 2)
        assert held(table) == 2 and intake.batches == 3


async def test_garbage_is_counted_and_survived():
    async with publishing() as publisher, following(publisher) as (table, intake, _):
        await publisher.publish_raw([b"kv", b"short", b"\xc1"])
        await publisher.publish_raw([b"kv", (7).to_bytes(8, "big"), b"\xc1\xc1"])
        await publisher.publish(blocks(0, 2))
        await until(lambda: held(table) == 2)
        assert intake.malformed == 2 and "2 KV event batches could not be read" in intake.problems[0]


async def test_resync_forgets_and_asks_for_everything():
    async with publishing() as publisher, following(publisher) as (table, intake, _):
        await publisher.publish(blocks(0, 4))
        await until(lambda: held(table) == 4)
        table.remove(0, [102])  # the map drifted
        intake.resync()
        assert held(table) == 0
        await until(lambda: held(table) == 4)
        assert publisher.asked == [0, 0]


RED = hash_blocks(array("I", TOKENS).tobytes(), BLOCK, chain_seed("m", BLOCK, "red"))


def red(start, stop, first_key):
    """Return a BlockStored event for blocks `start` to `stop` under the adapter "red"; keys are first_key + index."""
    event = blocks(start, stop) | {"lora_name": "red", "lora_id": 1, "extra_keys": [["red"]] * (stop - start)}
    return event | {
        "block_hashes": [first_key + i for i in range(start, stop)],
        "parent_block_hash": first_key + start - 1 if start else None,
    }


async def test_an_adapters_name_that_stands_for_another_folder_voids_what_was_stored_under_it():
    """Also where the engine replays it; what else the replica holds comes back, and what is stored from now on
    counts."""
    async with publishing() as publisher, following(publisher) as (table, intake, _):

        def seen():
            return held(table), table.match(RED, 0.0).confirmed[0]

        await publisher.publish(blocks(0, 4))
        await publisher.publish(red(0, 3, 1000))
        await until(lambda: seen() == (4, 3))
        intake.forget_adapter("red")
        assert seen() == (0, 0)
        await until(lambda: seen() == (4, 0))
        await publisher.publish(red(0, 1, 2000))
        await until(lambda: seen() == (4, 1))
        await publisher.publish(removed(1000, 1001, 1002), red(1, 2, 2000))
        await until(lambda: seen() == (4, 2))
        intake.resync()
        await until(lambda: seen() == (4, 2))


async def test_a_replay_socket_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 0.05)
    monkeypatch.setattr(cachemap.events.intake, "RETRY_SECONDS", (0.05, 0.1))
    async with publishing(serves=False) as publisher:
        await publisher.publish(blocks(0, 4))
        async with following(publisher, answers=False) as (table, _, _):
            await publisher.publish(blocks(0, 1))  # live events flow meanwhile
            await until(lambda: held(table) == 1)
            publisher.serve_replay()
            await until(lambda: held(table) == 4)


@pytest.mark.parametrize("junk", [[b"x"], [b""]])
async def test_a_replay_of_what_is_no_batch_is_none(junk, monkeypatch):
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 0.2)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")

        async def answer():
            asker, *_ = await server.recv_multipart()
            while True:
                await server.send_multipart([asker, *junk])
                await asyncio.sleep(0.01)

        task = asyncio.ensure_future(answer())
        with pytest.raises(TimeoutError, match="no answer"):
            async for _ in cachemap.events.sockets.replay(f"tcp://127.0.0.1:{port}", 0):
                raise AssertionError
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_is_long_in_replaying_keeps_nothing_waiting(monkeypatch):
    """As one that has just started: what it tells meanwhile is known at once, and what it told before when it
    answers."""
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 60)
    async with publishing(serves=False) as publisher:
        await publisher.publish(blocks(0, 2), lose=True)
        async with following(publisher, answers=False) as (table, intake, _):
            await publisher.publish(stored([1], TOKENS[:BLOCK]), stored([2], TOKENS[BLOCK : 2 * BLOCK], 1))
            await until(lambda: held(table) == 2)
            assert intake.unreplayed and intake.replayed == 0
            await publisher.publish(removed(2))
            await until(lambda: held(table) == 1)
            publisher.serve_replay()
            await until(lambda: intake.replayed == 3 and held(table) == 2)  # by the keys of the batch before
            await publisher.publish(removed(101))
            await until(lambda: held(table) == 1)
            assert intake.state == "live" and intake.gaps == 0


@pytest.mark.parametrize("drops_end", [False, True], ids=["a hole", "no end"])
async def test_what_an_engines_socket_drops_of_a_record_is_asked_for_again(monkeypatch, drops_end):
    """vLLM's drops what is 1,000 messages ahead of the network, and says nothing."""
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 0.2 if drops_end else 60)
    async with publishing(room=3, drops_end=drops_end) as publisher:
        for number in range(8):
            await publisher.publish(blocks(number, number + 1), lose=True)
        async with following(publisher) as (table, intake, _):
            await until(lambda: not intake.unreplayed)
            assert publisher.asked == [0, 3, 6] and intake.last_seq == 7 and intake.replayed == 8
            assert held(table) == 8 and table.match(HASHES, 0.0).held == [8]


async def test_a_record_of_which_the_rest_is_gone_meanwhile_is_asked_for_anew(monkeypatch):
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 60)
    monkeypatch.setattr(cachemap.events.intake, "RETRY_SECONDS", (0.0, 0.0))
    async with publishing(room=3) as publisher:
        for number in range(8):
            await publisher.publish(blocks(number, number + 1), lose=True)
        asked = []

        def forgets(start: int) -> None:
            asked.append(start)
            if start == 3:
                publisher.record = {number: batch for number, batch in publisher.record.items() if number > 4}

        publisher.asked = SimpleNamespace(append=forgets)
        async with following(publisher) as (table, intake, _):
            await until(lambda: not intake.unreplayed)
            # what is left begins in the middle of a chain
            assert asked == [0, 3, 0] and intake.last_seq == 7 and held(table) == 0


async def test_what_comes_while_the_record_is_on_its_way_is_not_forgotten_with_the_rest(monkeypatch):
    """The engine reads its record out, tells of another batch, and only then the record is here."""
    asked, replay = [], cachemap.events.intake.replay

    async def as_of_before_the_last(endpoint, start):
        asked.append(start)
        async for messages in replay(endpoint, start):
            if some := [
                frames
                for frames in messages
                if len(asked) > 1 or cachemap.events.intake.SEQUENCE.unpack(frames[-2])[0] < 2
            ]:
                yield some

    monkeypatch.setattr(cachemap.events.intake, "replay", as_of_before_the_last)
    monkeypatch.setattr(cachemap.events.sockets, "REPLAY_SECONDS", 60)
    async with publishing(serves=False) as publisher:
        await publisher.publish(blocks(0, 2), lose=True)
        async with following(publisher, answers=False) as (table, intake, _):
            await publisher.publish(blocks(2, 4))
            await publisher.publish(blocks(4, 6))
            await until(lambda: intake.last_seq == 2)
            publisher.serve_replay()
            await until(lambda: not intake.unreplayed)
            assert asked == [0, 2] and intake.last_seq == 2 and held(table) == 6


async def test_a_silent_replica_is_modelled_until_its_events_come(monkeypatch):
    monkeypatch.setattr(cachemap.events.intake, "SILENT_SECONDS", 0.0)
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        await until(lambda: intake.state == "live")
        for _ in range(3):
            intake.request_finished(5)
            intake.request_finished(0)  # nothing new in it: says nothing
        assert intake.state == "live"
        intake.held_up()  # what was told meanwhile may not be read yet
        for _ in range(3):
            intake.request_finished(5)
        assert intake.state == "live"
        intake.request_finished(5)
        assert intake.state == "unobserved" and "no block was reported" in changes[-1][1]
        table.expect(0, HASHES, 0.0)
        assert table.match(HASHES, 1e6).held == [12]  # a model does not expire
        await publisher.publish(blocks(0, 4), lose=True)
        await publisher.publish(blocks(4, 6))
        await until(lambda: intake.state == "live" and held(table) == 6)
        assert table.match(HASHES, 0.0).held == [6]


async def test_events_under_another_topic_are_named_not_dropped_silently(monkeypatch):
    monkeypatch.setattr(cachemap.events.intake, "SILENT_SECONDS", 0.0)
    async with publishing(topic=b"kv@r1") as publisher:
        async with following(publisher, replay=False, topic="kv@r0") as (table, intake, changes):
            await publisher.publish(blocks(0, 4))

            def finished():
                intake.request_finished(4)
                return "kv@r1" in intake.reason

            await until(finished)
            assert held(table) == 0 and intake.state == "unobserved"


async def test_another_block_size_makes_the_replica_unobserved_and_says_why():
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        await publisher.publish(stored([1], list(range(32)), block_size=32))
        await until(lambda: intake.state == "unobserved")
        assert "32 tokens" in intake.reason and f"blocks of {BLOCK}" in intake.reason
        await publisher.publish(stored([2], list(range(32)), block_size=32))
        await until(lambda: intake.last_seq == 1)
        assert [state for state, _ in changes].count("unobserved") == 1


async def test_array_events_with_byte_hashes_as_older_engines_send_them():
    keys = [bytes([i]) * 32 for i in range(12)]
    async with publishing() as publisher, following(publisher) as (table, intake, _):
        await publisher.publish(["BlockStored", keys[:8], None, TOKENS[: 8 * BLOCK], BLOCK, None, "GPU"])
        await publisher.publish(["BlockStored", keys[8:], keys[7], TOKENS[8 * BLOCK :], BLOCK, None])
        await publisher.publish(["BlockRemoved", [keys[11]], "GPU"], ["SomethingNew", 1, 2])
        await until(lambda: intake.last_seq == 2)
        assert held(table) == 11 and intake.passed_over == 1 and intake.malformed == 0


async def test_an_engine_that_writes_blocks_in_another_way_is_unobserved_and_the_reason_names_it(monkeypatch):
    """As a later vLLM might: a field renamed, an event added. It must not flap between the two ways of following."""
    monkeypatch.setattr(cachemap.events.intake, "SILENT_SECONDS", 0.0)
    renamed = blocks(0, 4)
    renamed["tokens"] = renamed.pop("token_ids")
    async with publishing() as publisher, following(publisher) as (table, intake, changes):
        for number in range(6):
            await publisher.publish(renamed, {"type": "BlockMoved"}, removed(300 + number))
            await until(lambda number=number: intake.last_seq == number)
            intake.request_finished(4)
        assert intake.state == "unobserved" and "missing required field `token_ids`" in intake.reason
        assert [state for state, reason in changes if "passed over" not in reason].count(
            "live"
        ) == 1 and intake.gaps == 0
        (said,) = intake.problems
        assert "12 KV events were passed over" in said and "unknown type 'BlockMoved'" in said
        assert sum("are passed over" in reason for _, reason in changes) == 2  # each cause is told once
        await publisher.publish(blocks(0, 4))
        await until(lambda: intake.state == "live" and held(table) == 4)


def test_the_payload_of_the_tests_is_that_of_the_engine():
    recorded = bytes.fromhex("93cb41dac001dbe80e6e918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf")
    ours = msgspec.msgpack.encode([1795164015.6258807, [stored([1 << 63], [0] * BLOCK)], 0])
    assert ours[:1] + ours[9:44] == recorded[:1] + recorded[9:44]


@contextlib.asynccontextmanager
async def hearing(endpoint, replay=None, capacity=8, **options):
    """Yield a map and an intake that reads from an endpoint where perhaps nothing listens."""
    table = CacheMap(1 << 20)
    slot = table.attach("r", capacity, True)
    intake = EventIntake(
        table, slot, endpoint=endpoint, replay=replay, decode=decode, model="m", block_size=BLOCK, **options
    )
    task = asyncio.ensure_future(intake.run())
    try:
        yield table, intake
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_endpoint_where_nobody_listens_is_told_at_once_and_the_cache_is_modelled_until_somebody_does(
    unused_tcp_port,
):
    async with hearing(f"tcp://127.0.0.1:{unused_tcp_port}") as (table, intake):
        await until(lambda: intake.state == "unobserved", 0.9)
        table.expect(0, HASHES, 0.0)
        assert table.match(HASHES, 0.0).held[0] <= 8, "all that the engine's cache has room for"
        assert f"tcp://127.0.0.1:{unused_tcp_port} cannot be reached: nothing listens there" in intake.reason
        async with publishing(port=unused_tcp_port) as publisher:
            await publisher.subscribed()
            await until(lambda: intake.state == "connecting")
            await publisher.publish(blocks(0, 4))
            await until(lambda: held(table) == 4 and intake.state == "live")


async def test_an_endpoint_that_takes_connections_and_says_nothing_is_unreachable(monkeypatch):
    monkeypatch.setattr(cachemap.events.intake, "LINK_SECONDS", 0.2)
    monkeypatch.setattr(cachemap.events.intake, "WAKE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with hearing(f"tcp://127.0.0.1:{server.getsockname()[1]}") as (_, intake):
            await until(lambda: intake.state == "unobserved")
            assert "no ZMQ publisher answered" in intake.reason


async def test_a_connection_that_is_lost_for_long_voids_what_was_heard_and_is_followed_again(monkeypatch):
    monkeypatch.setattr(cachemap.events.intake, "LINK_LOST_SECONDS", 0.3)
    monkeypatch.setattr(cachemap.events.intake, "WAKE_SECONDS", 0.1)
    publisher = Publisher()
    publisher.serve_replay()
    async with hearing(publisher.endpoint, publisher.replay) as (table, intake):
        await publisher.subscribed()
        await publisher.publish(blocks(0, 4))
        await until(lambda: held(table) == 4)
        port = int(publisher.endpoint.rpartition(":")[2])
        await publisher.close()
        await until(lambda: intake.state == "unobserved" and held(table) == 0)
        assert "was lost and cannot be made again" in intake.reason
        async with publishing(port=port) as back:
            await back.subscribed()
            await back.publish(blocks(0, 2))
            await until(lambda: held(table) == 2)


async def test_frames_that_are_too_long_are_named_among_the_replicas_problems():
    """Each ends the connection, and ZMQ makes none again; events behind it are followed."""
    async with publishing() as publisher, following(publisher, replay=False) as (table, intake, _):
        await publisher.publish(blocks(0, 1))
        await until(lambda: held(table) == 1)
        assert not intake.problems
        await publisher.publish_raw([b"kv", (1).to_bytes(8, "big"), bytes(MOST_FRAME + 1)])
        await publisher.subscribed()
        assert ["frame above 8 MiB" in one for one in intake.problems] == [True]
        await publisher.publish(blocks(0, 2))
        await until(lambda: held(table) == 2)
        assert intake.too_long == 1


# How ZMTP 3.0 greets, what a publisher says it is, and the head of a frame of 16 MiB.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"
LONG_FRAME = b"\x02" + (1 << 24).to_bytes(8, "big") + b"x"


@contextlib.asynccontextmanager
async def serving(serve):
    """Yield the endpoint of a server that passes its first connection to `serve`, and the writers of all of them."""
    writers = []

    async def accept(reader, writer):
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            if len(writers) == 1:
                await serve(reader, writer)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", writers
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    ("part", "most"),
    [(b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20), 68), (b"\x01\x01x", 1 << 16), (b"\x01\0", 1 << 16)],
    ids=["MiB", "bytes", "nothing"],
)
async def test_a_message_without_end_is_broken_off(part, most):
    """libzmq keeps all parts of a message whose end has not come: 1,200 of 1 MiB were 1.3 GB, and 3,000,000 of a byte
    held up all for 9 s."""
    taken = [0]

    async def serve(_, writer):
        writer.write(GREETING + READY)
        while True:
            writer.write(part * (1 + (1 << 16) // len(part)))
            await writer.drain()

    def count(inbox, data):
        taken[0] += len(data)
        received(inbox, data)

    received = Inbox.data_received
    with patch.object(Inbox, "data_received", count):
        async with serving(serve) as (endpoint, writers), hearing(endpoint) as (_, intake):
            await until(lambda: intake.too_long)
            assert taken[0] <= most * len(part) + (1 << 20)
            assert ["a message above 64 MiB" in one for one in intake.problems] == [True]
            await until(lambda: len(writers) > 1)


async def test_what_is_not_taken_is_not_read(monkeypatch):
    """And all of it comes once it is: many frames in one read, and one in many."""
    for name, most in (("MOST_QUEUED", 1 << 16), ("TURN_FRAMES", 7)):
        monkeypatch.setattr(cachemap.events.zmtp, name, most)
    sent = [[b"kv", number.to_bytes(8, "big"), bytes(number % 3000)] for number in range(3000)]
    async with publishing() as publisher:
        with connected("SUB", publisher.endpoint) as inbox:
            await publisher.subscribed()
            for frames in sent:
                await publisher.publish_raw(frames)
            await until(lambda: inbox._halted and inbox._queued > 1 << 16)
            assert inbox._queued < 1 << 17
            taken = []
            while len(taken) < len(sent):
                taken += inbox.take()
                await inbox.changed(0.01)
            assert taken == sent and inbox.faults == 0


async def test_pings_are_answered_and_other_commands_are_passed_over():
    came = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        writer.write(GREETING + READY + b"\x04\x09\x04PING\0\x0aab" + b"\x04\x04\x03NEW" + b"\0\x01m")
        await reader.readexactly(len(GREETING + READY) + 3)  # and the subscription
        came.set_result(await reader.readexactly(9))

    async with serving(serve) as (endpoint, _):
        with connected("SUB", endpoint) as inbox:
            assert await came == b"\x04\x07\x04PONGab" and inbox.take() == [[b"m"]]


@pytest.mark.parametrize(
    "greets", [GREETING + READY, b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)], ids=["ZMQ", "HTTP"]
)
async def test_who_breaks_the_protocol_and_says_nothing_then_is_asked_again_and_no_longer_believed(greets, monkeypatch):
    for name, seconds in (("LINK_SECONDS", 0.2), ("LINK_LOST_SECONDS", 0.8), ("WAKE_SECONDS", 0.1)):
        monkeypatch.setattr(cachemap.events.intake, name, seconds)
    speaks_zmq, may_end = greets.startswith(GREETING), asyncio.Event()

    async def serve(_, writer):
        writer.write(greets)
        await may_end.wait()
        writer.write(LONG_FRAME)

    async with serving(serve) as (endpoint, writers), hearing(endpoint) as (_, intake):
        if speaks_zmq:
            await until(lambda: intake._linked)
            may_end.set()
        await until(lambda: len(writers) > 1 and intake.state == "unobserved")
        assert ("was lost" in intake.reason) is speaks_zmq and intake.too_long == speaks_zmq
