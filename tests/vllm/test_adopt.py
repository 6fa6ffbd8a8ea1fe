"""What a running vLLM tells a gateway that is given its URL: facts, data-parallel ranks, adapters, and what is amiss.

Two engines are started for this: one with two ranks, and one that tells as little as vLLM can be made to.
"""

import asyncio
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

from ..gateway.running import counted
from ..gateway.running import running as gateway_process
from .conftest import ADAPTERS, SHARED_TOKENS
from .engines import Engine, block_size, gateway, lora, version

OLD = version() < (0, 29) if os.environ.get("HITHERTO_VLLM") else False
MANY = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
KEY = "sesame"


def publishing(first: int, **more) -> tuple[str, ...]:
    """Flags for events of two ranks: vLLM adds the rank to both ports."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{first}", **more}
    return "--kv-events-config", json.dumps(config)


@pytest.fixture(scope="module")
def started(start_engine, model):
    """{"ranks": two data-parallel ranks, "mute": an engine that tells little}; they load side by side."""
    first = ports.pick(1, "127.0.0.1", set(), run=4)[0]
    flags = (
        "--data-parallel-size",
        "2",
        "--api-server-count",
        "1",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--max-loras",
        "2",
    )
    ranks = start_engine(
        *flags, *publishing(first, replay_endpoint=f"tcp://*:{first + 2}"), events=None, blocks=256, env=MANY
    )
    # vLLM 0.32 tells where its events are, 0.28 has to be believed
    ranks.replica_url = (
        f"{ranks.url}#events=tcp://127.0.0.1:{first},replay=tcp://127.0.0.1:{first + 2}" if OLD else ranks.url
    )
    quiet = ("--no-enable-prompt-tokens-details", "--disable-log-stats", "--api-key", KEY)
    mute = start_engine(*quiet, *publishing(ports.pick(1, "127.0.0.1", set())[0]), events=None, blocks=128)
    yield {"ranks": ranks, "mute": mute}
    for engine in (ranks, mute):
        engine.stop()


@pytest.fixture(scope="module")
def ranks(started) -> Engine:
    return started["ranks"].wait()


@pytest.fixture(scope="module")
def mute(started) -> Engine:
    return started["mute"].wait()


async def told_by(engine: Engine):
    async with aiohttp.ClientSession() as session:
        return await probe(engine.url, session)


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-hitherto-cached-tokens"])


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
    assert (
        facts.serving
        and facts.models == {"tiny": None, **dict.fromkeys(ADAPTERS, "tiny")}
        and facts.root == str(engine.model)
    )
    assert facts.version == ".".join(map(str, version())) and facts.engines == (0,)
    assert (facts.block_size, facts.num_blocks) == (
        engine.block_size,
        engine.blocks,
    ) and facts.scrape.prefix_caching is True
    assert facts.max_model_len == SHARED_TOKENS - block_size() and facts.scrape.started > 1e9
    assert None not in facts.scrape[:8]
    (replica,) = described(parse_url(engine.replica_url), facts)
    assert (replica.id, replica.rank, replica.events.endpoint, replica.events.replay) == (
        f"127.0.0.1:{engine.port}",
        None,
        engine.events,
        engine.replay,
    )
    assert replica.problems == ()
    if OLD:
        assert set(facts.problems) == {"events"} and "#events=" in facts.problems["events"].remedy
    else:
        assert facts.problems == {} and facts.events()[0].endpoint == engine.events


async def test_an_engine_that_serves_a_folder_by_another_name_is_matched_by_tokens(engine):
    """Nobody has told the gateway where the model is; "tiny" leads nowhere."""
    async with gateway_process("--replica-url", engine.replica_url) as process:
        await process.until(lambda status: status["ready"])
        answer = await process.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": text("folder"), "max_tokens": 1}
        )
        assert answer.status_code == 200 and (await process.status())["totals"]["prompts"] == {"exact": 1}


async def test_ranks_tell_their_figures_apart(ranks):
    facts = await told_by(ranks)
    zero, one = described(parse_url(ranks.replica_url), facts)
    assert [replica.id for replica in (zero, one)] == [f"127.0.0.1:{ranks.port}-dp0", f"127.0.0.1:{ranks.port}-dp1"]
    assert zero.num_blocks == one.num_blocks == 256 and not zero.problems
    for first, second in ((zero.events.endpoint, one.events.endpoint), (zero.events.replay, one.events.replay)):
        assert int(second.rpartition(":")[2]) == int(first.rpartition(":")[2]) + 1
    assert [one.scrape.prefix_hits is not None and one.scrape.kv_usage is not None for one in (zero, one)] == [
        True,
        True,
    ]


async def test_predictions_equal_what_each_rank_reports(ranks):
    """Two turns of eight conversations over three endpoints; a client's own header is dropped."""

    def ask(client: httpx.AsyncClient, name: str, turn: int):
        body = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        if name in "abcd":
            path, body["prompt"] = "/v1/completions", text(name) + text("again") * turn
        else:
            messages = [
                {"role": "user", "content": text(name)},
                {"role": "assistant", "content": "So?"},
                {"role": "user", "content": text("again")},
            ]
            path, body["messages"] = (
                "/v1/messages" if name in "gh" else "/v1/chat/completions",
                messages[: 1 + 2 * turn],
            )
        return client.post(path, json=body, headers={"X-data-parallel-rank": "9"})

    async with gateway(ranks, ready=False) as running:
        await running.until(two_live, 60)
        homes: dict[str, set[str]] = {}
        # at first all at once, so that both ranks get some; then one by one, so that none has to make way
        for turn in range(2):
            asked = [ask(running.client, name, turn) for name in "abcdefgh"]
            answers = [await one for one in asked] if turn else await asyncio.gather(*asked)
            for name, answer in zip("abcdefgh", answers):
                assert answer.status_code == 200, answer.text
                path = answer.request.url.path
                usage = answer.json()["usage"]
                seen = usage["cache_read_input_tokens"] if path == "/v1/messages" else cached(answer)
                assert predicted(answer) == seen and bool(seen) == bool(turn), (name, turn, usage)
                homes.setdefault(name, set()).add(answer.headers["x-hitherto-replica"])
            await settled(running)
        assert all(len(where) == 1 for where in homes.values())
        assert set.union(*homes.values()) == {f"127.0.0.1:{ranks.port}-dp{rank}" for rank in (0, 1)}
        # what one rank holds the other does not
        async with httpx.AsyncClient(base_url=ranks.url, timeout=30) as direct:
            home = int(homes["a"].pop()[-1])
            body = {"model": "tiny", "prompt": text("a"), "max_tokens": 1}
            found = [
                cached(await direct.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}))
                for rank in (home, 1 - home)
            ]
        assert found[0] > 0 == found[1]
        figures = (await running.admin.get("/metrics")).text
        assert [counted(figures, "hitherto_predictions_total", outcome=wrong) for wrong in ("over", "under")] == [0, 0]


