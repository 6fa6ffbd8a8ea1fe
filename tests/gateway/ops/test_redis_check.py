"""What doctor finds wrong with a Redis."""

import re
from pathlib import Path

import pytest

from gateway.ops.redis_check import redis_findings
from tests.redis_server import Cluster, Proxy, running


async def findings(url):
    """A machine that is busy with other tests is no matter here: see the test of one that is far."""
    return [
        ("ok" if "answers in" in one.text else one.level, one.text, one.remedy)
        async for one in redis_findings(url, "prod")
    ]


async def test_a_good_one(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    told = await findings(server.url)
    assert [level for level, *_ in told] == ["ok"] * 5
    with server.client() as client:
        assert not [key for key in client.keys() if b":sent:" not in key]  # which go by themselves
    assert f"Redis {server.version}" in told[0][1] and "answers in" in told[2][1]


async def test_one_that_is_not_there_or_lets_nobody_in(start_redis):
    server = start_redis(requirepass="secret")
    told = await findings(server.url)
    assert told[0][0] == "fail" and "uthentication" in told[0][1]
    assert [level for level, *_ in await findings(server.url.replace("//", "//:secret@"))] == ["ok"] * 5
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
        cluster.nodes[1].kill()
        levels = [level for level, *_ in await findings(cluster.url)]
        assert levels == ["ok"] * 3 + ["fail"] + ["ok"] * 3


async def test_one_that_answers_and_takes_no_writes(start_redis):
    primary = start_redis()
    replica = start_redis(replicaof=f"127.0.0.1 {primary.port}")
    told = await findings(replica.url)
    assert (
        [level for level, *_ in told][3:] == ["fail", "fail"]
        and "READONLY" in told[3][1]
        and "READONLY" in told[4][1].upper()
    )


DOCUMENTED = re.search(
    r"An ACL user needs `~hitherto:\*`\s+and\s+`(.*?)`",
    (Path(__file__).parents[3] / "docs/scaling.md").read_text(),
    re.S,
)[1].split()


def acl(*commands):
    return f"gate on >secret ~hitherto:1:prod:* {' '.join('+' + one.lower() for one in commands)}"


async def test_one_whose_acl_is_as_documented(start_redis):
    server = start_redis(user=acl(*DOCUMENTED))
    told = await findings(server.url.replace("//", "//gate:secret@").replace("/0", "/1"))
    assert [level for level, *_ in told] == ["ok"] * 5, told


@pytest.mark.parametrize("missing", ["EVALSHA", "XREAD", "XADD", "HGETALL", "RENAME"])
async def test_one_whose_acl_lacks_something(start_redis, monkeypatch, missing):
    monkeypatch.setattr("gateway.ops.redis_check.TRIAL_SECONDS", 1.5)
    server = start_redis(user=acl(*(one for one in DOCUMENTED if one != missing)))
    told = await findings(server.url.replace("//", "//gate:secret@"))
    wrong = [text for level, text, _ in told if level == "fail"]
    assert wrong and all(
        "permission" in text.lower() or "can't run" in text or "not allowed" in text for text in wrong
    ), told
