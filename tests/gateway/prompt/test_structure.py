"""JSON that would hold up the process is refused before it is read."""

import json
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
import orjson
import pytest

from gateway.prompt import structure
from gateway.prompt.conversation import conversation
from gateway.prompt.fields import parse
from gateway.prompt.prompt import PromptError
from gateway.prompt.structure import MOST_OBJECTS, MOST_VALUES

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
        with pytest.raises(PromptError, match="objects, lists and members") as caught:
            parse(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and most < 60 * MB


@pytest.mark.parametrize("request_", [
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL] * 40}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}] * 40},
    {"input": [{"type": "function_call", "call_id": "1", **CALL["function"]}] * 40},
])
def test_so_are_those_in_the_arguments_of_tool_calls(request_):
    with pytest.raises(PromptError, match="objects, lists and members"):
        parse(json.dumps(request_).encode())


@pytest.mark.parametrize("request_", [
    {"prompt": list(range(1_000_000))},
    {"input": [[7] * 500] * 2000},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "[{:,"}, {"type": "text", "text": '"'}]}] * 20_000},
    {"messages": [{"role": "user", "content": json.dumps([{"a": ["x\\y", {}]}] * 200_000)}]},
    {"messages": [{"role": "user", "content": "[{:,\\\"" * 500_000}]},
])
def test_large_prompts_are_read(request_):
    body = json.dumps(request_).encode()
    assert len(body) > MOST_OBJECTS
    assert parse(body) == (request_, "")


JSON = st.recursive(st.one_of(st.text(st.sampled_from('\\"[]{}:,ax\n')), st.integers(0, 9)),
                    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.sampled_from('\\"[{:,a')), inner)))


@settings(max_examples=60)
@given(JSON, st.integers(2, 9))
def test_strings_are_told_from_structure(monkeypatch_module, value, piece):
    monkeypatch_module.setattr(structure, "_PIECE", piece)
    text = orjson.dumps(value)
    outside = b"".join(structure._outside_strings(text))

    def objects(value):
        if isinstance(value, list):
            return 1 + sum(map(objects, value))
        return 1 + len(value) + sum(map(objects, value.values())) if isinstance(value, dict) else 0

    assert sum(outside.count(one) for one in (b"[", b"{", b":")) == objects(value)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_at_the_limit(monkeypatch):
    monkeypatch.setattr(structure, "MOST_OBJECTS", 10)
    monkeypatch.setattr(structure, "MOST_VALUES", 20)
    assert not structure.too_much(orjson.dumps([[]] * 9)) and structure.too_much(orjson.dumps([[]] * 10))
    assert not structure.too_much(orjson.dumps([1] * 21)) and structure.too_much(orjson.dumps([1] * 22))
    assert MOST_OBJECTS < MOST_VALUES


@pytest.mark.parametrize("levels", [1_100, 200_000])
def test_arguments_that_no_engine_reads_are_refused(levels):
    call = {**CALL, "function": {"name": "f", "arguments": '{"a":' + "[" * levels + "]" * levels + "}"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(PromptError, match="nested too deeply") as caught:
        conversation(messages, as_parts=False)
    assert caught.value.status == 400
