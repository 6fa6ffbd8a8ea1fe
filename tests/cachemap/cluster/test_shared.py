"""One leads, the others follow: what is the same in all maps, and when."""

import asyncio
from array import array
from types import SimpleNamespace

import pytest

from cachemap import chain_seed, hash_blocks
from cachemap.cluster import shared
from cachemap.cluster.codec import RELOAD
from cachemap.events import sockets

from ..publisher import BLOCK, CLEARED, publishing, removed, stored
from .gateways import event, followed, gateways, hold, is_shared, led, prompt, report, same, sharing, until

PROMPT = prompt(1, 12)[1]


def keys_of(server, part):
    """Return the keys in Redis that contain `part`."""
    with server.client() as client:
        return [key for key in client.keys() if part in key]


async def test_a_gateway_that_joins_reports_no_state_before_it_follows(redis_server, caplog):
    caplog.set_level("INFO")
    async with sharing(redis_server.url, 1) as (publisher, one), gateways(redis_server.url) as (other,):
        await publisher.publish(CLEARED, event(1, 0, 8))
        await hold(1, 8, one)
        other.follow("r", publisher)
        await followed(other)
        assert not [change for change in other.changes if change[0] == "connecting"]
        assert "replica r: follower: another gateway reads its events" in caplog.messages


async def test_a_follower_holds_what_the_leader_holds(redis_server):
    async with sharing(redis_server.url) as (publisher, one, other):
        await publisher.publish(event(1, 0, 8), event(1, 8, 12))
        await hold(1, 12, one, other)
        await publisher.publish(removed(10_011), removed(10_010))
        await until(lambda: other.held("r", PROMPT) == 10, what=lambda: (one.told(), other.told()))
        await publisher.publish(CLEARED, event(2, 0, 3))
        await hold(2, 3, other)
        await same(one, other)
        assert other.held("r", PROMPT) == 0 and other.intakes["r"].state == "live"
        assert publisher.asked == [0]  # nobody but the leader reads events
        assert 0 < other.shared.lag_seconds < 5 and other.intakes["r"].blocks_stored == 15


async def test_a_record_that_comes_after_live_events_is_applied_anew_by_leader_and_follower(redis_server, monkeypatch):
    """What it repeats is held once, and counted again by both: their counts are of what events reported."""
    monkeypatch.setattr(sockets, "REPLAY_SECONDS", 60)
    async with publishing(serves=False) as publisher, gateways(redis_server.url, 2) as (one, other):
        leader = one.follow("r", publisher)
        await led(one)
        await publisher.subscribed()
        follower = other.follow("r", publisher)
        await followed(other)
        await publisher.publish(event(1, 0, 8), event(1, 8, 12))
        await hold(1, 12, other)
        assert leader.blocks_stored == follower.blocks_stored == 12
        publisher.serve_replay()
        await until(lambda: not leader.unreplayed)
        await publisher.publish(removed(10_011), event(2, 0, 3))
        await hold(2, 3, other)
        await same(one, other)
        assert other.held("r", PROMPT) == 11 and not other.contents("r")["copies"]
        assert publisher.asked == [0] and other.shared.reloads == 0
        for intake in (leader, follower):
            assert (intake.blocks_stored, intake.blocks_removed) == (27, 1)


async def test_deltas_that_are_read_again_are_applied_once(redis_server):
    """An answer that was on its way while a follower loaded brings what it has loaded, during the load or after it."""
    async with sharing(redis_server.url) as (publisher, one, other), gateways(redis_server.url) as (late,):
        await publisher.publish(event(1, 0, 6), removed(10_005))
        await until(lambda: other.held("r", PROMPT) == 5)
        read_deltas, loaded = late.shared.read_deltas, []

        async def answered_meanwhile(keys, n):
            deltas = await read_deltas(keys, n)
            loaded.extend(number for number, _ in deltas)
            follower.take(deltas)
            return deltas

        late.shared.read_deltas = answered_meanwhile
        follower = late.follow("r", publisher)
        await followed(late)
        follower.take(await read_deltas(follower.keys, 0))
        assert one.contents("r") == late.contents("r") and late.held("r", PROMPT) == 5
        assert (follower.n, follower.blocks_stored, follower.blocks_removed) == (loaded[-1], 6, 1)
        assert late.shared.reloads == 0 and follower.in_step


