"""Prompts computed by one real engine and answered by another, the KV cache moved between them over TCP: by NIXL, or by
Mooncake's transfer engine, where the engine that answers waits meanwhile."""

import asyncio
import json
import random

import pytest

from gateway import cli
from gateway.ops import doctor
from replicas.launch import ports
from replicas.launch.profile import SHIPPED

from ..gateway.running import counted
from . import pd
from .engines import Engine, folder, gateway, version
from .fleet import pools, ready
from .pd import WAYS, alone, asked, prompts, said
from .traffic import cached, caught_up

pytestmark = pytest.mark.pd
TURNS = 3  # of a conversation
QUICK = {"marks": pytest.mark.quick}
# vLLM's connector asks torch for the number of its GPU and does no more with it than to select that GPU again, which on
# a CPU does nothing. It is the only thing in it that needs a GPU.
MOONCAKE_ON_CPU = """
import torch
torch.accelerator.current_device_index = lambda: 0
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
"""


@pytest.fixture(scope="module")
def with_connector(start_engine, tmp_path_factory):
    """`with_connector(transfer)` starts an engine with that connector."""
    package, modules = folder() / "mooncake", tmp_path_factory.mktemp("mooncake")
    (modules / "mooncake_on_cpu.py").write_text(MOONCAKE_ON_CPU)

    def start(transfer: str) -> Engine:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
        [port] = ports.pick(1, "127.0.0.1", set())
        if transfer == "nixl":
            config |= {"kv_buffer_device": "cpu"}
            env = {"UCX_TLS": "tcp,self,sm,cma", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                   "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}  # fmt: skip
        else:
            config |= {"kv_connector": "MooncakeConnector", "kv_connector_module_path": "mooncake_on_cpu",
                       "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}  # fmt: skip
            env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1", "PYTHONHASHSEED": "0",
                   "PYTHONPATH": f"{package}:{modules}", "LD_LIBRARY_PATH": str(package / "system")}  # fmt: skip
        engine = start_engine(*pd.EXACTLY, "--kv-transfer-config", json.dumps(config), env=env)
        if transfer == "mooncake":
            engine.replica_url += f",transfer=mooncake,bootstrap={port}"
        return engine

    return start


def started(single: Engine, with_connector, transfer: str) -> list[Engine]:
    """A prefiller, a decoder, and the single engine."""
    trio = [with_connector(transfer), with_connector(transfer), single]
    for engine in trio:
        engine.wait()
        pd.spread(engine.pid)
    return trio


@pytest.fixture(scope="module")
def nixl(single, with_connector) -> list[Engine]:
    return started(single, with_connector, "nixl")


@pytest.fixture(scope="module")
def mooncake(single, with_connector) -> list[Engine]:
    if version()[:2] != (0, 32) or not (folder() / "mooncake" / "ready").exists():
        pytest.skip("needs vLLM 0.32 with Mooncake's transfer engine in its environment: tests/vllm/install.sh")
    return started(single, with_connector, "mooncake")


@pytest.fixture
def trio(transfer, request) -> list[Engine]:
    return request.getfixturevalue(transfer)


@pytest.mark.parametrize(
    "transfer, way, stream",
    [
        # of each API one of both is quick
        pytest.param("nixl", way, stream, marks=[pytest.mark.quick] if (at % 2 == 0) == stream else [])
        for at, way in enumerate(WAYS)
        for stream in (False, True)
    ]
    + [("mooncake", way, way in WAYS[::2]) for way in WAYS],
)
async def test_answers_are_those_of_one_engine_and_caches_are_what_was_predicted(
    trio, witness_of, transfer, way, stream
):
    """Of conversations with a common beginning, of which each part holds more with each turn."""
    prefiller, decoder, single = trio
    seen = {engine: witness_of(engine) for engine in (prefiller, decoder)}
    lengths = (pd.SHORT, pd.LONG) if transfer == "nixl" else (pd.SHORT,)
    turns, dice = [], random.Random(f"{way} {stream}")
    async with pd.apart(prefiller, decoder) as process:
        for words in lengths:
            talk = pd.Talk(dice, way, f"{way}, {stream}. {pd.SYSTEMS[1]}", words, stream)
            turns += [await pd.turn(process, talk, seen, single) for _ in range(TURNS)]
        page = (await process.admin.get("/metrics")).text
    found = sum(held for held, _ in turns)
    assert found > len(lengths) * len(pd.SYSTEMS[1].split()) and all(fetched > 0 for _, fetched in turns)
    assert counted(page, "hitherto_reported_cached_tokens_total") == found
    for leg in ("prefill", "decode"):
        assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == len(turns)
    assert counted(page, "hitherto_predictions_total", outcome="equal") == len(turns)
    assert counted(page, "hitherto_reservations") == counted(page, "hitherto_prompt_mismatches_total") == 0


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
async def test_usage_has_what_the_prefiller_found_cached(nixl, way):
    prefiller, decoder, _ = nixl
    async with pd.apart(prefiller, decoder) as process:
        path, body = asked(way, *prompts(1, 77 + WAYS.index(way)), False)
        await alone(prefiller, path, body)
        told = cached(await process.client.post(path, json=body))
        assert told == await process.counted("hitherto_reported_cached_tokens_total") >= prefiller.block_size
        assert await process.counted("hitherto_legs_total", leg="decode", outcome="complete") == 1


async def test_what_a_decoder_holds_is_asked_whole_again(nixl, witness_of):
    """The engine publishes the blocks that it fetched, so the map has them at the decoder."""
    prefiller, decoder, _ = nixl
    async with pd.apart(prefiller, decoder) as process:
        path, body = asked("completions", *prompts(1, 200), False)
        await process.client.post(path, json=body)
        await caught_up(process, witness_of(decoder), 60)
        assert cached(await process.client.post(path, json=body)) > 0
        assert await process.counted("hitherto_legs_total", leg="decode", outcome="complete") == 1


async def test_an_engine_without_a_connector_is_known_before_a_request_is_sent(nixl):
    _, decoder, single = nixl
    async with pd.apart(single, decoder) as process:
        for text in prompts(3, 300):
            path, body = asked("chat", text, False)
            answer, truth = await asyncio.gather(process.client.post(path, json=body), alone(single, path, body))
            assert said(answer, False) == said(truth, False)
        assert await process.counted("hitherto_leg_choices_total", choice="apart") == 0
        assert b"--kv-transfer-config" in b"".join(process.log)
        assert await process.counted("hitherto_reservations") == 0


@pytest.mark.parametrize(
    "transfer, name, paired",
    [
        pytest.param("nixl", "NIXL", True, **QUICK),
        pytest.param("nixl", "NIXL", False, **QUICK),
        ("mooncake", "Mooncake", True),
    ],
)
async def test_the_doctor_tries_a_transfer(trio, monkeypatch, name, paired):
    prefiller, decoder, single = trio
    first = prefiller if paired else single
    found, line = [], doctor.line

    def noted(finding):
        if finding.subject.split(" ")[0] in ("roles", "transfer"):
            found.append((finding.level, f"{finding.text} {finding.remedy}"))
        return line(finding)

    monkeypatch.setattr(doctor, "line", noted)
    before = (await pd.sources(decoder.url))[pd.FETCHED]
    urls = pd.with_role(first, "prefill"), pd.with_role(decoder, "decode")
    code = await asyncio.to_thread(cli.main, ["doctor", "--model", str(first.model), "--replica-url", *urls])
    fetched = (await pd.sources(decoder.url))[pd.FETCHED] - before
    level, text = found[-1]
    if paired:
        assert level == "ok" and f"answered a prompt that was computed there ({name})" in text and fetched > 0
    else:  # as its metrics show; where they did not come in time, the trial does
        assert ("has no connector" if len(found) == 1 else "kept nothing") in text
        assert code == 1 and level == "fail" and "--kv-transfer-config" in text
        assert fetched == 0


@pytest.mark.parametrize("transfer", [pytest.param("nixl", **QUICK), "mooncake"])
async def test_no_answer_that_had_not_begun_is_lost_with_its_decoder(trio, transfer, with_connector):
    """It is killed while it writes answers in one piece; the decoder that is left writes them, and the others. Nobody
    waits for the end of a prefiller that sends to it."""
    prefiller, decoder, single = trio
    victim = with_connector(transfer).wait()
    pd.spread(victim.pid)
    async with pd.apart(prefiller, decoder, victim) as process:
        bodies = [asked("completions", text, False, 300)[1] | {"ignore_eos": True} for text in prompts(4, 500)]
        answers = [asyncio.create_task(process.client.post("/v1/completions", json=body)) for body in bodies]
        async with asyncio.timeout(pd.PATIENCE):
            while not counted(await pd.page_of(victim.url), "vllm:num_requests_running"):
                assert not all(one.done() for one in answers), "it was given none"
                await asyncio.sleep(0.02)
        victim.kill()
        for body, answer in zip(bodies, await asyncio.gather(*answers), strict=True):
            assert said(answer, False) == said(await alone(single, "/v1/completions", body), False)
        page = (await process.admin.get("/metrics")).text
    assert counted(page, "hitherto_leg_failures_total", leg="decode") >= 1
    assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") >= 2
    assert counted(page, "hitherto_reservations") == 0


async def test_pools_are_launched_with_all_that_a_transfer_needs(model, tmp_path):
    """From the shipped profile alone: side channels, host buffers, roles."""
    pd.needs_nixl()
    shipped = (SHIPPED / "pd-cpu.yaml").read_text()
    async with gateway(model=model, **pools(tmp_path, 1, shipped)) as process:
        await ready(process)
        await process.ready_for_legs(2)
        for text in prompts(3, 5):
            path, body = asked("chat", text, False)
            answer = await process.client.post(path, json=body, timeout=120)
            assert answer.status_code == 200, answer.text
        page = (await process.admin.get("/metrics")).text
        for leg in ("prefill", "decode"):
            assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == 3, page
        assert counted(page, "hitherto_predictions_total", outcome="over") == 0
