"""What a running vLLM tells a gateway that is given its URL: facts, data-parallel ranks, adapters, and what is amiss.

Two engines are started for this: one with two ranks, and one that tells as little as vLLM can be made to.
"""

import asyncio
import itertools
import json
import os

import aiohttp
import httpx
import pytest

from gateway.ops import doctor
from gateway.settings import load
from replicas.adopt import described, probe
from replicas.launch import ports
from replicas.replica import parse_url

from ..gateway.running import counted, predicted
from .conftest import ADAPTERS, SHARED_TOKENS
from .engines import Engine, block_size, gateway, lora, release, version
from .pd import asked, body_of
from .traffic import cached

OLD = version() < (0, 29) if os.environ.get("HITHERTO_VLLM") else False
MANY = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
KEY = "sesame"


def publishing(first: int, **more) -> tuple[str, ...]:
    """Flags for events of two ranks: vLLM adds the rank to both ports."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{first}", **more}
    return "--kv-events-config", json.dumps(config)


@pytest.fixture(scope="module")
def started(start_engine) -> tuple[Engine, Engine]:
    """One with two data-parallel ranks, and one that tells little; they load side by side."""
    first = ports.pick(1, "127.0.0.1", set(), run=4)[0]
    flags = "--data-parallel-size 2 --api-server-count 1 --enable-lora --max-lora-rank 8 --max-loras 2".split()
    flags += publishing(first, replay_endpoint=f"tcp://*:{first + 2}")
    ranks = start_engine(*flags, events=None, blocks=256, env=MANY)
    if OLD:  # vLLM 0.32 tells where its events are, 0.28 has to be believed
        ranks.replica_url += f"#events=tcp://127.0.0.1:{first},replay=tcp://127.0.0.1:{first + 2}"
    quiet = ("--no-enable-prompt-tokens-details", "--disable-log-stats", "--api-key", KEY)
    mute = start_engine(*quiet, *publishing(ports.pick(1, "127.0.0.1", set())[0]), events=None, blocks=128)
    return ranks, mute


@pytest.fixture
def ranks(started) -> Engine:
    return started[0].wait()


@pytest.fixture
def mute(started) -> Engine:
    return started[1].wait()


async def told_by(engine: Engine):
    async with aiohttp.ClientSession() as session:
        return await probe(engine.url, session)


async def complete(client: httpx.AsyncClient, prompt: str, model: str = "tiny", **headers: str) -> httpx.Response:
    body = {"model": model, "prompt": text(prompt), "max_tokens": 1}
    return await client.post("/v1/completions", json=body, headers=headers)


def text(name: str, words: int = 120) -> str:
    return f"{name} " + f"said {name} and went on to say " * (words // 7)


def two_live(status: dict) -> bool:
    return [one["events"] for one in status["replicas"] if one["state"] == "ready"] == ["live", "live"]


async def settled(running) -> None:
    """Until the events of what was sent are in the map: the engine's count of blocks it told of stands still."""
    before = None
    while (now := [(one["id"], one["map_blocks"]) for one in (await running.status())["replicas"]]) != before:
        before = now
        await asyncio.sleep(0.3)


async def test_an_engine_tells_what_it_is(engine):
    facts = await told_by(engine)
    assert facts.serving and facts.root == str(engine.model)
    assert facts.models == {"tiny": None, **dict.fromkeys(ADAPTERS, "tiny")}
    assert facts.version == release() and facts.engines == (0,)
    assert (facts.block_size, facts.num_blocks) == (engine.block_size, engine.blocks)
    assert facts.scrape.prefix_caching is True
    assert facts.max_model_len == SHARED_TOKENS - block_size() and facts.scrape.started > 1e9
    assert None not in facts.scrape[:8]
    (replica,) = described(parse_url(engine.replica_url), facts)
    assert (replica.id, replica.rank, replica.problems) == (engine.id, None, ())
    assert (replica.events.endpoint, replica.events.replay) == (engine.events, engine.replay)
    if OLD:
        assert set(facts.problems) == {"events"} and "#events=" in facts.problems["events"].remedy
    else:
        assert facts.problems == {} and facts.events()[0].endpoint == engine.events


