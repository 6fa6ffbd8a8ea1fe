"""Replicas that hang, or only look like it: when a request that has no byte leaves one."""

import asyncio
import json

import pytest

from replicas import State

from ..http.talk import eventually, read_request
from .replies import ANSWER, SSE_HEAD, answers, post, reply, says
from .stack import stack


@pytest.mark.parametrize(("state", "patience"), [(State.FAILED, 0.0), (State.DEGRADED, 10.0)])
async def test_a_request_without_a_first_byte_leaves_a_replica_that_hangs(state, patience):
    """The head alone is no first byte."""

    async with stack(says(SSE_HEAD), answers(), request_timeout=60.0) as s:
        ill, well = s.proxy.backends.values()
        well.replica.state = State.DRAINING
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(post())
        await eventually(lambda: any(x.attempt is not None and x.attempt.response_head for x in s.proxy.exchanges))
        (exchange,) = s.proxy.exchanges
        assert (
            s.proxy.waited(ill.id, exchange.attempt.sent_at + 3) == 3
            and s.proxy.waited(well.id, exchange.attempt.sent_at + 3) == 0
        )
        assert s.proxy.oldest_unanswered() == {ill.id: exchange.attempt.sent_at}
        ill.replica.state = state
        s.proxy.changed()
        s.proxy.sweep(exchange.attempt.sent_at + 2)
        assert s.metrics.retries.total() == 0, "nobody is there"
        well.replica.state = State.DEGRADED
        s.proxy.changed()
        s.proxy.sweep(exchange.attempt.sent_at + 12)
        assert s.metrics.retries.total() == 0, "nobody is better"
        well.replica.state = State.READY
        s.proxy.changed()
        if patience:
            s.proxy.sweep(exchange.attempt.sent_at + patience - 0.1)
            assert s.metrics.retries.total() == 0, "it has its time"
        s.proxy.sweep(exchange.attempt.sent_at + patience)
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.faults == ["hung"] and s.metrics.retries.total() == 1
        await eventually(s.idle)


async def hang(s, count, state, waited, begun):
    """The request's attempt of this number has `begun`: its replica is in this state now, and it has waited so long."""
    await eventually(lambda: any(len(x.attempts) == count and begun(x.attempt) for x in s.proxy.exchanges))
    (exchange,) = s.proxy.exchanges
    exchange.attempt.backend.replica.state = state
    s.proxy.changed()
    s.proxy.sweep(exchange.attempt.sent_at + waited)


async def test_a_request_that_has_left_a_slow_replica_stays_with_the_next():
    """All of a machine that is overloaded look unwell by turns, and still answer."""
    wait = asyncio.Event()

    async def slow(reader, writer):
        await read_request(reader)
        await wait.wait()
        writer.write(reply(ANSWER))

    async with stack(slow, slow, slow, retries=5, request_timeout=120.0) as s:
        talk = await s.talk()
        await talk.say(post())
        for count in (1, 2):
            await hang(s, count, State.DEGRADED, 20.0, lambda attempt: attempt.sent_at)
        wait.set()
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.metrics.retries.total() == 1
        await eventually(s.idle)


async def test_after_two_replicas_hung_under_a_request_no_third_is_tried():
    async with stack(*[says(SSE_HEAD)] * 3, retries=5, request_timeout=60.0) as s:
        talk = await s.talk()
        await talk.say(post())
        for count in (1, 2):
            await hang(s, count, State.FAILED, 0.0, lambda attempt: attempt.response_head)
        status, _, body = await talk.response()
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_lost")
        assert s.faults == ["hung", "hung"] and s.metrics.retries.total() == 1
        await eventually(s.idle)
