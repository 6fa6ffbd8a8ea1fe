"""Prompts computed by one simulated engine and answered by another, through a gateway process."""

import asyncio
import hashlib
import json
import re

import httpx
import pytest

from .running import counted, running

TEXT = "Down the rabbit hole, and what Alice found there: a table, a key and a very small door. "


@pytest.fixture(scope="module")
def trio(start_engine):
    """Two engines that pass caches on, and one that knows nothing of that."""
    made = [start_engine("--kv-connector"), start_engine("--kv-connector"), start_engine()]
    return [one.wait() for one in made]


def asked(way, text, stream):
    messages = [{"role": "user", "content": text}]
    body = {"model": "sim", "stream": stream}
    return {
        "chat": ("/v1/chat/completions", body | {"messages": messages, "max_tokens": 9}),
        "completions": ("/v1/completions", body | {"prompt": text, "max_tokens": 9}),
        "responses": ("/v1/responses", body | {"input": text, "max_output_tokens": 9}),
        "messages": ("/v1/messages", body | {"messages": messages, "max_tokens": 9}),
    }[way]


def words(answer):
    """What all answers to one request have in common."""
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    if "choices" in answer:
        return [one.get("text") or one["message"]["content"] for one in answer["choices"]]
    return answer.get("content") or [one["content"] for one in answer["output"]]


@pytest.mark.parametrize("way", ["chat", "completions", "responses", "messages"])
async def test_two_legs_say_what_one_engine_says(trio, way):
    prefiller, decoder, single = trio
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"
    ) as gateway:
        await gateway.ready_for_legs(2)
        roles = {one["url"]: one["role"] for one in (await gateway.status())["replicas"]}
        assert roles == {prefiller.url: "prefill", decoder.url: "decode"}
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(4):
                path, body = asked(way, f"{way} {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        path, body = asked(way, f"{way}, streamed. " + TEXT * 20, True)
        streamed = await gateway.client.post(path, json=body)
        assert streamed.status_code == 200 and "broke off" not in streamed.text
        page = (await gateway.admin.get("/metrics")).text
        assert counted(page, "hitherto_legs_total", leg="prefill", outcome="complete") == 5
        assert counted(page, "hitherto_legs_total", leg="decode", outcome="complete") == 5
        assert counted(page, "hitherto_predictions_total", outcome="equal") == 5
        assert (await gateway.status())["legs"] == {
            "apart": 5,
            "whole": 0,
            "prefill": {"complete": 5},
            "decode": {"complete": 5},
        }
        assert counted(page, "hitherto_reservations") == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["chat", "completions", "responses"])
async def test_usage_has_the_tokens_that_the_prefiller_found_cached(trio, way, stream):
    prefiller, decoder, _ = trio
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"
    ) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked(way, f"{way}, {stream}: known to one. " + TEXT * 20, stream)
        if stream and way != "responses":
            body["stream_options"] = {"include_usage": True}
        async with httpx.AsyncClient(base_url=prefiller.url) as alone:
            await alone.post(path, json=body)
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200 and answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        [told] = {int(number) for number in re.findall(r'"cached_tokens":\s*(\d+)', answer.text)}
        found = await gateway.counted("hitherto_reported_cached_tokens_total", replica=f"127.0.0.1:{prefiller.port}")
        assert told == found > 300


async def test_no_counterpart_is_missed_that_has_not_been_heard_yet_or_has_stopped(trio):
    prefiller, decoder, _ = trio
    for _ in range(3):
        async with running("--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode") as gateway:
            await gateway.ready(2)
        assert b"none has role" not in b"".join(gateway.log)
    async with running("--replica-url", f"{prefiller.url}#role=prefill") as gateway:
        await gateway.ready(1)
        await gateway.until(lambda _: any(b"none has role=decode" in line for line in gateway.log))
    assert b"".join(gateway.log).count(b"none has role=decode") == 1


