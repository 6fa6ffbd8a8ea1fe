"""Prompts computed by one real engine and answered by another, the KV cache moved between them by NIXL over TCP."""

import asyncio
import json
import os
import random
import re
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic

import httpx
import pytest

from replicas.launch import ports
from replicas.launch.profile import SHIPPED

from ..gateway.running import counted
from .engines import Engine, folder, gateway, version
from .traffic import WORDS

pytestmark = pytest.mark.pd
PAIRS = 25  # prompts, of each way of asking
WAYS = ("chat", "completions", "responses", "messages")


@pytest.fixture(scope="session")
def trio(start_engine) -> list[Engine]:
    """A prefiller, a decoder, and an engine without a connector, whose answers are the truth."""
    if version()[:2] != (0, 32) or not list(folder().glob("lib/python3*/site-packages/nixl")):
        pytest.skip("needs vLLM 0.32 with nixl in its environment: tests/vllm/install.sh")
    made = []
    for _ in range(2):
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}  # fmt: skip
        env = {
            "UCX_TLS": "tcp,self,sm,cma",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.pick(1, "127.0.0.1", set())[0]),
        }
        made.append(start_engine("--kv-transfer-config", json.dumps(config), env=env))
    made.append(start_engine())
    for engine in made:
        engine.wait()
        spread(engine.pid)
    return made


