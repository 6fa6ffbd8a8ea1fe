"""What the usage log says of real vLLM's answers: once what the engine wrote, however a request ends."""

import asyncio
import json

import httpx
import pytest

from .engines import gateway

ANSWER = 64  # tokens


def chat(tokens, **fields):
    asked = {"messages": [{"role": "user", "content": "count"}], "max_tokens": tokens, "ignore_eos": True}
    return {"model": "tiny", **asked, **fields}


async def test_what_was_used_is_logged_once(engine, tmp_path):
    file = tmp_path / "usage.jsonl"

    def lines() -> list[dict]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async def logged(count: int) -> list[dict]:
        while len(lines()) < count:
            await asyncio.sleep(0.05)
        return lines()

    async with gateway(engine, usage_log=file) as process:
        client = process.client
        client.timeout = httpx.Timeout(120)

        body = {"model": "tiny", "input": "count", "max_output_tokens": ANSWER, "background": True, "store": True}
        made = (await client.post("/v1/responses", json=body)).json()
        assert made["status"] in ("queued", "in_progress"), made
        found, count, again = made, 1, 2
        while again:
            found, count = (await client.get(f"/v1/responses/{made['id']}")).json(), count + 1
            again -= found["status"] not in ("queued", "in_progress")
        told = await logged(count)
        assert sum(one["output_tokens"] for one in told) == found["usage"]["output_tokens"] > 0
        assert sum(one["input_tokens"] for one in told) == found["usage"]["input_tokens"] > 0

        for _ in range(3):
            await client.post("/v1/chat/completions", json=chat(ANSWER))
        with pytest.raises(httpx.TimeoutException):  # the pace is known: 77 tokens were written, and 100 counted
            await client.post("/v1/chat/completions", json=chat(4000), timeout=2)
        left = (await logged(count + 4))[-1]
        assert left["outcome"] == "aborted" and 0 < left["output_tokens"] <= 4000

        body = chat(ANSWER, stream=True, stream_options={"include_usage": True})
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
        last = (await logged(count + 5))[-1]
        assert (last["outcome"], last["output_tokens"]) == ("complete", ANSWER)
