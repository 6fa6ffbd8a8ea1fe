"""Prompts so long that a thread prepares them: they go through, and hold up nobody."""

import asyncio
import functools
import threading
from array import array
from itertools import count

import orjson
import pytest

from gateway.errors import ApiError
from gateway.prompt import long
from gateway.prompt.long import LARGE
from gateway.prompt.offload import event_loop
from gateway.prompt.pipeline import OFFLOAD_BYTES, OFFLOAD_THREADS, Pipeline
from gateway.proxy import preparation
from gateway.proxy.exchange import MOST
from gateway.proxy.placement import decisions
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually
from .replies import LONG, answers, post, reply, says
from .stack import all_answered, stack

WORDS = "all the world is a stage and all the men and women merely players "


def chat(text: str) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})


HUGE = chat("x" * OFFLOAD_BYTES)


class Gated(Pipeline):
    """Prepares long prompts only when the gate is open."""

    def __init__(self):
        super().__init__(None, "m", 16)
        self.gate, self.begun = threading.Event(), []

    def prepare_parsed(self, path, body, *given):
        if len(body) > OFFLOAD_BYTES:
            self.begun.append(body)
            assert self.gate.wait(20)
        return super().prepare_parsed(path, body, *given)


@pytest.fixture
def gated():
    pipeline = Gated()
    yield pipeline
    pipeline.gate.set()


async def test_a_million_tokens_go_through():
    pipeline, seen = Pipeline(sim_model_dir(), "m", 16), []
    body = chat(WORDS * 72_000)
    async with stack(answers(seen=seen), pipeline=pipeline, cached_tokens_header=True, request_timeout=60.0) as s:
        status, headers, _ = await s.ask(post(body), 30)
        assert status == 200
        assert [received for _, received in seen] == [body]
        assert s.metrics.prompt_tokens.total() > 1_000_000 and s.metrics.prompts.values == {("exact",): 1}
        status, headers, _ = await s.ask(post(body), 30)
        assert status == 200 and int(headers["x-hitherto-cached-tokens"]) == 16_000  # its replica has 1,000 blocks


async def test_others_are_answered_while_huge_prompts_are_prepared(gated):
    async with stack(answers(), pipeline=gated) as s:
        huge = await s.crowd(OFFLOAD_THREADS + 6, post(HUGE))
        await eventually(lambda: len(gated.begun) == OFFLOAD_THREADS and len(s.proxy.exchanges) == len(huge))
        await s.answered(3, post(LONG))
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # nor do other things wait that are done in threads
        assert len(s.proxy.exchanges) == len(huge)
        gated.gate.set()
        await all_answered(huge)


async def test_what_takes_less_is_prepared_first_even_if_it_came_last(gated, monkeypatch):
    """20 prompts of 380 kB, and one of 50 kB behind them."""
    monkeypatch.setattr(long, "PATIENCE", 1.0)  # a second a byte: however slowly they arrive
    monkeypatch.setattr(long, "LARGE", 1 << 30)
    async with stack(answers(), pipeline=gated) as s:
        longer = await s.crowd(20, post(chat("x" * 380_000)))
        await eventually(lambda: len(gated.begun) == OFFLOAD_THREADS and len(s.proxy.exchanges) == len(longer))
        honest = await s.say(post(HUGE))
        await eventually(lambda: len(s.proxy.exchanges) == len(longer) + 1)
        gated.gate.set()
        await all_answered((honest, *longer))
        assert HUGE in gated.begun[OFFLOAD_THREADS : OFFLOAD_THREADS + 2]


