"""Tokenizers in Mistral's own format: `tekken.json`, which engines read with mistral-common.

In this format no part of a text is ever a special token, so special tokens get names that no text contains
(`UNSPOKEN`). The rules by which mistral-common writes conversations depend on its version, which an engine does not
report. So no prompt counts as exact until an engine has made the gateway's tokens of fixed texts and chats.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from ..quirks import Transformers
from ..render.program import UNSPOKEN
from .folder import ModelError
from .reading import Reading
from .tekken_program import FILE, Tekken, read
from .tiktoken_files import merges_of, symbols_of


class TekkenReadings:
    """The only way of reading a tekken.json, with the interface of `reading.Readings`."""

    def __init__(self, directory: Path) -> None:
        """Read the file. Raises ModelError."""
        self._directory = directory
        self._made: str | None = None
        digest = sha256(self._content().encode()).digest()
        self._reading = Reading(f"{FILE} as mistral-common reads it", digest, {}, False, self._content)
        self.mentioned: list[str] = []
        self.unknown = "the engine's mistral-common may write this model by other rules"

    def likeliest(self, transformers: Transformers) -> tuple[Reading, str]:
        return self._reading, self.unknown

    def all(self) -> Iterator[Reading]:
        yield self._reading

    def let_go(self) -> None:
        """Free the tokenizer.json made of the file, some 25 MB; it is made again when needed."""
        self._made = None

    def _content(self) -> str:
        """Return the folder's tokenizer as a tokenizer.json, kept until `let_go`. Raises ModelError."""
        if self._made is None:
            try:
                told, whole = read(self._directory)
                self._made = _as_tokenizer_json(told, whole["vocab"])
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ModelError(f"{self._directory / FILE}: {type(error).__name__}: {error}") from error
        return self._made


def _as_tokenizer_json(told: Tekken, vocabulary: list[dict[str, Any]]) -> str:
    ranks = {base64.b64decode(one["token_bytes"]): rank for rank, one in enumerate(vocabulary[: told.words])}
    symbols = {rank: symbols_of(token) for token, rank in ranks.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": id, "content": name, **plain} for name, id in told.names().items()]
    begin, first = UNSPOKEN + "<s>", {"type_id": 0}
    words = {"type": "Split", "pattern": {"Regex": told.pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
             "vocab": {**told.names(), **{token: rank + told.reserved for rank, token in symbols.items()}},
             "merges": merges_of(ranks, symbols)}  # fmt: skip
    return orjson.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, **first}}, {"Sequence": {"id": "A", **first}}],
            "pair": [{"Sequence": {"id": "A", **first}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [told.special["<s>"]], "tokens": [begin]}},
        },
        "decoder": level, "model": model,
    }).decode()  # fmt: skip
