"""JSON that would hold up the process is refused before it is read."""

import json
import tracemalloc
from functools import cache

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.prompt.api import structure
from gateway.prompt.api.conversation import conversation
from gateway.prompt.api.openai import parse
from gateway.prompt.api.structure import MOST_OBJECTS
from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

MB = 1_000_000
HEAD = b'{"model": "sim", "messages": ['
TWICE = (
    HEAD + b"[]," * 6 * MB + b"1]}",
    HEAD + b"{}," * 6 * MB + b"1]}",
    HEAD + b'{"a": 1},' * 2 * MB + b"1]}",
    HEAD + b"1," * 9 * MB + b"1]}",
    HEAD + b'"",' * 6 * MB + b"1]}",
    b"{" + b'"a":1,' * 3 * MB + b'"b": 1}',
    HEAD + rb'"\\\"", "\"[[[\\",' + b"[]," * 6 * MB + b"1]}",
    HEAD + b'"' + b"\\\\" * 200_000 + b'",' + b"[]," * 6 * MB + b"1]}",
    (HEAD + b"[]," * 3 * MB + b"1]}").decode().encode("utf-16"),
    ('{"a": "\\\\", "b": [' + "[]," * 3 * MB + "1]}").encode("utf-16-le"),
    HEAD + b"[]," * 6 * MB + b"NaN",
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 60_000 + "1]"}}


@pytest.mark.parametrize("body", TWICE)
def test_millions_of_small_values_are_refused_before_they_are_made(body):
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="objects, lists and members") as caught:
            parse(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and most < 60 * MB


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL] * 40}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}] * 40},
        {"input": [{"type": "function_call", "call_id": "1", **CALL["function"]}] * 40},
    ],
)
def test_so_are_those_in_the_arguments_of_tool_calls(request_):
    with pytest.raises(ApiError, match="objects, lists and members"):
        parse(json.dumps(request_).encode())


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": list(range(500_000))},
        {"input": [[7] * 500] * 900},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "[{:,"}, {"type": "text", "text": '"'}]}]
            * 20_000
        },
        {"messages": [{"role": "user", "content": json.dumps([{"a": ["x\\y", {}]}] * 200_000)}]},
        {"messages": [{"role": "user", "content": '[{:,\\"' * 500_000}]},
    ],
)
def test_large_prompts_are_read(request_):
    body = json.dumps(request_).encode()
    assert len(body) > MOST_OBJECTS
    assert parse(body) == (request_, "")


JSON = st.recursive(
    st.one_of(st.text(st.sampled_from('\\"[]{}:,ax\n')), st.integers(0, 9)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.sampled_from('\\"[{:,a')), inner)),
)


@settings(max_examples=60)
@given(JSON, st.integers(2, 9))
def test_strings_are_told_from_structure(value, piece):
    text = orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_PIECE", piece)
        outside = b"".join(structure._outside_strings(text))

    def objects(value):
        if isinstance(value, list):
            return 1 + sum(map(objects, value))
        return 1 + len(value) + sum(map(objects, value.values())) if isinstance(value, dict) else 0

    def strings(value):
        if isinstance(value, dict):
            return sum(1 + strings(one) for one in value.values())
        return isinstance(value, str) if not isinstance(value, list) else sum(map(strings, value))

    assert sum(outside.count(one) for one in (b"[", b"{", b":")) == objects(value)
    assert outside.count(b'"') == 2 * strings(value)


def test_at_the_limit(monkeypatch):
    for name, value in (("MOST_OBJECTS", 10), ("MOST_STRINGS", 15), ("MOST_VALUES", 20)):
        monkeypatch.setattr(structure, name, value)

    def refused(value, context=0):
        return structure.too_much(orjson.dumps(value), context)

    assert not refused([[]] * 9) and refused([[]] * 10)
    assert not refused([1] * 21) and refused([1] * 22)
    assert not refused([1] * 26, context=5) and refused([1] * 27, context=5)
    assert not refused(['"[{,\\'] * 15) and refused([""] * 16)
    assert not refused({str(i): "x" for i in range(7)}) and refused({str(i): "x" for i in range(8)})


@pytest.mark.parametrize("context", [8_000, 1_000_000])
def test_as_many_ids_as_the_context_has_are_read_and_a_million_strings_are_not(context):
    pipeline = Pipeline(None, "m", 16, max_model_len=context)

    def prepared(prompt):
        return pipeline.prepare("/v1/completions", orjson.dumps({"model": "m", "prompt": prompt}))

    assert prepared([7] * context).mode == "text"
    assert prepared([[7] * 500] * 900).mode == "text"
    with pytest.raises(ApiError, match=f"{500_000 + context:,} values in all"):
        prepared([7] * (600_000 + context))
    with pytest.raises(ApiError, match="400,000 strings"):
        prepared([""] * 500_000)


@pytest.mark.parametrize("levels", [900, 1_100, 5_000, 200_000])
def test_arguments_that_no_engine_reads_are_refused(levels):
    call = {**CALL, "function": {"name": "f", "arguments": '{"a":' + "[" * levels + "]" * levels + "}"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        conversation(messages, as_parts=False)
    assert caught.value.status == 400


def test_arguments_are_read_up_to_that_level_whatever_they_hold():
    """On each Python the same, and brackets within strings are none."""
    arguments = '{"a":' + "[" * 898 + '["\\"[", {}]' + "]" * 898 + ', "b": "' + "[{" * 2_000 + '"}'
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ApiError, match="nested too deeply"):
        conversation(messages, as_parts=False)
    call["function"]["arguments"] = arguments.replace(", {}", "")
    assert conversation(messages, as_parts=False)


DEEP = {**CALL, "function": {"name": "f", "arguments": '{"a":' + "[" * 1_100 + "]" * 1_100 + "}"}}
TALK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [DEEP]}]
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
ITEM = {"type": "function_call", "call_id": "1", **DEEP["function"]}


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/chat/completions", {"messages": TALK}),
        ("/v1/chat/completions", {"messages": [PICTURE, *TALK]}),
        ("/v1/chat/completions", {"messages": TALK, "chat_template": "{{ messages }}"}),
        ("/v1/responses", {"input": [ITEM]}),
        ("/v1/responses", {"input": [ITEM], "previous_response_id": "resp_1"}),
        ("/v1/embeddings", {"messages": TALK}),
        ("/tokenize", {"messages": TALK}),
    ],
)
@pytest.mark.parametrize("folder", [None, sim_model_dir()], ids=["text", "tokens"])
def test_so_they_are_where_the_prompt_is_not_rendered_here(folder, path, request_):
    pipeline = pipeline_of(folder)
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        pipeline.prepare(path, orjson.dumps({"model": "m", **request_}))
    assert caught.value.status == 400


pipeline_of = cache(lambda folder: Pipeline(folder, "m", 16))