async def test_explain_tells_both_ways_and_reserves_nothing(trio):
    prefiller, decoder, _ = trio
    async with running("--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode") as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "Explained. " + TEXT * 20, False)
        told = (await gateway.admin.post("/explain", params={"path": path}, json=body)).json()
        # nothing there is to be held up, so moving the cache is not worth it
        assert told["choice"] == f"127.0.0.1:{decoder.port}" and told["legs"] is None
        other = told["other_legs"]
        assert (other["prefill"], other["decode"]) == (f"127.0.0.1:{prefiller.port}", told["choice"])
        assert other["seconds"] > other["whole_seconds"] > 0 and f"prompt on {other['prefill']}" in told["sentence"]
        assert (await gateway.client.post(path, json=body)).headers["x-hitherto-replica"] == told["choice"]
        assert await gateway.counted("hitherto_leg_choices_total", choice="whole") == 1
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"
    ) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "Explained otherwise. " + TEXT * 20, False)
        legs = (await gateway.admin.post("/explain", params={"path": path}, json=body)).json()["legs"]
        assert (legs["prefill"], legs["decode"]) == (f"127.0.0.1:{prefiller.port}", f"127.0.0.1:{decoder.port}")
        assert legs["moved_tokens"] > 300 and legs["seconds"] is None
        assert await gateway.counted("hitherto_reservations") == 0
        await gateway.client.post(path, json=body)
        (decision,) = (await gateway.admin.get("/recent")).json()["decisions"]
        assert decision["replicas"] == [legs["prefill"], legs["decode"]]
        said = f"{legs['prefill']} computes the prompt and {legs['decode']} writes the answer: the policy chose both"
        assert decision["sentence"].startswith(said)


async def test_a_prompt_that_the_decoder_has_now_is_asked_whole(trio):
    prefiller, decoder, _ = trio
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"
    ) as gateway:
        await gateway.ready_for_legs(2)
        await gateway.until(lambda status: all(one["events"] == "live" for one in status["replicas"]))
        path, body = asked("chat", "Twice. " + TEXT * 20, False)
        first, second = [(await gateway.client.post(path, json=body)).json()["usage"] for _ in range(2)]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] > 300
        assert await gateway.counted("hitherto_legs_total", leg="decode", outcome="complete") == 1


async def test_an_engine_without_a_connector_is_found_out_and_its_requests_stay_whole(trio):
    _, decoder, single = trio
    way = "transfer=nixl-unchecked"  # else its metrics would have told
    urls = f"{single.url}#role=prefill,{way}", f"{decoder.url}#role=decode,{way}"
    async with running("--replica-url", *urls, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        for number in range(3):
            path, body = asked("chat", f"Nothing kept {number}. " + TEXT * 20, False)
            assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="not kept") == 1
        assert b"".join(gateway.log).count(b"--kv-connector") == 1
        assert await gateway.counted("hitherto_reservations") == 0


async def test_two_legs_by_llm_ds_sidecar_say_what_one_engine_says(start_engine, trio):
    """The decoder alone knows of the sidecar."""
    _, _, single = trio
    prefiller, decoder = start_engine("--kv-connector").wait(), start_engine("--kv-connector", "llm-d").wait()
    urls = [f"{prefiller.url}#role=prefill,transfer=llm-d", f"{decoder.url}#role=decode,transfer=llm-d"]
    async with running("--replica-url", *urls, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        assert {one["transfer"] for one in (await gateway.status())["replicas"]} == {"llm-d"}
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for way in ("chat", "completions", "responses", "messages"):
                path, body = asked(way, f"Beside it, {way}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
                path, body = asked(way, f"Beside it, {way}, streamed. " + TEXT * 20, True)
                streamed = await gateway.client.post(path, json=body)
                assert streamed.status_code == 200 and "broke off" not in streamed.text
        assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == 8
        assert await gateway.counted("hitherto_legs_total", leg="decode", outcome="complete") == 8
        assert await gateway.counted("hitherto_retries_total") == 0
        assert await gateway.counted("hitherto_reservations") == 0
    async with httpx.AsyncClient(base_url=prefiller.url) as asked_itself:
        page = (await asked_itself.get("/metrics")).text
        assert counted(page, "vllm:request_success_total") == 8, "each prompt was computed there"


async def test_replicas_that_pass_caches_on_in_different_ways_are_told_of_and_take_whole_requests(trio):
    prefiller, decoder, _ = trio
    async with running(
        "--replica-url",
        f"{prefiller.url}#role=prefill",
        f"{decoder.url}#role=decode,transfer=llm-d",
        "--policy",
        "round_robin",
    ) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "Unlike. " + TEXT * 20, False)
        assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_leg_choices_total", choice="apart") == 0
        said = b"".join(gateway.log)
        assert b"by NIXL, those that write answers by llm-d's sidecar" in said and b"transfer=" in said


async def test_a_sidecar_whose_prefiller_is_killed_loses_no_request(start_engine):
    dies, decoder = start_engine("--kv-connector").wait(), start_engine("--kv-connector", "llm-d").wait()
    async with running(
        "--replica-url",
        f"{dies.url}#role=prefill,transfer=llm-d",
        f"{decoder.url}#role=decode,transfer=llm-d",
        "--policy",
        "round_robin",
    ) as gateway:
        await gateway.ready_for_legs(2)
        dies.process.kill()
        for number in range(4):
            path, body = asked("chat", f"Bereft {number}. " + TEXT * 20, False)
            assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_reservations") == 0


async def test_a_prefiller_that_is_killed_loses_no_request(start_engine, trio):
    _, decoder, _ = trio
    dies = start_engine("--kv-connector").wait()
    async with running(
        "--replica-url", f"{dies.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"
    ) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "Alive. " + TEXT * 20, False)
        assert (await gateway.client.post(path, json=body)).status_code == 200
        dies.process.kill()
        for number in range(4):
            path, body = asked("chat", f"Killed {number}. " + TEXT * 20, False)
            assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_reservations") == 0