async def test_an_engine_that_serves_a_folder_by_another_name_is_matched_by_tokens(engine):
    """Nobody has told the gateway where the model is; "tiny" leads nowhere."""
    async with gateway(engine.replica_url) as process:
        assert (await complete(process.client, "folder")).status_code == 200
        assert (await process.status())["totals"]["prompts"] == {"exact": 1}


async def test_ranks_tell_their_figures_apart(ranks):
    facts = await told_by(ranks)
    both = zero, one = described(parse_url(ranks.replica_url), facts)
    assert [replica.id for replica in both] == [f"{ranks.id}-dp{rank}" for rank in (0, 1)]
    assert zero.num_blocks == one.num_blocks == 256 and not zero.problems
    for first, second in ((zero.events.endpoint, one.events.endpoint), (zero.events.replay, one.events.replay)):
        assert int(second.rpartition(":")[2]) == int(first.rpartition(":")[2]) + 1
    assert None not in [figure for one in both for figure in (one.scrape.prefix_hits, one.scrape.kv_usage)]


async def test_predictions_equal_what_each_rank_reports(ranks):
    """Two turns of eight conversations over three endpoints; a client's own header is dropped."""

    def ask(client: httpx.AsyncClient, name: str, turn: int):
        said = [("user", text(name)), ("assistant", "So?"), ("user", text("again"))][: 1 + 2 * turn]
        path, body = body_of({"g": "messages", "h": "messages"}.get(name, "chat"), said, stream=False, most=4)
        if name in "abcd":
            path, body = asked("completions", text(name) + text("again") * turn, stream=False, most=4)
        return client.post(path, json=body, headers={"X-data-parallel-rank": "9"})

    async with gateway(ranks, ready=False) as running:
        await running.until(two_live, 60)
        homes: dict[str, set[str]] = {}
        # at first all at once, so that both ranks get some; then one by one, so that none has to make way
        for turn in range(2):
            asking = [ask(running.client, name, turn) for name in "abcdefgh"]
            answers = [await one for one in asking] if turn else await asyncio.gather(*asking)
            for name, answer in zip("abcdefgh", answers):
                assert answer.status_code == 200, answer.text
                assert predicted(answer) == cached(answer) and bool(cached(answer)) == bool(turn), (name, answer.text)
                homes.setdefault(name, set()).add(answer.headers["x-hitherto-replica"])
            await settled(running)
        assert all(len(where) == 1 for where in homes.values())
        assert set.union(*homes.values()) == {f"{ranks.id}-dp{rank}" for rank in (0, 1)}
        # what one rank holds the other does not
        async with httpx.AsyncClient(base_url=ranks.url, timeout=30) as direct:
            home = int(homes["a"].pop()[-1])
            rank_headers = [{"X-data-parallel-rank": str(rank)} for rank in (home, 1 - home)]
            found = [cached(await complete(direct, "a", **header)) for header in rank_headers]
        assert found[0] > 0 == found[1]
        figures = (await running.admin.get("/metrics")).text
        assert [counted(figures, "hitherto_predictions_total", outcome=wrong) for wrong in ("over", "under")] == [0, 0]


async def test_a_drained_rank_gets_nothing_and_the_other_goes_on(ranks):
    async with gateway(ranks, ready=False) as running:
        await running.until(two_live, 60)
        await running.admin.post(f"/replicas/{ranks.id}-dp1/drain")
        before = (await told_by(ranks)).scrape.ranks[1].prefix_queries
        for number in range(6):
            answer = await complete(running.client, f"n{number}")
            assert answer.headers["x-hitherto-replica"].endswith("-dp0")
        assert (await told_by(ranks)).scrape.ranks[1].prefix_queries == before