async def test_a_drained_rank_gets_nothing_and_the_other_goes_on(ranks):
    async with gateway(ranks, ready=False) as running:
        await running.until(two_live, 60)
        await running.admin.post(f"/replicas/127.0.0.1:{ranks.port}-dp1/drain")
        before = (await told_by(ranks)).scrape.ranks[1].prefix_queries
        for number in range(6):
            answer = await running.client.post(
                "/v1/completions", json={"model": "tiny", "prompt": text(f"n{number}"), "max_tokens": 1}
            )
            assert answer.headers["x-hitherto-replica"].endswith("-dp0")
        assert (await told_by(ranks)).scrape.ranks[1].prefix_queries == before


async def test_adapters_loaded_and_unloaded_at_run_time(ranks, engine, tmp_path):
    """`green` only on the ranks, `red` only on the other engine, and the base model on all three."""
    folder = lora(tmp_path / "green", seed=7)
    here, there = {f"127.0.0.1:{ranks.port}-dp{rank}" for rank in (0, 1)}, {f"127.0.0.1:{engine.port}"}
    async with (
        gateway(ranks, engine, ready=False) as running,
        httpx.AsyncClient(base_url=ranks.url, timeout=60) as direct,
    ):

        def green(status):
            return {one["id"] for one in status["replicas"] if one["adapters"].get("green") == "tiny"}

        await running.until(lambda status: sum(one["events"] == "live" for one in status["replicas"]) == 3, 60)
        assert (
            await direct.post("/v1/load_lora_adapter", json={"lora_name": "green", "lora_path": str(folder)})
        ).status_code == 200
        await running.until(lambda status: green(status) == here)
        seen: dict[str, set[str]] = {"green": set(), "red": set()}
        for turn in range(2):
            for name in ("green", "red"):
                for prompt in "xyz":
                    answer = await running.client.post(
                        "/v1/completions", json={"model": name, "prompt": text(prompt), "max_tokens": 1}
                    )
                    assert answer.status_code == 200, answer.text
                    assert predicted(answer) == cached(answer) and bool(turn) == bool(cached(answer))
                    seen[name].add(answer.headers["x-hitherto-replica"])
            await settled(running)
        assert seen["green"] <= here and seen["red"] == there
        explained = (
            await running.admin.post(
                "/explain", params={"path": "/v1/completions"}, json={"model": "green", "prompt": text("x")}
            )
        ).json()
        assert explained["adapter"] == "green" and {one["id"] for one in explained["replicas"]} == here
        assert max(one["overlap_tokens"] for one in explained["replicas"]) > 0
        assert (await direct.post("/v1/unload_lora_adapter", json={"lora_name": "green"})).status_code == 200
        await running.until(lambda status: not green(status))
        refused = await running.client.post("/v1/completions", json={"model": "green", "prompt": "x"})
        assert refused.status_code == 404 and "red" in refused.json()["error"]["message"]


