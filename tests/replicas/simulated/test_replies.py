"""What the engine says can be said again: same prompt same reply, same ids from its text, same end if continued."""

import random
from array import array

import pytest
import tokenizers

from replicas.simulated.replies import PARAGRAPHS, Replies
from replicas.simulated.requests import Asked
from replicas.simulated.runner import Generation
from replicas.simulated.tokens import Tokens

PROMPTS = [[7, number, 9, number + 1, 5] for number in range(60)]


def planned(prompt, replies, eos, **fields) -> Generation:
    generation = Generation("r", prompt, Asked([prompt], 500, **fields))
    generation.plan(replies, eos, 5000)
    return generation


def test_a_reply_retokenizes_to_the_ids_it_came_from(tokens, replies):
    for prompt in PROMPTS:
        ids, pieces = replies.walk(*replies.begin(array("I", prompt)))
        assert "".join(pieces) == tokens.decode(ids) and tokens.encode("".join(pieces), False) == ids


def test_replies_differ_in_text_and_length(replies):
    begun = [replies.begin(array("I", prompt)) for prompt in PROMPTS]
    assert len(set(begun)) > 20 and len({length for _, length in begun}) > 10


def test_a_reply_goes_on_where_its_prompt_leaves_it(tokens, replies):
    other = Replies(tokens)
    for prompt in PROMPTS:
        start, length = replies.begin(array("I", prompt))
        ids, _ = replies.walk(start, length)
        for cut in {replies.context, length // 2, length - 1} - set(range(replies.context)):
            assert other.begin(array("I", prompt + ids[:cut])) == (start + cut, length - cut)


def test_a_finished_reply_only_ends(tokens, replies):
    ids, _ = replies.walk(*replies.begin(array("I", PROMPTS[0])))
    generation = planned(PROMPTS[0] + ids, replies, tokens.eos_id)
    assert (generation.ids, generation.pieces, generation.reason) == ([tokens.eos_id], [""], "stop")
    generation.plan(replies, None, 1000)
    assert len(generation.ids) == 1  # without an end-of-turn token it says one more


def test_the_walk_wraps_around(replies):
    size = len(replies.ids)
    ids, pieces = replies.walk(size - 2, size + 5)
    assert ids[:4] == [*replies.ids[-2:], *replies.ids[:2]] and len(ids) == len(pieces) == size + 5


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_cut_the_text_there(tokens, replies, seed):
    rng = random.Random(seed)
    whole = planned(PROMPTS[seed], replies, tokens.eos_id)
    text = "".join(whole.pieces)
    at = rng.randrange(len(text) - 8)
    stops = [text[at : at + rng.randrange(1, 8)], "nowhere in it"]
    cut = planned(PROMPTS[seed], replies, tokens.eos_id, stop=stops)
    first = text.index(stops[0])
    assert "".join(cut.pieces) == text[:first] and (cut.reason, cut.stop) == ("stop", stops[0])
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) == len(cut.pieces)
    assert stops[0] in tokens.decode(cut.ids) and stops[0] not in tokens.decode(cut.ids[:-1])


def folder(path, tokenizer) -> Tokens:
    tokenizer.save(str(path / "tokenizer.json"))
    return Tokens(path)


def letters(path) -> Tokens:
    """A model of bytes: as small as a byte-level vocabulary gets."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return folder(path, made)


def unknown(path) -> Tokens:
    """A model of whole words that knows none of ours."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return folder(path, made)


def test_a_small_vocabulary_says_the_same_and_goes_on_where_it_was_left(tmp_path):
    tokens = letters(tmp_path)
    replies, other = Replies(tokens), Replies(tokens)
    assert len({tuple(replies.walk(start, replies.context)[0]) for start in replies._starts}) == PARAGRAPHS
    for prompt in PROMPTS[:20]:
        start, length = replies.begin(array("I", prompt))
        ids, pieces = replies.walk(start, length)
        assert "".join(pieces) == tokens.decode(ids)
        for cut in (replies.context, length // 2, length - 1):
            assert other.begin(array("I", prompt + ids[:cut])) == (start + cut, length - cut)


def test_a_vocabulary_that_tells_nothing_apart_still_answers(tmp_path):
    replies = Replies(unknown(tmp_path))
    ids, pieces = replies.walk(*replies.begin(array("I", PROMPTS[0])))
    assert set(ids) == {0} and len(ids) == len(pieces)


def test_a_tokenizer_without_tokens_for_english_is_said(tmp_path):
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 1}, unk_token="[UNK]"))
    empty.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(".+"), "")
    with pytest.raises(ValueError, match="makes no tokens of plain English"):
        Replies(folder(tmp_path, empty))
