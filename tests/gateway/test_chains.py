"""A gateway is no engine: two that name each other, or one that names itself, send nothing in circles."""

import pytest

from ..redis_server import free_port
from .running import running

MESSAGES = [{"role": "user", "content": "Which way?"}]


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine().wait()


async def test_a_gateway_that_is_named_as_a_replica_gets_no_request(engine):
    """Behind a gateway whose only replica is another gateway nobody answers; beside an engine that one does."""
    async with running("--replica-url", engine.url, "--model", "sim") as inner:
        await inner.ready(1)
        async with running("--replica-url", inner.url, "--model", "sim") as outer:
            status = await outer.until(lambda status: "gateway" in status["replicas"][0]["reason"])
            assert status["replicas"][0]["state"] != "ready"
            answer = await outer.chat(MESSAGES)
            assert answer.status_code == 503 and "a gateway of this kind answers there" in answer.text
            added = await outer.admin.post("/replicas", json={"url": engine.url})
            assert added.status_code == 201
            await outer.ready(1)
            assert {(await outer.chat(MESSAGES)).headers["x-hitherto-replica"] for _ in range(3)} == {
                added.json()["id"]
            }


async def test_one_that_names_itself_ends_no_request_in_a_circle(engine):
    port = free_port()
    own = f"http://127.0.0.1:{port}"
    async with running("--replica-url", own, engine.url, "--model", "sim", "--port", str(port)) as gateway:
        await gateway.ready(1)
        status = await gateway.until(lambda status: any("gateway" in one["reason"] for one in status["replicas"]))
        assert sorted(one["state"] == "ready" for one in status["replicas"]) == [False, True]
        assert {(await gateway.chat(MESSAGES)).status_code for _ in range(3)} == {200}
