"""Huge foreign members at the keys of the shared map and ledger: nothing reads them whole, and they cost their replica
at most.

What is read shows in the server's peak of memory: a reply, also one inside a script, is a copy.
"""

from tests.gateway.proxy.test_shared import Gateway as LedgerGateway

from ..publisher import publishing
from .gateways import event, gateways, prompt, until
from .test_poison import role_pair

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
            for gateway in (one, other):
                gateway.follow("well:1", quiet)
                for name in names:
                    gateway.follow(name, publisher)
            await until(
                lambda: all(role_pair(one, other, name) == {"leader", "follower"} for name in (*names, "well:1"))
            )
            await publisher.publish(event(1, 0, 6))
            await until(
                lambda: all(gateway.held(name, prompt(1, 6)[1]) == 6 for gateway in (one, other) for name in names)
            )
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
                three = one, other, late
                await until(
                    lambda: all(sorted(one.role(name) for one in three) == ["follower", "follower", "leader"]
                                and {one.held(name, prompt(2, 6)[1]) for one in three} == {6} for name in names), 30,
                    lambda: [(case, [(one.role(name), one.intakes[name].role_reason) for one in three]) for name, case in names.items()],
                )  # fmt: skip
            assert peak(client) - before < SIZE / 2
            assert client.info("memory")["lazyfreed_objects"] > 0  # beside other commands, not in their way


async def test_a_long_entry_behind_those_that_are_followed_is_sent_once(start_redis, redis_binary, monkeypatch):
    """A follower waits for whatever comes next, so Redis sends it; the stream is written anew then."""
    monkeypatch.setattr("cachemap.cluster.link.Link.lease_seconds", 1.0)
    monkeypatch.setattr("cachemap.cluster.link.Link.look_seconds", 0.2)
    server = start_redis(binary=redis_binary)
    async with publishing() as publisher, gateways(server.url, 2) as (one, other):
        with server.client() as client:
            for gateway in (one, other):
                gateway.follow("r:1", publisher)
            await until(lambda: role_pair(one, other, "r:1") == {"leader", "follower"})
            await publisher.publish(event(1, 0, 6))
            await until(lambda: all(gateway.held("r:1", prompt(1, 6)[1]) == 6 for gateway in (one, other)))
            key = one.intakes["r:1"].keys.deltas
            before = client.info("stats")["total_net_output_bytes"]
            client.xadd(key, {"d": b"x" * SIZE}, "1000-0")
            await publisher.publish(event(2, 0, 6))
            await until(lambda: all(gateway.held("r:1", prompt(2, 6)[1]) == 6 for gateway in (one, other)), 30)
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
