"""Whatever happens to Redis, maps go on and become one again by themselves."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from cachemap.cluster.link import Link
from tests.gateway.ops.test_redis_check import DOCUMENTED, acl
from tests.redis_server import Cluster, Proxy, Sentinels, certificate, running

from ..publisher import publishing, removed
from .gateways import event, followed, gateways, healed, hold, led, report, same, share, sharing, until, writes


def now():
    return asyncio.get_running_loop().time()


def through(proxy, publisher, replay=None):
    """Return what a gateway needs of a publisher that it reaches through a proxy."""
    return SimpleNamespace(endpoint=f"tcp://127.0.0.1:{proxy.port}", replay=replay, subscribed=publisher.subscribed)


@pytest.mark.parametrize("data", ["empty", "kept"])
async def test_redis_killed_and_restarted(start_redis, redis_binary, data):
    server = start_redis(binary=redis_binary, appendonly="yes")
    async with sharing(server.url) as (publisher, one, other):
        await report(publisher, 1, one, other)
        server.kill()
        await publisher.publish(event(1, 6, 9))
        await hold(1, 9, one)
        await until(lambda: other.role("r") == "standalone", 6)  # after the lease's time it follows the events itself
        await hold(1, 9, other)
        await publisher.publish(removed(10_008), event(2, 0, 5))
        await hold(2, 5, one, other)
        server.restart(empty=data == "empty")
        await healed(one, other)
        await report(publisher, 3, one, other, blocks=5)
        await same(one, other)
        async with gateways(server.url) as (late,):
            late.follow("r", publisher)
            await same(one, late)
            assert late.role("r") == "follower"
        assert not any("cleared" in reason for _, reason in one.changes + other.changes)


async def test_redis_restarted_at_once_while_nothing_happens_has_the_map_again(start_redis):
    server = start_redis()
    async with sharing(server.url) as (publisher, one, other):
        await report(publisher, 1, one, other)
        server.restart(empty=True)
        async with gateways(server.url) as (late,):
            late.follow("r", publisher)
            await hold(1, 6, late)
            await healed(one, other) if late.role("r") == "follower" else await same(one, late)


@pytest.mark.parametrize("seconds", [1.5, 5.0])
async def test_redis_frozen(start_redis, seconds):
    server = start_redis()
    async with sharing(server.url) as (publisher, one, other):
        server.freeze()
        thaws = now() + seconds
        for number in range(1, 6):
            await report(publisher, number, one)
        if seconds > 4:
            await hold(5, 6, other)
        await until(lambda: now() >= thaws)
        server.thaw()
        await hold(5, 6, other)
        await healed(one, other)
        await report(publisher, 9, one, other)


async def test_after_redis_was_stopped_for_longer_than_a_lease_the_leader_writes_again_at_once(redis_server):
    """What could not be written while nobody answered is no sign that Redis takes no more."""
    async with sharing(redis_server.url, 1) as (publisher, one):
        redis_server.freeze()
        await publisher.publish(event(1, 0, 6))
        await until(lambda: one.intakes["r"].journal is None or one.intakes["r"].journal.whole)
        since = one.shared.now()
        await until(lambda: one.shared.now() - since > Link.lease_seconds)  # Redis's clock goes on
        redis_server.thaw()
        await until(lambda: one.shared.usable and writes(one), 4)
        async with gateways(redis_server.url) as (other,):  # and goes on
            other.follow("r", publisher)
            await followed(other)
            await report(publisher, 2, one, other)
            assert one.role("r") == "leader"


async def test_redis_slow(redis_server):
    async with Proxy(redis_server.port) as proxy, publishing() as publisher, gateways(proxy.url, 2) as (one, other):
        proxy.delay = 0.1
        await share(publisher, one, other)
        for number in range(1, 20):
            await publisher.publish(event(number, 0, 6))
        await hold(19, 6, one, other)
        await same(one, other)
        assert (one.role("r"), other.role("r")) == ("leader", "follower")
        assert one.shared.errors == other.shared.errors == 0
        proxy.delay = 1.0  # two of them are more than a call may take
        await report(publisher, 20, one, other)
        proxy.delay = 0.0
        await healed(one, other)


@pytest.mark.parametrize("whose", ["leader", "follower"])
async def test_one_gateway_cut_off_from_redis(redis_server, whose):
    """The other half goes on; nothing is written by two."""
    async with Proxy(redis_server.port) as proxy, publishing() as publisher, gateways(redis_server.url) as gates:
        gates.start(proxy.url)
        one, other = gates if whose == "follower" else gates[::-1]
        await share(publisher, one, other)
        proxy.cut()
        await report(publisher, 1, one, other)
        if whose == "leader":
            await led(other)
        await report(publisher, 2, one, other)
        proxy.mend()
        await healed(one, other)
        assert (other if whose == "leader" else one).role("r") == "leader"


async def test_redis_full(start_redis):
    server = start_redis(maxmemory_policy="noeviction")
    async with sharing(server.url) as (publisher, one, other):
        with server.client() as client:
            client.config_set("maxmemory", 1)
            await report(publisher, 1, one, other)  # the follower learns that nobody can write, and listens itself
            client.config_set("maxmemory", 0)
        await healed(one, other)


async def test_started_while_redis_is_away(start_redis):
    server = start_redis()
    server.kill()
    async with publishing() as publisher, gateways(server.url, 2) as (one, other):
        began = now()
        for gateway in (one, other):
            gateway.follow("r", publisher)
            await publisher.subscribed()
        await report(publisher, 1, one, other)
        assert now() - began < 3
        server.start()
        await healed(one, other)


async def test_behind_tls_with_an_acl_user(start_redis, tmp_path):
    context, authority = certificate(tmp_path)
    server = start_redis(user=acl(*DOCUMENTED))
    async with Proxy(server.port, tls=context) as proxy, publishing() as publisher:
        url = f"rediss://gate:secret@127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority}"
        async with gateways(url, 2, deployment="prod") as (one, other):
            await share(publisher, one, other)
            await report(publisher, 1, one, other)
        for wrong in (url.replace("secret", "guess"), url.partition("?")[0]):
            async with gateways(wrong, deployment="prod") as (stranger,):
                stranger.follow("r", publisher)
                await hold(1, 6, stranger)
                assert stranger.role("r") == "standalone" and not stranger.shared.usable


async def test_a_fault_of_a_gateways_own_in_one_replica_is_seen_and_costs_the_others_nothing(redis_server):
    """Its part of the map is gone under the leader's hands: another gateway takes over, the second replica is as
    before."""
    async with publishing() as publisher, publishing() as another, gateways(redis_server.url, 2) as (one, other):
        await share(publisher, one, other)
        await share(another, one, other, name="s")
        one.map.detach(one.slots["r"])
        await publisher.publish(event(1, 0, 6))
        await until(lambda: other.role("r") == "leader")
        await hold(1, 6, other)
        failures = one.shared.background.recent()
        assert any("KeyError" in told["last"] and "r" in told["last"] for told in failures.values())
        assert "KeyError" in one.intakes["r"].problems[0]
        await report(another, 2, one, other, name="s")
        assert (one.role("s"), other.role("s")) == ("leader", "follower")


async def test_a_leader_that_cannot_reach_the_events_lets_another_lead(redis_server, unused_tcp_port):
    async with publishing() as publisher, gateways(redis_server.url, 2) as (one, other):
        await publisher.publish(event(1, 0, 6))
        one.follow("r", SimpleNamespace(endpoint=f"tcp://127.0.0.1:{unused_tcp_port}", replay=publisher.replay))
        await until(lambda: one.intakes["r"].state == "unobserved")
        other.follow("r", publisher)
        await healed(one, other)
        assert other.role("r") == "leader"
        await hold(1, 6, one, other)  # though the engine is idle since
        assert one.intakes["r"].state == other.intakes["r"].state == "live"


async def test_a_leader_that_loses_the_events_lets_another_lead_who_loses_nothing(redis_server, monkeypatch):
    monkeypatch.setattr("cachemap.events.intake.LINK_LOST_SECONDS", 0.3)
    monkeypatch.setattr("cachemap.events.intake.WAKE_SECONDS", 0.1)
    async with (
        publishing() as publisher,
        gateways(redis_server.url, 2) as (one, other),
        Proxy(int(publisher.endpoint.rpartition(":")[2])) as proxy,
    ):
        await share(through(proxy, publisher, publisher.replay), one, other)
        other.intakes["r"].engine._endpoint = publisher.endpoint
        await report(publisher, 1, one, other)
        proxy.cut()
        await until(
            lambda: (one.role("r"), other.role("r")) == ("follower", "leader"), what=lambda: (one.told(), other.told())
        )
        await report(publisher, 2, one, other)
        await hold(1, 6, one, other)
        assert not any(state == "unobserved" for state, _ in other.changes)


async def test_that_nobody_reaches_an_engine_is_said_once_by_each_and_in_words(redis_server, monkeypatch, caplog):
    """Until it is back: gateways go on taking turns in trying meanwhile."""
    caplog.set_level("INFO")
    monkeypatch.setattr("cachemap.events.intake.LINK_LOST_SECONDS", 2.0)
    monkeypatch.setattr("cachemap.events.intake.WAKE_SECONDS", 0.1)
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    async with (
        publishing() as publisher,
        gateways(redis_server.url, 2) as (one, other),
        Proxy(int(publisher.endpoint.rpartition(":")[2])) as proxy,
    ):
        await share(through(proxy, publisher), one, other)
        await report(publisher, 1, one, other)
        proxy.cut()
        leaders = [one]

        def have_taken_turns(times: int) -> bool:
            for gateway in (one, other):
                if gateway.role("r") == "leader" and leaders[-1] is not gateway:
                    leaders.append(gateway)
            return len(leaders) >= times

        await until(lambda: have_taken_turns(3), 30)
        gone = [gateway for gateway in (one, other) if gateway.intakes["r"].away]
        assert gone
        said = len(caplog.records), len(one.changes), len(other.changes)
        await until(lambda: have_taken_turns(5) and all(each.intakes["r"].away for each in (one, other)), 30)
        lines = [record.getMessage() for record in caplog.records if record.name == "hitherto.share"]
        assert sum("gateways take turns in trying" in line for line in lines) == 2, lines
        new = [record.getMessage() for record in caplog.records[said[0] :]]
        late = sum("is loaded anew" in line for line in new)  # a follower that comes late to what the last leader wrote
        assert late <= 2 and len(new) - late <= 3 * (2 - len(gone)), new
        for each in (one, other):
            assert sum("was lost and cannot be made again" in reason for _, reason in each.changes) <= 1
        proxy.mend()
        async with asyncio.timeout(30):
            while any(each.intakes["r"].away for each in (one, other)):
                await publisher.publish(event(2, 0, 6))
                await asyncio.sleep(0.1)
        lines = [record.getMessage() for record in caplog.records if record.name == "hitherto.share"]
        assert all(line.startswith("replica r: ") for line in lines if line.startswith("replica")), lines


async def test_a_lease_that_goes_as_its_snapshot_is_begun_keeps_no_other_from_being_written(redis_server, monkeypatch):
    monkeypatch.setattr("cachemap.cluster.writing.MOST_SNAPSHOTS", 1)
    async with publishing() as publisher, publishing() as another, gateways(redis_server.url) as (one,):
        real = one.shared.beside

        def beside(work):
            real(work)
            if "_write_snapshot" in work.__qualname__:
                one.shared.beside = real
                one.shared.abdicate()

        one.shared.beside = beside
        one.follow("r", publisher)
        await until(lambda: one.shared.beside is real and one.role("r") == "standalone")
        one.follow("s", another)
        await led(one, "s")
        assert not any(told["last"] for told in one.shared.background.recent().values())


async def test_a_newer_incarnation_that_nobody_has_is_given_up(redis_server, monkeypatch):
    """Somebody wrote it, or the host's clock was set back before the engine was restarted: the one there is is shared
    again."""
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    async with sharing(redis_server.url) as (publisher, one, other):
        with redis_server.client() as client:
            client.set(one.intakes["r"].keys.newest, f"{time.time():.2f}")
        await until(lambda: one.role("r") == other.role("r") == "standalone")
        await report(publisher, 1, one, other)
        await healed(one, other)
        await report(publisher, 2, one, other)


async def reaches(gateway, seconds=6.0):
    await until(lambda: gateway.shared.usable, seconds, lambda: gateway.shared.trouble)
    assert gateway.shared.trouble == ""


async def test_a_follower_that_leads_after_an_outage_has_no_trouble_with_what_it_no_longer_reads(redis_server):
    async with (
        Proxy(redis_server.port) as proxy,
        publishing() as publisher,
        gateways(redis_server.url) as (one,),
        gateways(proxy.url) as (other,),
    ):
        await share(publisher, one, other)
        proxy.cut()
        await until(lambda: "deltas cannot be read" in other.shared.trouble)
        await one.stop()
        proxy.mend()
        other.shared.look_soon()  # it leads before it would have read again
        await led(other)
        await reaches(other)


async def test_a_leader_that_another_relieved_has_no_trouble_with_what_it_no_longer_writes(start_redis, monkeypatch):
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.2)
    server = start_redis(maxmemory_policy="noeviction")
    async with sharing(server.url) as (publisher, one, other):
        with server.client() as client:
            client.config_set("maxmemory", 1)
            await publisher.publish(event(1, 0, 6))
            await until(lambda: "cannot be written" in one.shared.trouble)
            await until(lambda: one.role("r") == "standalone")
            assert not one.shared.usable, "it has given up, and Redis is as full as before"
            client.config_set("maxmemory", 0)
        await led(other)
        await followed(one)
        await reaches(one)
        await reaches(other)


async def test_a_gateway_without_replicas_knows_whether_redis_is_there(start_redis, monkeypatch):
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.2)
    server = start_redis()
    async with gateways(server.url) as (one,):
        await reaches(one)
        server.kill()
        await until(lambda: not one.shared.usable)
        server.restart()
        await reaches(one)


async def test_sentinel_fails_over(tmp_path):
    with running(Sentinels(tmp_path)) as servers:
        async with sharing(servers.url) as (publisher, one, other):
            await report(publisher, 1, one, other)
            servers.primary.kill()
            await report(publisher, 2, one, other)
            await until(lambda: one.shared.usable and other.shared.usable, 60)
            await healed(one, other)
            await report(publisher, 3, one, other)


async def test_cluster_with_one_shard_gone(tmp_path):
    with running(Cluster(tmp_path)) as cluster:
        async with publishing() as a, publishing() as b, gateways(cluster.url, 2) as (one, other):
            names = spread(cluster)
            for name, publisher in zip(names, (a, b), strict=True):
                await share(publisher, one, other, name=name)
                await report(publisher, 1, one, other, name=name)
            dead = cluster.node_of(one.intakes[names[0]].keys.lease)
            dead.kill()
            for name, publisher in zip(names, (a, b), strict=True):
                await report(publisher, 2, one, other, name=name)
            await until(lambda: other.role(names[0]) == "standalone")
            # the other shard's replica is as before
            assert {one.role(names[1]), other.role(names[1])} == {"leader", "follower"}
            dead.restart()
            for name in names:
                await healed(one, other, name)


def dies(cluster, key):
    cluster.node_of(key).kill()


def is_replaced(cluster, key):
    with cluster.replica_of(cluster.node_of(key)).client() as client:
        client.execute_command("CLUSTER FAILOVER")


def loses_the_slot(cluster, key):
    cluster.move(key, next(one for one in cluster.nodes if one is not cluster.node_of(key)))


@pytest.mark.parametrize("primary", [dies, is_replaced, loses_the_slot])
async def test_gateways_share_the_map_again_wherever_a_cluster_has_it(tmp_path, primary):
    with running(Cluster(tmp_path, replicas=True)) as cluster:
        async with sharing(cluster.url) as (publisher, one, other):
            await report(publisher, 1, one, other)
            primary(cluster, one.intakes["r"].keys.lease)
            for name in (2, 3):
                await report(publisher, name, one, other)
                await until(lambda: one.shared.usable and other.shared.usable, 60)
                await healed(one, other)


async def test_a_shard_of_which_no_replica_is_left_is_no_trouble(tmp_path):
    with running(Cluster(tmp_path)) as cluster:
        async with publishing() as a, publishing() as b, gateways(cluster.url) as (one,):
            names = spread(cluster)
            for name, publisher in zip(names, (a, b), strict=True):
                one.follow(name, publisher)
                await led(one, name)
            cluster.node_of(one.intakes[names[0]].keys.lease).kill()
            await until(lambda: not one.shared.usable)
            await one.remove(names[0])
            await reaches(one)


def spread(cluster: Cluster) -> list[str]:
    """Return the names of two replicas whose keys are on different shards."""
    from cachemap.cluster.keys import Keys

    first, *rest = (f"r{i}" for i in range(40))
    home = cluster.node_of(Keys("test", first, "").lease)
    return [first, next(name for name in rest if cluster.node_of(Keys("test", name, "").lease) is not home)]
