"""Three kinds of engines behind one gateway, each spoken to in its own way: one that speaks as vLLM does, the simulated
one, and a toy that has nothing in common with them."""

import asyncio
import json
from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import httpx
import pytest

from gateway.app import Gateway
from gateway.settings import Settings
from replicas import State, engines
from replicas.adopt import probe

from .toy_engine import PAGE, Publisher, ToyDialect, toy, vllm

HEADERS = {"X-Toy-Shard": "client", "X-data-parallel-rank": "client"}


async def until(true, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def one_gateway(simulated: str):
    publishers = [Publisher(), Publisher()]
    fakes = {"vllm": vllm(), "toy": toy([one.port for one in publishers])}
    urls = [await fake.start() for fake in fakes.values()]
    settings = Settings(
        host="127.0.0.1", port=0, admin_port=0, replica_url=(*urls, simulated), model="sim", policy="round_robin"
    )
    gateway = Gateway(settings)
    try:
        await gateway.start()
        await until(
            lambda: (
                len(gateway.proxy.backends) == 5
                and all(one.state is State.READY for one in gateway.fleet.replicas.values())
            )
        )
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30) as client:
            yield SimpleNamespace(
                gateway=gateway,
                client=client,
                publishers=publishers,
                simulated=simulated.removeprefix("http://"),
                **fakes,
            )
    finally:
        await gateway.stop(0)
        for fake in fakes.values():
            await fake.runner.cleanup()
        for publisher in publishers:
            publisher.close()


@pytest.fixture
def known():
    """The toy is one of the engines that are known."""
    engines.DIALECTS.insert(0, ToyDialect())
    yield
    engines.DIALECTS.pop(0)


@pytest.fixture(scope="module")
def simulated(start_engine):
    return start_engine("--no-events", "--no-cached-tokens").wait().url


def prompt(number: int) -> dict:
    return {"model": "sim", "prompt": f"{number} is what nobody else says. " * 20, "max_tokens": 2}


async def ask(house, number: int) -> httpx.Response:
    answer = await house.client.post("/v1/completions", json=prompt(number), headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer


async def test_each_engine_is_read_and_asked_in_its_own_way(known, simulated):
    async with one_gateway(simulated) as house:
        replicas = house.gateway.fleet.replicas
        speaks = {id: one.dialect.id for id, one in replicas.items()}
        assert speaks == {**dict.fromkeys((f"{house.vllm.id}-dp0", f"{house.vllm.id}-dp1"), "vllm"),
                          **dict.fromkeys((f"{house.toy.id}-dp0", f"{house.toy.id}-dp1"), "toy"), house.simulated: "sim"}  # fmt: skip
        assert [replicas[f"{house.vllm.id}-dp1"].num_blocks, replicas[f"{house.toy.id}-dp1"].num_blocks] == [
            100,
            480 // PAGE,
        ]
        told = {speaks[id]: " ".join(one.problems) for id, one in replicas.items()}
        assert (
            "--kv-events-config" in told["vllm"]
            and "--no-events" in told["sim"]
            and "toy's replay knob" not in told["vllm"]
        )
        assert told["toy"] == ""

        for number in range(10):
            await ask(house, number)
        # The rank is in each engine's own header; a client's is dropped where it would choose one.
        ranks = [[headers.getall(name) for headers in house.vllm.seen] for name in HEADERS]
        shards = [[headers.getall(name) for headers in house.toy.seen] for name in HEADERS]
        assert sorted(ranks[1]) == sorted(shards[0]) == [["0"], ["0"], ["1"], ["1"]]
        assert ranks[0] == shards[1] == [["client"]] * 4

        (prompts,) = house.gateway.models.pipelines
        hashes = prompts.prepare("/v1/completions", json.dumps(prompt(99)).encode()).hashes
        tokens = array("I", prompts.tokenizer.encode(prompt(99)["prompt"])).tolist()[: len(hashes) * PAGE]
        await house.publishers[1].subscribed()
        await house.publishers[1].store(list(range(len(hashes))), tokens)
        slot = house.gateway.slots[f"{house.toy.id}-dp1"]
        await until(lambda: house.gateway.map.match(hashes, 0.0).confirmed[slot] == len(hashes) > 0)


async def test_what_one_engine_calls_cut_short_is_an_answer_of_another(known, simulated):
    async with one_gateway(simulated) as house:
        house.toy.answer, house.vllm.answer = {"finish_reason": "abort"}, {"toy_cut": True}
        for number in range(5):
            await ask(house, number)
        assert (len(house.toy.seen), len(house.vllm.seen)) == (2, 2)
        house.toy.answer, house.vllm.answer = {"toy_cut": True}, {"finish_reason": "abort"}
        answers = [await ask(house, number) for number in range(5, 10)]
        elsewhere = sum(one.headers["x-hitherto-replica"] == house.simulated for one in answers)
        assert len(house.toy.seen) + len(house.vllm.seen) - 4 + elsewhere > len(answers)  # some were sent again


async def test_an_engine_of_no_known_kind_is_taken_for_the_usual_one():
    fake = toy([])
    async with aiohttp.ClientSession() as session:
        facts = await probe(await fake.start(), session)
        await fake.runner.cleanup()
    assert facts.serving and facts.dialect is engines.DEFAULT and "series" in facts.problems["metrics"].what
