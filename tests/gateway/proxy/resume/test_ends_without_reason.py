"""With --continue-streams: streams that end with a bare [DONE], of engines that say why a stream ends and of others."""

import json

import orjson
import pytest

from ...http.talk import eventually, read_request
from ..replies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SSE_HEAD, chunk, post, reply
from ..stack import stack
from .test_resumer import GREEDY, PIPELINE, SAID, WORDS, continued, engine

SAMPLED = {"temperature": 1, "stop": ["zzz"]}
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def fields(path: str, **more) -> bytes:
    given = {CHAT: {"messages": SAID}, COMPLETIONS: {"prompt": "Hi"}, MESSAGES: {"messages": SAID}}
    given = given.get(path, {"input": "Hi"})
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return orjson.dumps({"model": "m", "stream": True, "temperature": 0, limit: 6, **given} | more)


def word(path: str, text: str, reason: str | None = None, **more) -> bytes:
    if path == CHAT:
        told = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason} | more]}
    elif path == COMPLETIONS:
        told = {"choices": [{"index": 0, "text": text, "finish_reason": reason} | more]}
    elif path == MESSAGES:
        told = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    else:
        told = {"type": "response.output_text.delta", "item_id": "i", "output_index": 0, "content_index": 0}
        told |= {"delta": text, "sequence_number": 4, "logprobs": []}
    name = b"event: %b\n" % told["type"].encode() if "type" in told else b""
    return name + b"data: " + orjson.dumps({"id": "1", "created": 1} | told) + b"\n\n"


OPENS = {
    CHAT: b'data: {"id":"1","created":1,"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    COMPLETIONS: b"",
    MESSAGES: b'event: message_start\ndata: {"type":"message_start","message":{"id":"1","content":[],"usage":'
    b'{"input_tokens":9,"output_tokens":0}}}\n\nevent: content_block_start\ndata: {"type":"content_block_start",'
    b'"index":0,"content_block":{"type":"text","text":""}}\n\n',
    RESPONSES: b'event: response.created\ndata: {"type":"response.created","response":{"id":"1","created_at":1,'
    b'"status":"in_progress","output":[]},"sequence_number":0}\n\n',
}
SAYS_WHY = {
    CHAT: word(CHAT, "", "stop"),
    COMPLETIONS: word(COMPLETIONS, "", "stop"),
    MESSAGES: b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":'
    b'{"output_tokens":6}}\n\n',
    RESPONSES: b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"1","created_at":1,'
    b'"status":"completed","output":[]},"sequence_number":9}\n\n',
}


def writes(*streams: list[bytes], seen: list | None = None):
    """An engine without token ids that answers each request with the next of these streams, the last one from then
    on."""
    left = list(streams)

    async def script(reader, writer):
        while True:
            _, body = await read_request(reader)
            if seen is not None:
                seen.append(body)
            if b'"return_token_ids"' in body:
                writer.write(reply(b"{}", b"400 Bad Request"))
                continue
            writer.write(SSE_HEAD)
            pieces = left.pop(0) if len(left) > 1 else left[0]
            for piece in pieces:
                writer.write(piece if piece == END else chunk(piece))
                await writer.drain()
            if pieces[-1] != END:
                return

    return script


def stream(path: str, *behind: bytes, words: int = 6) -> list[bytes]:
    return [OPENS[path] + word(path, WORDS[0]), *(word(path, one) for one in WORDS[1:words]), *behind, END]


def text_of(path: str, body: bytes) -> str:
    found = ""
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            told = json.loads(line[6:])
            for choice in told.get("choices", ()):
                found += choice["delta"].get("content") or "" if path == CHAT else choice["text"]
            found += told.get("delta", "") if path == RESPONSES and isinstance(told.get("delta"), str) else ""
            found += told.get("delta", {}).get("text", "") if path == MESSAGES else ""
    return found


async def ask(s, path: str, body: bytes) -> bytes:
    answer = (await s.ask(post(body, path.encode())))[2]
    await eventually(lambda: s.idle() and not s.proxy.handler.resumer.kept)
    return answer


ENDS = {
    "bare": [DONE],
    "no space": [b"data:[DONE]\n\n"],
    "CRLF": [b"data: [DONE]\r\n\r\n"],
    "in two packets": [b"data: [DO", b"NE]\n\n"],
    "behind a comment": [b": bye\n\n", DONE],
    "twice": [DONE, DONE],
    "with more behind": [DONE, b": more\n\n"],
    "without a blank line": [b"data: [DONE]"],
}


