"""Engines that could not fetch a prompt's cache from each other: they are not paired, and everybody is told why."""

import httpx
import pytest

from .running import running
from .test_legs import TEXT, asked, words


@pytest.fixture(scope="module")
def quartet(start_engine):
    """A prefiller, a decoder that cannot fetch from it, one that can, and an engine without a connector."""
    made = [
        start_engine("--kv-connector"),
        start_engine("--kv-connector", "--kv-cache-dtype", "fp8"),
        start_engine("--kv-connector"),
        start_engine(),
    ]
    return [one.wait() for one in made]


def urls(*engines):
    return [f"{one.url}#role={role}" for one, role in engines]


async def test_unlike_engines_get_whole_requests_and_no_transfer_is_tried(quartet):
    prefiller, unlike, _, single = quartet
    replicas = urls((prefiller, "prefill"), (unlike, "decode"))
    async with running("--replica-url", *replicas, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(3):
                path, body = asked("chat", f"Unlike {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{unlike.port}"
        status = await gateway.status()
        assert status["legs"] == {"apart": 0, "whole": 3, "prefill": {}, "decode": {}}
        why = "kv_cache_dtype is auto in one and fp8 in the other"
        for one in status["replicas"]:
            [said] = [problem for problem in one["problems"] if "cannot fetch" in problem]
            assert why in said and f":{unlike.port} cannot fetch what 127.0.0.1:{prefiller.port}" in said
        assert b"".join(gateway.log).count(why.encode()) == 1, "said once"
        assert await gateway.counted("hitherto_retries_total") == 0
        told = (await gateway.admin.post("/explain", params={"path": path}, json=body)).json()
        assert told["legs"] is None and told["other_legs"] is None
