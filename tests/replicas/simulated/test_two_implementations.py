"""The engine's way from a request to token ids against the gateway's: written apart, they must agree."""

import json
import random

import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated import requests

WORDS = (
    "hello",
    " world",
    "\n\n",
    "  ",
    "12345",
    "\u00e9t\u00e9",
    "\u65e5\u672c",
    "<think>",
    "don't",
    "<\uff5cUser\uff5c>",
    "",
)


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(8)))


def message(rng: random.Random) -> dict:
    role = rng.choice(("system", "user", "assistant", "tool"))
    made = {"role": role, "content": rng.choice((text(rng), None, [{"type": "text", "text": text(rng)}, text(rng)]))}
    if role == "assistant" and rng.random() < 0.4:
        arguments = rng.choice(('{"a": 1, "\u00e9": [true, null]}', "", "{bad", "[1]"))
        made["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    if role == "tool":
        made["tool_call_id"] = "1"
    return made


def chat(rng: random.Random) -> dict:
    body = {"model": "sim", "messages": [message(rng) for _ in range(rng.randrange(1, 6))]}
    if rng.random() < 0.3:
        body["tools"] = [{"type": "function", "function": {"parameters": {"b": 1, "a": [2]}, "name": "f"}, "more": 1}]
    if rng.random() < 0.3:
        body |= {"add_generation_prompt": False, "continue_final_message": rng.random() < 0.5}
    return body


def anthropic(rng: random.Random) -> dict:
    blocks = {
        "user": ({"type": "text", "text": "Hi"}, {"type": "tool_result", "tool_use_id": "1", "content": "ok"}),
        "assistant": (
            {"type": "text", "text": "Yes"},
            {"type": "thinking", "thinking": "Hm"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        ),
    }
    messages = [
        {"role": role, "content": rng.choice((text(rng) + ".", rng.sample(blocks[role], 2)))}
        for role in rng.choices(("user", "assistant"), k=rng.randrange(1, 5))
    ]
    return {"model": "sim", "max_tokens": 1, "system": text(rng), "messages": messages}


def responses(rng: random.Random) -> dict:
    items = (
        {"role": "user", "content": [{"type": "input_text", "text": text(rng)}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text(rng)}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": text(rng)},
    )
    return {"model": "sim", "instructions": text(rng), "input": [*rng.choices(items, k=3), items[0]]}


@pytest.fixture(scope="module")
def pipeline(model_dir):
    return Pipeline(model_dir, "sim", 16)


@pytest.mark.parametrize(
    "path, make, ask",
    [
        ("/v1/chat/completions", chat, requests.chat),
        ("/v1/messages", anthropic, requests.anthropic),
        ("/v1/responses", responses, requests.responses),
    ],
)
def test_both_give_the_same_ids(tokens, pipeline, path, make, ask):
    rng = random.Random(path)
    for _ in range(300):
        body = make(rng)
        prompt = pipeline.prepare(path, json.dumps(body).encode(), {}, ())
        assert prompt.mode == "exact", (prompt.note, body)
        assert memoryview(prompt.token_ids).cast("I").tolist() == ask(body, tokens).prompts[0], body
