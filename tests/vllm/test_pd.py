"""Prompts computed by one real engine and answered by another, the KV cache moved between them by NIXL over TCP."""

import asyncio
import json
import random
import re
from statistics import median
from time import monotonic

import httpx
import pytest

from gateway import cli
from gateway.ops import doctor
from replicas.launch import ports
from replicas.launch.profile import SHIPPED

from ..gateway.running import counted
from .engines import Engine, folder, gateway
from .pd import (
    EXACTLY,
    FETCHED,
    LONG,
    PATIENCE,
    SHORT,
    SYSTEMS,
    WAYS,
    Talk,
    alone,
    apart,
    asked,
    needs_nixl,
    page_of,
    prompts,
    said,
    sources,
    spread,
    turn,
    with_role,
)
from .traffic import caught_up
from .witness import Witness

pytestmark = pytest.mark.pd
TURNS = 6  # of a conversation, of each way of asking


def with_connector(start_engine) -> Engine:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}  # fmt: skip
    env = {
        "UCX_TLS": "tcp,self,sm,cma",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.pick(1, "127.0.0.1", set())[0]),
    }
    return start_engine(*EXACTLY, "--kv-transfer-config", json.dumps(config), env=env)


@pytest.fixture(scope="module")
def trio(single, start_engine) -> list[Engine]:
    """A prefiller, a decoder, and the single engine."""
    made = [with_connector(start_engine) for _ in range(2)]
    made.append(single)
    for engine in made:
        engine.wait()
        spread(engine.pid)
    yield made
    for engine in made[:2]:
        engine.stop()


