"""The servers the other tests stand on do what they say."""

import redis

from tests.redis_server import Cluster, Sentinels, running, wait


def test_a_killed_server_comes_back_empty_or_with_its_data(start_redis, redis_binary):
    server = start_redis(binary=redis_binary, appendonly="yes")
    with server.client() as client:
        client.set("a", 1)
        server.restart()
        assert client.get("a") == b"1"
        server.restart(empty=True)
        assert client.get("a") is None


def test_sentinels_fail_over(tmp_path, redis_binary):
    with running(Sentinels(tmp_path, redis_binary)) as servers:
        servers.primary.kill()
        with servers.sentinels[0].client() as client, servers.replica.client() as replica:
            wait(lambda: client.sentinel_get_master_addr_by_name("hitherto")[1] == servers.replica.port)
            wait(lambda: replica.set("a", 1))


def test_a_cluster_answers_for_every_key(tmp_path, redis_binary):
    with running(Cluster(tmp_path, redis_binary)) as cluster:
        with redis.RedisCluster("127.0.0.1", port=cluster.nodes[0].port) as client:
            for i in range(20):
                client.set(f"k{i}", i)
                assert client.get(f"k{i}") == str(i).encode()
            with cluster.node_of("k3").client() as node:
                assert node.get("k3") == b"3"
