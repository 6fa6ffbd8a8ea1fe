"""Names in, tokens out: what is shared by name is shared by token, and nothing else is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from loadgen.workload.conversations import Span, span
from loadgen.workload.synthetic import VOCABULARY, text, token_ids
from replicas.simulated.model import sim_model_dir

names = st.integers(0, 2**64 - 1)


@st.composite
def prompts(draw, ids=st.integers(0, 40), block=16):
    """A span as a trace has it: full blocks, the last one maybe partial."""
    chosen = draw(st.lists(ids, min_size=1, max_size=12))
    return Span(chosen, (len(chosen) - 1) * block + draw(st.integers(1, block)), block)


def common(one, other) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def told(one: Span, other: Span) -> int:
    """Common tokens as ids and lengths say."""
    return min(one.block * common(one.ids, other.ids), one.length, other.length)


@given(prompts(), prompts(), st.integers(0, 2**40))
def test_two_prompts_share_what_their_ids_and_lengths_say(one, other, salt):
    assert common(token_ids([one], salt), token_ids([other], salt)) == told(one, other)


@given(prompts(names, 32), prompts(names, 32), st.integers(0, 5))
def test_names_of_any_size_share_the_same_blocks(one, other, shared):
    other = Span([*one.ids[:shared], *other.ids], other.length + 32 * len(one.ids[:shared]), 32)
    assert common(token_ids([one]), token_ids([other])) // 16 == told(one, other) // 16


@given(st.lists(prompts(), max_size=4), st.integers(1, 64_000), st.integers())
def test_there_are_as_many_tokens_as_said_and_all_are_in_the_vocabulary(spans, vocabulary, salt):
    made = token_ids(spans, salt, vocabulary)
    assert len(made) == sum(span.length for span in spans) and made.dtype == np.uint32
    assert not len(made) or made.max() < vocabulary


def test_a_block_is_the_same_wherever_it_stands_and_however_it_is_cut():
    whole = token_ids([Span([7, 8, 9], 48, 16)])
    assert whole.tolist() == token_ids([span(7, 16), Span([8, 9], 32, 16)]).tolist()
    assert whole[16:22].tolist() == token_ids([span(8, 6)]).tolist()


def test_another_salt_makes_other_tokens():
    assert (token_ids([span(1, 1000)], 1) != token_ids([span(1, 1000)], 2)).mean() > 0.99


@settings(max_examples=30)
@given(prompts(), prompts())
def test_words_are_shared_as_far_as_names_are(one, other):
    first, second = text([one]).split(), text([other]).split()
    assert (len(first), len(second)) == (one.length, other.length)
    assert common(first, second) >= told(one, other)
    assert common(first, second) // 16 == told(one, other) // 16 or told(one, other) % 16


def test_a_word_is_a_token():
    tokenizer = Tokenizer.from_file(str(sim_model_dir() / "tokenizer.json"))
    assert abs(len(tokenizer.encode(text([span(1, 5000)]), add_special_tokens=False).ids) - 5000) <= 1


def test_nothing_is_nothing():
    assert token_ids([]).size == 0 and text([]) == "" and VOCABULARY > 1000