@pytest.mark.parametrize(
    "way, stream",
    [
        # of each API one of both is quick
        pytest.param(way, stream, id=f"{way}-{form}", marks=[pytest.mark.quick] if (at % 2 == 0) == stream else [])
        for at, way in enumerate(WAYS)
        for form, stream in (("whole", False), ("streamed", True))
    ],
)
async def test_answers_are_those_of_one_engine_and_caches_are_what_was_predicted(trio, witness_of, way, stream):
    """Of conversations with a common beginning, of which each part holds more with each turn."""
    prefiller, decoder, single = trio
    seen: dict[Engine, Witness] = {engine: witness_of(engine) for engine in (prefiller, decoder)}
    found = fetched = 0
    async with apart(prefiller, decoder) as process:
        dice = random.Random(f"{way} {stream}")
        for at in range(2):
            talk = Talk(dice, way, f"{way}, {stream}. {SYSTEMS[1]}", (SHORT, LONG)[at], stream)
            for _ in range(TURNS // 2):
                held, moved = await turn(process, talk, seen, single)
                found, fetched = found + held, fetched + moved
        page = (await process.admin.get("/metrics")).text
    assert found > 2 * len(SYSTEMS[1].split()) and fetched > 0
    assert counted(page, "hitherto_reported_cached_tokens_total") == found
    for leg in ("prefill", "decode"):
        assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == TURNS
    assert counted(page, "hitherto_predictions_total", outcome="equal") == TURNS
    assert counted(page, "hitherto_reservations") == counted(page, "hitherto_prompt_mismatches_total") == 0


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
async def test_usage_has_what_the_prefiller_found_cached(trio, way):
    prefiller, decoder, _ = trio
    async with apart(prefiller, decoder) as process:
        path, body = asked(way, *prompts(1, 77 + WAYS.index(way)), False)
        await alone(prefiller, path, body)
        answer = await process.client.post(path, json=body)
        name = "cache_read_input_tokens" if way == "messages" else "cached_tokens"
        [told] = {int(number) for number in re.findall(rf'"{name}":\s*(\d+)', answer.text)}
        found = await process.counted("hitherto_reported_cached_tokens_total")
        assert told == found >= prefiller.block_size
        assert await process.counted("hitherto_legs_total", leg="decode", outcome="complete") == 1


async def test_what_a_decoder_holds_is_asked_whole_again(trio, witness_of):
    """The engine publishes the blocks that it fetched, so the map has them at the decoder."""
    prefiller, decoder, _ = trio
    witness = witness_of(decoder)
    async with apart(prefiller, decoder) as process:
        (text,) = prompts(1, 200)
        path, body = asked("completions", text, False)
        await process.client.post(path, json=body)
        await caught_up(process, witness, 60)
        again = await process.client.post(path, json=body)
        page = (await process.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 1
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_an_engine_without_a_connector_is_known_before_a_request_is_sent(trio):
    _, decoder, single = trio
    async with apart(single, decoder) as process:
        for text in prompts(3, 300):
            path, body = asked("chat", text, False)
            answer, truth = await asyncio.gather(process.client.post(path, json=body), alone(single, path, body))
            assert said(answer, False) == said(truth, False)
        page = (await process.admin.get("/metrics")).text
        assert counted(page, "hitherto_leg_choices_total", choice="apart") == 0
        assert b"--kv-transfer-config" in b"".join(process.log)
        assert counted(page, "hitherto_reservations") == 0


@pytest.mark.quick
@pytest.mark.parametrize("with_connector", [True, False], ids=["a pair", "a prefiller without a connector"])
async def test_the_doctor_tries_a_transfer(trio, monkeypatch, with_connector):
    prefiller, decoder, single = trio
    first = prefiller if with_connector else single
    found, line = [], doctor.line

    def noted(finding):
        if finding.subject.split(" ")[0] in ("roles", "transfer"):
            found.append((finding.level, f"{finding.text} {finding.remedy}"))
        return line(finding)

    monkeypatch.setattr(doctor, "line", noted)
    before = (await sources(decoder.url))[FETCHED]
    urls = with_role(first, "prefill"), with_role(decoder, "decode")
    code = await asyncio.to_thread(cli.main, ["doctor", "--model", str(first.model), "--replica-url", *urls])
    fetched = (await sources(decoder.url))[FETCHED] - before
    level, text = found[-1]
    if with_connector:
        assert level == "ok" and "answered a prompt that was computed there (NIXL)" in text and fetched > 0
    else:  # as its metrics show; where they did not come in time, the trial does
        assert ("has no connector" if len(found) == 1 else "kept nothing") in text
        assert code == 1 and level == "fail" and "--kv-transfer-config" in text
        assert fetched == 0


@pytest.mark.quick
async def test_no_answer_that_had_not_begun_is_lost_with_its_decoder(trio, start_engine):
    """It is killed while it writes answers in one piece; the decoder that is left writes them, and the others."""
    prefiller, decoder, single = trio
    victim = with_connector(start_engine).wait()
    spread(victim.pid)
    async with apart(prefiller, decoder, victim) as process:
        bodies = [body for _, body in [asked("completions", text, False, 300) for text in prompts(4, 500)]]
        for body in bodies:
            body["ignore_eos"] = True
        answers = [asyncio.create_task(process.client.post("/v1/completions", json=body)) for body in bodies]
        async with asyncio.timeout(PATIENCE):
            while not counted(await page_of(victim.url), "vllm:num_requests_running"):
                assert not all(one.done() for one in answers), "it was given none"
                await asyncio.sleep(0.02)
        victim.kill()
        for body, answer in zip(bodies, await asyncio.gather(*answers), strict=True):
            assert said(answer, False) == said(await alone(single, "/v1/completions", body), False)
        page = (await process.admin.get("/metrics")).text
    assert counted(page, "hitherto_leg_failures_total", leg="decode") >= 1
    assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") >= 2
    assert counted(page, "hitherto_reservations") == 0


async def test_how_long_the_legs_take(trio):
    """Prints what a first token takes in two legs and in one, prompts of some 2,000 tokens, one after the other."""
    prefiller, decoder, single = trio
    in_two, whole = [], []
    async with apart(prefiller, decoder) as process:
        for text in prompts(12, 400):
            path, body = asked("completions", " ".join([text] * 2), True)
            for found, client, base in (
                (in_two, process.client, ""),
                (whole, httpx.AsyncClient(timeout=PATIENCE), single.url),
            ):
                begun = monotonic()
                async with client.stream("POST", base + path, json=body) as answer:
                    async for _ in answer.aiter_lines():
                        found.append(monotonic() - begun)
                        break
        page = (await process.admin.get("/metrics")).text
        moved = counted(page, "hitherto_transfer_seconds_sum") / max(
            1, counted(page, "hitherto_transfer_seconds_count")
        )
    print(f"first token: two legs {1e3 * median(in_two):.0f} ms, one engine {1e3 * median(whole):.0f} ms; "
          f"of that the transfer {1e3 * moved:.0f} ms")  # fmt: skip


async def test_pools_are_launched_with_all_that_a_transfer_needs(model, tmp_path):
    """From the shipped profile alone: side channels, host buffers, roles."""
    needs_nixl()
    profile = tmp_path / "pd.yaml"
    shipped = (SHIPPED / "pd-cpu.yaml").read_text()
    profile.write_text(shipped + f"executable: {folder()}/bin/vllm\n")
    pools = f"{{prefill: {{profile: {profile}, launch: 1, role: prefill}}, decode: {{profile: {profile}, launch: 1, role: decode}}}}"
    async with gateway(pools=pools, model=model, policy="round_robin", ready=False) as hitherto:
        ready = await hitherto.until(lambda status: [one["state"] for one in status["replicas"]] == ["ready"] * 2, 180)
        for one in ready["replicas"]:
            spread(one["pid"])
        await hitherto.ready_for_legs(2)
        for text in prompts(3, 5):
            path, body = asked("chat", text, False)
            answer = await hitherto.client.post(path, json=body | {"model": model.name}, timeout=120)
            assert answer.status_code == 200, answer.text
        page = (await hitherto.admin.get("/metrics")).text
        legs = "\n".join(line for line in page.splitlines() if line.startswith("hitherto_leg"))
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == 3, legs
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 3, legs
        assert counted(page, "hitherto_predictions_total", outcome="over") == 0
