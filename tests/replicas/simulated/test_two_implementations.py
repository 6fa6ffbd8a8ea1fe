"""The engine's way from a request to token ids against the gateway's: written apart, they must agree."""

import json
import random

import pytest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated import requests, translate
from replicas.simulated.tokens import RequestError, conversation

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


SPACE = {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find"}, {"type": "custom"}]}
PATCH = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
CODEX = {
    "model": "sim",
    "tools": [SHELL, {"type": "web_search"}, PATCH, SPACE, {"type": "tool_search"}],
    "input": [
        {"role": "user", "content": "Mend it."},
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "mcp", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "found"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** \u00e9"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ],
}
FOUND = [{"type": "tool_reference", "tool_name": "grep"}, {"type": "tool_reference", "name": "read"}]
CLAUDE = {
    "model": "sim",
    "max_tokens": 1,
    "tools": [{"name": "search", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "two"}, *FOUND]},
            {"type": "tool_reference", "tool_name": "grep"}]},
    ],
}  # fmt: skip
CHAT = {"model": "sim", "messages": [
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "tool_reference", "name": "grep"}, {"type": "text", "text": ""}]},
]}  # fmt: skip


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


@pytest.mark.parametrize(
    "path, body, ask",
    [
        ("/v1/responses", CODEX, requests.responses),
        ("/v1/messages", CLAUDE, requests.anthropic),
        ("/v1/chat/completions", CHAT, requests.chat),
        *(
            ("/v1/completions", {"model": "sim", "prompt": prompt}, requests.completion)
            for prompt in (["5", 6], [["5", 6.0], [7]], [True, 8])
        ),
    ],
)
def test_both_follow_the_rules_of_agents_tools_and_of_ids_as_texts(tokens, pipeline, path, body, ask):
    prompt = pipeline.prepare(path, json.dumps(body).encode(), {}, ())
    assert prompt.mode == "exact", prompt.note
    assert memoryview(prompt.token_ids).cast("I").tolist() == ask(body, tokens).prompts[0]


def test_what_agents_send_reaches_the_template_by_vllms_rules(tokens):
    tools = translate.responses(CODEX)["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["shell", "patch", "mcp__find"]
    text = tokens.decode(requests.responses(CODEX, tokens).prompts[0])
    assert all(shown in text for shown in ("mcp__find", "*** \u00e9", "freeform text payload"))
    assert not any(kind in text for kind in ("web_search", "tool_search", "namespace"))
    answers = [one["content"] for one in translate.anthropic(CLAUDE)["messages"] if one["role"] == "tool"]
    assert answers == ["two", [{"type": "tool_reference", "name": name} for name in ("grep", "read")]]
    parts = conversation([{"role": "tool", "content": answers[1]}], True)
    assert parts == [{"role": "tool", "content": answers[1]}]
    assert requests.completion({"prompt": ["5", 6]}, tokens).text is False
    for prompt in (["5", "x", 6], ["5.5", 6], [None, 6]):
        with pytest.raises(RequestError, match="not a token id"):
            requests.completion({"prompt": prompt}, tokens)