@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_that_never_says_why_is_taken_at_its_word(path, more):
    """It is asked once, and nobody is blamed."""
    seen = []
    async with continued(*[writes(stream(path, DONE), seen=seen)] * 3) as s:
        for asked in range(1, 4):
            body = await ask(s, path, fields(path, **more))
            assert text_of(path, body) == "abcdef" and body.endswith(DONE)
            assert len([one for one in seen if b"return_token_ids" not in one]) == asked
        assert not s.faults and not s.metrics.continued_streams.total() and not s.metrics.streams_not_continued.total()


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_however_it_writes_that(end):
    async with continued(*[writes(stream(CHAT, *end))] * 2) as s:
        body = await ask(s, CHAT, fields(CHAT))
        assert text_of(CHAT, body) == "abcdef" and b"[DONE]" in body and b"broke off" not in body
        assert not s.faults


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_apis_that_end_otherwise_have_no_bare_done(path, end):
    """Also where the engine has ended no stream before."""
    whole = stream(path, SAYS_WHY[path], DONE)
    async with continued(writes(stream(path, *end, words=2)), writes(whole)) as s:
        for _ in range(2):
            body = await ask(s, path, fields(path))
            assert text_of(path, body) == "abcdef" and b"broke off" not in body
        assert s.metrics.continued_streams.total(way="repeat") == 1


@pytest.mark.parametrize("repeated", [0, 1, 3, 4])
async def test_engines_that_die_within_the_repetition_are_not_taken_down_one_after_the_other(repeated):
    """However much of what the client has each of them writes again."""
    seen = []
    part = stream(CHAT, words=repeated)[:-1] if repeated else [OPENS[CHAT]]
    engines = [writes(stream(CHAT, words=4)[:-1], seen=seen), *[writes(part, seen=seen)] * 5]
    async with continued(*engines) as s:
        body = await ask(s, CHAT, fields(CHAT))
        assert text_of(CHAT, body) == "abcd" and b"broke off" in body
        assert len([one for one in seen if b"return_token_ids" not in one]) == 3
        assert s.metrics.streams_not_continued.total(reason="crashes") == 1


BARE_END = chunk(DONE) + END


@pytest.mark.parametrize(
    "engines",
    [
        [engine("1", BARE_END, 2), engine("2")],
        [engine("1", b"", 2), engine("2", BARE_END, 0), engine("3")],  # its only event tells the prompt's ids
    ],
    ids=["at first", "where it goes on"],
)
async def test_who_tells_ids_says_why_and_has_broken_off(engines):
    async with continued(*engines) as s:
        body = await ask(s, CHAT, orjson.dumps(GREEDY))
        assert text_of(CHAT, body) == "abcdef" and s.metrics.continued_streams.total(way="ids") >= 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_an_answer_without_a_word_is_whole(path, reason):
    empty = [OPENS[path] + word(path, "", reason), DONE, END]
    async with continued(*[writes(empty)] * 2) as s:
        for _ in range(3):
            body = await ask(s, path, fields(path))
            assert text_of(path, body) == "" and body.endswith(DONE) and b"broke off" not in body
        assert not s.faults


SEVERAL = [
    word(CHAT, "a"),
    word(CHAT, "b", index=1),
    word(CHAT, "", "stop"),
    word(CHAT, "", "stop", index=1),
    DONE,
    END,
]
CALL = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
CALLS = [OPENS[CHAT] + word(CHAT, "", delta=CALL), DONE, END]
USED = (
    b'data: {"id":"1","created":1,"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":6,"total_tokens":15}}\n\n'
)


@pytest.mark.parametrize(
    ("path", "more", "answer"),
    [
        (CHAT, {"n": 2}, SEVERAL),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, CALLS),
        (CHAT, {"stream_options": {"include_usage": True}}, stream(CHAT, SAYS_WHY[CHAT], USED, DONE)),
        (CHAT, {"stream_options": {"include_usage": True}}, stream(CHAT, USED, DONE)),
        (CHAT, {}, stream(CHAT, SAYS_WHY[CHAT], USED, DONE)),
        (COMPLETIONS, {"echo": True}, stream(COMPLETIONS, SAYS_WHY[COMPLETIONS], DONE)),
        (COMPLETIONS, {"echo": True}, stream(COMPLETIONS, DONE)),
    ],
    ids=["n", "tools", "usage", "usage, no reason", "usage unasked", "echo", "echo, no reason"],
)
async def test_what_such_streams_are_passes_as_it_is(path, more, answer):
    async with continued(*[writes(answer)] * 2) as s, stack(writes(answer), pipeline=PIPELINE) as plain:
        for _ in range(2):
            body = await ask(s, path, fields(path, **more))
            assert body == (await plain.ask(post(fields(path, **more), path.encode())))[2]
        assert not s.faults and not s.metrics.streams_not_continued.total()