def spread(pid: int) -> None:
    """Let it run on any CPU. vLLM binds the core of each engine to one CPU; a prefiller whose cache was not fetched yet
    polls without a pause, and requests to a decoder that is bound to the same CPU were seen to wait for 30 s, until the
    lease was over."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == pid:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))


def with_role(engine: Engine, role: str) -> str:
    return f"{engine.replica_url},role={role}"


def asked(way: str, text: str, stream: bool) -> tuple[str, dict]:
    messages = [{"role": "user", "content": text}]
    body: dict = {"model": "tiny", "temperature": 0, "stream": stream}
    if way == "completions":
        return "/v1/completions", body | {"prompt": text, "max_tokens": 24}
    if way == "chat":
        return "/v1/chat/completions", body | {"messages": messages, "max_tokens": 24}
    if way == "responses":
        return "/v1/responses", body | {"input": text, "max_output_tokens": 24}
    return "/v1/messages", body | {"messages": messages, "max_tokens": 24}


# What no two answers have in common, and what tells where the cache came from.
OWN = re.compile(
    r'"(id|created|created_at|completed_at|item_id|\w*cach\w*|\w*created?_\w*tokens|'
    r'input_tokens|system_fingerprint|kv_transfer_params)":\s*("[^"]*"|[\d.]+|null)'
)


def said(answer: httpx.Response, stream: bool) -> str:
    """What it says, byte for byte: but for ids and times, and in a stream for how many tokens an event has."""
    assert answer.status_code == 200, answer.text
    if not stream:
        return OWN.sub(r'"\1":_', answer.text)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(map(piece, events))


def piece(event: dict) -> str:
    """The text in one event of a stream of any API, and why it ended."""
    if "choices" in event:
        choice = event["choices"][0]
        return (choice.get("text") or choice.get("delta", {}).get("content") or "") + (choice["finish_reason"] or "")
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "") + (delta.get("stop_reason") or "")


def prompts(count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(120, 700))) for _ in range(count)]


async def alone(engine: Engine, path: str, body: dict) -> httpx.Response:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_those_of_one_engine(trio, way, stream):
    prefiller, decoder, single = trio
    # round robin has no price to compare: whatever has a block to compute goes in two legs
    async with gateway(
        with_role(prefiller, "prefill"), with_role(decoder, "decode"), model=prefiller.model, policy="round_robin"
    ) as process:
        for text in prompts(PAIRS, WAYS.index(way) * 2 + stream):
            path, body = asked(way, text, stream)
            answer, truth = await asyncio.gather(process.client.post(path, json=body), alone(single, path, body))
            assert said(answer, stream) == said(truth, stream), body
            assert answer.headers["x-hitherto-replica"] == decoder.url.removeprefix("http://"), b"".join(process.log)
        page = (await process.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == PAIRS
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == PAIRS
        assert counted(page, "hitherto_reservations") == 0
        assert counted(page, "hitherto_predictions_total", outcome="equal") == PAIRS, "predicted is delivered"
        assert counted(page, "hitherto_prompt_mismatches_total") == 0


def fetched(engine: Engine) -> float:
    """Prompt tokens whose cache an engine has from another one."""
    page = httpx.get(engine.url + "/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("vllm:prompt_tokens_by_source_total") and 'source="external_kv_transfer"' in line
    )


async def test_the_cache_is_fetched_and_not_computed_again(trio):
    prefiller, decoder, _ = trio
    before, tokens = fetched(decoder), 0
    async with gateway(
        with_role(prefiller, "prefill"), with_role(decoder, "decode"), model=prefiller.model, policy="round_robin"
    ) as process:
        for text in prompts(10, 100):
            answer = await process.client.post(*asked("chat", text, False)[:1], json=asked("chat", text, False)[1])
            tokens += answer.json()["usage"]["prompt_tokens"]
    assert fetched(decoder) - before >= 0.95 * tokens


async def test_what_a_decoder_holds_is_asked_whole_again(trio):
    """The engine publishes the blocks that it fetched, so the map has them at the decoder."""
    prefiller, decoder, _ = trio
    async with gateway(
        with_role(prefiller, "prefill"), with_role(decoder, "decode"), model=prefiller.model, policy="round_robin"
    ) as process:
        (text,) = prompts(1, 200)
        path, body = asked("completions", text, False)
        await process.client.post(path, json=body)
        await asyncio.sleep(0.5)  # events lie in queues and sockets
        again = await process.client.post(path, json=body)
        page = (await process.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 1
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_an_engine_without_a_connector_keeps_nothing_and_requests_stay_whole(trio):
    _, decoder, single = trio
    async with gateway(
        with_role(single, "prefill"), with_role(decoder, "decode"), model=decoder.model, policy="round_robin"
    ) as process:
        for text in prompts(3, 300):
            path, body = asked("chat", text, False)
            answer, truth = await asyncio.gather(process.client.post(path, json=body), alone(single, path, body))
            assert said(answer, False) == said(truth, False)
        page = (await process.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="not kept") == 1, "once is enough"
        assert b"--kv-transfer-config" in b"".join(process.log)
        assert counted(page, "hitherto_reservations") == 0


async def test_how_long_the_legs_take(trio):
    """Prints what a first token takes in two legs and in one, prompts of some 2,000 tokens, one after the other."""
    prefiller, decoder, single = trio
    apart, whole = [], []
    async with gateway(
        with_role(prefiller, "prefill"), with_role(decoder, "decode"), model=prefiller.model, policy="round_robin"
    ) as process:
        for text in prompts(12, 400):
            path, body = asked("completions", " ".join([text] * 2), True)
            for found, client, base in ((apart, process.client, ""), (whole, httpx.AsyncClient(), single.url)):
                begun = monotonic()
                async with client.stream("POST", base + path, json=body) as answer:
                    async for _ in answer.aiter_lines():
                        found.append(monotonic() - begun)
                        break
        page = (await process.admin.get("/metrics")).text
        moved = counted(page, "hitherto_transfer_seconds_sum") / max(
            1, counted(page, "hitherto_transfer_seconds_count")
        )
    print(f"first token: two legs {1e3 * median(apart):.0f} ms, one engine {1e3 * median(whole):.0f} ms; "
          f"of that the transfer {1e3 * moved:.0f} ms")  # fmt: skip


async def test_pools_are_launched_with_all_that_a_transfer_needs(model, tmp_path):
    """From the shipped profile alone: side channels, host buffers, roles."""
    if version()[:2] != (0, 32) or not list(folder().glob("lib/python3*/site-packages/nixl")):
        pytest.skip("needs vLLM 0.32 with nixl in its environment: tests/vllm/install.sh")
    profile = tmp_path / "pd.yaml"
    shipped = (SHIPPED / "pd-cpu.yaml").read_text()
    profile.write_text(shipped + f"executable: {folder()}/bin/vllm\n")
    pools = f"{{prefill: {{profile: {profile}, launch: 1, role: prefill}}, decode: {{profile: {profile}, launch: 1, role: decode}}}}"
    async with gateway(pools=pools, model=model, policy="round_robin", ready=False) as hitherto:
        await hitherto.until(lambda status: [one["state"] for one in status["replicas"]] == ["ready"] * 2, 180)
        for text in prompts(3, 5):
            path, body = asked("chat", text, False)
            answer = await hitherto.client.post(path, json=body | {"model": model.name}, timeout=120)
            assert answer.status_code == 200, answer.text
        page = (await hitherto.admin.get("/metrics")).text
        legs = [line for line in page.splitlines() if line.startswith("hitherto_legs_total{")]
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == 3, legs
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 3, legs
        assert counted(page, "hitherto_predictions_total", outcome="over") == 0
