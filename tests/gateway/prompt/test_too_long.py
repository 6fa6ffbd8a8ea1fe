"""Prompts that are refused for their length are refused before anybody has worked on their tokens."""

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens import tokenizer as module
from gateway.prompt.tokens.tokenizer import Tokenizer
from replicas.simulated.model import sim_model_dir

CONTEXT = 4000
TEXT = "all the world's a stage " * 10_000


class Counting:
    """In place of what tokenizes: adds up what it was given."""

    def __init__(self, real):
        self.real, self.chars = real, 0

    def encode_batch_flat(self, texts, **options):
        self.chars += sum(map(len, texts))
        return self.real.encode_batch_flat(texts, **options)


@pytest.fixture(scope="module")
def loaded():
    return Pipeline(sim_model_dir(), "m", 16)


@pytest.fixture
def pipeline(loaded, monkeypatch):
    loaded.max_model_len = CONTEXT
    monkeypatch.setattr(loaded.tokenizer, "_fast", Counting(loaded.tokenizer._fast))
    loaded.prefixes.forget()
    yield loaded
    loaded.max_model_len = None


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"prompt": TEXT}, "at least 4"),
        ("/v1/completions", {"prompt": ["short", TEXT]}, "at least 4"),
        ("/v1/completions", {"prompt": [1] * 4001}, "4001"),
        ("/v1/completions", {"prompt": [[1], [1] * 4001]}, "4001"),
        ("/v1/embeddings", {"input": TEXT}, "at least 4"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, "at least 4"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT[:2000]}] * 120}, "at least 4"),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}, "at least 4"),
        ("/v1/responses", {"input": TEXT}, "at least 4"),
    ],
)
def test_what_is_too_long_is_tokenized_no_further_than_the_context(pipeline, path, body, told):
    """240 kB, 60,000 tokens."""
    with pytest.raises(
        ApiError, match=f"maximum context length is {CONTEXT} tokens, but the prompt has {told}"
    ) as refused:
        pipeline.prepare(path, orjson.dumps({"model": "m", **body}))
    param = "prompt" if "prompt" in body or path == "/v1/embeddings" else "messages"
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "context_length_exceeded", param)
    assert pipeline.tokenizer._fast.chars < 40_000
    assert len(pipeline.prefixes._nodes) == 0  # nor does it put out of the memo what others will ask for


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


SMALL_SLICES = {"_BRIEF": {"fastokens": 0}, "_UNLIKELY": 1, "_SLICE": 200, "_CUT_TOKENS": 8}


@given(
    text=st.text(" \n-=*#x1\u4f60\u0301\U0001f600", max_size=3000)
    | st.sampled_from([BLANKS * 40, "=" * 2000, "x" * 3000, "12" * 1500, "\u4f60\u597d" * 900])
)
@example(text="\u03b1\u0313\u0300\u0345" * 50)
def test_no_text_that_fits_is_refused_for_what_its_slices_hold(text, tokenizer):
    ids = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_SLICES.items():
            patch.setattr(module, name, value)
        tokenizer.bound(max(len(ids) // 4, 1))
        assert tokenizer.encode(text) == tokenizer.encode_many([text])[0] == ids
    tokenizer.bound(None)
