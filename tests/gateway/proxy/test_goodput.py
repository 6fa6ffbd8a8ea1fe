"""Answers in one piece in goodput: they keep their limits if they are complete in time for all their tokens."""

import asyncio
import json

import pytest

from gateway.ops.view import _admission
from policies import Rules, Slo

from ..http.talk import eventually, read_request
from .replies import ANSWER, post, reply
from .test_queue import queued

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
        talk = await s.talk()
        await talk.say(post(json.dumps(body).encode(), path))
        await talk.response()
        await eventually(s.idle)
        assert not s.metrics.predicted_answers.total() and not s.metrics.predicted_ttft_seconds.total()
        assert {one["ttft_seconds"] for one in _admission(s.metrics)} == {None}
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
