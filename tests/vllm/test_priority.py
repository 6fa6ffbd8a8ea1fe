"""Real vLLM engines take the priority of a request's class: with and without the scheduling policy for it."""

import asyncio

import httpx
import pytest

from .engines import gateway

CLASSES = "{qos_classes: [{name: premium, priority: 100}, {name: free, priority: 10}]}"
ROUTES = "{routes: [{match: {header: 'x-tier: premium'}, qos: premium}, {qos: free}]}"
SETTINGS = {"scheduler": CLASSES, "request_router": ROUTES, "admission": "{when_full: observe}"}


@pytest.fixture
def engine(start_engine):
    """`engine(*flags)`: one with these, until the test is over."""
    started = []

    def start(*flags):
        started.append(start_engine(*flags, events=None))
        return started[-1].wait()

    yield start
    for one in started:
        one.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_of_those_that_wait_in_the_engine_the_higher_class_goes_first(engine, path):
    engine = engine("--scheduling-policy", "priority", "--max-num-seqs", "1")  # all but one wait in it
    async with gateway(engine, **SETTINGS) as one:
        order = []

        async def ask(name, tokens, **headers):
            text, where = f"the story of {name}", path if name.startswith(("free", "premium")) else "/v1/completions"
            asked = {"messages": [{"role": "user", "content": text}]} if where == "/v1/messages" else {"prompt": text}
            body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, **asked}
            answer = await one.client.post(where, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            order.append(name)

        async def inside(count):
            async with httpx.AsyncClient() as client:
                while True:
                    page = (await client.get(f"{engine.url}/metrics")).text
                    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_waiting{")]
                    if sum(float(line.split()[-1]) for line in lines) >= count:
                        return
                    await asyncio.sleep(0.02)

        await ask("who is asked about first", 2)
        order.clear()
        running = [asyncio.ensure_future(ask("running", 1500))]
        await asyncio.sleep(0)
        for number, headers in enumerate(({}, {}, {"x-tier": "premium"})):
            running.append(asyncio.ensure_future(ask(f"{headers.get('x-tier', 'free')} {number}", 4, **headers)))
            await inside(number + 1)
        await asyncio.gather(*running)
        assert order == ["running", "premium 2", "free 0", "free 1"]


async def test_without_the_policy_a_priority_is_taken_and_changes_nothing(engine):
    """What its documents call an error: 0.28 and 0.32 answer as if none were given."""
    replica = engine()
    body = {"model": replica.name, "prompt": "one two three", "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=replica.url, timeout=60) as client:
        answers = [await client.post("/v1/completions", json=body | more) for more in ({}, {"priority": -7})]
    assert [one.status_code for one in answers] == [200, 200]
    assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
