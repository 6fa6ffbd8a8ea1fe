import json

import pytest

from loadgen.drive.client import Client
from loadgen.drive.engines import between, cache_counts

PAGE = b"""# HELP vllm:prefix_cache_queries_total Prefix cache queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1021.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1e3
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 992.0
"""


def test_what_fell_between_two_readings():
    before, after = {"a": (100, 50)}, {"a": (300, 200), "b": (100, 0)}
    assert between(before, after) == {"engines": 2, "queries": 300, "hits": 150, "hit_rate": 0.5}
    assert between({}, {}) is None
    assert between({}, {"a": (0, 0)})["hit_rate"] is None


def test_an_engine_that_began_again_counts_from_zero():
    assert between({"a": (100, 90)}, {"a": (10, 4)})["hits"] == 4


@pytest.mark.parametrize("page, counts", [(PAGE, (2021, 992)), (b"vllm:prefix_cache_queries 5\n", None), (b"{}", None)])
async def test_engines_are_found_through_the_gateway(engine, wire, page, counts):
    async def respond(request, writer):
        if request.path == "/replicas":
            urls = [server.url, "http://127.0.0.1:1", "nonsense://"]
            writer.write(wire.whole({"replicas": [{"id": str(number), "url": url} for number, url in enumerate(urls)]}))
        else:
            writer.write(wire.head(200, "text/plain", f"content-length: {len(page)}") + page)

    async with engine(respond) as server:
        admin = Client(server.url)
        found = {server.url: counts} if counts else {}
        assert await cache_counts(admin) == found, "summed over the engines of a page that has both counters"
        admin.close()


async def test_a_server_that_has_no_admin_side_is_fine(engine, wire):
    for answer in (wire.whole({}), wire.whole(b"nonsense"), wire.whole(json.dumps([1]).encode()), wire.whole({}, 404)):
        async with engine(answer) as server:
            admin = Client(server.url)
            assert await cache_counts(admin) == {}
            admin.close()
