"""Bodies of any shape: they are prepared, or refused in the client's own terms; no other error comes out."""

import json
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from gateway.prompt.tokens.agreement import Differences
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM

from .reference import model_dir

PATHS = (CHAT, RESPONSES, MESSAGES, COMPLETIONS, EMBEDDINGS)


@cache
def pipeline_of(dialect, matched_as_text: bool) -> Pipeline:
    pipeline = Pipeline(model_dir("sim"), "m", 16, max_model_len=500)
    pipeline.follow(dialect.version_quirks("0.33.0"))
    texts = {"": "it makes other tokens"} if matched_as_text else {}
    pipeline.differ(Differences(texts, shown=True))
    return pipeline


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 7), st.just(1.5), st.sampled_from(["", "hi", "user", "x-anthropic-billing-header: a"])
)  # fmt: skip
KEYS = st.sampled_from(
    """role content type text name tool_calls function arguments id call_id tool_call_id output input summary thinking
    reasoning reasoning_content cache_control source image_url url tool_use_id is_error encrypted_content tools
    parameters description input_schema""".split()
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "strange"])
TYPES = st.sampled_from(
    """text doc input_text output_text image_url image tool_use tool_result thinking message reasoning function
    function_call function_call_output custom_tool_call item_reference input_image""".split()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
PARTS = st.builds(lambda kind, more: {**more, "type": kind}, TYPES, st.dictionaries(KEYS, VALUES, max_size=3))
ITEMS = st.builds(
    lambda role, content, more: {**more, "role": role, "content": content},
    ROLES,
    st.one_of(st.just("hi"), st.lists(PARTS, max_size=3), VALUES),
    st.dictionaries(KEYS, VALUES, max_size=3),
)
GIVEN = st.lists(st.one_of(ITEMS, PARTS, VALUES), max_size=4)
BODIES = st.builds(
    lambda given, system, tools, more: {
        "messages": given, "input": given, "prompt": given or "hi", "max_tokens": 4,
        **({"system": system, "instructions": system} if system is not None else {}),
        **({"tools": tools} if tools is not None else {}), **more,
    },
    GIVEN, VALUES, st.one_of(st.none(), st.lists(PARTS, max_size=2), VALUES),
    st.dictionaries(
        st.sampled_from(["chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "input_ids", "echo", "kv_transfer_params",
                         "truncate_prompt_tokens", "documents", "cache_salt", "add_generation_prompt", "tool_choice"]),
        VALUES, max_size=2,
    ),
)  # fmt: skip
LINE = {"messages": [{"role": "user", "content": [{"type": "doc", "text": 5, "cache_control": {}}]}]}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PATHS), st.sampled_from([VLLM, SGLANG]), st.booleans(), BODIES)
@example(CHAT, VLLM, True, LINE)
@example(MESSAGES, SGLANG, False, LINE)
def test_any_body_is_prepared_or_refused_in_the_clients_own_terms(path, dialect, matched_as_text, body):
    try:
        found = pipeline_of(dialect, matched_as_text).prepare(path, json.dumps(body).encode())
    except ApiError as refusal:
        assert 400 <= refusal.status < 500
        return
    assert found.tokens >= 0 and (found.hashes is not None)


@pytest.mark.parametrize("text", [5, None, [], {"a": 1}, True])
def test_a_part_without_a_text_keeps_its_conversation_on_one_replica(text):
    """An agent's mark moves from turn to turn, and the rest is matched all the same."""
    parts = [{"type": "doc", "text": text}, {"type": "text", "text": "word " * 100}]
    turns = [
        [{"role": "user", "content": [{**parts[0], "cache_control": {}}, parts[1]]}],
        [{"role": "user", "content": parts}, {"role": "user", "content": [{**parts[0], "cache_control": {}}]}],
    ]
    pipeline = pipeline_of(VLLM, True)
    first, second = (pipeline.prepare(CHAT, json.dumps({"messages": one}).encode()) for one in turns)
    assert (first.mode, second.mode) == ("text", "text")
    assert len(first.hashes) > 4 and list(second.hashes[: len(first.hashes) - 1]) == list(first.hashes[:-1])
