"""A gateway process whose replicas are pods: roles by label, in one process and in workers, and for the doctor.

The tests of `gateway` share one of each kind, and each test starts with a gateway that knows no pod."""

import json
from typing import NamedTuple

import pytest
import pytest_asyncio

from gateway.ops.doctor import examine, line
from gateway.settings import load
from tests.replicas.cluster import Cluster

from .running import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

APP = {"app": "vllm"}
TEXT = "Down the rabbit hole, and what Alice found there: a table, a key and a very small door. "


@pytest.fixture(scope="module")
def pair(start_engine):
    made = [start_engine("--kv-connector"), start_engine("--kv-connector")]
    return [one.wait() for one in made]


@pytest_asyncio.fixture(loop_scope="module")
async def cluster():
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


def settings(cluster, engine, **fields) -> str:
    """Where `cluster` is, for pods that listen where `engine` does."""
    return json.dumps(
        {
            "selector": "app=vllm",
            "namespace": "inference",
            "api": f"http://127.0.0.1:{cluster.port}",
            "url": f"http://{{ip}}:{engine.port}",
            **fields,
        }
    )


class Shared(NamedTuple):
    gateway: Running
    cluster: Cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one process", "two workers"])
async def shared(pair, request):
    """A gateway whose pods listen where the first of the pair does. The second is a replica by its URL."""
    cluster, (pod, other) = Cluster(), pair
    await cluster.start()
    given = ["--discover", settings(cluster, pod, labels={"role": "part"}), "--replica-url", f"{other.url}#role=decode"]
    workers = ["--workers", "2"] if request.param == "two workers" else []
    async with running(*given, "--policy", "round_robin", *workers) as gateway:
        yield Shared(gateway, cluster)
    await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared):
    await shared.gateway.ready(1)
    yield shared.gateway
    for name in [*shared.cluster.pods]:
        await shared.cluster.delete(name)
    await shared.gateway.until(lambda status: (status["discovery"]["replicas"], len(status["replicas"])) == (0, 1))


@pytest.fixture
def pods(shared):
    return shared.cluster


async def test_a_pod_computes_the_prompts_that_its_label_says(gateway, pods, pair):
    prefiller, decoder = pair
    before = await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete")
    await pods.create("p", "127.0.0.1", APP | {"part": "prefill"})
    status = await gateway.ready_for_legs(2)
    assert {one["url"]: one["role"] for one in status["replicas"]} == {prefiller.url: "prefill", decoder.url: "decode"}
    assert status["discovery"] == {"selector": "app=vllm", "replicas": 1, "problem": None}
    with_workers = len(status.get("workers", ()))  # no prompt is in the engines' caches from the other gateway
    answer = await gateway.chat([{"role": "user", "content": f"With {with_workers}. " + TEXT * 20}])
    assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
    assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == before + 1
    await pods.delete("p")
    await gateway.until(lambda status: [one["role"] for one in status["replicas"]] == ["decode"])
    answer = await gateway.chat([{"role": "user", "content": f"With {with_workers}, alone. " + TEXT * 20}])
    assert answer.status_code == 200


async def test_without_any_pod_it_is_said_what_is_waited_for(cluster, pair):
    async with running("--discover", settings(cluster, pair[0])) as gateway:
        await gateway.until(lambda status: "has the labels of discover.selector" in (status["why_not"] or ""))
        cluster.refuses = 403
        await cluster.stop()
        await gateway.until(lambda status: "does not answer" in status["why_not"])


async def doctor(discover: str) -> str:
    config = load(flags={"discover": discover, "port": 0, "admin_port": 0}, environ={})
    return "\n".join([line(finding) async for finding in examine(config)])


async def test_the_doctor_says_which_pods_are_replicas_and_tries_them(cluster, pair):
    given = settings(cluster, pair[0])
    assert "none that 'app=vllm' selects is a replica" in await doctor(given)
    await cluster.create("p", "127.0.0.1", APP | {"llm-d.ai/role": "prefill"})
    await cluster.create("odd", "127.0.0.9", APP | {"llm-d.ai/role": "encode"})
    told = await doctor(given)
    assert "1 are replicas (1 prefill)" in told and f"replica 127.0.0.1:{pair[0].port}" in told, told
    assert "pod odd: its label llm-d.ai/role says 'encode'" in told
    assert "none has role=decode" in told
    cluster.refuses = 403
    told = await doctor(given)
    assert "get, list and watch pods" in told


async def test_a_model_whose_only_pod_is_made_again_is_not_refused_for_good(cluster, pair, start_engine):
    llama = start_engine("--served-model-name", "llama", "--lora", "red").wait()
    async with running("--discover", settings(cluster, llama), "--replica-url", pair[0].url) as gateway:
        await gateway.ready(1)
        await cluster.create("p", "127.0.0.1", APP)
        await gateway.until(lambda status: len(status["spaces"]) == 2)
        await cluster.delete("p")
        await gateway.until(lambda status: len(status["replicas"]) == 1 == len(status["spaces"]))
        for model in ("llama", "red"):
            assert await gateway.counted("hitherto_model_gone", model=model) == 1
            answer = await gateway.chat([{"role": "user", "content": TEXT}], model=model)
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
            assert "a pod of it went " in answer.json()["error"]["message"]
            body = {"model": model, "query": "x", "documents": ["y"]}
            assert (await gateway.client.post("/v1/rerank", json=body)).status_code == 503
            assert (await gateway.client.get(f"/v1/models/{model}")).status_code == 503
            ready = await gateway.admin.get("/readyz", params={"model": model})
            assert ready.status_code == 503 and "a pod of it went " in ready.json()["why_not"]
        assert await gateway.counted("hitherto_prompt_failures_total") == 0, "they were not routed by load, but refused"
        assert (await gateway.chat([{"role": "user", "content": TEXT}], model="lama")).status_code == 404
        await cluster.create("p", "127.0.0.1", APP)
        await gateway.ready(2)
        assert (await gateway.chat([{"role": "user", "content": TEXT}], model="red")).status_code == 200
        assert "hitherto_model_gone{" not in (await gateway.admin.get("/metrics")).text
    llama.stop()


async def test_while_the_pods_are_not_known_no_model_is_refused_for_good(cluster, pair, unused_tcp_port):
    given = settings(cluster, pair[0], api=f"http://127.0.0.1:{unused_tcp_port}")
    async with running("--discover", given, "--replica-url", pair[1].url) as gateway:
        await gateway.ready(1)
        answer = await gateway.chat([{"role": "user", "content": TEXT}], model="late")
        assert answer.status_code == 503 and "the pods are not known: " in answer.json()["error"]["message"]