async def test_two_gateways_count_both_legs_in_one_ledger(trio, start_redis):
    prefiller, decoder, _ = trio
    server = start_redis()
    flags = ["--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode", "--policy", "round_robin"]
    async with running(*flags, "--redis-url", server.url) as one, running(*flags, "--redis-url", server.url) as other:
        for gateway in (one, other):
            await gateway.ready_for_legs(2)
            await gateway.until(lambda status: status["map"]["redis"]["ledger_joined"], 20)
        asked_of = [
            gateway.client.post(path, json=body)
            for number in range(6)
            for gateway in (one, other)
            for path, body in [asked("chat", f"Shared {number}, {gateway is one}. " + TEXT * 20, number % 2 == 0)]
        ]
        assert {answer.status_code for answer in await asyncio.gather(*asked_of)} == {200}
        for gateway in (one, other):
            assert await gateway.counted("hitherto_legs_total", leg="decode", outcome="complete") == 6
            decided = await gateway.counted("hitherto_shared_decisions_total", outcome="shared")
            late = await gateway.counted("hitherto_shared_decisions_total", outcome="late")
            assert decided + late == 12, "two for each request"
            assert await gateway.counted("hitherto_reservations") == 0
        with server.client() as client:
            async with asyncio.timeout(10):
                while client.hgetall("hitherto:1:default:{pool}:load"):
                    await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["chat", "completions", "responses", "messages"])
async def test_tenants_prompts_move_in_two_legs_and_only_as_the_gateway_says(trio, tmp_path, way):
    """One with a salt of its own gets no handle of its prompt's cache, and another one can do nothing with a handle."""
    prefiller, decoder, _ = trio
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "cache_salt": f"{way}-{name}-0123456789"}
        for name in ("team-a", "team-b")
    ]
    (keys := tmp_path / "keys.yaml").write_text("".join(f"- {json.dumps(one)}\n" for one in entries))
    path, body = asked(way, f"{way}, a secret. " + TEXT * 20, False)
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode",
        "--policy", "round_robin", "--api-keys", str(keys),
    ) as gateway:  # fmt: skip
        await gateway.ready_for_legs(2)

        async def ask(name, **more):
            return await gateway.client.post(path, json={**body, **more}, headers={"Authorization": f"Bearer {name}"})

        assert words(await ask("team-b"))
        async with httpx.AsyncClient(base_url=prefiller.url) as engine:  # as it would tell team-b
            salted = {**body, "cache_salt": entries[1]["cache_salt"], "kv_transfer_params": {"do_remote_decode": True}}
            handle = (await engine.post(path, json=salted)).json()["kv_transfer_params"]
        assert handle["remote_host"] and handle["remote_block_ids"]
        for name, given in (("team-b", {"do_remote_decode": True}), ("team-a", handle)):
            answer = await ask(name, kv_transfer_params=given)
            assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]
            assert "remote_host" not in answer.text
        assert words(await ask("team-a"))
        assert (await gateway.status())["legs"]["prefill"] == {"complete": 2}
        assert (await gateway.status())["legs"]["decode"] == {"complete": 2}
