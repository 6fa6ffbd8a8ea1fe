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


WAYS = ("chat", "completions", "responses", "messages")
# How each transfer is started and named: the flags of the prefiller and the decoder, and the end of their URLs.
TRANSFERS = {
    "nixl": (("--kv-connector",), ("--kv-connector",), ""),
    "llm-d": (("--kv-connector",), ("--kv-connector", "llm-d"), ",transfer=llm-d"),
    "mooncake": (("--kv-connector", "mooncake"), ("--kv-connector", "mooncake"), ",transfer=mooncake,bootstrap={}"),
}


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_two_legs_say_what_one_engine_says(start_engine, trio, transfer):
    *flags, end = TRANSFERS[transfer]
    prefiller, decoder = [start_engine(*one).wait() for one in flags]
    urls = [
        f"{one.url}#role={role}{end.format(one.port)}" for one, role in ((prefiller, "prefill"), (decoder, "decode"))
    ]
    async with running("--replica-url", *urls, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        replicas = (await gateway.status())["replicas"]
        assert {one["url"]: one["role"] for one in replicas} == {prefiller.url: "prefill", decoder.url: "decode"}
        assert {one["transfer"] for one in replicas} == {transfer}
        async with httpx.AsyncClient(base_url=trio[2].url) as alone:
            for way in WAYS:
                path, body = asked(way, f"{transfer}, {way}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
                path, body = asked(way, f"{transfer}, {way}, streamed. " + TEXT * 20, True)
                streamed = await gateway.client.post(path, json=body)
                assert streamed.status_code == 200 and "broke off" not in streamed.text
        async with asyncio.timeout(10):  # a first leg's answer may come after the second one's
            while await gateway.counted("hitherto_reservations"):
                await asyncio.sleep(0.02)
        legs = {"apart": 8, "whole": 0, "prefill": {"complete": 8}, "decode": {"complete": 8}}
        assert (await gateway.status())["legs"] == legs
        assert await gateway.counted("hitherto_retries_total") == 0
        page = (await gateway.admin.get("/metrics")).text
        outcome = {"outcome": "equal"} if transfer == "nixl" else {}
        assert counted(page, "hitherto_predictions_total", **outcome) == 8 or transfer == "llm-d"
    async with httpx.AsyncClient(base_url=prefiller.url) as asked_itself:
        page = (await asked_itself.get("/metrics")).text
        assert counted(page, "vllm:request_success_total") == 8, "each prompt was computed there"


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


async def test_tenants_prompts_move_in_two_legs_and_only_as_the_gateway_says(trio, tmp_path):
    """One with a salt of its own gets no handle of its prompt's cache, and another one can do nothing with a handle."""
    prefiller, decoder, _ = trio
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "cache_salt": f"{name}-0123456789"}
        for name in ("team-a", "team-b")
    ]
    (keys := tmp_path / "keys.yaml").write_text("".join(f"- {json.dumps(one)}\n" for one in entries))
    async with running(
        "--replica-url", f"{prefiller.url}#role=prefill", f"{decoder.url}#role=decode",
        "--policy", "round_robin", "--api-keys", str(keys),
    ) as gateway:  # fmt: skip
        await gateway.ready_for_legs(2)
        for way in WAYS:
            path, body = asked(way, f"{way}, a secret. " + TEXT * 20, False)

            async def ask(name, path=path, body=body, **more):
                headers = {"Authorization": f"Bearer {name}"}
                return await gateway.client.post(path, json={**body, **more}, headers=headers)

            assert words(await ask("team-b"))
            async with httpx.AsyncClient(base_url=prefiller.url) as engine:  # as it would tell team-b
                told = {"cache_salt": entries[1]["cache_salt"], "kv_transfer_params": {"do_remote_decode": True}}
                handle = (await engine.post(path, json={**body, **told})).json()["kv_transfer_params"]
            assert handle["remote_host"] and handle["remote_block_ids"]
            for name, given in (("team-b", {"do_remote_decode": True}), ("team-a", handle)):
                answer = await ask(name, kv_transfer_params=given)
                assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]
                assert "remote_host" not in answer.text
            assert words(await ask("team-a"))
        legs = (await gateway.status())["legs"]
        assert legs["prefill"] == legs["decode"] == {"complete": 2 * len(WAYS)}
