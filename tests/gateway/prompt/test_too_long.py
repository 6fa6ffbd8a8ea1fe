"""Prompts that are refused for their length are refused before anybody has worked on their tokens."""

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens import tokenizer as module
from gateway.prompt.tokens.tokenizer import Tokenizer, TooLong, _longest_token
from replicas.simulated.model import sim_model_dir

CONTEXT = 100
TEXT = "all the world's a stage " * 2000


class Untouched:
    """In place of what tokenizes."""

    def encode_batch_flat(self, *_, **__):
        raise AssertionError("it was tokenized")


@pytest.fixture(scope="module")
def loaded():
    return Pipeline(sim_model_dir(), "m", 16)


@pytest.fixture
def pipeline(loaded, monkeypatch):
    loaded.max_model_len = CONTEXT
    monkeypatch.setattr(loaded.tokenizer, "_fast", Untouched())
    yield loaded
    loaded.max_model_len = None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["short", TEXT]}),
        ("/v1/completions", {"prompt": [1] * 101}),
        ("/v1/completions", {"prompt": [[1], [1] * 101]}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT[:400]}] * 100}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}),
        ("/v1/responses", {"input": TEXT}),
    ],
)
def test_what_is_too_long_however_it_is_tokenized_is_not_tokenized(pipeline, path, body):
    if body.get("prompt") == ["short", TEXT]:
        body["prompt"].reverse()
    with pytest.raises(ApiError, match=f"maximum context length is {CONTEXT} tokens") as refused:
        pipeline.prepare(path, orjson.dumps({"model": "m", **body}))
    assert refused.value.status == 400 and refused.value.code == "context_length_exceeded"


def test_a_prompt_that_is_to_be_truncated_may_be_too_long(pipeline):
    prompt = pipeline.prepare(
        "/v1/completions", orjson.dumps({"model": "m", "prompt": TEXT, "truncate_prompt_tokens": 10})
    )
    assert prompt.mode == "text"


def test_the_context_may_become_known_later(loaded):
    pipeline = loaded
    body = orjson.dumps({"model": "m", "prompt": TEXT})
    assert pipeline.prepare("/v1/completions", body).tokens > CONTEXT
    pipeline.max_model_len = CONTEXT
    with pytest.raises(ApiError, match="at least"):
        pipeline.prepare("/v1/completions", body)
    pipeline.max_model_len = None
    assert pipeline.prepare("/v1/completions", body).mode == "exact"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(sim_model_dir())


BLANKS = " " * 128


@given(
    text=st.text(max_size=300)
    | st.text(" \n-=*#", max_size=2000)
    | st.sampled_from([BLANKS * 40, "=" * 2000, "\u1100\u1161\u11a8" * 99])
)
@example(text=BLANKS)
@example(text="\u03b1\u0313\u0300\u0345" * 50)
def test_no_text_that_fits_is_refused(text, tokenizer):
    tokens = len(tokenizer.encode(text)) // 4
    tokenizer.bound(max(tokens, 1))
    try:
        tokenizer.encode(text)
        tokenizer.encode_many([text[:9], text[9:]])
    finally:
        tokenizer.bound(None)


class Counting:
    """In place of what tokenizes: adds up what it was given."""

    def __init__(self, real):
        self.real, self.chars = real, 0

    def encode_batch_flat(self, texts, **options):
        self.chars += sum(map(len, texts))
        return self.real.encode_batch_flat(texts, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT * 5}),
        ("/v1/completions", {"prompt": ["short", TEXT * 5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 5}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT[:2000]}] * 120}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT * 5}], "max_tokens": 1}),
        ("/v1/responses", {"input": TEXT * 5}),
    ],
)
def test_what_is_too_long_is_tokenized_no_further_than_the_context(pipeline, monkeypatch, tokenizer, path, body):
    """240 kB, 60,000 tokens: not so many that no tokenizer could fit them in."""
    pipeline.max_model_len = 4000
    counting = Counting(tokenizer._fast)
    monkeypatch.setattr(pipeline.tokenizer, "_fast", counting)
    pipeline.prefixes.forget()
    with pytest.raises(ApiError, match="maximum context length is 4000 tokens, but the prompt has at least 4"):
        pipeline.prepare(path, orjson.dumps({"model": "m", **body}))
    assert counting.chars < 40_000
    assert len(pipeline.prefixes._nodes) == 0  # nor does it put out of the memo what others will ask for


SMALL_SLICES = {"_BRIEF": {"fastokens": 0}, "_UNLIKELY": 1, "_SLICE": 200, "_CUT_TOKENS": 8}


@given(
    text=st.text(" \n-=*#x1\u4f60\u0301\U0001f600", max_size=3000)
    | st.sampled_from([BLANKS * 40, "=" * 2000, "x" * 3000, "12" * 1500, "\u4f60\u597d" * 900])
)
def test_no_text_that_fits_is_refused_for_what_its_slices_hold(text, tokenizer):
    ids = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_SLICES.items():
            patch.setattr(module, name, value)
        tokenizer.bound(max(len(ids) // 4, 1))
        assert tokenizer.encode(text) == tokenizer.encode_many([text])[0] == ids
    tokenizer.bound(None)


def test_a_text_is_refused_when_no_token_is_long_enough(tokenizer):
    tokenizer.bound(2)
    try:
        with pytest.raises(TooLong):
            tokenizer.encode("x" * (2 * tokenizer._longest + 1))
        with pytest.raises(TooLong):
            tokenizer.encode_many(["x" * tokenizer._longest] * 2 + ["x"])
    finally:
        tokenizer.bound(None)


def added(**fields):
    return {"content": "<|end|>", "lstrip": False, "rstrip": False, **fields}


def split(behavior):
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": behavior}, {"type": "ByteLevel"}]}


BYTES = {"model": {"type": "BPE", "vocab": {"a": 0, "abc": 1}}, "pre_tokenizer": {"type": "ByteLevel"}}


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        (BYTES, 3),
        ({**BYTES, "added_tokens": [added()]}, 7),
        ({**BYTES, "added_tokens": [added(rstrip=True)]}, None),  # takes any number of blanks
        ({**BYTES, "normalizer": {"type": "NFC"}}, 3),
        ({**BYTES, "normalizer": {"type": "Strip"}}, None),
        ({**BYTES, "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}}, None),
        ({**BYTES, "pre_tokenizer": split("Isolated")}, 3),
        ({**BYTES, "pre_tokenizer": split("Removed")}, None),
        ({**BYTES, "pre_tokenizer": {"type": "Metaspace"}}, None),
        # a word of any length is one [UNK]
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}, "pre_tokenizer": {"type": "BertPreTokenizer"}}, None),
    ],
)
def test_where_a_token_may_stand_for_any_number_of_characters_there_is_no_bound(settings, longest):
    assert _longest_token(settings) == longest
