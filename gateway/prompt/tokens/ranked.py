"""Conversion of tokenizers that are lists of ranked tokens (`tekken.json`, `tiktoken.model`) to a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import orjson

from ..quirks import Transformers
from .reading import Reading


class RankedReadings:
    """The one interpretation of a list of ranked tokens that is known here, with the interface of `Readings`."""

    mentioned: Sequence[str] = ()

    def __init__(
        self,
        how: str,
        make: Callable[[], str],
        unknown: str,
        named: Mapping[str, str] | None = None,
        longest_run: int = 0,
    ) -> None:
        """Read the files by calling `make`. Raises what `make` raises.

        `how`: the name of this interpretation, for messages; `make`: returns the tokenizer.json that is made of the
        files; `unknown`: why an engine may interpret the files differently; `named`: the special tokens that a template
        may print, by name; `longest_run`: the longest run of blanks, or of other characters, whose tokens are known (0:
        any run).
        """
        self.unknown = unknown
        content = cache(make)  # some 25 MB, dropped by `let_go` and made again when it is needed
        self.let_go = content.cache_clear
        rebuilt = sha256(content().encode()).digest()
        self._reading = Reading(how, rebuilt, dict(named or {}), False, content, longest_run)

    def likeliest(self, transformers: Transformers) -> tuple[Reading, str]:
        return self._reading, self.unknown

    def all(self) -> Iterator[Reading]:
        yield self._reading


def tokenizer_json(
    ranks: Mapping[bytes, int],
    pattern: str,
    special: Mapping[str, int],
    in_vocabulary: Mapping[str, int] | None = None,
    first_id: int = 0,
    post_processor: dict[str, Any] | None = None,
) -> str:
    """Return the content of a tokenizer.json that makes the same ids as a list of ranked tokens.

    `ranks`: the rank of each token, by the token's bytes; `pattern`: the regular expression that matches one word;
    `special`: the ids of the special tokens by name; `in_vocabulary`: the ids of the special tokens that are also part
    of the vocabulary; `first_id`: the id of the token with rank 0; `post_processor`: the part of tokenizer.json that
    adds special tokens around a text.
    """
    symbols = {rank: "".join(map(_SYMBOLS.__getitem__, token)) for token, rank in ranks.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokens = {**(in_vocabulary or {}), **{token: first_id + rank for rank, token in symbols.items()}}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
             "vocab": tokens, "merges": _merges(ranks, symbols)}  # fmt: skip
    return orjson.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": post_processor,
        "added_tokens": [{"id": id, "content": name, **plain} for name, id in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]}, "decoder": level, "model": model,
    }).decode()  # fmt: skip


def _merges(ranks: Mapping[bytes, int], symbols: Mapping[int, str]) -> list[list[str]]:
    """Return the pairs of tokens that form a token when joined, ordered by the rank of the joined token.

    A tokenizer with these merges joins tokens in the same order as tiktoken. `ranks`: the rank of each token, by the
    token's bytes; `symbols`: how a byte-level vocabulary writes each token, by rank.
    """
    rank_of, merges = ranks.get, []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (left, right)
            for i in range(1, len(token))
            if (left := rank_of(token[:i])) is not None and (right := rank_of(token[i:])) is not None
        ]
        merges += [[symbols[left], symbols[right]] for left, right in sorted(pairs)]
    return merges


# The bytes that a byte-level vocabulary writes as the character of the same number, then how it writes all bytes.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_SYMBOLS = {**{byte: chr(byte) for byte in _PRINTED}, **{byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}}
