"""A Redis that answers with refusals: what is said is plain, and names the key, the reason and what to do."""

import asyncio
import contextlib
import re
import socket

import pytest

from cachemap import CacheMap
from cachemap.cluster import SharedMap
from cachemap.cluster.connect import FAILURES, RedisClients, Trouble, describe, in_words, parse
from cachemap.cluster.link import LEASES, READS
from gateway.proxy.placement.shared import SharedLedger
from policies import Candidate, CostGroup, Demand, Evaluation, Ledger, make
from tests.gateway.ops.test_redis_check import DOCUMENTED, acl

from ..publisher import publishing
from .gateways import event, followed, gateways, report, until

SCRIPT = re.compile(r"user_script|Error running|f_[0-9a-f]{40}|\r|\n")


@contextlib.asynccontextmanager
async def gateway(url):
    """Yield what a gateway has of the map and of the ledger, with one replica, and the replica's publisher."""
    ledger = Ledger()
    load = SharedLedger(RedisClients(parse(url)), "prod", ledger, make("least_time").cost)
    ledger.add("r:1")
    async with publishing() as publisher, gateways(url, deployment="prod") as (one,):
        one.follow("r:1", publisher)
        load.start()
        try:
            yield one.shared, load, publisher
        finally:
            await load.stop()


def is_plain(said, *words):
    return all(word in said for word in words) and not SCRIPT.search(said)


@pytest.fixture
def refusing(start_redis, redis_binary):
    """Return functions that start a Redis server and return its URL, by how the server refuses."""

    def read_only():
        return start_redis(binary=redis_binary, replicaof=f"127.0.0.1 {start_redis(binary=redis_binary).port}").url

    def user(text, login="gate:secret"):
        return start_redis(binary=redis_binary, user=text).url.replace("//", f"//{login}@")

    return {
        "read-only": read_only,
        "no SET": lambda: user(acl(*(one for one in DOCUMENTED if one != "SET"))),
        "no EVALSHA": lambda: user(acl(*(one for one in DOCUMENTED if one != "EVALSHA"))),
        "no TIME": lambda: user(acl(*(one for one in DOCUMENTED if one != "TIME"))),
        "other keys": lambda: user("gate on >secret ~other:* +@all"),
        "no password": lambda: start_redis(binary=redis_binary, requirepass="secret").url,
        "another password": lambda: user(acl(*DOCUMENTED), "gate:guess"),
    }  # fmt: skip


ACL = "does not let this user do that", "grant the user what docs/scaling.md lists"


@pytest.mark.parametrize(
    ("how", "of_map", "of_ledger"),
    [
        (
            "read-only",
            ("refuses SET at hitherto:1:prod:{", ":lease: it is a read-only replica", "give the URL of the primary"),
            ("read-only replica", "give the URL"),
        ),
        ("no SET", ("refuses SET at hitherto:1:prod:{", *ACL), ("joined",)),
        ("no EVALSHA", ("evalsha", "hitherto:1:prod:{", *ACL), ("evalsha", "hitherto:1:prod:{pool}", *ACL)),
        ("no TIME", ("refuses TIME:", *ACL), ("refuses TIME:", *ACL)),
        ("other keys", ("hitherto:1:prod:{", *ACL), ("hitherto:1:prod:{pool}", *ACL)),
        ("no password", ("does not accept this user and password", "HITHERTO_REDIS_URL"), ("does not accept",)),
        ("another password", ("does not accept this user and password", "HITHERTO_REDIS_URL"), ("does not accept",)),
    ],
)
async def test_what_is_refused_at_which_key_why_and_what_to_do(refusing, how, of_map, of_ledger):
    async with gateway(refusing[how]()) as (shared, ledger, _):
        await until(lambda: is_plain(shared.trouble, *of_map), 5, lambda: shared.trouble)
        await until(lambda: is_plain(ledger.reason, *of_ledger), 5, lambda: ledger.reason)
        assert shared.reachable and not shared.usable


async def test_the_acl_that_is_documented_is_enough(start_redis, redis_binary):
    """For a map that one gateway writes and another one reads, and for a ledger that places requests."""
    url = start_redis(binary=redis_binary, user=acl(*DOCUMENTED)).url
    url = url.replace("//", "//gate:secret@").replace("/0", "/1")
    policy, own, placed = make("least_time"), Ledger(), asyncio.get_running_loop().create_future()
    candidate, demand = Candidate("r:1", 0, own.add("r:1"), CostGroup().add("r:1")), Demand(32, 16, hashes=[1, 2])
    ledger = SharedLedger(RedisClients(parse(url)), "prod", own, policy.cost, deadline=5.0)
    ledger.start()
    try:
        async with gateway(url) as (shared, _, publisher), gateways(url, deployment="prod") as (other,):
            await until(lambda: shared.snapshots and ledger.joined)
            other.follow("r:1", publisher)
            await followed(other, "r:1")
            await publisher.subscribed()
            await report(publisher, 1, other, name="r:1")
            ledger.decide(Evaluation(demand, [candidate], policy.choose(demand, [candidate]), 0), placed.set_result)
            assert await placed is not None, ledger.reason
            assert not shared.trouble and not other.shared.trouble
    finally:
        await ledger.stop()


