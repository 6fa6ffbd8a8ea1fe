"""With --continue-streams: answers that may call tools, and whose engine dies."""

import asyncio
import json

import orjson
import pytest

from ..replies import ENDS, chunk, post, streams
from .test_resumer import SAID, continued

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASKED = {"model": "m", "stream": True, "temperature": 0, "messages": SAID, "tools": TOOLS}


def chat(name: str, reason: str | None = None, **delta) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return chunk(b"data: " + orjson.dumps({"id": name, "created": 1, "choices": [choice]}) + b"\n\n")


def called(name: str, arguments: str) -> bytes:
    call = {"index": 0, "id": f"call-{name}", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return chat(name, tool_calls=[call])


def opened(name: str) -> bytes:
    return chat(name, role="assistant", content="")


def ended(name: str) -> bytes:
    return chat(name, "tool_calls", content="") + ENDS


def writes(*events: bytes, seen: list | None = None):
    """An engine that writes these and dies, unless the last one ends the stream."""

    ends = events and events[-1].endswith(b"0\r\n\r\n")
    return streams(*events, end=b"" if ends else None, seen=seen, pause=lambda: asyncio.sleep(0))


def of(body: bytes) -> tuple[str, list[dict], set]:
    """Text, calls of tools and names of a chat's stream."""
    found = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for one in found for choice in one.get("choices", ())]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    return "".join(delta.get("content") or "" for delta in deltas), calls, {one.get("id") for one in found}


async def answer(s, body, path=b"/v1/chat/completions") -> bytes:
    return (await s.ask(post(body, path)))[2]


async def test_a_text_before_a_call_is_repeated_and_the_call_follows_it():
    seen: list[tuple[bytes, bytes]] = []
    first = writes(opened("1"), chat("1", content="I look"), seen=seen)
    other = writes(
        opened("2"), chat("2", content="I lo"), chat("2", content="ok it up."), called("2", '{"a"'), called("2", ":1}"),
        ended("2"), seen=seen,
    )  # fmt: skip
    async with continued(first, other, policy="round_robin") as s:
        body = await answer(s, ASKED)
        text, calls, names = of(body)
        assert text == "I look it up." and names == {"1"} and body.endswith(b"data: [DONE]\n\n")
        assert "".join(call["arguments"] for call in calls) == '{"a":1}'
        assert [json.loads(body)["tools"] for _, body in seen] == [TOOLS] * 2, "the same request once more"
        assert s.metrics.continued_streams.total(way="repeat") == 1


LOOKS, CALLS = [opened("1"), chat("1", content="I look")], called("1", '{"a"')


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ([[*LOOKS, CALLS]] * 2, "tools"),
        ([LOOKS, [opened("2"), chat("2", content="I look"), called("2", '{"a"')], LOOKS], "tools"),
        ([LOOKS, [opened("2"), chat("2", content="I"), called("2", "{}"), ended("2")]], "differs"),
    ],
    ids=["had begun", "was begun by who went on", "comes where the client has text"],
)
async def test_a_stream_whose_call_of_a_tool_cannot_be_joined_is_cut_and_counted(engines, reason):
    async with continued(*[writes(*events) for events in engines], policy="round_robin") as s:
        body = await answer(s, ASKED)
        assert b"broke off" in body and b"[DONE]" not in body
        assert of(body)[0] == "I look" and "1" in of(body)[2]
        assert reason == "tools" or of(body)[1] == []
        assert s.metrics.streams_not_continued.total(reason=reason) == 1


@pytest.mark.parametrize("began", [False, True])
async def test_a_sampled_answer_is_asked_for_again_until_it_has_text(began):
    first = writes(opened("1"), *([chat("1", content="I")] if began else []))
    other = writes(opened("2"), chat("2", content="You"), called("2", "{}"), ended("2"))
    async with continued(first, other, policy="round_robin") as s:
        body = await answer(s, ASKED | {"temperature": 1})
        if began:
            assert of(body)[0] == "I" and b"[DONE]" not in body
            assert s.metrics.streams_not_continued.total(reason="tools") == 1
        else:
            assert of(body)[:2] == ("You", [{"name": "look", "arguments": "{}"}]) and b"[DONE]" in body
            again = s.metrics.continued_streams.total(way="repeat")
            assert again + s.metrics.retries.total() == 1, "by whether its head had gone out"


def message(kind: str, **data) -> bytes:
    return chunk(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data})))


@pytest.mark.parametrize("closed", [False, True], ids=["within the text", "behind it"])
async def test_a_tool_of_the_messages_api_follows_the_text_that_the_client_has(closed):
    def start(name):
        usage = {"input_tokens": 9, "output_tokens": 0}
        head = {"id": name, "type": "message", "role": "assistant", "content": [], "model": "m", "usage": usage}
        block = {"type": "text", "text": ""}
        return message("message_start", message=head) + message("content_block_start", index=0, content_block=block)

    def says(text):
        return message("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    stops = message("content_block_stop", index=0)
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    call = (
        message("content_block_start", index=1, content_block=use)
        + message("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": "{}"})
        + message("content_block_stop", index=1)
        + message("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 7})
        + message("message_stop")
        + b"0\r\n\r\n"
    )
    first = writes(start("1"), says("I look"), *([stops] if closed else []))
    other = writes(start("2"), says("I look"), says(" up") if not closed else b"", stops, call)
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    async with continued(first, other, policy="round_robin") as s:
        body = await answer(s, ASKED | {"tools": tools, "max_tokens": 9}, b"/v1/messages")
        told = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data: {")]
        kinds = [one["type"] for one in told]
        assert kinds.count("message_start") == kinds.count("message_stop") == 1 and kinds[-1] == "message_stop"
        starts = [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"]
        assert starts == ["text", "tool_use"] and kinds.count("content_block_stop") == 2
        text = "".join(one["delta"]["text"] for one in told if one.get("delta", {}).get("type") == "text_delta")
        assert text == ("I look" if closed else "I look up")
        assert s.metrics.continued_streams.total(way="repeat") == 1
