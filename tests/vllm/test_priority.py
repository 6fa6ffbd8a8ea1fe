"""Real vLLM engines take the priority of a request's class: with and without the scheduling policy for it."""

import asyncio

import pytest

from ..gateway.running import counted
from .engines import gateway
from .pd import alone, asked, page_of

CLASSES = "{qos_classes: [{name: premium, priority: 100}, {name: free, priority: 10}]}"
ROUTES = "{routes: [{match: {header: 'x-tier: premium'}, qos: premium}, {qos: free}]}"
SETTINGS = {"scheduler": CLASSES, "request_router": ROUTES, "admission": "{when_full: observe}"}


@pytest.fixture(scope="module")
def one_by_one(start_engine):
    """An engine in which all but one request wait."""
    return start_engine("--scheduling-policy", "priority", "--max-num-seqs", "1", events=None).wait()


@pytest.mark.parametrize("way", ["completions", "messages"])
async def test_of_those_that_wait_in_the_engine_the_higher_class_goes_first(one_by_one, way):
    async with gateway(one_by_one, **SETTINGS) as one:
        order = []

        async def ask(name, tokens, way=way, **headers):
            path, body = asked(way, f"the story of {name}", stream=False, most=tokens)
            answer = await one.client.post(path, json=body | {"ignore_eos": True}, headers=headers)
            assert answer.status_code == 200, answer.text
            order.append(name)

        async def inside(count):
            while counted(await page_of(one_by_one.url), "vllm:num_requests_waiting") < count:
                await asyncio.sleep(0.02)

        await ask("who is asked about first", 2, "completions")
        running = [asyncio.ensure_future(ask("running", 1500, "completions"))]
        await asyncio.sleep(0)
        for number, headers in enumerate(({}, {}, {"x-tier": "premium"})):
            running.append(asyncio.ensure_future(ask(f"{headers.get('x-tier', 'free')} {number}", 4, **headers)))
            await inside(number + 1)
        await asyncio.gather(*running)
        assert order[1:] == ["running", "premium 2", "free 0", "free 1"]


async def test_without_the_policy_a_priority_is_taken_and_changes_nothing(engine):
    """What its documents call an error: 0.28 and 0.32 answer as if none were given."""
    path, body = asked("completions", "one two three", stream=False, most=4)
    answers = [await alone(engine, path, body | more) for more in ({}, {"priority": -7})]
    assert [one.status_code for one in answers] == [200, 200]
    assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