async def test_a_new_gateway_is_warm_from_snapshot_and_tail(redis_server):
    async with sharing(redis_server.url, 1) as (publisher, one), gateways(redis_server.url) as (two,):
        for number in range(1, 6):
            await publisher.publish(*(event(number, start, start + 40) for start in range(0, 400, 40)))
        await hold(5, 400, one)
        await until(lambda: one.shared.snapshots > 1)
        await publisher.publish(removed(*(10_000 + i for i in range(399, 300, -1))), event(6, 0, 10), event(6, 0, 10))
        await hold(6, 10, one)
        two.follow("r", publisher)
        await same(one, two)
        assert len(two.contents("r")["held"]) == 1911 and len(two.contents("r")["copies"]) == 10
        assert two.intakes["r"].state == "live" and publisher.asked == [0]


async def test_a_snapshot_that_is_written_anew_while_its_deltas_are_read_is_read_again(redis_server):
    """The delta that says so may follow the old snapshot by its number, and has no changes: a gateway that applied it
    held nothing from then on."""
    async with sharing(redis_server.url, 1) as (publisher, one), gateways(redis_server.url) as (late,):
        # Its answer to the first snapshot is here, too, and is not taken for one to the second.
        await until(lambda: one.shared.snapshots > 0)
        read_snapshot, read_deltas, read = late.shared.read_snapshot, late.shared.read_deltas, []

        async def is_replaced(keys):
            pieces = await read_snapshot(keys)
            if not read:
                written = one.shared.snapshots
                one.intakes["r"].journal.start_over()
                await report(publisher, 1, one)
                await until(lambda: one.shared.snapshots > written)
            return pieces

        async def after(keys, n):
            read.append(await read_deltas(keys, n))
            return read[-1]

        late.shared.read_snapshot, late.shared.read_deltas = is_replaced, after
        late.follow("r", publisher)
        await followed(late)
        assert read[0][0][1].flags & RELOAD and len(read) >= 2
        await same(one, late)


async def test_leases_are_shared_by_gateways_that_start_together(redis_server):
    async with publishing() as publisher, gateways(redis_server.url, 2) as (one, other):
        for i in range(24):
            for gateway in (one, other):
                gateway.follow(f"r{i}", publisher)
        await until(lambda: one.shared.leases + other.shared.leases == 24)
        assert min(one.shared.leases, other.shared.leases) >= 4


async def test_a_leader_that_stops_hands_over_and_the_next_goes_on(redis_server):
    async with sharing(redis_server.url) as (publisher, one, other):
        await report(publisher, 1, one, other)
        await one.stop()
        await publisher.publish(event(1, 6, 9))  # while nobody leads
        await led(other)
        await publisher.publish(event(1, 9, 12))
        await hold(1, 12, other)
        assert set(publisher.asked) == {0} and other.shared.takeovers == 1  # the last batch known is number 0
        assert not any("cleared" in reason for _, reason in other.changes)


async def test_a_gateway_that_takes_over_learns_what_blocks_are_from_the_first_event(redis_server):
    """The gateway before it has heard none: what that expected is not what the engine told."""
    async with sharing(redis_server.url) as (publisher, one, other):
        assert other.intakes["r"].stored_as.size == 0
        await one.stop()
        await led(other, "r", publisher)
        await publisher.publish(stored([1, 2], list(range(4 * BLOCK)), block_size=2 * BLOCK))
        await until(lambda: other.intakes["r"].stored_as.size == 2 * BLOCK)


async def test_a_leader_that_dies_is_followed_within_seconds(redis_server):
    async with sharing(redis_server.url, 3) as (publisher, one, *others):
        await report(publisher, 1, one, *others)
        await one.stop(gracefully=False)
        await publisher.publish(event(1, 6, 12))
        await hold(1, 12, *others, seconds=6)
        assert is_shared(*others)
        await same(*others)


@pytest.mark.parametrize("why", ["the engine lost what came since", "the engine restarted"])
async def test_what_a_dead_leader_missed_and_nobody_can_tell_is_cleared(redis_server, why):
    async with sharing(redis_server.url, kept=3) as (publisher, one, other):
        await report(publisher, 1, one, other)
        await one.stop(gracefully=False)
        if "restarted" in why:
            publisher.restart()
        last = 2 if "restarted" in why else 6
        for number in range(2, last + 1):  # all of them before another gateway leads: the engine keeps three
            await publisher.publish(event(number, 0, 4))
        await hold(last, 4, other)
        assert other.held("r", PROMPT) == 0
        cleared = "gap", "the engine no longer has what was missed: cleared"
        assert "restarted" in why or cleared in other.changes


