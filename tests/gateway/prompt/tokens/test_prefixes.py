"""Known prefixes: exact, bounded, shared by branches, safe between threads."""

import gc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.tokens.prefixes import Generations, Mismatch, Plan, Prefixes, Segment, bare
from gateway.prompt.tokens.tokenizer import Tokenizer

from ..reference import hashes, model_dir
from ..test_exact import TEXTS

CUT = "<｜User｜>"
SEED = 77


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(model_dir("sim"))


@pytest.fixture
def asked(monkeypatch):
    """The texts that are tokenized."""
    found, whole = [], Tokenizer.encode_many
    monkeypatch.setattr(Tokenizer, "encode_many", lambda self, texts: found.extend(texts) or whole(self, texts))
    return found


def tokens_of(prefixes, pieces, seed=SEED, lead=b""):
    return prefixes.tokens(seed, bare(len(pieces)), pieces, lead)


def expected(tokenizer, pieces, block_size=16, seed=SEED, lead=b""):
    tokens = lead + tokenizer.encode("".join(pieces))
    return tokens, array("Q", hashes(memoryview(tokens).cast("I").tolist(), block_size, seed)), sum(map(len, pieces))


@given(
    prompts=st.lists(
        st.lists(st.one_of(st.sampled_from(["a", "b", "c " * 40]), TEXTS), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([0, 3000, 8000, 10**8]),
)
@settings(max_examples=40)
def test_any_prompts_in_any_order(tokenizer, prompts, block_size, budget):
    """Prompts that share prefixes, with a memo that holds all, some or none: always what tokenizing gives."""
    prefixes = Prefixes(tokenizer, block_size, budget)
    for texts in prompts + prompts[::-1]:
        pieces = [CUT + text for text in texts]
        assert tuple(tokens_of(prefixes, pieces)) == expected(tokenizer, pieces, block_size)


def test_a_known_prefix_is_not_tokenized_again(tokenizer, asked):
    prefixes = Prefixes(tokenizer, 16, 10**8)
    given = [CUT + "x " * 30, CUT + "y " * 30]
    tokens_of(prefixes, given)
    asked.clear()
    found = tokens_of(prefixes, [*given, CUT + "z"])
    assert asked == [CUT + "z"]
    assert tuple(found) == expected(tokenizer, [*given, CUT + "z"])


def test_of_two_conversations_that_go_on_by_turns_each_is_found_whole(tokenizer, asked):
    prefixes = Prefixes(tokenizer, 16, 10**8)
    one, other = [CUT + "the same"], [CUT + "the same"]
    for turn in range(6):
        for talk in (one, other):
            talk.append(CUT + f"{'x' if talk is one else 'y'} {turn} " * 30)
            asked.clear()
            assert tuple(tokens_of(prefixes, talk)) == expected(tokenizer, talk)
            assert asked == ([*talk] if talk is one and not turn else talk[-1:])


def test_seeds_and_leading_tokens_do_not_mix(tokenizer):
    prefixes = Prefixes(tokenizer, 4, 10**8)
    lead = tokenizer.encode("<｜begin▁of▁sentence｜>")
    pieces = [CUT + "the same words", CUT + "and again the same"]
    for _ in range(2):
        for seed in (0, 1, 2**64 - 1, SEED):
            for front in (b"", lead):
                found = tokens_of(prefixes, pieces, seed, front)
                assert tuple(found) == expected(tokenizer, pieces, 4, seed, front)


def test_segments_of_different_literals_do_not_mix(tokenizer):
    prefixes = Prefixes(tokenizer, 4, 10**8)
    for before, text, after in (
        (CUT, "text", "!"),
        (CUT + " ", "text", "!"),
        (CUT, "text", "!!"),
        (CUT + "text", "", "!"),
        (CUT, "", "text!"),
    ):
        segment = Segment(0, before, after, (), ())
        assert prefixes.tokens(SEED, Plan([segment], []), [text]).tokens == tokenizer.encode(before + text + after)


def test_bytes_are_bounded(tokenizer):
    budget = 400_000
    prefixes = Prefixes(tokenizer, 16, budget)
    for i in range(600):
        tokens_of(prefixes, [CUT + f"{i} " * 100])
    assert 500 < prefixes._nodes.young_bytes <= budget // 2 and prefixes.bytes >= prefixes._nodes.young_bytes
    assert 20 < len(prefixes._nodes) < 600


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "pop"]), st.integers(0, 30), st.integers(1, 60)), max_size=200)
)
def test_its_bytes_are_those_of_what_it_keeps(steps):
    kept = Generations(400, lambda key, size: size)
    for what, key, size in steps:
        if what == "put":
            kept.put(key, size)
        else:
            getattr(kept, what)(key)
        assert kept.bytes == sum([*kept.young.values(), *kept.old.values(), *kept._gone.values()])
    kept.clear()
    assert kept.bytes == 0


