"""Several choices, or one prompt several times: what is predicted is what the engine's one usage tells.

Which sequence that speaks of was seen with real vLLM 0.28, and is so in the simulated engine.
"""

import re

import pytest

from .running import running

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def story(name: str) -> str:
    return f"{name}: it was a bright cold day in April, and the clocks were striking thirteen. " * 6


async def compared(gateway) -> dict[str, float]:
    page = (await gateway.admin.get("/metrics")).text
    return {
        outcome: float(count)
        for outcome, count in re.findall(r'^hitherto_predictions_total{.*outcome="(\w+)".*} (\S+)', page, re.M)
    }


@pytest.fixture
async def gateway(engine):
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        yield gateway


async def test_predictions_are_as_usage_tells_where_sequences_share_a_prompt(gateway):
    async def ask(prompt, **fields):
        before = (await gateway.status())["totals"]["reported_cached_tokens"]
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
        )
        assert answer.status_code == 200
        return (await gateway.status())["totals"]["reported_cached_tokens"] - before

    once = [await ask(story("a"), n=3), await ask(story("a"), n=3), await ask(story("a"))]
    assert once[0] == once[1] == once[2] > 0, "in an answer of one piece the last choice finds what the first has left"
    assert [await ask(story("b"), n=2, **STREAM), await ask(story("b"), n=2, **STREAM) > 0] == [0, True]
    assert await ask([story("c"), story("c")]) > 0
    assert await ask([story("d"), story("d")], **STREAM) == 0
    totals = (await gateway.status())["totals"]
    assert totals["predicted_cached_tokens"] == totals["reported_cached_tokens"]
    assert await compared(gateway) == {"equal": 7, "over": 0, "under": 0}
    await ask([story("e"), story("f")])  # of which one it speaks nobody knows: not compared
    assert await compared(gateway) == {"equal": 7, "over": 0, "under": 0}