async def test_a_new_incarnation_starts_from_nothing_and_the_old_one_counts_no_more(redis_server):
    async with sharing(redis_server.url, 3) as (publisher, one, other, late):
        await report(publisher, 1, other, late)
        publisher.restart()
        other.follow("r", publisher, "200.00")
        await led(other)
        assert other.held("r", PROMPT) == 0
        # they have not heard of it yet, Redis has
        await until(lambda: one.held("r", PROMPT) == late.held("r", PROMPT) == 0)
        assert all("newer incarnation" in each.intakes["r"].role_reason for each in (one, late))
        await publisher.publish(event(2, 0, 5))
        for gateway in (one, late):
            gateway.follow("r", publisher, "200.00")
        await hold(2, 5, one, other, late)
        assert not keys_of(redis_server, b":100.00:")


async def test_an_engine_that_was_down_for_long_leaves_nothing_of_its_last_incarnation(redis_server, monkeypatch):
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 0.5)
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.1)
    async with sharing(redis_server.url, 1) as (publisher, one):
        await one.remove("r")
        await asyncio.sleep(2)  # four leases; a model is loaded in minutes
        one.follow("r", publisher, "200.00")
        await led(one)
        assert not keys_of(redis_server, b":100.00:")


@pytest.mark.parametrize("first", ["seen-1", "100.00"])
async def test_a_gateway_that_cannot_tell_the_incarnation_takes_the_one_others_know(redis_server, first):
    async with publishing() as publisher, gateways(redis_server.url, 2) as (one, other):
        one.follow("r", publisher, first)
        await led(one, "r", publisher)
        await report(publisher, 1, one)
        other.follow("r", publisher, "100.00" if first == "seen-1" else "seen-7")
        await until(lambda: is_shared(one, other))
        await hold(1, 6, other)
        await report(publisher, 2, one, other)
        await same(one, other)
        assert not keys_of(redis_server, b":-:")


@pytest.mark.parametrize("name", ["100.00@10.0.0.5", "100.00@fe80::1%eth0", "pid-17"])
async def test_every_name_of_an_incarnation_stays_in_redis_and_is_shared(redis_server, name):
    """Also by gateways that reach the engine at another address, or have never seen it move."""
    async with publishing() as publisher, gateways(redis_server.url, 2) as (one, other):
        one.follow("r", publisher, name)
        await led(one, "r", publisher)
        other.follow("r", publisher, name.partition("@")[0])
        await report(publisher, 1, other)
        assert (one.role("r"), other.role("r")) == ("leader", "follower")
        with redis_server.client() as client:
            assert client.get(one.intakes["r"].keys.newest).decode() == name.partition("@")[0]


async def test_gateways_that_name_blocks_otherwise_are_not_mixed(redis_server):
    async with sharing(redis_server.url, 1) as (publisher, one), gateways(redis_server.url, model="other") as (other,):
        other.follow("r", publisher)
        await until(lambda: other.role("r") == "standalone" and other.intakes["r"].state == "live")
        assert "model m, here it is other" in other.intakes["r"].role_reason
        await publisher.publish(event(1, 0, 6))
        await until(lambda: len(one.contents("r")["held"]) == len(other.contents("r")["held"]) == 6)
        assert not set(one.contents("r")["held"].values()) & set(other.contents("r")["held"].values())


async def test_deployments_do_not_meet(redis_server):
    async with publishing() as publisher, gateways(redis_server.url) as running:
        running.start(redis_server.url, deployment="other")
        for gateway in running:
            gateway.follow("r", publisher)
        for gateway in running:
            await led(gateway)


async def test_a_replica_whose_events_cannot_be_used_is_modelled_by_all(redis_server):
    async with sharing(redis_server.url) as (publisher, one, other), gateways(redis_server.url) as (late,):
        await publisher.publish(stored([1], list(range(2 * BLOCK)), block_size=2 * BLOCK))
        await until(lambda: one.intakes["r"].state == other.intakes["r"].state == "unobserved")
        other.map.expect(0, prompt(3, 5)[1], 0.0)
        assert other.map.match(prompt(3, 5)[1], 0.0).held == [5]
        late.follow("r", publisher)
        await until(lambda: late.intakes["r"].state == "unobserved")


