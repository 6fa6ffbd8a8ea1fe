"""An engine's error at Anthropic's paths is spelled as Anthropic's; everywhere else it passes as it is."""

import json

import pytest

from .replies import NEXT, chunk, post, says
from .stack import stack

OPENAI = b'{"error":{"message":"max_tokens must be at least 1","type":"BadRequestError","param":null,"code":400}}'
OLD = b'{"object":"error","message":"max_tokens must be at least 1","type":"BadRequestError","param":null,"code":400}'
ANTHROPIC = b'{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens must be at least 1"}}'
HEAD = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-engine: 1\r\n"


def refusal(body: bytes, framing: str):
    """A replica that refuses, in one read or in several."""

    answer = [HEAD + b"content-length: %d\r\n\r\n" % len(body) + body]
    if framing == "chunked":
        answer = [HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(body[:20]), chunk(body[20:]) + b"0\r\n\r\n"]
    return says(*answer, NEXT, *answer)


@pytest.mark.parametrize("framing", ("length", "chunked"))
@pytest.mark.parametrize("body", (OPENAI, OLD, ANTHROPIC), ids=("openai", "old", "anthropic"))
async def test_a_refusal_at_messages_has_anthropics_shape(body, framing):
    async with stack(refusal(body, framing)) as s:
        talk = await s.talk()
        for _ in range(2):  # on one connection: the length fits
            status, headers, told = await talk.ask(post(path=b"/v1/messages"))
            assert status == 400 and json.loads(told) == json.loads(ANTHROPIC)
            assert headers["x-engine"] == "1" and headers["x-hitherto-replica"] in s.proxy.backends
        assert not s.faults


@pytest.mark.parametrize(
    "path, body",
    [
        (b"/v1/chat/completions", OPENAI),
        (b"/v1/messages", b"[1, 2]"),
        (b"/v1/messages", b'{"error": {"reason": 7}}'),
    ],
)
async def test_what_needs_no_other_spelling_or_cannot_be_read_passes(path, body):
    async with stack(refusal(body, "length")) as s:
        assert (await s.ask(post(path=path)))[::2] == (400, body)
