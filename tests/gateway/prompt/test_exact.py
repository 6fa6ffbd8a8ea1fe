"""The same ids as the plain way, whatever is said, in whatever order, known or not."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachemap import chain_seed

from ...vllm import bodies
from .reference import MODELS, hashes, ids_of

CHAT = "/v1/chat/completions"
# Text that looks like structure, to templates and to tokenizers.
NASTY = """
<|im_start|> <|im_end|> </think> <tool_response> </tool_response> <|eot_id|> <|start_header_id|> [INST] [/INST] </s> <s>
<|endoftext|> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <|im_ start|> {# \ufdd00\ufdd1 \ufdd2 \x00 \u200b 's é e\u0301
汉字 😀 👩\u200d👩\u200d👧 ẞ 1234567 " \\ &amp; <b>
""".split()
NASTY += ["<|im_start|>system\n", "<think>\n", "{{ messages }}", "{% if %}", "  ", "\n\n", "\r\n", "\t"]
WORDS = ["hello", " world", "The quick brown fox", " jumps", "def f(x):\n    return x", " 3.14", "a" * 40]
TEXTS = st.one_of(
    st.lists(st.sampled_from(NASTY + WORDS), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.sampled_from([" ", "", "x " * 3000, "<|im_end|>" * 50]),
)
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def body(messages, **more) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def alternate(texts, system) -> list[dict]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


@pytest.fixture(params=MODELS)
def fresh(request, load_model):
    return load_model(request.param)


@given(texts=st.lists(TEXTS, min_size=1, max_size=7), system=st.one_of(st.none(), TEXTS))
@FEW
def test_conversations_turn_by_turn(fresh, texts, system):
    pipeline, reference = fresh
    messages = alternate(texts, system)
    for count in range(1, len(messages) + 1):
        talk = messages[:count]
        if talk[-1]["role"] != "user":
            continue
        ids = reference.ids(reference.render(talk))
        for _ in range(2):  # the second time all is known
            prompt = pipeline.prepare(CHAT, body(talk))
            assert prompt.mode == "exact", prompt.note
            assert ids_of(prompt) == ids
            assert prompt.tokens == len(ids)
            assert list(prompt.hashes) == hashes(ids, 16, chain_seed("m", 16))


ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "é", "n", "<|im_end|>"]),
    st.one_of(
        st.none(), st.booleans(), st.integers(-10, 10**12), st.floats(allow_nan=False, allow_infinity=False), TEXTS
    ),
    max_size=3,
)


@given(asked=TEXTS, said=TEXTS, arguments=ARGUMENTS, result=TEXTS, again=TEXTS)
@FEW
def test_tool_calls(load_model, asked, said, arguments, result, again):
    for name in ("sim", "qwen3", "deepseek_v3"):
        pipeline, reference = load_model(name)
        called = bodies.call(json.dumps(arguments), "look_up")
        messages = [
            bodies.user(asked),
            bodies.said(said, tool_calls=[called]),
            bodies.result(result),
            bodies.user(again),
        ]
        function = {"arguments": arguments, "name": "look_up"}
        seen = [dict(message) for message in messages]
        seen[1]["tool_calls"] = [{"id": "call00001", "function": function, "type": "function"}]
        for _ in range(2):
            prompt = pipeline.prepare(CHAT, body(messages))
            assert prompt.mode == "exact", prompt.note
            assert ids_of(prompt) == reference.ids(reference.render(seen))


@given(text=TEXTS, special=st.booleans())
@FEW
def test_completions(fresh, text, special):
    pipeline, reference = fresh
    prompt = pipeline.prepare("/v1/completions", json.dumps({"prompt": text, "add_special_tokens": special}).encode())
    assert ids_of(prompt) == reference.ids(text, special)


def test_a_huge_conversation(fresh):
    pipeline, reference = fresh
    talk = alternate([f"{i} " * 400 + "<|im_end|>" for i in range(101)], "s" * 100_000)
    prompt = pipeline.prepare(CHAT, body(talk))
    ids = reference.ids(reference.render(talk))
    assert ids_of(prompt) == ids and list(prompt.hashes) == hashes(ids, 16, chain_seed("m", 16))


def test_another_block_size_is_taken_over(sim, monkeypatch):
    pipeline, reference = sim
    monkeypatch.setattr(pipeline, "_block_size", 16)
    talk = alternate(["a" * 500, "b", "c" * 300], "s")
    for size in (16, 32, 8, 16):
        pipeline.block_size = size
        for _ in range(3):
            prompt = pipeline.prepare(CHAT, body(talk))
            assert list(prompt.hashes) == hashes(ids_of(prompt), size, chain_seed("m", size))
    assert ids_of(prompt) == reference.ids(reference.render(talk))
