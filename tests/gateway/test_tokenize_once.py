"""A gateway process and a simulated engine: long prompts go as ids, and what an operator sees of it."""

import json

import httpx
import pytest

from .running import running

WORDS = "All the world's a stage, and all the men and women merely players. " * 60
PATHS = {"/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}]}, "/v1/completions": {"prompt": WORDS}}


async def answer(client: httpx.AsyncClient, path: str, **more) -> dict:
    reply = await client.post(path, json={"model": "sim", "max_tokens": 8, **PATHS[path], **more})
    assert reply.status_code == 200, reply.text
    if more.get("stream"):
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        return {"text": [one["choices"][0] for one in chunks if one["choices"]], "usage": chunks[-1]["usage"]}
    return {name: value for name, value in reply.json().items() if name not in ("id", "created")}


async def test_an_engine_answers_the_same_to_ids():
    async with running("--launch", "1") as gateway:
        replica = (await gateway.ready(1))["replicas"][0]
        async with httpx.AsyncClient(base_url=replica["url"], timeout=30) as engine:
            for path in PATHS:
                await answer(gateway.client, path)
                await gateway.until(lambda status, path=path: f"{path}: yes" in status["replicas"][0]["takes_ids"])
                for more in ({}, {"n": 2}, {"return_token_ids": True}, {"stream": True, "stream_options": {"include_usage": True}}):
                    assert await answer(gateway.client, path, **more) == await answer(engine, path, **more), (path, more)
        page = (await gateway.admin.get("/metrics")).text
        assert f'hitherto_long_prompts_total{{replica="{replica["id"]}",sent="ids"}} 8.0' in page
        assert f'hitherto_long_prompts_total{{replica="{replica["id"]}",sent="text"}} 2.0' in page
        assert 'outcome="over"' not in page and 'outcome="under"' not in page
        assert (await gateway.status())["replicas"][0]["problems"] == []


@pytest.mark.parametrize("setting, found", [([], "the ids it makes differ from ours"), (["--tokenize-once", "never"], None)])
async def test_an_engine_with_another_template_gets_text_and_is_named(tmp_path, setting, found):
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}<<{{ message['role'] }}>> {{ message['content'] }}\n{% endfor %}")
    async with running("--launch", "1", "--chat-template", str(template), *setting) as gateway:
        await gateway.ready(1)
        await answer(gateway.client, "/v1/chat/completions")
        if found:
            status = await gateway.until(lambda status: "/v1/chat/completions: no" in status["replicas"][0]["takes_ids"])
            assert any(found in problem for problem in status["replicas"][0]["problems"])
        await answer(gateway.client, "/v1/chat/completions")
        assert 'sent="ids"' not in (await gateway.admin.get("/metrics")).text
        if not found:
            assert (await gateway.status())["replicas"][0]["takes_ids"] == "not tried yet"
