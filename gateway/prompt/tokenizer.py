"""Text to token ids as the engine makes them.

fastokens reads the same `tokenizer.json` and gives the same ids as `tokenizers`, 40 to 200
times faster (8 kB of prose: 12 us against 2.5 ms); where it can't load a file, `tokenizers`
does the work. Ids travel as uint32 little-endian bytes: no Python int is made per token.
"""
from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path
from typing import Any

import fastokens
import tokenizers

log = logging.getLogger(__name__)

_WARM_UP = "Hello, world! 12345 \n\n\tdef f(x): return x  # na\u00efve \u4f60\u597d \U0001f600 <|end|>"


class TokenizerError(Exception):
    """The tokenizer can't be loaded; the message says what is missing and what to do."""


class Tokenizer:
    """One model's tokenizer. Encoding is thread safe (both backends are, and neither is changed here)."""

    def __init__(self, model_dir: Path, backend: str = "fastokens") -> None:
        """`backend` is "fastokens" or "tokenizers". Raises TokenizerError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{model_dir} has no tokenizer.json: convert the tokenizer to the "
                                 "fast format (save_pretrained with transformers) and put it there")
        self.backend = backend
        self._fast: Any = None
        self._slow: Any = None
        if backend == "fastokens":
            try:
                self._fast = fastokens.Tokenizer.from_file(str(path))
                self._fast.no_truncation()
                self._fast.no_padding()
                self._fast.encode(_WARM_UP)      # the first call compiles its patterns: 40 to 170 ms
            except Exception as error:           # any failure of an optional speed-up means: do without
                log.warning("fastokens can't load %s (%s): using tokenizers, about 100 times slower", path, error)
                self._fast = None
                self.backend = "tokenizers"
        if self._fast is None:
            try:
                self._slow = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:
                raise TokenizerError(f"{path} is no tokenizer that can be read: {error}") from error
            self._slow.no_truncation()
            self._slow.no_padding()
            self._slow.encode(_WARM_UP)
        self.added_tokens: list[dict[str, Any]] = json.loads(path.read_bytes()).get("added_tokens") or []

    def encode(self, text: str, special: bool = False) -> bytes:
        """Ids of `text` as uint32 LE bytes; `special` adds what the post-processor adds (BOS, EOS)."""
        if self._fast is not None:
            return self._fast.encode_batch_flat([text], add_special_tokens=special)[0]
        return _pack(self._slow.encode(text, add_special_tokens=special).ids)

    def encode_many(self, texts: list[str]) -> list[bytes]:
        """Ids of each text, without special tokens, in one call."""
        if len(texts) == 1:
            return [self.encode(texts[0])]
        if self._fast is None:
            return [_pack(e.ids) for e in self._slow.encode_batch(texts, add_special_tokens=False)]
        ids, offsets = self._fast.encode_batch_flat(texts)
        ends = memoryview(offsets).cast("Q")
        return [ids[4 * ends[i]:4 * ends[i + 1]] for i in range(len(texts))]

    def decode(self, ids: list[int]) -> str:
        backend = self._fast if self._fast is not None else self._slow
        return backend.decode(ids, skip_special_tokens=False)


def _pack(ids: list[int]) -> bytes:
    """List of ids -> uint32 LE bytes ("I" is 4 bytes and little endian on every platform vLLM runs on)."""
    return array("I", ids).tobytes()