async def test_what_takes_long_waits_no_longer_for_less_than_its_patience_lasts(monkeypatch):
    monkeypatch.setattr(long, "PATIENCE", 1e-12)  # none left when the next one comes
    prompts, gate, order = long.LongPrompts(), threading.Event(), []
    first = [prompts.submit(1, gate.wait) for _ in range(OFFLOAD_THREADS)]
    waiting = [prompts.submit(size, functools.partial(order.append, size)) for size in (200_000, 1, 150_000, 2)]
    gate.set()
    await asyncio.gather(*first, *waiting)
    assert sorted(order[:2]) == [1, 200_000] and sorted(order[2:]) == [2, 150_000]


async def test_a_short_body_that_takes_long_is_prepared_in_a_thread():
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    threads, encode = [], pipeline.tokenizer.encode_many
    pipeline.tokenizer.encode_many = lambda texts: [encode(texts), threads.append(threading.current_thread())][0]
    body = chat("x" * (OFFLOAD_BYTES - 2000))
    async with stack(answers(), pipeline=pipeline) as s:
        await s.answered(2, post(body))
        assert len(threads) == 1 and threads[0] is not threading.current_thread()
        # The second time it is known
        await eventually(s.idle)
        assert [s.metrics.stage_seconds.count(stage) for stage in ("prepare", "prepare_offloaded")] == [1, 1]
        d = decisions.Decisions(s.proxy)
        external = await d.decide("/v1/chat/completions", chat("y" * 39_000), {})
        assert len(threads) == 2 and threads[1] is not threading.current_thread()
        await d.done(external["id"], b"")


class Pipelined(Pipeline):
    """Counts what the event loop reads."""

    def __init__(self):
        super().__init__(None, "m", 16)
        self.on_loop = 0

    def prepare_parsed(self, path, body, *given):
        self.on_loop += event_loop.holds
        return super().prepare_parsed(path, body, *given)


async def test_prompts_that_come_at_once_hold_the_event_loop_for_a_bounded_time_together(monkeypatch):
    """On a clock that goes on by 2 ms whenever it is looked at: a dozen that come in one turn, and then a dozen more.
    What comes when the time is up is not even read there."""
    ticks = count(step=0.002)
    monkeypatch.setattr("gateway.proxy.preparation.perf_counter", lambda: next(ticks))
    pipeline = Pipelined()
    async with stack(answers(), pipeline=pipeline) as s:
        talks = [await s.talk() for _ in range(MOST)]
        for turn in (1, 2):
            begun, together = [], s.proxy.preparation._together
            s.proxy.preparation._short._work = begun.extend
            for talk in talks:
                await talk.say(post(chat("x")))
            await eventually(lambda: len(begun) == MOST)
            s.proxy.preparation._short._work = together
            together(begun)
            assert pipeline.on_loop == 2 * turn
            await all_answered(talks)


async def test_prompts_that_fill_a_context_leave_a_thread_for_lesser_ones(gated):
    """An honest prompt of some pages does not wait until all those are done."""
    gated.gate.set()
    first, gate = threading.Event(), threading.Event()
    prepare = gated.prepare_parsed

    def slowly(path, body, *rest):
        if len(body) > LARGE:
            first.set()
            assert gate.wait(20)
        return prepare(path, body, *rest)

    gated.prepare_parsed = slowly
    async with stack(answers(), pipeline=gated) as s:
        larger = await s.crowd(OFFLOAD_THREADS + 2, post(chat("x" * LARGE)))
        await asyncio.to_thread(first.wait, 20)
        for _ in range(3):
            talks = await s.crowd(3, post(HUGE))
            await all_answered(talks)
        assert len(s.proxy.exchanges) == len(larger)
        gate.set()
        await all_answered(larger, 30)


async def test_what_a_client_sent_that_left_is_not_kept_until_its_turn(gated):
    async with stack(answers(), pipeline=gated) as s:
        talks = await s.crowd(OFFLOAD_THREADS + 1, post(HUGE))
        await eventually(lambda: len(gated.begun) == OFFLOAD_THREADS and len(s.proxy.exchanges) == len(talks))
        *_, waiting = sorted(s.proxy.exchanges, key=lambda x: x.begun)
        for talk in talks:
            await talk.close()
        await eventually(lambda: not s.proxy.exchanges)
        assert waiting.request.body == b"" and s.server.held == 0
        gated.gate.set()


