"""Requests become the prompts that a real vLLM made of them, and that the gateway predicts."""

import json
import shutil
from array import array
from pathlib import Path

import pytest
import tokenizers
from xxhash import xxh3_64_hexdigest

from gateway.prompt.pipeline import Pipeline
from replicas.simulated import requests
from replicas.simulated.model import tokenizer_file
from replicas.simulated.tokens import RequestError, Tokens

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK = {
    CHAT: requests.chat,
    COMPLETIONS: requests.completion,
    RESPONSES: requests.responses,
    MESSAGES: requests.anthropic,
}
# What vLLM 0.32 made of random bodies, as tests/gateway/prompt/test_against_vllm.py has it.
RECORDED = Path(__file__).parents[2] / "gateway" / "prompt" / "vllm_0_32.jsonl"
CASES = [case for case in map(json.loads, RECORDED.read_text().splitlines()) if case["model"] == "sim"]
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "x"}]
CODEX = {
    "model": "sim",
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "web_search"},
        {"type": "tool_search"},
    ],
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        {"role": "user", "content": "Mend it."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "1", "name": "find", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "found"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It"}], "status": "incomplete"},
    ],
}  # fmt: skip
CLAUDE = {
    "model": "sim",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: 5"}, {"type": "text", "text": "Be brief."}],
    "tools": [{"name": "search", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "id": "1", "name": "search", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "two"}]}]},
        {"role": "system", "content": "Quickly."},
    ],
}  # fmt: skip
CALLS = {"model": "sim", "tools": [TOOL], "messages": [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"]},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "grep"}, {"type": "text", "text": ""}]},
]}  # fmt: skip


def prompt_of(path: str, body: dict, tokens: Tokens) -> list[int]:
    """The request's prompt, the longest one of several."""
    return max(ASK[path](requests.parse(json.dumps(body).encode()), tokens).prompts, key=len)


def test_prompts_are_those_that_vllm_was_seen_to_make(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "sim")
    shutil.copyfile(tokenizer_file(), folder / "tokenizer.json")  # the recorded model had all merges
    tokens = Tokens(folder).within(131_072)
    assert len(CASES) >= 100 and {case["path"] for case in CASES} == set(ASK)
    for case in CASES:
        ids = prompt_of(case["path"], case["body"], tokens)
        assert xxh3_64_hexdigest(array("I", ids).tobytes()) == case["ids"], case["body"]


def test_prompts_are_those_that_the_gateway_predicts(model_dir, tokens):
    pipeline = Pipeline(model_dir, "sim", 16, max_model_len=131_072)
    tokens = tokens.within(131_072)
    agents = ((RESPONSES, CODEX), (MESSAGES, CLAUDE), (CHAT, CALLS))
    for path, body in [*agents, *((case["path"], case["body"] | {"model": "sim"}) for case in CASES)]:
        prompt = pipeline.prepare(path, json.dumps(body).encode(), {}, ())
        assert prompt.mode == "exact", (prompt.note, body)
        assert memoryview(prompt.token_ids).cast("I").tolist() == prompt_of(path, body, tokens), body


def test_what_agents_send_is_shown_to_the_model(tokens):
    text = tokens.decode(prompt_of(RESPONSES, CODEX, tokens))
    assert all(shown in text for shown in ("shell", "find", "found", "Ask first."))
    assert not any(kind in text for kind in ("web_search", "tool_search")) and text.endswith("It")
    text = tokens.decode(prompt_of(MESSAGES, CLAUDE, tokens))
    assert "two" in text and "Quickly." in text and "billing" not in text


def build(folder: Path, template: str | list | None = None) -> Tokens:
    """A model with another template and a tokenizer of a kind that only the reference can load."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokens(folder)


def test_a_tokenizer_that_fastokens_cannot_load_is_loaded_by_the_reference(tmp_path):
    tokens = build(tmp_path, "{{ messages[0].content }}")
    assert tokens.chat({"messages": [{"role": "user", "content": "a b a"}]}) == [1, 0, 1] and tokens.eos_id == 2


def test_a_template_that_strips_is_continued_without_the_blank(tmp_path):
    tokens = build(tmp_path, "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    body = {"add_generation_prompt": False, "continue_final_message": True}
    for text in ("Two", "Two  "):
        assert tokens.render({**body, "messages": [{"role": "assistant", "content": text}]}) == "[Two"


@pytest.mark.parametrize("loop", ["for part in m['content']", "set content = m.content %}{% for part in content"])
def test_a_template_that_loops_over_parts_gets_parts(tmp_path, loop):
    tokens = build(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% " + loop + " %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}",
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
    ]
    assert tokens.render({"messages": messages}) == "<s>user:(a)user:(b)(c)tool:d"


def test_what_a_template_may_use(tmp_path):
    tokens = build(
        tmp_path,
        "{%- for m in messages %}\n    {%- if loop.last %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{%- endfor %}{{ thinking }}|{{ enable_thinking }}|"
        "{{ {'a': 'é', 'b': '<'} | tojson }}|{{ strftime_now('%Y') | length }}|{{ documents | length }}",
    )
    body = {"chat_template_kwargs": {"thinking": True}, "documents": [{}], "reasoning_effort": "none"}
    assert tokens.render({"messages": [*HELLO, *HELLO], **body}) == 'xTrue|False|{"a": "é", "b": "<"}|4|1'


def test_named_templates(tmp_path):
    tokens = build(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert tokens.render({"messages": HELLO}) == "plain"
    assert tokens.render({"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}) == "tools"  # as vLLM by default


def test_what_truncation_leaves(tmp_path):
    tokens = build(tmp_path, "{{ messages[0].content }}").within(6)
    for side, ids in ((None, [0, 1]), ("left", [0, 1]), ("right", [1, 0])):
        body = {"prompt": "a b b b a", "truncate_prompt_tokens": 2, "truncation_side": side}
        assert requests.completion(body, tokens).prompts == [ids]
    assert requests.embeddings({"input": [1, 2, 3], "truncate_prompt_tokens": 2}, tokens).prompts == [[1, 2]]
    many = list(range(1, 10))
    asked = requests.completion({"prompt": many, "truncate_prompt_tokens": -1}, tokens)
    assert asked.prompts == [many[-5:]]  # one token of the context is for the answer
    for wrong in (-2, 7, 1.5, "x"):
        with pytest.raises(RequestError, match="must be -1 to 6"):
            requests.completion({"prompt": many, "truncate_prompt_tokens": wrong}, tokens)


def test_without_a_template_chats_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no chat template"):
        build(tmp_path).chat({"messages": HELLO})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO, "tools": []},
        {"messages": HELLO, "tools": [{"type": "function"}]},
        {"messages": HELLO, "chat_template_kwargs": 3},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        {"messages": ["x"]},
        {"messages": [{}]},
        {"messages": [{"role": "owl", "content": "x"}]},
    ],
)
def test_bodies_that_are_no_conversation(tokens, body):
    with pytest.raises(RequestError):
        tokens.chat(body)
