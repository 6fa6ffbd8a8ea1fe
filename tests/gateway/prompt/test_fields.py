"""JSON and fields that are looser than the standard, and that vLLM takes."""

import json

import pytest

from gateway.prompt.fields import boolean, count, integer, packed, parse, prompts_of, rounded
from gateway.prompt.prompt import PromptError

from .reference import ids_of

CHAT = "/v1/chat/completions"
HI = '{"messages": [{"role": "user", "content": "hi"}], '


@pytest.mark.parametrize("body", [
    (HI + '"x": NaN}').encode(), (HI + '"x": -Infinity}').encode(), (HI + '"x": 1e999}').encode(), (HI + '"user": "\\ud83d"}').encode(),
    b"\xef\xbb\xbf" + (HI + '"x": 1}').encode(), (HI + '"x": 1}').encode("utf-16"),
    b'{"messages": [{"role": "user", "content": "hi \\ud83d"}]}', b'{"messages": [{"role": "user", "content": "hi \xed\xa0\xbd"}]}',
])
def test_json_that_only_python_reads_is_left_to_the_engine(sim, body):
    prompt = sim[0].prepare(CHAT, body)
    assert prompt.mode == "load" and "only Python reads" in prompt.note and prompt.tokens > 0
    assert (prompt.session or "").encode() is not None       # whatever leaves the room can be encoded


@pytest.mark.parametrize("body", [b"\xff{", b'{"a": 1,}', b"{'a': 1}", b"NaN", b"[" * 100_000, b'{"a": "\n"}', b'{"a": "\xff"}', b""])
def test_what_python_cannot_read_either(body):
    with pytest.raises(PromptError) as caught:
        parse(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("given, seen", [
    (True, True), (False, False), ("true", True), ("False", False), ("YES", True), ("off", False), (1, True), (0, False), (1.0, True)])
def test_booleans(given, seen):
    assert boolean(given, "k") is seen


@pytest.mark.parametrize("given", [None, 2, "", "maybe", [], float("nan"), -1])
def test_no_booleans(given):
    with pytest.raises(PromptError, match="'k' must be true or false"):
        boolean(given, "k")


@pytest.mark.parametrize("given, seen", [
    (3, 3), ("3", 3), (" +3 ", 3), ("3.0", 3), ("1_000", 1000), (3.0, 3), (True, 1), ("-1", -1),
    (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)), (2**64, None), (-(2**63) - 1, None), (2.0**64, None), (str(2**64), None), (1e308, None), ("9" * 5000, None),
    (3.5, None), ("3.5", None), ("x", None), ("", None), (None, None), ([], None), (float("inf"), None), (float("nan"), None), ("\u0663", None)])
def test_integers(given, seen):
    assert integer(given) == seen


def test_counts():
    assert (count(None, "k"), count(0, "k"), count("16", "k")) == (None, 0, 16)
    for given in (-1, "-1", 1.5, "many"):
        with pytest.raises(PromptError, match="at least 0"):
            count(given, "k")


HUGE = ["9" * 4300, "9" * 4301, '"%s"' % ("9" * 5000), '"%s"' % ("9" * 30), "1e308", "1" + "0" * 25, "-" + "9" * 25, "1e400"]


@pytest.mark.parametrize("path, field", [
    (CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (CHAT, "n"), (CHAT, "priority"), (CHAT, "seed"), (CHAT, "top_logprobs"),
    (CHAT, "min_tokens"), (CHAT, "truncate_prompt_tokens"), (CHAT, "top_k"), ("/v1/completions", "best_of"), ("/v1/completions", "logprobs"),
    ("/v1/completions", "prompt_logprobs"), ("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens"),
    ("/v1/embeddings", "dimensions"), ("/tokenize", "max_tokens"), (CHAT, "stream"), (CHAT, "thinking_token_budget")])
def test_numbers_that_no_integer_holds_are_the_clients_fault(sim, path, field):
    for number in HUGE:
        refused(sim, path, field, number)


def refused(sim, path, field, number):
    body = '{"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "%s": %s}' % (field, number)
    with pytest.raises(PromptError) as caught:
        sim[0].prepare(path, body.encode())
    assert caught.value.status == 400 and ("64 bits" in caught.value.message or "not valid JSON" in caught.value.message or field == "stream")


@pytest.mark.parametrize("field", ["prompt", "input"])
@pytest.mark.parametrize("number", ['"%s"' % ("9" * 5000), "1e308", "9" * 30, '"%s"' % ("9" * 30)])
def test_so_are_token_ids(sim, field, number):
    with pytest.raises(PromptError) as caught:
        sim[0].prepare("/v1/completions" if field == "prompt" else "/v1/embeddings", ('{"%s": [1, %s]}' % (field, number)).encode())
    assert caught.value.status == 400


def test_ids_as_pydantic_reads_them():
    assert prompts_of([True, 2.0, "3"][:2], "prompt") == [packed([1, 2], "prompt")]
    assert prompts_of([[1.0], [2]], "prompt") == [packed([1], "prompt"), packed([2], "prompt")]
    assert prompts_of(["1", "2"], "prompt") == ["1", "2"]
    with pytest.raises(PromptError):
        prompts_of([1, None], "prompt")


def test_loose_fields_change_the_prompt_as_strict_ones_do(sim):
    pipeline, _ = sim
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    strict = pipeline.prepare(CHAT, json.dumps({**talk, "add_generation_prompt": False, "stream": True, "max_tokens": 5}).encode())
    loose = pipeline.prepare(CHAT, json.dumps({**talk, "add_generation_prompt": "no", "stream": "true", "max_tokens": "5"}).encode())
    assert ids_of(loose) == ids_of(strict) != ids_of(pipeline.prepare(CHAT, json.dumps(talk).encode()))
    assert (loose.stream, loose.max_tokens) == (strict.stream, strict.max_tokens) == (True, 5)


@pytest.mark.parametrize("number, mode", [("18446744073709551615", "exact"), ("18446744073709551616", "load"), ("-9223372036854775808", "exact"),
                                          ("123456789012345678901234567890", "load"), ("1e16", "exact"), ("1.5e-30", "exact")])
def test_integers_of_more_than_64_bits_are_not_rounded_in_silence(sim, number, mode):
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}' % number
    prompt = sim[0].prepare(CHAT, f'{HI} "tools": [{tool}]}}'.encode())
    assert prompt.mode == mode and ("64 bits" in prompt.note) == (mode == "load")
    used = '{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [%s]}}' % number
    prompt = sim[0].prepare("/v1/messages", f'{{"messages": [{{"role": "user", "content": "x"}}, {{"role": "assistant", "content": [{used}]}}]}}'.encode())
    assert prompt.mode == mode
    assert rounded({"a": [{"b": float(number)}]}) == (abs(float(number)) >= 2**63)
