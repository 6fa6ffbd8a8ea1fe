"""Answers in goodput that tell less than they might: those in one piece, and streams without usage."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.ops.view import _admission
from policies import Rules, Slo

from ..http.talk import eventually, read_request
from .replies import ANSWER, EVENT, SSE_HEAD, chunk, post, reply
from .test_queue import USAGE, queued

TOKENS = 11
WHOLE = ANSWER[:-1] + b',"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":20}}' % TOKENS
SECONDS = 0.3  # that an answer takes at least


async def engine(reader, writer):
    while True:
        await read_request(reader)
        await asyncio.sleep(SECONDS)
        writer.write(reply(WHOLE))


async def fails(reader, writer):
    while True:
        await read_request(reader)
        writer.write(reply(b'{"error":{"message":"died","type":"InternalServerError","code":500}}', b"500 Failed"))


async def judged(slo, script=engine, path=b"/v1/chat/completions", **fields):
    """How often an answer counted as what, and whether anything was said of predictions."""
    async with queued(script, slo=slo, rules=Rules(("observe",))) as (s, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20} | fields
        await s.ask(post(body, path))
        await eventually(s.idle)
        assert not s.metrics.predicted_answers.total() and not s.metrics.predicted_ttft_seconds.total()
        assert {one["ttft_seconds"] for one in _admission(s.metrics, {})} == {None}
        return dict(s.metrics.slo_requests.by("outcome"))


@pytest.mark.parametrize(
    "slo, outcome",
    [
        (Slo(20.0, 0.001), {"met": 1}),
        (Slo(0.001, 2.0), {"met": 1}),  # 2 s for each of ten tokens after the first
        (Slo(0.1, SECONDS / TOKENS / 2), {"missed": 1}),
        (Slo(20.0, None), {}),  # nothing is known of its first token
        (Slo(None, 2.0), {}),
        (Slo(), {}),
    ],
)
async def test_a_whole_answer_is_within_its_limits_if_it_is_complete_in_time(slo, outcome):
    assert await judged(slo) == outcome


async def test_a_whole_answer_that_fails_is_no_goodput():
    assert await judged(Slo(20.0, 2.0), fails) == {"failed": 1}


async def test_what_writes_no_tokens_does_not_count():
    assert await judged(Slo(20.0, 2.0), path=b"/v1/embeddings", input="a") == {}


@pytest.mark.parametrize(
    "slo, begins, stream, outcome",
    [
        (Slo(0.1), False, True, {"missed": 1}),
        (Slo(20.0), False, True, {}),  # it might have come in time
        (Slo(0.1), True, True, {}),  # in the middle of an answer
        (Slo(None, 2.0), False, True, {}),
        (Slo(0.1, 2.0), False, False, {}),  # nobody sees when it begins
    ],
)
async def test_who_leaves_without_a_first_token_after_the_time_for_it_has_missed_it(slo, begins, stream, outcome):
    sent = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        writer.write((SSE_HEAD + chunk(EVENT)) * begins)
        sent.set()
        await reader.read()

    async with queued(script, slo=slo, rules=Rules(("observe",))) as (s, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "stream": stream}
        talk = await s.say(post(body))
        await sent.wait()
        if begins:
            await talk.until(b"\r\n\r\n")
        await asyncio.sleep(0.15)
        await talk.close()
        await eventually(s.idle)
        assert dict(s.metrics.slo_requests.by("outcome")) == outcome


EVENTS, GAP = 20, 0.03
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


def in_a_stream(events, usage=b""):
    """So many events of output, one in GAP seconds after the first."""

    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(SSE_HEAD + chunk(ROLE) + chunk(EVENT))
            for _ in range(events - 1):
                await asyncio.sleep(GAP)
                writer.write(chunk(EVENT))
            writer.write(chunk(usage) * bool(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


async def streamed(slo, script):
    """As `judged`, and how often a margin of the time per token was learned from."""
    async with queued(script, slo=slo, rules=Rules(("observe",))) as (s, queue):
        learned = []
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "stream": True}
        talk = await s.say(post(body))
        await eventually(lambda: queue._fleets)
        for fleet in queue._fleets.values():
            fleet.fit.tpot_margin = SimpleNamespace(learn=lambda *given: learned.append(given), factor=1.0)
        await talk.response()
        await eventually(s.idle)
        return dict(s.metrics.slo_requests.by("outcome")), len(learned)


@pytest.mark.parametrize(
    "usage, events, slo, outcome, learned",
    [
        (b"", EVENTS, Slo(20.0, GAP / 2), {"missed": 1}, 0),
        (b"", EVENTS, Slo(20.0, 2.0), {"met": 1}, 0),
        (USAGE, EVENTS, Slo(20.0, GAP / 2), {"missed": 1}, 1),
        (b"", 8, Slo(20.0, GAP / 2), {"met": 1}, 0),  # too short: the role and the end are no tokens
    ],
)
async def test_a_stream_without_usage_is_judged_by_its_events_of_which_no_margin_is_learned(
    usage, events, slo, outcome, learned
):
    assert await streamed(slo, in_a_stream(events, usage)) == (outcome, learned)


async def test_events_that_come_in_one_read_are_counted_each():
    """They are 24 in 23 gaps of a half; by reads there would be 12."""
    gap, read = 0.04, chunk(EVENT) + chunk(EVENT)

    async def script(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(ROLE) + read)
        for _ in range(11):
            await asyncio.sleep(gap)
            writer.write(read)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with queued(script, slo=Slo(20.0, 2.0), rules=Rules(("observe",))) as (s, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
        await s.ask(post(body))
        await eventually(s.idle)
        assert s.metrics.answer_tokens.total(kind="output") == 24
        seconds = s.metrics.answer_tpot_seconds.mean(("free", "m")) * 23
        assert seconds >= 11 * gap
