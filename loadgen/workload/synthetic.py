"""Make up tokens for spans (parts of a prompt without text): token ids, or words for targets that take text.

A span (`conversations.Span`) is a sequence of blocks, each named by an id. Token j of a block is a hash of (salt, id,
j), so nothing is stored, any block can be made alone, and equal ids give equal tokens in every process. A block's first
token is its id modulo the vocabulary. Two blocks whose ids differ by less than the vocabulary therefore differ from the
first token on, others within a token or two. Prompts thus share KV blocks of 16 tokens exactly as far as they share
ids.

Prompts of token ids have exact lengths, prompts of text have not. A word with a blank before it is one token in common
vocabularies, but a chat template adds tokens. Lengths are therefore off by a few tokens per message, and shared
prefixes by less than a block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loadgen.workload.conversations import Message, Span

VOCABULARY = 32_000  # ids below this are in the vocabulary of every model since Llama 2
_RESERVED = 1_000  # ids below this are bytes and special tokens in most vocabularies
_MASK = (1 << 64) - 1
# odd, so that multiplication modulo 2**64 maps no two ids or places to the same value
_ID, _PLACE, _SALT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


def token_ids(spans: Iterable[Span], salt: int = 0, vocabulary: int = VOCABULARY) -> np.ndarray:
    """Return the token ids of a prompt that is made of spans, parts without text, as one array (uint32).

    `salt`: a number that goes into the hash of every token. With another salt all tokens differ, but prompts still
    share the same parts. `vocabulary`: upper bound of the ids. 12,000 tokens in 24 blocks take 0.15 ms.
    """
    ids, lengths = [], []
    for span in spans:
        ids.extend(span.ids)
        lengths += [span.block] * (len(span.ids) - 1)
        lengths.append(span.length - span.block * (len(span.ids) - 1))
    sizes = np.array(lengths, np.int64)
    firsts = np.cumsum(sizes) - sizes
    names = np.array([name & _MASK for name in ids], np.uint64)
    lowest = min(_RESERVED, vocabulary // 4)
    room = np.uint64(vocabulary - lowest)
    salted = np.uint64(salt * _SALT & _MASK)
    places = np.arange(sizes.sum(), dtype=np.uint64) - np.repeat(firsts.astype(np.uint64), sizes)
    mixed = places * np.uint64(_PLACE) + np.repeat(names * np.uint64(_ID) + salted, sizes)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's finalizer
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    tokens = (mixed >> np.uint64(33)) % room
    some = sizes > 0
    tokens[firsts[some]] = (names[some] % room + salted % room) % room
    return (tokens + np.uint64(lowest)).astype(np.uint32)


def text(spans: Iterable[Span], salt: int = 0) -> str:
    """Make up a text for some spans (parts of a prompt without text), with one word for each of their tokens.

    `salt`: a number that goes into the choice of every word. With another salt the words differ, but prompts still
    share the same parts. 12,000 words take 0.4 ms.
    """
    return " ".join(_WORDS[token_ids(spans, salt) % len(_WORDS)].tolist())


def in_words(message: Message, salt: int) -> Message:
    """Return a message with its spans (parts without text) replaced by words; a message with text is unchanged.

    `salt`: as for `text`.
    """
    spans = message.get("content")
    return {**message, "content": text(spans, salt)} if isinstance(spans, tuple) else message


# 250 short words, each a single token with its blank in the vocabularies that were tried.
_WORDS = np.array(
    (
        "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
        "were all her she there would their we him been has when who will no more if out so up said what its about than into them "
        "can only other time new some could these two may first then do any like my now over such our man me even most made after "
        "also did many off before must well back through years much where your way down should because long each just state people "
        "those too seven little good world make very year still see own work men day get here old between both life being under three "
        "never know same last another while us might great go come since against right came take used himself few house use place "
        "during high without again home around small however found part thought went say general once upon school every does got "
        "window left number course war until always away something fact water though less public put think almost hand enough far "
        "took head yet government system better set nothing night end why called find going look asked later point knew next "
        "city business group give days young let room word side door road line form best white told open light voice money story "
        "letter table north south river music paper green early black field women girl food cold party"
    ).split(),
    dtype=object,
)
