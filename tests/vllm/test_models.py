"""Two real models behind one gateway of two workers that share a Redis: each is predicted exactly, whichever worker a
request comes to, and what an engine is restarted as is followed."""

import asyncio
import json
import shutil

import httpx
import pytest
import pytest_asyncio

from loadgen.demo.tiny_model import tiny_model

from ..gateway.running import Running, counted
from ..redis_server import RedisServer, binaries
from ..redis_server import running as redis_running
from .engines import Engine, block_size, gateway, heard
from .traffic import drive, share_equal, talking, wrong
from .witness import Witness

pytestmark = pytest.mark.exact

CONTEXT = 1024  # of the other model, in tokens
TOKENS = 4096  # in its cache


@pytest.fixture(scope="module")
def other(start_engine, model, tmp_path_factory):
    """An engine of an unlike model: half of the tokenizer's merges, another chat template, larger blocks, a shorter
    context."""
    files = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, files / name)
    tokenizer = json.loads((files / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 2]
    (files / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((files / "tokenizer_config.json").read_text())
    config["chat_template"] = "Speak plainly. " + config["chat_template"]
    (files / "tokenizer_config.json").write_text(json.dumps(config))
    folder = tiny_model(tmp_path_factory.mktemp("models") / "other", files, seed=5)
    size = 2 * block_size()
    return start_engine("--max-model-len", str(CONTEXT), model=folder, name="other", size=size, blocks=TOKENS // size)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if not binaries():
        pytest.skip("needs a redis-server")
    with redis_running(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server.url


@pytest_asyncio.fixture
async def workers(engine, other, redis_url):
    """A gateway of two workers before both, each request on a connection of its own, so that both workers get some."""
    settings = {"workers": 2, "redis_url": redis_url, "policy": "least_time"}
    limits = httpx.Limits(max_keepalive_connections=0)
    async with gateway(engine.replica_url, other.wait().replica_url, **settings) as process:
        kept = process.client
        async with httpx.AsyncClient(base_url=process.url, timeout=180, limits=limits) as process.client:
            await process.until(compared, 60)
            yield process
        process.client = kept


def compared(status: dict) -> bool:
    return all(one["tokenizer"].startswith("the gateway's") for one in status["replicas"])


async def all_caught_up(process: Running, witnesses: list[Witness]) -> None:
    """Until each worker's map has as many blocks of each replica as its engine has."""
    async with asyncio.timeout(10):
        while True:
            for witness in witnesses:
                await asyncio.to_thread(witness.settled, 0.03)
            page = (await process.admin.get("/metrics")).text
            if all(
                counted(page, "hitherto_map_replica_blocks", worker=worker, replica=one.id) == one.held
                for one in witnesses
                for worker in "01"
            ):
                return


async def driven(process: Running, witnesses: list[Witness], models: tuple[str, ...], count: int, seed: int) -> None:
    """Conversations with each model, all of whose predictions are exact, hits among them for each model."""
    make = talking(models, longest=600)
    outcomes = await drive(
        process, count, make, talks=6, seed=seed, between=lambda _: all_caught_up(process, witnesses)
    )
    assert share_equal(outcomes) == 1, wrong(outcomes)
    for model in models:
        mine = [one for one in outcomes if one.model == model]
        assert len({one.replica for one in mine}) == 1 and any(one.cached for one in mine), mine


async def test_each_of_two_models_is_exact_through_either_worker(workers, engine, other, witness_of):
    witnesses = [witness_of(engine), witness_of(other)]
    await all_caught_up(workers, witnesses)
    await driven(workers, witnesses, ("tiny", "red", "other"), 36, seed=51)
    page = (await workers.admin.get("/metrics")).text
    for number in "01":
        assert counted(page, "hitherto_predictions_total", worker=number, outcome="equal") > 5
    told = {one["id"]: one["max_model_len"] for one in (await workers.client.get("/v1/models")).json()["data"]}
    length = TOKENS - block_size()
    assert told == {"tiny": length, "red": length, "blue": length, "other": CONTEXT}
    spaces = {one["models"][0]: one["block_size"] for one in (await workers.status())["spaces"]}
    assert spaces == {"tiny": block_size(), "other": 2 * block_size()}
    long = {"prompt": "a prompt that is too long for one of them " * 150, "max_tokens": 1}
    for _ in range(4):
        assert (await workers.client.post("/v1/completions", json=long | {"model": "tiny"})).status_code == 200
        refused = await workers.client.post("/v1/completions", json=long | {"model": "other"})
        assert refused.status_code == 400 and str(CONTEXT) in refused.json()["error"]["message"]
        unknown = await workers.client.post("/v1/completions", json=long | {"model": "nobody"})
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


async def test_an_engine_that_comes_back_as_another_is_followed_by_both_workers(
    workers, engine: Engine, other: Engine, model, witness_of
):
    """Another tokenizer and template in the same folder, and other blocks, behind the same URL and name."""
    other.kill()
    await workers.until(lambda status: any(one["state"] == "failed" for one in status["replicas"]))
    long = {"model": "other", "prompt": "away " * 100, "max_tokens": 1}
    # 502 through the worker that has not noticed yet
    assert (await workers.client.post("/v1/completions", json=long)).status_code in (502, 503)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, other.model / name)
    other.block_size, other.command[other.command.index("--block-size") + 1] = block_size(), str(block_size())
    other.start().wait()
    await workers.until(lambda status: heard(status, 2) and compared(status), 60)
    await workers.until(lambda status: {one["block_size"] for one in status["spaces"]} == {block_size()})
    witnesses = [witness_of(engine), witness_of(other)]
    await all_caught_up(workers, witnesses)
    await driven(workers, witnesses, ("tiny", "other"), 24, seed=52)
