"""Replicas that hang, or only look like it: when a request that has no byte leaves one."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from replicas import State, metrics
from replicas.engines.vllm.metrics import NAMES

from ..http.talk import eventually
from .replies import ANSWER, EVENT, SSE_HEAD, answers, chunk, post, reply, says
from .stack import stack


@asynccontextmanager
async def steady(*scripts, **options):
    """A stack that does not notice if this process stands still: the tests say what time it is."""
    async with stack(*scripts, **options) as s:
        s.proxy.pulse.stop()
        yield s


async def until_sent(s, count=1):
    await eventually(lambda: any(len(x.attempts) == count and x.attempt.sent_at for x in s.proxy.exchanges))
    (exchange,) = s.proxy.exchanges
    return exchange, exchange.attempt


@pytest.mark.parametrize(("state", "patience"), [(State.FAILED, 0.0), (State.DEGRADED, 10.0)])
async def test_a_request_without_a_first_byte_leaves_a_replica_that_hangs(state, patience):
    """The head alone is no first byte."""

    async with steady(says(SSE_HEAD), answers(), request_timeout=60.0) as s:
        ill, well = s.proxy.backends.values()
        s.becomes(well.replica, State.DRAINING)
        talk = await s.say(post())
        exchange = await s.exchange(lambda attempt: attempt.response_head)
        assert s.proxy.waited(ill.id, exchange.attempt.sent_at + 3) == 3
        assert s.proxy.waited(well.id, exchange.attempt.sent_at + 3) == 0
        assert s.proxy.oldest_unanswered() == {ill.id: exchange.attempt.sent_at}
        s.becomes(ill.replica, state)
        s.proxy.sweep(exchange.attempt.sent_at + 2)
        assert s.metrics.retries.total() == 0, "nobody is there"
        s.becomes(well.replica, State.DEGRADED)
        s.proxy.sweep(exchange.attempt.sent_at + 12)
        assert s.metrics.retries.total() == 0, "nobody is better"
        s.becomes(well.replica, State.READY)
        if patience:
            s.proxy.sweep(exchange.attempt.sent_at + patience - 0.1)
            assert s.metrics.retries.total() == 0, "it has its time"
        s.proxy.sweep(exchange.attempt.sent_at + patience)
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.faults == ["hung"] and s.metrics.retries.total() == 1


async def test_a_request_that_has_left_a_slow_replica_stays_with_the_next():
    """All of a machine that is overloaded look unwell by turns, and still answer."""
    wait = asyncio.Event()
    slow = says(wait, reply())
    async with steady(slow, slow, slow, retries=5, request_timeout=120.0) as s:
        talk = await s.say(post())
        for count in (1, 2):
            _, attempt = await until_sent(s, count)
            s.becomes(attempt.backend.replica, State.DEGRADED)
            s.proxy.sweep(attempt.sent_at + 20.0)
        wait.set()
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.metrics.retries.total() == 1


def figures(at, generated):
    return metrics.parse(b"vllm:num_requests_running 1\nvllm:generation_tokens_total %d\n" % generated, at, NAMES)


@pytest.mark.parametrize("state", [State.DEGRADED, State.LEAVING])
async def test_what_an_engine_has_stays_there_while_its_counters_move(state):
    """Whatever it answers to newcomers: one that drains fails those. Its own limit ends it, not its replica's state."""
    wait = asyncio.Event()
    slow = says(wait, reply())
    async with steady(slow, slow, request_timeout=1000.0) as s:
        talk = await s.say(post())
        exchange, attempt = await until_sent(s)
        replica = attempt.backend.replica
        s.becomes(replica, state)
        for seconds in range(5, 500, 5):
            replica.scraped(figures(attempt.sent_at + seconds, seconds))
            s.proxy.sweep(attempt.sent_at + seconds + 1)
        assert exchange.attempt is attempt and s.metrics.retries.total() == 0
        wait.set()
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.faults == [] and s.proxy.handler.failures.holds(replica.id) is False


async def test_a_request_leaves_an_engine_that_ends_and_stands_still_and_that_is_no_crash():
    """Three replaced in turn, more than it has attempts: it ends at the fourth."""
    async with steady(*[says(SSE_HEAD)] * 3, answers(), retries=1, request_timeout=1000.0) as s:
        *ending, _ = s.proxy.backends.values()
        talk = await s.say(post())
        for count in range(1, 4):
            exchange, attempt = await until_sent(s, count)
            replica = attempt.backend.replica
            assert attempt.backend in ending and s.proxy.handler.failures.holds(replica.id)
            s.becomes(replica, State.LEAVING)
            s.proxy.sweep(attempt.sent_at + 500)
            assert exchange.attempt is attempt, "its figures cannot be read, so nothing shows that it stands still"
            replica.scraped(figures(attempt.sent_at + 5, 7))
            replica.scraped(figures(attempt.sent_at + 24, 7))
            s.proxy.sweep(attempt.sent_at + 24)
            assert exchange.attempt is attempt, "19 s are no stand"
            replica.scraped(figures(attempt.sent_at + 25, 7))
            s.proxy.sweep(attempt.sent_at + 25)
        assert (await talk.response())[0::2] == (200, ANSWER)
        assert s.faults == [] and s.metrics.retries.total(reason="left") == 3


@pytest.mark.parametrize("others", [[], [answers()]], ids=["all end", "one is well"])
async def test_a_connection_that_an_engine_breaks_as_it_ends_is_no_crash(others):
    """Its time is over, and it is killed. Where all engines end, a client that has nothing is told to come again."""
    async with steady(*[says(SSE_HEAD)] * 3, *others, retries=1) as s:
        talk = await s.say(post())
        for count in range(1, 4):
            _, attempt = await until_sent(s, count)
            s.becomes(attempt.backend.replica, State.LEAVING)
            attempt.upstream.transport.abort()
        status, headers, body = await talk.response()
        if others:
            assert (status, body) == (200, ANSWER)
        else:
            assert (status, headers["retry-after"]) == (503, "1") and b"no_replica_ready" in body
        assert s.faults == [] and s.metrics.retries.total(reason="left") == 2 + len(others)


async def test_a_stream_from_an_engine_that_ends_may_pause_for_its_own_limit():
    """Unless nothing is computed any more: then as of one that is lost."""
    async with steady(says(SSE_HEAD + chunk(EVENT)), request_timeout=1000.0, idle_timeout=120.0) as s:
        talk = await s.say(post())
        await talk.until(b"\n\n\r\n")
        (exchange,) = s.proxy.exchanges
        attempt, replica = exchange.attempt, exchange.attempt.backend.replica
        s.becomes(replica, State.LEAVING)
        begun = attempt.seen_at
        s.proxy.sweep(begun)
        s.proxy.sweep(begun + 60)
        assert s.proxy.exchanges, "60 s of silence, and nothing speaks against it"
        replica.scraped(figures(begun + 40, 7))
        replica.scraped(figures(begun + 61, 7))
        s.proxy.sweep(begun + 62)
        assert b"no byte for 10 s" in await talk.until(b"0\r\n\r\n") and not s.proxy.exchanges
