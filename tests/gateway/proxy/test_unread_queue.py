"""Requests whose prompt nobody here reads: which of them wait in the queue, and what they are told."""

import asyncio

import pytest

from gateway.proxy.placement.decisions import Decisions
from policies import Rule, Rules, Slo

from ..http.talk import eventually
from .replies import post
from .test_queue import FREE, PREMIUM, Engine, ask, busy, decide, fills, queued, waiting


def unread(name, path=b"/invocations"):
    return post({"model": "m", "messages": [{"content": name}]}, path)


@pytest.mark.parametrize("path", [b"/invocations", b"/cohere/v2/chat"])
async def test_a_request_whose_prompt_is_not_read_waits_where_all_is_full(path):
    engine = Engine()
    async with queued(engine, slo=Slo(ttft=60.0)) as (s, queue):
        first = await fills(s, engine)
        second, premium = await s.talk(), await s.talk()
        await second.say(unread("b", path))
        await eventually(lambda: waiting(queue)["free"] == 1)
        await premium.say(ask("c", b"x-tier: premium"))
        await eventually(lambda: waiting(queue)["premium"] == 1)
        for name in "acb":
            await eventually(lambda: engine.seen[-1] == name)
            engine.answer(name)
        for one in (first, premium, second):
            assert (await one.response())[0] == 200
        each = [("queued", "full"), ("admitted", "turn")]
        counts = {(decision, name, reason): 1 for name in ("free", "premium") for decision, reason in each}
        assert s.metrics.admission.values == {("admitted", "free", "room"): 1, **counts}
        assert s.metrics.slo_requests.total() == 2, "of the one that is not read nobody sees when it begins"


async def test_the_class_of_a_request_whose_prompt_is_not_read_goes_by_its_model_too():
    """Also where one model is all that is served."""
    engine = Engine()
    async with queued(engine, routes=(Rule(PREMIUM, model="m"), Rule(FREE))) as (s, _):
        talk = await s.say(unread("a"))
        await eventually(lambda: engine.seen == ["a"])
        engine.answer("a")
        assert (await talk.response())[0] == 200
        assert s.metrics.admission.values == {("admitted", "premium", "room"): 1}


async def test_what_computes_no_prompt_does_not_wait():
    engine = Engine()
    async with queued(engine) as (s, queue):
        first = await fills(s, engine)
        other = await s.say(unread("b", b"/v1/messages/count_tokens"))
        await eventually(lambda: engine.seen == ["a", "b"])
        engine.answer("a", "b")
        assert (await first.response())[0] == (await other.response())[0] == 200
        assert s.metrics.admission.total() == 1


async def test_unread_requests_that_are_not_taken_are_told_so():
    rules = Rules(("reject",), engine_wait=0.0)
    async with busy(rules=rules) as (s, queue, engine):
        status, headers, body = await s.ask(unread("b"))
        assert status == 429 and b"overloaded" in body


async def test_a_decision_for_what_computes_no_prompt_does_not_wait():
    async with queued(Engine()) as (s, queue):
        decisions = Decisions(s.proxy)
        leases = [await decide(decisions)]
        leases.append(await decisions.decide("/v1/messages/count_tokens", b"{}", {}))
        late = asyncio.ensure_future(decisions.decide("/invocations", b"{}", {}))
        await eventually(lambda: waiting(queue)["free"] == 1)
        for one in leases:
            await decisions.done(one["id"], b"")
        await decisions.done((await late)["id"], b"")
