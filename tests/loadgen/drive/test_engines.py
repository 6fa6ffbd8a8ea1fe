import json

from loadgen.drive.client import Client
from loadgen.drive.engines import between, cache_counts, parse_counts

PAGE = b"""# HELP vllm:prefix_cache_queries_total Prefix cache queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1021.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1e3
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 992.0
"""


def test_counters_are_summed_over_a_pages_engines():
    assert parse_counts(PAGE) == {"queries": 2021.0, "hits": 992.0}
    assert parse_counts(b"vllm:prefix_cache_queries 5\n") == {}
    assert parse_counts(b"{}") == {}


def test_what_fell_between_two_readings():
    before = {"a": {"queries": 100.0, "hits": 50.0}}
    after = {"a": {"queries": 300.0, "hits": 200.0}, "b": {"queries": 100.0, "hits": 0.0}}
    assert between(before, after) == {"engines": 2, "queries": 300, "hits": 150, "hit_rate": 0.5}
    assert between({}, {}) is None
    assert between({}, {"a": {"queries": 0.0, "hits": 0.0}})["hit_rate"] is None


def test_an_engine_that_began_again_counts_from_zero():
    assert between({"a": {"queries": 100.0, "hits": 90.0}}, {"a": {"queries": 10.0, "hits": 4.0}})["hits"] == 4


async def test_engines_are_found_through_the_gateway(engine, wire):
    async def respond(request, writer):
        if request.path == "/replicas":
            urls = [server.url, "http://127.0.0.1:1", "nonsense://"]
            writer.write(wire.whole({"replicas": [{"id": str(number), "url": url} for number, url in enumerate(urls)]}))
        else:
            writer.write(wire.head(200, "text/plain", f"content-length: {len(PAGE)}") + PAGE)

    async with engine(respond) as server:
        admin = Client(server.url)
        assert await cache_counts(admin) == {server.url: {"queries": 2021.0, "hits": 992.0}}
        admin.close()


async def test_a_server_that_has_no_admin_side_is_fine(engine, wire):
    for answer in (wire.whole({}), wire.whole(b"nonsense"), wire.whole(json.dumps([1]).encode()), wire.whole({}, 404)):
        async with engine(answer) as server:
            admin = Client(server.url)
            assert await cache_counts(admin) == {}
            admin.close()