async def test_adapters_loaded_and_unloaded_at_run_time(ranks, engine, tmp_path):
    """`green` only on the ranks, `red` only on the other engine, and the base model on all three."""
    named = {"lora_name": "green", "lora_path": str(lora(tmp_path / "green", seed=7))}
    here, there = {f"{ranks.id}-dp{rank}" for rank in (0, 1)}, {engine.id}

    def green(status):
        return {one["id"] for one in status["replicas"] if one["adapters"].get("green") == "tiny"}

    async with (
        gateway(ranks, engine, ready=False) as running,
        httpx.AsyncClient(base_url=ranks.url, timeout=60) as direct,
    ):
        await running.until(lambda status: sum(one["events"] == "live" for one in status["replicas"]) == 3, 60)
        assert (await direct.post("/v1/load_lora_adapter", json=named)).status_code == 200
        await running.until(lambda status: green(status) == here)
        seen: dict[str, set[str]] = {"green": set(), "red": set()}
        for turn in range(2):
            for name, prompt in itertools.product(seen, "xyz"):
                answer = await complete(running.client, prompt, name)
                assert answer.status_code == 200, answer.text
                assert predicted(answer) == cached(answer) and bool(turn) == bool(cached(answer))
                seen[name].add(answer.headers["x-hitherto-replica"])
            await settled(running)
        assert seen["green"] <= here and seen["red"] == there
        question = {"params": {"path": "/v1/completions"}, "json": {"model": "green", "prompt": text("x")}}
        explained = (await running.admin.post("/explain", **question)).json()
        assert explained["adapter"] == "green" and {one["id"] for one in explained["replicas"]} == here
        assert max(one["overlap_tokens"] for one in explained["replicas"]) > 0
        assert (await direct.post("/v1/unload_lora_adapter", json={"lora_name": "green"})).status_code == 200
        await running.until(lambda status: not green(status))
        refused = await complete(running.client, "x", "green")
        assert refused.status_code == 404 and "red" in refused.json()["error"]["message"]


async def examined(engine: Engine, monkeypatch, tmp_path) -> dict[str, doctor.Finding]:
    """What the doctor says of one replica, by subject."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gateway.ops.trial.EVENT_SECONDS", 2.0)
    free = ports.pick(2, "127.0.0.1", set())
    settings = {
        "replica_url": (engine.replica_url,),
        "model": str(engine.model),
        "port": free[0],
        "admin_port": free[1],
    }
    config = load(settings, file=None)
    return {finding.subject.split(" 127.")[0]: finding async for finding in doctor.examine(config)}


async def test_the_doctor_finds_nothing_amiss_with_whole_engines(engine, ranks, monkeypatch, tmp_path):
    """It tries each rank."""
    shown = f"{engine.blocks} blocks of {engine.block_size}"
    for one, *words in ((engine, "adapters red, blue", shown), (ranks, "2 data-parallel ranks")):
        found = await examined(one, monkeypatch, tmp_path)
        assert {finding.level for finding in found.values()} == {"ok"}, found
        assert all(word in found["replica"].text for word in words)


async def test_the_doctor_names_what_an_engine_does_not_tell(mute, monkeypatch, tmp_path):
    found = await examined(mute, monkeypatch, tmp_path)
    assert "--engine-api-key" in found["model names"].remedy and "--disable-log-stats" in found["metrics"].remedy
    assert "API key" in found["trial"].text and found["block size"].remedy.startswith("give --block-size")
    assert not [one for one in found.values() if one.level == "fail"], found


async def test_an_engine_behind_a_key_is_served_with_the_clients_key(mute):
    """Nothing is told but that it lives; it still gets requests, and its cache is modelled or followed."""
    async with gateway(mute, block_size=block_size(), ready=False) as running:
        (shown,) = (await running.until(lambda status: status["ready"]))["replicas"]
        assert shown["models"] == [] and any("API key" in problem for problem in shown["problems"])
        # with another prompt: what is refused counts as sent there for the 5 s of a prediction
        assert (await complete(running.client, "n")).status_code == 401
        for turn in range(2):
            answer = await complete(running.client, "k", Authorization=f"Bearer {KEY}")
            assert answer.status_code == 200 and bool(predicted(answer)) == bool(turn)
            await settled(running)
        (shown,) = (await running.status())["replicas"]
        for flag in ("--enable-prompt-tokens-details", "--disable-log-stats"):
            assert any(flag in problem for problem in shown["problems"])
