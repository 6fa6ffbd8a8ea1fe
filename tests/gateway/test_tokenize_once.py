"""A gateway process and a simulated engine: long prompts go as ids, and what an operator sees of it."""

import asyncio
import itertools
import json

import httpx

from gateway.proxy.exactness.token_ids import CONFIRMATIONS

from .running import running

WORDS = "All the world's a stage, and all the men and women merely players. " * 60
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}]},
    "/v1/completions": {"prompt": WORDS},
}


def other(path: str, number: int) -> dict:
    """A body of the same kind with another text."""
    text = f"{number}. {WORDS}"
    return {"prompt": text} if "prompt" in PATHS[path] else {"messages": [{"role": "user", "content": text}]}


async def confirmed(gateway, path: str) -> None:
    """Ask for other bodies of the kind until the engine has confirmed enough of them."""
    async with asyncio.timeout(180):  # a check that a busy engine leaves unanswered is made again after 30 s
        for number in itertools.count():
            if f"{path}: yes" in (await gateway.status())["replicas"][0]["takes_ids"]:
                break
            await answer(gateway.client, path, **other(path, number))


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
                await confirmed(gateway, path)
                await answer(engine, path)  # from here on it is cached
                before = await gateway.counted("hitherto_long_prompts_total", replica=replica["id"], sent="ids")
                for more in (
                    {},
                    {"n": 2},
                    {"return_token_ids": True},
                    {"stream": True, "stream_options": {"include_usage": True}},
                ):
                    assert await answer(gateway.client, path, **more) == await answer(engine, path, **more), (
                        path,
                        more,
                    )
                # The last check may have ended between a look at it and the request behind that.
                after = await gateway.counted("hitherto_long_prompts_total", replica=replica["id"], sent="ids")
                assert after - before == 4
        checks = await gateway.counted("hitherto_token_id_checks_total", replica=replica["id"], outcome="same")
        assert checks == 2 * CONFIRMATIONS
        assert not await gateway.any_counted("hitherto_predictions_total", "outcome", ("over", "under"))
        assert (await gateway.status())["replicas"][0]["problems"] == []
