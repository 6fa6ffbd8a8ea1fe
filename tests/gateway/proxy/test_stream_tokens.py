"""The tokens of a stream whose client asked for no usage, however many of its events come in one read."""

import pytest

from ..http.talk import eventually
from .play import Play
from .replies import ENDS, EVENT, SSE_HEAD, chunk, post, streams
from .resume.test_resumer import BODY, PROMPT_IDS, continued, event
from .stack import stack

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"text":"x"}]}\n\n'
STREAMING = b'{"model":"m","stream":true,%b}'
CHAT = STREAMING % b'"messages":[{"role":"user","content":"hi"}]'
COMPLETION = STREAMING % b'"prompt":"hi"'


@pytest.mark.parametrize(
    "path, body, together",
    [
        (b"/v1/chat/completions", CHAT, (ROLE + 8 * EVENT, 22 * EVENT)),
        (b"/v1/completions", COMPLETION, 2 * (15 * TEXT,)),
    ],
    ids=["chat", "completions"],
)
@pytest.mark.parametrize("figures", [False, True])
async def test_each_event_with_output_is_a_token(path, body, together, figures):
    async with stack(streams(*map(chunk, together)), slo_figures=figures) as s:
        await tokens_are(s, body, path, 30)


LARGE = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"x"},"logprobs":%b}]}\n\n'
SMALL, LONG = chunk(LARGE % (b" " * 100)), chunk(LARGE % (b" " * 3400))


@pytest.mark.parametrize(
    "reads",
    [
        [SMALL, SMALL + SMALL, SMALL, SMALL[:90], SMALL[90:], SMALL + SMALL + SMALL, SMALL, SMALL],
        [LONG[at : at + 1448] for _ in range(10) for at in range(0, len(LONG), 1448)],  # as segments of TCP come
        [SMALL, *(LONG[at : at + 1448] for _ in range(9) for at in range(0, len(LONG), 1448))],
        [read for _ in range(10) for at in [SMALL.find(b"delta")] for read in (SMALL[:at], SMALL[at:])],
        [b"".join([SMALL] * 10)[at : at + 7] for at in range(0, 10 * len(SMALL), 7)],
    ],
    ids=["small", "long", "both", "within the mark", "tiny"],
)
@pytest.mark.parametrize("metered", [False, True])
async def test_events_are_counted_however_they_are_cut(reads, metered):
    play = Play(1, usage_log=(lambda *_: None) if metered else None)
    await play.asks(post(CHAT))
    wire = play.replica(0).accept()
    await play.answers(wire, SSE_HEAD, *reads, ENDS)
    assert play.proxy.metrics.replica_decode_tokens.total() == 10 - 1


async def test_a_stream_that_could_be_gone_on_with_is_counted_alike():
    together = b"".join(event("1", [number], "x") for number in range(1, 6)) + event(
        "1", [6], "x", finish_reason="stop"
    )
    async with continued(streams(event("1", PROMPT_IDS) + event("1", [0], "x"), together)) as s:
        await tokens_are(s, BODY, b"/v1/chat/completions", 7)


async def tokens_are(s, body, path, tokens):
    assert (await s.ask(post(body, path)))[0] == 200
    await eventually(s.idle)
    assert s.metrics.replica_decode_tokens.total() == tokens - 1