async def test_one_that_is_full_says_so_of_deltas_too(start_redis, redis_binary, caplog):
    server = start_redis(binary=redis_binary)
    async with gateway(server.url) as (shared, ledger, publisher):
        await until(lambda: shared.usable and shared.leases and shared.snapshots and ledger.joined)
        with server.client() as client:
            client.config_set("maxmemory", 1)
        await publisher.publish(event(1, 0, 6))
        said = "refuses XADD at hitherto:1:prod:{", ":deltas: it has no memory left (maxmemory)", "raise its maxmemory"
        await until(lambda: is_plain(shared.trouble, *said), 5, lambda: shared.trouble)
        assert shared.reachable and not shared.usable
        await until(lambda: not ledger.joined and is_plain(ledger.reason, "no memory left"), 5, lambda: ledger.reason)
        seen = [ledger.joined]

        def came_and_went():
            if ledger.joined != seen[-1]:
                seen.append(ledger.joined)
            return len(seen) > 5

        await until(came_and_went)
    assert len([one for one in caplog.messages if "the shared ledger is away" in one]) == 1


async def test_one_that_is_gone_is_not_reachable(start_redis):
    server = start_redis()
    async with gateway(server.url) as (shared, ledger, _):
        await until(lambda: shared.usable and ledger.joined)
        server.kill()
        await until(lambda: not shared.reachable and not ledger.joined)
        assert "onnect" in shared.trouble


async def answers(reply):
    """Return a server that gives the same reply to everything."""

    async def serve(reader, writer):
        while await reader.read(65536):
            writer.write(reply)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def test_one_that_loads_its_data_answers():
    server = await answers(b"-LOADING Redis is loading the dataset in memory\r\n")
    async with server, gateway(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as (shared, ledger, _):
        for part in (lambda: shared.trouble, lambda: ledger.reason):
            await until(lambda part=part: "it is still loading its data" in part(), 5, part)
        assert shared.reachable and not shared.usable


@pytest.mark.parametrize(
    ("said", "plain"),
    [  # as Redis 7 puts it
        ("refuses SET at hitherto:1:d:{3}:map:r:1:7:lease: READONLY You can't write against a read only replica. "
         "script: f8739d2f837ed52b12f51c023a427edc715b85d85, on @user_script:110.",
         "Redis refuses SET at hitherto:1:d:{3}:map:r:1:7:lease: it is a read-only replica "
         "(READONLY You can't write against a read only replica.); give the URL of the primary, or redis+sentinel://, which finds it"),
        ("ACL failure in script: User gate has no permissions to run the 'set' command",
         "Redis refuses: its ACL does not let this user do that "
         "(ACL failure in script: User gate has no permissions to run the 'set' command); grant the user what docs/scaling.md lists"),
        ("MISCONF Redis is configured to save RDB snapshots",
         "Redis refuses: it takes no writes because it cannot save to disk (MISCONF Redis is configured to save RDB snapshots); "
         "see its log and its disk, or turn stop-writes-on-bgsave-error off"),
        ("Error running script (call to f_1776dded815f5a397c9ae5eaffc05dfe95100adb): @user_script:8: @user_script: 8: "
         "attempt to index a nil value", "attempt to index a nil value"),
        ("Connection refused", "Connection refused"),
        ("DENIED Redis is running in protected mode because no password is set for the default user. In this mode " + "x" * 200,
         "Redis refuses: it is in protected mode, so it answers its own machine only (DENIED Redis is running in protected mode "
         "because no password is set for the default user); give it a password, or start it with --protected-mode no where no "
         "stranger reaches it"),
    ],
)  # fmt: skip
def test_what_other_versions_say_is_as_plain(said, plain):
    assert in_words(said) == plain


async def test_a_server_that_is_not_reached_is_named_with_why(unused_tcp_port, tmp_path, monkeypatch):
    async def page(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def told(url):
        ways = RedisClients(parse(url))
        with pytest.raises(FAILURES) as failed:
            await (await ways.to("key")).ping()
        await ways.aclose()
        return describe(failed.value)

    place = f"127.0.0.1:{unused_tcp_port}"
    assert await told(f"redis://{place}") == f"cannot connect to {place}: nothing listens there"
    assert await told(f"redis+sentinel://{place}/main") == "no sentinel names a primary 'main'"
    gone = tmp_path / "redis.sock"
    assert await told(f"unix://{gone}") == f"cannot connect to {gone}: No such file or directory"
    async with await asyncio.start_server(page, "127.0.0.1", unused_tcp_port):
        assert (await told(f"redis://{place}")).startswith("something else than Redis answers there (")
    several = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 1)) for host in ("127.0.0.1", "127.0.0.2")]

    async def addresses(*_, **__):
        return several

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    assert await told("redis://redis.example:1") == "cannot connect to redis.example:1: nothing listens there"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Error 113 connecting to r:1. Connect call failed ('10.0.0.1', 1).", "No route to host"),
        ("Error 111 connecting to r:1. Connect call failed ('10.0.0.1', 1).", "nothing listens there"),
        ("Error Multiple exceptions: [Errno 111] x ('::1', 1), [Errno 113] x connecting to r:1.",
         "nothing listens there, No route to host"),
        ("Error -2 connecting to r:1. Name or service not known.", "Name or service not known"),
        ("Error Multiple exceptions: odd connecting to r:1.", "Multiple exceptions: odd"),
    ],
)  # fmt: skip
def test_each_reason_why_a_server_is_not_reached_is_told_as_it_is(said, why):
    assert describe(ConnectionError(said)) == f"cannot connect to r:1: {why}"


async def test_what_cannot_be_done_for_one_reason_is_told_with_it_once():
    shared = SharedMap(parse("redis://127.0.0.1:9"), "prod", CacheMap(1 << 20))
    troubles = (LEASES, 0, "no answer"), (READS, 0, "no answer"), (READS, 1, "no answer"), (READS, 2, "NOPERM")
    for what, lane, why in troubles:
        shared.in_trouble(what, lane, Trouble(why, False))
    said = "leases cannot be looked at and deltas cannot be read: no answer; deltas cannot be read: NOPERM"
    assert shared.trouble == said
    await shared.stop()
