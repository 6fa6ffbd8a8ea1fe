"""Prompts computed by one real engine while another one waits to answer them: Mooncake's transfer engine, over TCP."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from gateway import cli
from replicas.launch import ports

from ..gateway.running import counted
from .engines import Engine, folder, version
from .pd import (  # fmt: skip
    EXACTLY,
    FETCHED,
    PATIENCE,
    SHORT,
    SYSTEMS,
    WAYS,
    Talk,
    alone,
    apart,
    asked,
    page_of,
    prompts,
    said,
    sources,
    spread,
    turn,
    with_role,
)

pytestmark = pytest.mark.pd
TURNS = 2  # of a conversation, of each way of asking
# vLLM's connector asks torch for the number of its GPU and does no more with it than to select that GPU again, which on
# a CPU does nothing. It is the only thing in it that needs a GPU.
ON_CPU = """
import torch
torch.accelerator.current_device_index = lambda: 0
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
"""


@pytest.fixture(scope="module")
def trio(single, start_engine, tmp_path_factory) -> list[Engine]:
    """A prefiller and a decoder with Mooncake's connector, and the single engine."""
    package = folder() / "mooncake"
    if version()[:2] != (0, 32) or not (package / "ready").exists():
        pytest.skip("needs vLLM 0.32 with Mooncake's transfer engine in its environment: tests/vllm/install.sh")
    module = tmp_path_factory.mktemp("mooncake") / "mooncake_on_cpu.py"
    module.write_text(ON_CPU)
    made = [with_connector(start_engine, package, module) for _ in range(2)]
    for engine in (*made, single):
        engine.wait()
        spread(engine.pid)
    yield [*made, single]
    for engine in made:
        engine.stop()


def with_connector(start_engine, package: Path, module: Path) -> Engine:
    config = {"kv_connector": "MooncakeConnector", "kv_connector_module_path": module.stem, "kv_role": "kv_both",
              "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}  # fmt: skip
    [port] = ports.pick(1, "127.0.0.1", set())
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1", "PYTHONHASHSEED": "0",
           "PYTHONPATH": f"{package}:{module.parent}", "LD_LIBRARY_PATH": str(package / "system")}  # fmt: skip
    engine = start_engine(*EXACTLY, "--kv-transfer-config", json.dumps(config), env=env)
    engine.replica_url += f",transfer=mooncake,bootstrap={port}"
    return engine


@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_those_of_one_engine_and_caches_are_what_was_predicted(trio, witness_of, way):
    prefiller, decoder, single = trio
    seen = {engine: witness_of(engine) for engine in (prefiller, decoder)}
    async with apart(prefiller, decoder) as process:
        talk = Talk(random.Random(way), way, f"{way}. {SYSTEMS[1]}", SHORT, stream=way in WAYS[::2])
        moved = [await turn(process, talk, seen, single) for _ in range(TURNS)]
        page = (await process.admin.get("/metrics")).text
    assert all(fetched > 0 for _, fetched in moved) and moved[-1][0] > 0
    for leg in ("prefill", "decode"):
        assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == TURNS
    assert counted(page, "hitherto_predictions_total", outcome="equal") == TURNS
    assert counted(page, "hitherto_reservations") == counted(page, "hitherto_prompt_mismatches_total") == 0


async def test_the_doctor_tries_a_transfer(trio, capsys):
    prefiller, decoder, _ = trio
    before = (await sources(decoder.url))[FETCHED]
    urls = with_role(prefiller, "prefill"), with_role(decoder, "decode")
    await asyncio.to_thread(cli.main, ["doctor", "--model", str(prefiller.model), "--replica-url", *urls])
    assert "answered a prompt that was computed there (Mooncake)" in capsys.readouterr().out
    assert (await sources(decoder.url))[FETCHED] > before


async def test_no_answer_is_lost_with_the_decoder_that_waited_for_its_prompt(trio, start_engine, tmp_path):
    """It is killed while it writes answers in one piece; the prefiller's end is not to be waited for, and the decoder
    that is left writes them."""
    prefiller, decoder, single = trio
    (tmp_path / "mooncake_on_cpu.py").write_text(ON_CPU)
    victim = with_connector(start_engine, folder() / "mooncake", tmp_path / "mooncake_on_cpu.py").wait()
    spread(victim.pid)
    async with apart(prefiller, decoder, victim) as process:
        bodies = [asked("completions", text, False, 300)[1] | {"ignore_eos": True} for text in prompts(4, "killed")]
        answers = [asyncio.create_task(process.client.post("/v1/completions", json=body)) for body in bodies]
        async with asyncio.timeout(PATIENCE):
            while not counted(await page_of(victim.url), "vllm:num_requests_running"):
                assert not all(one.done() for one in answers), "it was given none"
                await asyncio.sleep(0.02)
        victim.kill()
        for body, answer in zip(bodies, await asyncio.gather(*answers), strict=True):
            assert said(answer, False) == said(await alone(single, "/v1/completions", body), False)
        assert await process.counted("hitherto_leg_failures_total", leg="decode") >= 1
        assert await process.counted("hitherto_reservations") == 0