async def examined(engine: Engine, model, monkeypatch, tmp_path) -> dict[str, doctor.Finding]:
    """What the doctor says of one replica, by subject."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gateway.ops.trial.EVENT_SECONDS", 2.0)
    free = ports.pick(2, "127.0.0.1", set())
    config = load(
        {"replica_url": (engine.replica_url,), "model": str(model), "port": free[0], "admin_port": free[1]}, file=None
    )
    return {finding.subject.split(" 127.")[0]: finding async for finding in doctor.examine(config)}


async def test_the_doctor_finds_nothing_amiss_with_a_whole_engine(engine, model, monkeypatch, tmp_path):
    found = await examined(engine, model, monkeypatch, tmp_path)
    assert {one.level for one in found.values()} == {"ok"}, found
    assert (
        "adapters red, blue" in found["replica"].text
        and f"{engine.blocks} blocks of {engine.block_size}" in found["replica"].text
    )


async def test_the_doctor_tries_each_rank(ranks, model, monkeypatch, tmp_path):
    found = await examined(ranks, model, monkeypatch, tmp_path)
    assert {one.level for one in found.values()} == {"ok"}, found
    assert "2 data-parallel ranks" in found["replica"].text


async def test_the_doctor_names_what_an_engine_does_not_tell(mute, model, monkeypatch, tmp_path):
    found = await examined(mute, model, monkeypatch, tmp_path)
    assert "--engine-api-key" in found["model names"].remedy and "--disable-log-stats" in found["metrics"].remedy
    assert "API key" in found["trial"].text and found["block size"].remedy.startswith("give --block-size")
    assert not [one for one in found.values() if one.level == "fail"], found


async def test_an_engine_behind_a_key_is_served_with_the_clients_key(mute, model):
    """Nothing is told but that it lives; it still gets requests, and its cache is modelled or followed."""
    async with gateway(mute, model=model, block_size=block_size(), ready=False) as running:
        (shown,) = (await running.until(lambda status: status["ready"]))["replicas"]
        assert shown["models"] == [] and any("API key" in problem for problem in shown["problems"])
        body = {"model": "tiny", "prompt": text("k"), "max_tokens": 1}
        # with another prompt: what is refused counts as sent there for the 5 s of a prediction
        assert (await running.client.post("/v1/completions", json=body | {"prompt": text("n")})).status_code == 401
        for turn in range(2):
            answer = await running.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200 and bool(predicted(answer)) == bool(turn)
            await settled(running)
        (shown,) = (await running.status())["replicas"]
        assert any("--enable-prompt-tokens-details" in problem for problem in shown["problems"])
        assert any("--disable-log-stats" in problem for problem in shown["problems"])
