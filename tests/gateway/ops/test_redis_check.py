"""What doctor finds wrong with a Redis."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.ops.gateway_checks import REDIS_COMMANDS, redis
from tests.redis_server import Cluster, Proxy, running


async def findings(url):
    """A machine that is busy with other tests is no matter here: see the test of one that is far."""
    config = SimpleNamespace(settings=SimpleNamespace(redis_url=url, deployment="prod"))
    return [("ok" if "answers in" in one.text else one.level, one.text, one.remedy) async for one in redis(config)]


async def test_a_good_one(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    told = await findings(server.url)
    assert [level for level, *_ in told] == ["ok"] * 4
    with server.client() as client:
        assert not client.keys(), "nothing is left"
    assert f"Redis {server.version}" in told[0][1] and "answers in" in told[2][1]


async def test_one_that_is_not_there_or_lets_nobody_in(start_redis):
    server = start_redis(requirepass="secret")
    told = await findings(server.url)
    assert told[0][0] == "fail" and "uthentication" in told[0][1]
    assert [level for level, *_ in await findings(server.url.replace("//", "//:secret@"))] == ["ok"] * 4
    server.kill()
    assert (await findings(server.url))[0][0] == "fail"


@pytest.mark.parametrize(("policy", "level"), [("allkeys-lru", "fail"), ("volatile-lru", "ok"), ("noeviction", "ok")])
async def test_one_that_drops_keys(start_redis, policy, level):
    server = start_redis(maxmemory="50mb", maxmemory_policy=policy)
    told = (await findings(server.url))[1]
    assert told[0] == level and (level == "ok" or "noeviction" in told[2])


async def test_one_that_is_far(redis_server):
    async with Proxy(redis_server.port) as proxy:
        proxy.delay = 0.01
        told = (await findings(proxy.url))[2]
        assert "local view" in told[1]


async def test_each_shard_of_a_cluster(tmp_path):
    with running(Cluster(tmp_path)) as cluster:
        ((level, said, remedy),) = await findings(f"redis://127.0.0.1:{cluster.nodes[0].port}")
        assert level == "fail" and "it is a Cluster" in said and "write redis+cluster://" in remedy
        cluster.nodes[1].kill()
        levels = [level for level, *_ in await findings(cluster.url)]
        assert levels == ["ok"] * 4 + ["fail"] + ["ok"] * 4


async def test_one_that_answers_and_takes_no_writes(start_redis):
    primary = start_redis()
    replica = start_redis(replicaof=f"127.0.0.1 {primary.port}")
    level, said, remedy = (await findings(replica.url))[-1]
    assert level == "fail" and "read only replica" in said and "SET, " in said and "GETRANGE" not in said
    assert "a primary that takes writes" in remedy


async def test_one_that_is_full(start_redis):
    server = start_redis()
    with server.client() as client:
        client.config_set("maxmemory", 1)
        level, said, _ = (await findings(server.url))[-1]
        assert level == "fail" and "HSET" in said and "it has no memory left" in said
        client.config_set("maxmemory", 0)
    assert (await findings(server.url))[-1][0] == "ok"


DOCUMENTED = re.search(
    r"An ACL user needs `~hitherto:\*`\s+and\s+`(.*?)`",
    (Path(__file__).parents[3] / "docs/scaling.md").read_text(),
    re.S,
)[1].split()


def acl(*commands):
    return f"gate on >secret ~hitherto:1:prod:* {' '.join('+' + one.lower() for one in commands)}"


async def test_one_whose_acl_is_as_documented_or_lacks_something(start_redis):
    """Each command that is missing is named; `test_refusals.py` shows that the others are enough."""
    server = start_redis(user=acl(*DOCUMENTED))
    url = server.url.replace("//", "//gate:secret@").replace("/0", "/1")
    assert [level for level, *_ in await findings(url)] == ["ok"] * 4
    tried = [command.split()[0] for command in REDIS_COMMANDS.split("; ")]
    assert {*tried, "SELECT", "CLIENT|SETNAME", "PING", "INFO"} == {*DOCUMENTED}, "the others are used all the time"
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "gate", *(f"-{one}" for one in tried))
        level, said, remedy = (await findings(url))[-1]
        assert level == "fail" and said.startswith(f"refuses {', '.join(tried)}: ") and "docs/scaling.md" in remedy
        assert "its ACL does not let this user do that" in said
        client.execute_command("ACL", "SETUSER", "gate", *(f"+{one}" for one in tried), "-xread")
        assert (await findings(url))[-1][1].startswith("refuses XREAD: ")