@pytest.mark.parametrize(
    ("path", "kind"), [(b"/v1/chat/completions", "chat"), (b"/v1/rerank", "other")], ids=["prepared", "passed on"]
)
async def test_nothing_is_prepared_or_looked_for_where_a_client_left_before_its_turn(gated, monkeypatch, path, kind):
    looked = []
    monkeypatch.setattr(preparation, "named_model", lambda _, body: looked.append(body))
    async with stack(answers(), pipeline=gated) as s:
        talks = await s.crowd(OFFLOAD_THREADS, post(HUGE))
        await eventually(lambda: len(gated.begun) == OFFLOAD_THREADS)
        leaves = await s.say(post(chat("nobody waits for this" * OFFLOAD_BYTES), path))
        await eventually(lambda: len(s.proxy.exchanges) == len(talks) + 1)
        await leaves.close()
        await eventually(lambda: len(s.proxy.exchanges) == OFFLOAD_THREADS)
        gated.gate.set()
        await all_answered(talks)
        await s.proxy.preparation.long.submit(1, int)  # behind it in the queue
        assert gated.begun == [HUGE] * OFFLOAD_THREADS and not looked and s.idle()
        assert s.metrics.requests.total() == OFFLOAD_THREADS + 1 and s.metrics.requests.values[kind, "aborted"] == 1


async def test_bodies_to_decide_on_that_wait_are_bounded_and_not_prepared_for_callers_that_left(gated, monkeypatch):
    monkeypatch.setattr(decisions, "MOST_BYTES", len(HUGE) * OFFLOAD_THREADS + 1)
    async with stack(answers(), pipeline=gated) as s:
        d = decisions.Decisions(s.proxy)
        callers = [
            asyncio.ensure_future(d.decide("/v1/chat/completions", HUGE, {})) for _ in range(OFFLOAD_THREADS + 1)
        ]
        await eventually(lambda: len(gated.begun) == OFFLOAD_THREADS)
        with pytest.raises(ApiError, match="under way") as full:
            await d.decide("/v1/chat/completions", HUGE, {})
        assert full.value.status == 429
        callers[-1].cancel()
        await asyncio.wait(callers[-1:])
        gated.gate.set()
        for id in [(await caller)["id"] for caller in callers[:-1]]:
            await d.done(id, b"")
        await s.proxy.preparation.long.submit(1, int)  # behind it in the queue
        assert gated.begun == [HUGE] * OFFLOAD_THREADS and s.idle()


async def test_ids_are_not_kept_while_an_answer_is_waited_for():
    release = asyncio.Event()
    async with stack(says(release, reply()), pipeline=Pipeline(sim_model_dir(), "m", 16), tokenize_once=False) as s:
        talk = await s.say(post(chat(WORDS * 5000)))
        await eventually(lambda: any(x.unanswered for x in s.proxy.exchanges), 20)
        (exchange,) = s.proxy.exchanges
        assert exchange.prompt.tokens > 65_000 and len(exchange.prompt.hashes) == exchange.prompt.tokens // 16
        assert exchange.prompt.token_ids == b""
        release.set()
        assert (await talk.response())[0] == 200


async def test_a_body_of_many_ids_goes_through():
    """Ids in place of text: as many numbers as tokens."""
    ids = array("I", range(100_000)).tolist()
    body, seen = orjson.dumps({"model": "m", "prompt": ids}), []
    async with stack(answers(seen=seen), pipeline=Pipeline(sim_model_dir(), "m", 16)) as s:
        assert (await s.ask(post(body, b"/v1/completions"), 20))[0] == 200
        assert [received for _, received in seen] == [body]
        assert s.metrics.prompt_tokens.total() == 100_000