async def test_a_follower_that_finds_its_map_wrong_has_the_events_read_anew(redis_server):
    async with sharing(redis_server.url) as (publisher, one, other):
        await report(publisher, 1, one, other)
        one.map.remove(0, [10_003])  # all have drifted, by their leader
        await until(lambda: other.held("r", PROMPT) == 3)
        other.intakes["r"].resync()
        await hold(1, 6, one, other)
        await same(one, other)


async def test_what_an_adapters_name_stood_for_before_is_forgotten_by_all_and_by_the_next_leader(redis_server):
    red = hash_blocks(array("I", prompt(2, 3)[0]).tobytes(), BLOCK, chain_seed("m", BLOCK, "red"))
    async with sharing(redis_server.url) as (publisher, one, other):
        await publisher.publish(event(1, 0, 6))
        await publisher.publish(event(2, 0, 3) | {"lora_name": "red", "lora_id": 1})
        await until(lambda: one.held("r", red) == other.held("r", red) == 3)
        for gateway in (other, one):  # each sees it by itself
            gateway.intakes["r"].forget_adapter("red")
        await until(lambda: [each.held("r", PROMPT) + each.held("r", red) for each in (one, other)] == [6, 6])
        await same(one, other)
        await one.stop()
        await led(other)
        other.intakes["r"].resync()
        await until(lambda: len(publisher.asked) > 2 and other.held("r", PROMPT) == 6)
        assert other.held("r", red) == 0


async def test_a_reader_that_was_too_slow_for_the_tail_loads_the_snapshot(redis_server):
    async with sharing(redis_server.url) as (publisher, one, other):
        other.shared._tasks["follow 0"].cancel()  # it sleeps
        for number in range(1, 31):
            await publisher.publish(*(event(number, start, start + 40) for start in range(0, 200, 40)))
            await hold(number, 200, one)
        await until(lambda: one.shared.snapshots > 1)
        with redis_server.client() as client:
            kept = client.xrange(one.intakes["r"].keys.deltas, count=1)
            assert not kept or int(kept[0][0].split(b"-")[0]) > other.intakes["r"].n + 1
        del other.shared._tasks["follow 0"]
        other.shared._spawn("follow 0", lambda: other.shared._follow(0))
        await same(one, other)
        assert other.shared.reloads >= 1


async def test_a_follower_that_has_read_on_when_a_look_is_answered_stays(redis_server, monkeypatch):
    """What Redis told of the deltas' number is older than what was read meanwhile."""
    async with sharing(redis_server.url) as (publisher, _, other):
        tend, looks = shared.TEND, []

        async def late(client, keys, arguments):
            answer = await tend(client, keys, arguments)
            if arguments[0] == other.shared.token:
                looks.append(answer)
                if len(looks) == 1:
                    await report(publisher, 2, other)
            return answer

        monkeypatch.setattr(shared, "TEND", late)
        await until(lambda: len(looks) > 1)
        assert other.shared.reloads == 0 and other.role("r") == "follower"


@pytest.mark.parametrize("reads_on", [True, False])
async def test_a_follower_that_is_always_a_little_behind_is_not_stuck(redis_server, reads_on):
    async with gateways(redis_server.url) as (one,):
        reloads = []
        follower = SimpleNamespace(
            load_at=0.0, in_step=True, n=5, behind=0, looked_n=-1, reload=reloads.append, want=lambda role: None
        )
        for _ in range(5):
            one.shared._keep_up(follower, follower.n + 2, follower.n)
            follower.n += reads_on
        assert bool(reloads) is not reads_on


async def test_two_replicas_at_once_with_evictions_and_clears_end_equal(redis_server):
    async with publishing() as a, publishing() as b, gateways(redis_server.url, 3) as running:
        for name, publisher in (("a", a), ("b", b)):
            for gateway in running:
                gateway.follow(name, publisher)
            await publisher.subscribed()
        for step in range(60):
            for publisher, base in ((a, 100), (b, 500)):
                gone = [10_000 * (base + step - 5) + i for i in range(3, 7)] if step > 5 else []
                await publisher.publish(event(base + step, 0, 7), *([removed(*gone)] if gone else []))
                if step == 30:
                    await publisher.publish(CLEARED)
        for name in ("a", "b"):
            await until(lambda name=name: all(gateway.intakes[name].last_seq == 60 for gateway in running))
            await same(running[0], running[1], name)
            await same(running[0], running[2], name)
            assert 0 < len(running[0].contents(name)["held"]) < 400
