"""What doctor finds wrong with a Redis."""

import pytest

from gateway.redis_check import redis_findings
from tests.redis_server import Cluster, Proxy, running


async def findings(url):
    return [(one.level, one.text, one.remedy) async for one in redis_findings(url)]


async def test_a_good_one(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    told = await findings(server.url)
    assert [level for level, *_ in told] == ["ok", "ok", "ok"]
    assert f"Redis {server.version}" in told[0][1] and "answers in" in told[2][1]


async def test_one_that_is_not_there_or_lets_nobody_in(start_redis):
    server = start_redis(requirepass="secret")
    told = await findings(server.url)
    assert told[0][0] == "fail" and "uthentication" in told[0][1]
    assert [level for level, *_ in await findings(server.url.replace("//", "//:secret@"))] == ["ok"] * 3
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
        assert told[0] == "warn" and "local view" in told[1]


async def test_each_shard_of_a_cluster(tmp_path):
    with running(Cluster(tmp_path)) as cluster:
        cluster.nodes[1].kill()
        levels = [level for level, *_ in await findings(cluster.url)]
        assert levels == ["ok"] * 3 + ["fail"] + ["ok"] * 3
