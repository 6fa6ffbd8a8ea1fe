"""Huge foreign values at the keys of the shared map and ledger: they are not read, and cost their replica at most.

What is read shows in the server's peak of memory: a reply, also one inside a script, is a copy.
"""

from types import SimpleNamespace

import pytest

from cachemap.cluster.codec import PIECE
from cachemap.cluster.connect import parse
from cachemap.cluster.link import Link
from tests.gateway.proxy.test_shared import Gateway as LedgerGateway

from ..publisher import publishing
from .gateways import event, gateways, hold, is_shared, report, same, share, sharing, until

MIB = 1 << 20
POOL = "hitherto:1:test:{pool}:"
SIZE = 8 * MIB  # of each; all together a few hundred
KEYS = ("newest", "lease", "head", "deltas", "snapshot", "request")
MANY = "for i = 1, ARGV[1] do redis.call('%s', KEYS[1], %s) end"
ENTRIES = "return #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])"  # counted there: this reader takes no output
HASH, SORTED, LIST, STREAM = (MANY % one for one in (
    ("HSET", "string.rep('f', 200) .. i, 'v'"), ("ZADD", "i, string.rep('f', 200) .. i"), ("RPUSH", "string.rep('f', 200)"),
    ("XADD", "i .. '-0', 'd', string.rep('f', 200)"),
))  # fmt: skip


def make(client, key, kind):
    client.delete(key)
    if kind == "string":
        client.set(key, b"x" * SIZE)
    elif kind == "long member":
        client.rpush(key, b"x" * SIZE)
    elif kind == "long entry":
        client.xadd(key, {"d": b"x" * SIZE}, "1-0")
    else:
        client.eval({"hash": HASH, "sorted set": SORTED, "list": LIST, "stream": STREAM}[kind], 1, key, SIZE // 200)


def peak(client):
    return client.info("memory")["used_memory_peak"]


async def test_what_lies_at_a_replicas_keys_is_not_read_and_made_anew(start_redis, redis_binary, monkeypatch):
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.2)
    server = start_redis(binary=redis_binary)
    cases = [(key, kind) for key in KEYS for kind in ("string", "hash")]
    cases += [("snapshot", "list"), ("snapshot", "long member"), ("deltas", "stream"), ("deltas", "long entry")]
    names = {f"r{number}:1": case for number, case in enumerate(cases)}
    async with publishing() as publisher, publishing() as quiet, gateways(server.url, 2) as (one, other):
        with server.client() as client:
            await share(quiet, one, other, name="well:1")
            for name in names:
                for gateway in (one, other):
                    gateway.follow(name, publisher)
            await until(lambda: all(is_shared(one, other, name) for name in names), 60)
            await publisher.publish(event(1, 0, 6))
            for name in names:
                await hold(1, 6, one, other, name=name)
            for number, (_, kind) in enumerate(cases):
                make(client, f"side{number}", kind)
            before = peak(client)
            for number, (name, (key, _)) in enumerate(names.items()):
                client.rename(f"side{number}", getattr(one.intakes[name].keys, key))
            async with gateways(server.url) as (late,):  # which reads all that lies there
                for name in (*names, "well:1"):
                    late.follow(name, quiet if name == "well:1" else publisher)
                await until(lambda: late.role("well:1") == "follower", 5)
                await publisher.publish(event(2, 0, 6))
                for name in names:
                    await hold(2, 6, one, other, late, name=name, seconds=30)
                    await until(lambda name=name: is_shared(one, other, name) or is_shared(one, late, name))
                    await same(one, late, name)
            assert peak(client) - before < SIZE / 2
            assert client.info("memory")["lazyfreed_objects"] > 0  # beside other commands, not in their way


async def test_a_long_entry_behind_those_that_are_followed_is_sent_once(start_redis, redis_binary, monkeypatch):
    """A follower waits for whatever comes next, so Redis sends it; the stream is written anew then."""
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.2)
    server = start_redis(binary=redis_binary)
    async with sharing(server.url) as (publisher, one, other):
        with server.client() as client:
            await report(publisher, 1, one, other)
            key = one.intakes["r"].keys.deltas
            before = client.info("stats")["total_net_output_bytes"]
            client.xadd(key, {"d": b"x" * SIZE}, "1000-0")
            await publisher.publish(event(2, 0, 6))
            await hold(2, 6, one, other, seconds=30)
            await until(lambda: not client.eval(ENTRIES, 1, key, "1000-0"))
            assert SIZE < client.info("stats")["total_net_output_bytes"] - before < 1.5 * SIZE


async def test_what_lies_at_the_ledgers_keys_is_not_read_and_made_anew(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    with server.client() as client:
        one, other = LedgerGateway(server.url).start(), LedgerGateway(server.url).start()
        try:
            await until(lambda: one.shared.joined and other.shared.joined)
            for name in ("load", "alive", "of:"):
                for kind in ("string", "hash", "sorted set"):
                    token = client.zrange(f"{POOL}alive", 0, 0)[0].decode() if name == "of:" else ""
                    make(client, "side", kind)
                    before = peak(client)
                    client.rename("side", POOL + name + token)
                    await one.route([])
                    await until(lambda: one.shared.joined and other.shared.joined
                                and one.ledger.total().requests == sum(c.load.requests for c in other.candidates), 10,
                                lambda: (name, kind, one.shared.reason, other.shared.reason))  # fmt: skip
                    assert peak(client) - before < SIZE / 2, (name, kind)
        finally:
            await one.stop()
            await other.stop()


@pytest.mark.parametrize("left", [100, 18_000, PIECE - 1, PIECE])
async def test_a_snapshot_is_read_whole_wherever_its_last_piece_ends(redis_server, left):
    """A read may stop at its limit with the list's last piece, which may be short."""
    body = b"x" * (36 * PIECE + left)  # with the head a little less, or more, than one read takes
    pieces = [b"h" * 300, *(body[at : at + PIECE] for at in range(0, len(body), PIECE))]
    link = Link(parse(redis_server.url), "test")
    with redis_server.client() as client:
        client.rpush("snapshot", *pieces)
    assert await link.read_snapshot(SimpleNamespace(snapshot="snapshot")) == pieces
    await link.clients.aclose()