def test_what_is_used_outlives_what_is_not(tokenizer, asked):
    prefixes = Prefixes(tokenizer, 16, 200_000)
    used, unused = CUT + "used " * 50, CUT + "unused " * 50
    for text in (used, unused):
        tokens_of(prefixes, [text])
    for i in range(600):
        tokens_of(prefixes, [CUT + f"{i} " * 50])
        tokens_of(prefixes, [used])
    asked.clear()
    for text in (used, unused):
        tokens_of(prefixes, [text])
    assert asked == [unused]


def test_a_long_text_is_known_without_being_kept(tokenizer, asked):
    prefixes = Prefixes(tokenizer, 16, 10**8)
    long = CUT + "all the world " * 3000
    other = long[:-1] + "!"
    for text in (long, other):
        assert tuple(tokens_of(prefixes, [text, CUT + "on"])) == expected(tokenizer, [text, CUT + "on"])
    tokens = len(tokenizer.encode(long + other))
    assert prefixes._nodes.young_bytes < tokens * 4.5 + 5000
    asked.clear()
    assert tuple(tokens_of(prefixes, [long, CUT + "z"])) == expected(tokenizer, [long, CUT + "z"])
    assert asked == [CUT + "z"]


@given(st.lists(st.sampled_from((1, 30, 400)), min_size=50, max_size=150))
@settings(max_examples=20)
def test_what_nobody_used_goes_little_by_little(tokenizer, sizes):
    prefixes = Prefixes(tokenizer, 16, 60_000)
    going, generation = 0, None
    for number, size in enumerate(sizes):
        tokens_of(prefixes, [CUT + f"{number} " + "x " * size])
        if prefixes._nodes.old is not generation:
            assert not going or generation is None  # all was gone before the next ones went
            generation = prefixes._nodes.old
        going = len(prefixes._nodes._gone)


def test_questions_are_asked_of_new_texts_and_when_they_change(tokenizer):
    prefixes = Prefixes(tokenizer, 16, 10**8)
    no_x = ("contains", (("strip", ("text",), (), None),), ("X",), False)  # about a literal: always true
    has_a = ("contains", ("abc",), ("Z",), True)  # and one that is never
    easy = Segment(0, CUT, "", (), (no_x,))
    hard = Segment(0, CUT, "", (), (has_a,))
    prefixes.tokens(SEED, Plan([easy], []), ["text"])
    with pytest.raises(Mismatch):
        prefixes.tokens(SEED, Plan([hard], []), ["text"])
    with pytest.raises(Mismatch):
        prefixes.tokens(SEED, Plan([hard], []), ["new text"])
    assert prefixes.tokens(SEED, Plan([easy], []), ["text"]).tokens == tokenizer.encode(CUT + "text")


def test_the_garbage_collector_stops_tracking_nodes(tokenizer):
    prefixes = Prefixes(tokenizer, 16, 10**8)
    tokens_of(prefixes, [CUT + "some words " * 20])
    gc.collect()
    gc.collect()
    kept = prefixes._nodes.young.items()
    assert len(kept) == 2 and not any(map(gc.is_tracked, [one for entry in kept for one in entry]))
