"""Prompts for engines that are not vLLM: what vLLM refuses or reads is not what they refuse or read."""

import json

import pytest

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.agreement import Differences
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM

from .reference import ids_of, model_dir

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def prepared(dialect, body, path=CHAT, version="0.33.0"):
    pipeline = Pipeline(model_dir("sim"), "m", 16, max_model_len=50)
    pipeline.follow(dialect.version_quirks(version))
    pipeline.differ(Differences(shown=True))
    return pipeline.prepare(path, json.dumps(body).encode())


def test_an_empty_list_of_tools_is_none():
    found = prepared(SGLANG, {**HI, "tools": []})
    assert found.mode == "exact" and found.token_ids == prepared(SGLANG, HI).token_ids
    with pytest.raises(ApiError, match="non-empty list"):
        prepared(VLLM, {**HI, "tools": []})


LONG = {"messages": [{"role": "user", "content": "one two three four " * 40}]}


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, LONG),
        (COMPLETIONS, {"prompt": "one two three four " * 40}),
        (COMPLETIONS, {"prompt": [1] * 60}),
        (MESSAGES, {**LONG, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}),
        (CHAT, {**HI, "tools": [{"type": "web_search"}]}),
    ],
)
def test_what_vllm_refuses_is_left_to_the_engine(path, body):
    """It may cut a prompt that is too long, and has other schemas."""
    assert prepared(SGLANG, body, path).mode in ("exact", "text", "load")
    with pytest.raises(ApiError):
        prepared(VLLM, body, path)


def test_a_limit_above_the_context_is_left_to_the_engine():
    assert prepared(SGLANG, {**HI, "max_tokens": 60}).mode == "exact"
    with pytest.raises(ApiError, match="max_model_len"):
        prepared(VLLM, {**HI, "max_tokens": 60})


@pytest.mark.parametrize(
    "version, read",
    [("0.16.0", False), ("0.27.1", False), ("0.28.0", True), ("0.33.2", True), ("0.34.0", False), (None, False)],
)
def test_only_versions_of_vllm_that_were_read_are_answered_for(version, read):
    refused = [({**HI, "max_tokens": 60}, CHAT), ({"prompt": "hi", "max_tokens": 60}, COMPLETIONS)]
    refused += [({"prompt": [1] * 60}, COMPLETIONS), ({**HI, "tools": []}, CHAT), (LONG, CHAT)]
    for body, path in refused:
        if read:
            with pytest.raises(ApiError):
                prepared(VLLM, body, path, version)
        else:
            assert prepared(VLLM, body, path, version).mode in ("exact", "text")


def test_ids_in_the_place_of_messages_are_the_prompt():
    assert ids_of(prepared(SGLANG, {**HI, "input_ids": [5, 6, 7]})) == [5, 6, 7]
    assert ids_of(prepared(VLLM, {**HI, "input_ids": [5, 6, 7]})) == ids_of(prepared(VLLM, HI))


def test_an_empty_list_of_ids_is_not_called_a_prompt_without_tokens():
    found = prepared(SGLANG, {**HI, "input_ids": []})
    assert found.mode == "text" and found.tokens and "empty list of input_ids" in found.note
    assert ids_of(prepared(VLLM, {**HI, "input_ids": []})) == ids_of(prepared(VLLM, HI))


@pytest.mark.parametrize(
    "more",
    [
        {"extra_key": "tenant"},
        {"lora_path": "adapter"},
        {"reasoning_effort": "low"},
        {"session_params": {"id": "1"}},
        {"add_generation_prompt": False},
        {"input_ids": [5, 6], "extra_key": "tenant"},
    ],
)
def test_a_field_that_the_engine_reads_in_its_own_way_is_not_called_exact(more):
    found = prepared(SGLANG, {**HI, **more})
    assert found.mode == "text" and list(more)[-1] in found.note
    if "add_generation_prompt" not in more:  # whose null vLLM refuses
        assert prepared(SGLANG, {**HI, **dict.fromkeys(more)}).mode == "exact"


@pytest.mark.parametrize("prompt", ["hi", [5, 6, 7]])
def test_completions_too(prompt):
    assert prepared(SGLANG, {"prompt": prompt}, COMPLETIONS).mode == "exact"
    assert prepared(SGLANG, {"prompt": prompt, "lora_path": "adapter"}, COMPLETIONS).mode == "text"
    assert prepared(VLLM, {"prompt": prompt, "lora_path": "adapter"}, COMPLETIONS).mode == "exact"


def test_prompts_of_two_adapters_or_keys_are_not_one():
    """Their blocks are apart in the engine, so they are here."""
    found = {prepared(SGLANG, {"prompt": "x " * 45, **more}, COMPLETIONS).hashes[0] for more in (
        {"lora_path": "one"}, {"lora_path": "two"}, {"extra_key": "one"}, {"extra_key": "two"})}  # fmt: skip
    assert len(found) == 4
