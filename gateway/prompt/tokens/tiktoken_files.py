"""Tokenizers that come as `tiktoken.model`, with a program in the model's folder that reads it (Kimi K2).

The program is not run; `tiktoken_program` analyses its text. A program may do anything, so no prompt counts as exact
until an engine has made the gateway's tokens of fixed texts; `unknown` says so, as in `reading.Readings`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from ..quirks import Transformers
from .folder import read, using
from .reading import Reading
from .tiktoken_program import LONGEST_RUN, word_pattern

_RESERVED = 256 + 2  # special tokens after the vocabulary, named or not
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class TiktokenReadings:
    """The only way of reading such a folder here, with the interface of `reading.Readings`."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        """Read the files. `config` is tokenizer_config.json. Raises ModelError."""
        self._directory, self._config = directory, config
        self._made: str | None = None
        with using(directory / "tiktoken.model", directory / "tokenizer_config.json"):
            content = self._content()
            named = {key: _text(config[key]) for key in _NAMED if config.get(key)}
        digest = sha256(content.encode()).digest()
        self._reading = Reading(
            "tiktoken.model by the model's own rules", digest, named, False, self._content, LONGEST_RUN
        )
        self.mentioned: list[str] = []
        self.unknown = "the model brings tokenizer code of its own (tiktoken.model)"

    def likeliest(self, transformers: Transformers) -> tuple[Reading, str]:
        return self._reading, self.unknown

    def all(self) -> Iterator[Reading]:
        yield self._reading

    def let_go(self) -> None:
        """Free the tokenizer.json made of the files, some 25 MB; it is made again when needed."""
        self._made = None

    def _content(self) -> str:
        """Return the folder's tokenizer as a tokenizer.json, kept until `let_go`."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> str:
        ranks, path = {}, self._directory / "tiktoken.model"
        with using(path):
            for line in read(path).splitlines():
                if line:
                    token, rank = line.split()
                    ranks[base64.b64decode(token)] = int(rank)
        symbols = {rank: symbols_of(token) for token, rank in ranks.items()}
        vocabulary = {token: rank for rank, token in symbols.items()}
        names = {int(id): _text(one) for id, one in (self._config.get("added_tokens_decoder") or {}).items()}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [
            {"id": id, "content": names.get(id, f"<|reserved_token_{id}|>"), **plain}
            for id in range(len(ranks), len(ranks) + _RESERVED)
        ]
        words = {
            "type": "Split",
            "pattern": {"Regex": word_pattern(self._directory)},
            "behavior": "Isolated",
            "invert": False,
        }
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                 "vocab": vocabulary, "merges": merges_of(ranks, symbols)}  # fmt: skip
        return orjson.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]}, "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "model": model,
        }).decode()  # fmt: skip


def merges_of(ranks: dict[bytes, int], symbols: dict[int, str]) -> list[list[str]]:
    """Return every pair of tokens that make a token, ordered by its rank, so that merges are chosen as in tiktoken."""
    rank_of, merges = ranks.get, []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (left, right)
            for i in range(1, len(token))
            if (left := rank_of(token[:i])) is not None and (right := rank_of(token[i:])) is not None
        ]
        merges += [[symbols[left], symbols[right]] for left, right in sorted(pairs)]
    return merges


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_SYMBOLS = {**{byte: chr(byte) for byte in _PRINTED}, **{byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}}


def symbols_of(token: bytes) -> str:
    """Return bytes as a byte-level vocabulary writes them."""
    return "".join(map(_SYMBOLS.__getitem__, token))


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
