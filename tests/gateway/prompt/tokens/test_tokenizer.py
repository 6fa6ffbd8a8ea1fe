"""The tokenizer room: two backends with the same ids, and where a text may be cut."""

import functools
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Real

from gateway.prompt.tokens.model import ModelError
from gateway.prompt.tokens.tokenizer import Tokenizer, TokenizerError

from ..reference import MODELS, model_dir
from ..test_exact import TEXTS


def made(directory, *added, normalizer=None):
    """A byte-level tokenizer of single bytes with these added tokens."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    real = Real(models.BPE(vocab=vocab, merges=[("a", "b")] if "ab" in vocab else []))
    real.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    real.decoder = decoders.ByteLevel()
    if normalizer is not None:
        real.normalizer = normalizer
    for token in added:
        real.add_special_tokens([token]) if token.special else real.add_tokens([token])
    directory.mkdir(parents=True, exist_ok=True)
    real.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def special(text, **more):
    return AddedToken(text, special=True, normalized=more.pop("normalized", False), **more)


@pytest.mark.parametrize("name", MODELS)
def test_cuts_are_exact_on_real_tokenizers(name, load_model):
    pipeline, reference = load_model(name)
    cuts = sorted(pipeline.tokenizer.safe_cuts())
    assert cuts

    @given(left=TEXTS, cut=st.sampled_from(cuts[:40] + cuts[-5:]), right=TEXTS)
    @settings(max_examples=40)
    def same(left, cut, right):
        assert reference.ids(left + cut + right) == reference.ids(left) + reference.ids(cut + right)

    same()


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_an_opening_stay_whatever_follows(name, load_model):
    pipeline, reference = load_model(name)
    openings = [
        one
        for cut in sorted(pipeline.tokenizer.safe_cuts())
        for one in (cut, f"a {cut}")
        if pipeline.tokenizer.opening(one)
    ]
    assert openings

    @given(opening=st.sampled_from(openings[:40] + openings[-5:]), right=TEXTS)
    @settings(max_examples=40)
    def same(opening, right):
        assert reference.ids(opening + right) == reference.ids(opening) + reference.ids(right)

    same()


@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=40)
def test_both_backends_give_the_same_ids(texts):
    fast, slow = backends()
    assert fast.backend == "fastokens" and slow.backend == "tokenizers"
    assert fast.encode_many(texts) == slow.encode_many(texts) == [slow.encode(text) for text in texts]
    assert fast.encode(texts[0], special=True) == slow.encode(texts[0], special=True)


@functools.cache
def backends():
    return [Tokenizer(model_dir("sim")), Tokenizer(model_dir("sim"), backend="tokenizers")]


X, W = special("<x>"), special("<w>")
NORMALIZED = special("<x>", normalized=True)


@pytest.mark.parametrize(
    "tokens, normalizer, cuts",
    [
        *(((token,), None, set()) for token in (special("<x>", lstrip=True), special("<x>", single_word=True))),
        *(((token,), None, set()) for token in (special("\nx>"), special(" <x>"))),
        # matched on normalized text: a cut where normalizing changes nothing
        ((NORMALIZED,), None, {"<x>"}),
        ((NORMALIZED,), normalizers.Sequence([]), {"<x>"}),
        ((NORMALIZED,), normalizers.NFC(), set()),
        ((NORMALIZED,), normalizers.Sequence([normalizers.Lowercase()]), set()),
        # others reach into them; "aa" reaches into "a<x>"
        ((X, special("a<x>"), special("aa"), special("<ok>")), None, {"<ok>"}),
        ((special("<y>"), special("b<y"), special("<z>"), special("<z>>", lstrip=True)), None, {"b<y"}),
        # a letter is no cut where tokens look for words
        ((special("xyz"), W), None, {"xyz", "<w>"}),
        ((special("xyz"), W, special("word", single_word=True)), None, {"<w>"}),
    ],
)
def test_where_a_text_may_be_cut(tmp_path, tokens, normalizer, cuts):
    assert made(tmp_path, *tokens, normalizer=normalizer).safe_cuts() == cuts


@pytest.mark.parametrize(
    "tokens, literal, opens",
    [
        ((X,), "a<x>", True),
        ((X, W), "<x>a", False),
        ((special("<x>", rstrip=True),), "<x>", False),
        ((special("<x>", single_word=True),), "<x>", False),
        ((X, special("<x>>")), "<x>", False),
        ((X, special("a<x>b")), "a<x>", False),
        ((X, special("a<x>b")), "c<x>", False),  # such a token is no cut, either
        ((X, special("<é>", single_word=True)), "<x>", False),
        ((X, special("<é>", lstrip=True)), "<x>", False),
        ((special("xyz"),), "xyz", True),
        ((X, special("a<x"), W), "a<x><w>", True),
        ((special("ab"), special("bc")), "abc", False),  # ab is found in it
    ],
)
def test_which_literals_open_a_text(tmp_path, tokens, literal, opens):
    tokenizer = made(tmp_path, *tokens)
    assert tokenizer.opening(literal) == (tokenizer.encode(literal) if opens else b"")


def test_a_tokenizer_that_treats_the_first_text_otherwise_opens_none(tmp_path):
    made(tmp_path, X)
    path = tmp_path / "tokenizer.json"
    real = Real.from_file(str(path))
    real.pre_tokenizer = pre_tokenizers.Metaspace(replacement="a", prepend_scheme="first", split=False)
    real.save(str(path))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<x>b") != tokenizer.encode("<x>") + tokenizer.encode("b") and not tokenizer.opening("<x>")


def test_a_token_that_takes_blanks_to_its_right_leaves_cuts_alone(tmp_path):
    tokens = made(tmp_path, special("<r>", rstrip=True), special("<x>"))
    assert tokens.safe_cuts() == {"<r>", "<x>"}
    assert tokens.encode("<r>  <x>a") == tokens.encode("<r>  ") + tokens.encode("<x>a")


def test_a_tokenizer_that_breaks_the_rule_has_no_cuts(tmp_path, monkeypatch, caplog):
    tokens = made(tmp_path, special("<x>"))
    whole = Tokenizer.encode

    def odd(self, text, special=False):
        return whole(self, text, special) + (b"\0\0\0\0" if "a<x>" in text else b"")

    monkeypatch.setattr(Tokenizer, "encode", odd)
    with caplog.at_level(logging.WARNING):
        assert tokens.safe_cuts() == frozenset()
    assert "nothing of a prompt is reused" in caplog.text


def test_special_tokens_around_a_text(tmp_path):
    tokens = made(tmp_path, special("<s>"), special("</s>"))
    assert tokens.added_around() == (0, 0)
    path = tmp_path / "tokenizer.json"
    real = Real.from_file(str(path))
    ids = [(name, real.token_to_id(name)) for name in ("<s>", "</s>")]
    real.post_processor = processors.TemplateProcessing(single="<s> <s> $A </s>", pair=None, special_tokens=ids)
    real.save(str(path))
    assert Tokenizer(tmp_path).added_around() == (2, 1)


def test_truncation_and_padding_in_the_file_are_off(tmp_path):
    made(tmp_path, special("<s>"))
    real = Real.from_file(str(tmp_path / "tokenizer.json"))
    real.enable_truncation(3)
    real.enable_padding(length=8, pad_id=0, pad_token="<s>")
    real.save(str(tmp_path / "tokenizer.json"))
    for backend in ("fastokens", "tokenizers"):
        tokens = Tokenizer(tmp_path, backend)
        assert [len(ids) // 4 for ids in tokens.encode_many(["abcdef", "a"])] == [6, 1]


def test_what_fastokens_cannot_load_is_left_to_tokenizers(monkeypatch, caplog):
    class Broken:
        @staticmethod
        def from_json_str(content):
            raise ValueError("unsupported model")

    expected = backends()[0].encode("Hello, world!")
    monkeypatch.setattr("gateway.prompt.tokens.tokenizer.fastokens.Tokenizer", Broken)
    with caplog.at_level(logging.WARNING):
        tokens = Tokenizer(model_dir("sim"))
    assert tokens.backend == "tokenizers" and "unsupported model" in caplog.text
    assert tokens.encode("Hello, world!") == expected


def test_what_nobody_can_load_says_so(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json: convert"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "None"}}))
    with pytest.raises(ModelError, match="no tokenizer that can be read"):
        Tokenizer(tmp_path)
