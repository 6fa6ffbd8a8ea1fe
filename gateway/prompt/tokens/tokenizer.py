"""Tokenizing texts into the token ids that the engine makes.

The library fastokens reads the same `tokenizer.json` and gives the same ids as the library `tokenizers`, 40 to 200
times faster (8 kB of prose: 12 us against 2.5 ms). Where it can't load a file, `tokenizers` is used. Token ids are
passed around as uint32 little-endian bytes, so that no Python int is made for each token.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from array import array
from functools import cached_property
from pathlib import Path
from typing import Any

import fastokens
import orjson
import tokenizers

from ..offload import TakesLong, event_loop
from ..render.program import UNSPOKEN
from .folder import ModelError, read_text, using
from .reading import Reading
from .tiktoken_files import LONGEST_TEXT

log = logging.getLogger(__name__)

# Otherwise `tokenizers` passes each text to a thread pool of its own, with a thread for each core in every process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The most bytes of new text that the event loop may tokenize, which takes some 5 ms for any text. At worst (random
# letters, one letter over and over, rare Chinese) fastokens takes 0.2 us a byte, and `tokenizers` 1 us (a quiet 2-core
# cloud machine).
_BRIEF = {"fastokens": 24 * 1024, "tokenizers": 5 * 1024}
_CHAR_BYTES = 3  # nearly no text has more bytes per character, and those that do take little work
# If a text has more characters than this for each token of the context length, it is checked slice by slice before it
# is tokenized. Prose and code have 3 to 5 characters per token.
_UNLIKELY = 6
# The number of characters of such a slice. The slices on both sides of a cut may have up to _CUT_TOKENS more tokens
# together than the uncut text.
_SLICE = 16 * 1024
_CUT_TOKENS = 64

_WARM_UP = "Hello, world! 12345 \n\n\tdef f(x): return x  # na\u00efve \u4f60\u597d \U0001f600 <|end|>"


class TokenizerError(ModelError):
    """Raised when the tokenizer can't be loaded; the message says what is missing and what to do."""


class UnlikeEngine(Exception):
    """Raised for a text that the engine may tokenize differently from the gateway; the text of the error says why."""


class TooLong(Exception):
    """Raised for a text that is certain to have more tokens than the context length.

    `tokens`: a lower bound on the number of its tokens.
    """

    def __init__(self, chars: int, tokens: int) -> None:
        super().__init__(f"{chars} characters, at least {tokens} tokens")
        self.tokens = tokens


class Tokenizer:
    """One model's tokenizer. Encoding is thread safe: both backends are, and neither is changed after loading."""

    def __init__(self, model_dir: Path, backend: str = "fastokens", reading: Reading | None = None) -> None:
        """Load the tokenizer of the model in the folder `model_dir`. Raises TokenizerError.

        `backend`: the library to use, "fastokens" or "tokenizers". `reading`: how the engine interprets the folder's
        tokenizer files; None: it uses tokenizer.json as it is.
        """
        path = model_dir / "tokenizer.json"
        content = reading.content if reading else None
        if content is None and not path.is_file():
            raise TokenizerError(
                f"{model_dir} has no tokenizer.json: convert the tokenizer to the "
                "fast format (save_pretrained with transformers) and put it there"
            )
        content = content or read_text(path)
        splits = reading is not None and reading.splits_special_tokens
        self.backend = "tokenizers" if splits else backend  # fastokens always finds special tokens in a text
        self._fast = self._slow = None
        if self.backend == "fastokens":
            try:
                fast: Any = fastokens.Tokenizer.from_json_str(content)
                fast.no_truncation()
                fast.no_padding()
                fast.encode(_WARM_UP)  # the first call compiles its patterns: 40 to 170 ms
                self._fast = fast
            except Exception as error:  # fastokens is only faster: after any failure `tokenizers` is used
                log.warning("fastokens can't load %s (%s): using tokenizers, about 100 times slower", path, str(error))
                self.backend = "tokenizers"
        if self._fast is None:
            try:
                self._slow = tokenizers.Tokenizer.from_str(content)
                self._slow.no_truncation()
                self._slow.no_padding()
                self._slow.encode_special_tokens = splits
                self._slow.encode(_WARM_UP)
            except Exception as error:  # for example a vocabulary that lacks its own unknown token
                raise TokenizerError(f"{path} is no tokenizer that can be read: {error}") from error
        self._splits_special_tokens = splits
        run = reading.longest_run if reading else 0
        self._run = re.compile(rf"\S{{{run}}}|\s{{{run}}}") if run else None
        with using(path):
            settings = orjson.loads(content)
            self.added_tokens: list[dict[str, Any]] = settings.get("added_tokens") or []
            self._normalizes = not _changes_nothing(settings.get("normalizer"))
            self._unspoken = any(token["content"].startswith(UNSPOKEN) for token in self.added_tokens)
            self._takes_blanks = any(token["lstrip"] or token["rstrip"] for token in self.added_tokens)
        self.bound(None)

    def bound(self, tokens: int | None) -> None:
        """Set the context length in tokens; None: unknown.

        A text that has more tokens for certain, by its length and a part of its tokens, is refused with TooLong before
        most of the work.
        """
        self._context = tokens or sys.maxsize
        self._unchecked = _BRIEF[self.backend] // _CHAR_BYTES

    def _check(self, texts: list[str], chars: int) -> None:
        """Raise an error if these texts should not be tokenized, or not on the event loop.

        TooLong: they have more tokens than the context length. UnlikeEngine: the engine may tokenize them differently.
        TakesLong: they would block the event loop too long. Short texts need no check. `chars`: the number of
        characters of all texts together.
        """
        self._weigh(texts)
        if self._run is not None and any(len(one) >= LONGEST_TEXT or self._run.search(one) for one in texts):
            raise UnlikeEngine("the engine tokenizes such a long text, or so long a run without blanks, in parts")
        # If added tokens absorb adjacent blanks, any number of blanks is one token, so the tokens of slices do not
        # bound the tokens of the text.
        if chars // _UNLIKELY > self._context and not self._takes_blanks:
            self._count(texts, chars)

    def _weigh(self, texts: list[str]) -> None:
        """Raise TakesLong if this is the event loop's thread and tokenizing these texts would block it too long."""
        if (
            event_loop.holds
            and sum(len(one) if one.isascii() else len(one.encode("utf-8", "replace")) for one in texts)
            > _BRIEF[self.backend]
        ):
            raise TakesLong

    def _count(self, texts: list[str], chars: int) -> None:
        """Raise TooLong as soon as it is certain that the texts have more tokens together than the context length.

        The texts are tokenized slice by slice, so one that is too long takes no more work than one that fits. `chars`:
        the number of characters of all texts together.
        """
        tokens = 0
        for text in texts:
            for at in range(0, len(text), _SLICE):
                tokens += len(self._ids([text[at : at + _SLICE]], False)[0]) // 4 - (_CUT_TOKENS if at else 0)
                if tokens > self._context:
                    raise TooLong(chars, tokens)

    def encode(self, text: str, special: bool = False) -> bytes:
        """Return the token ids of `text` as uint32 little-endian bytes.

        `special`: include the special tokens that the tokenizer adds before and after a text (BOS, EOS). Raises
        TooLong, UnlikeEngine, or TakesLong on the event loop.
        """
        if len(text) > self._unchecked:
            self._check([text], len(text))
        return self._ids([text], special)[0]

    def _ids(self, texts: list[str], special: bool) -> list[bytes]:
        """Return the token ids of each text, with one backend call for each text.

        A batch call with several texts wakes a thread pool of the backend, which costs more than tokenizing the new
        texts of a turn: 30 us of CPU time against 8 for three texts of 340 characters. The method `encode` of
        `tokenizers` is not used, because it holds the interpreter until it is done, 0.4 s for 380 kB.
        """
        if self._fast is not None:
            encode = self._fast.encode_batch_flat
            return [encode([text], add_special_tokens=special)[0] for text in texts]
        encode = self._slow.encode_batch_fast
        return [_pack(encode([text], add_special_tokens=special)[0].ids) for text in texts]

    def encode_many(self, texts: list[str]) -> list[bytes]:
        """Return the token ids of texts that are parts of one prompt, without special tokens around them.

        Raises what `encode` raises; TooLong refers to all texts together.
        """
        if (chars := sum(map(len, texts))) > self._unchecked:
            self._check(texts, chars)
        return self._ids(texts, False)

    def encode_each(self, texts: list[str], special: bool) -> list[bytes]:
        """Return the token ids of texts that are separate prompts.

        `special`: include the special tokens that the tokenizer adds around a text. Raises what `encode` raises;
        TooLong concerns one prompt, not all together. UnlikeEngine is also raised for a text that could spell the name
        that a special token has only inside the gateway.
        """
        if self._unspoken and any(UNSPOKEN in one for one in texts):
            raise UnlikeEngine("a text with Unicode non-characters")
        if len(texts) > 1:
            self._weigh(texts)
        return [self.encode(text, special) for text in texts]

    def added_around(self) -> tuple[int, int]:
        """Return the numbers of special tokens that the tokenizer adds before and after a text."""
        bare, dressed = self.encode("x"), self.encode("x", special=True)
        before = dressed.find(bare) // 4
        return before, len(dressed) // 4 - before - len(bare) // 4

    def leading(self) -> bytes:
        """Return the special tokens that the tokenizer adds before a text, as uint32 little-endian bytes."""
        return self.encode("x", special=True)[: 4 * self.added_around()[0]]

    def safe_cuts(self) -> frozenset[str]:
        """Return the added tokens before which a text may be cut without changing its tokens.

        For each token t of them, ids(a + b) == ids(a) + ids(b) for any text a and any text b that starts with t.

        A tokenizer first finds added tokens in the raw text. Then it normalizes, splits and merges each text between
        two of them separately. So a cut changes no tokens if the added token after it is found there in any case, and
        no added token is found across the cut. That holds for a token that
        - takes no blanks from its left (lstrip),
        - is matched on raw text (not `normalized`, unless the normalizer changes nothing),
        - is matched whatever its neighbours (not single_word),
        - cannot be the inside or the end of a longer match,
        - starts with no blank, which a token before it would take (rstrip), and, if there are single_word tokens, with
          no letter, digit or underscore, which would prevent one before it from matching.
        The rule is tested on sample texts. If a test fails, no token is returned.
        """
        return self._safe

    @cached_property
    def _safe(self) -> frozenset[str]:
        cuts = _standing_alone(self._matched)
        return cuts if self._cuts_hold(sorted(cuts)) else frozenset()

    @cached_property
    def _matched(self) -> list[dict[str, Any]]:
        """Return the added tokens that are found in texts; they are not `normalized` if nothing is normalized."""
        return [
            {**token, "normalized": token["normalized"] and self._normalizes}
            for token in self.added_tokens
            if not (token["special"] and self._splits_special_tokens)
        ]

    def _cuts_hold(self, cuts: list[str]) -> bool:
        """Return whether cutting before these tokens leaves the tokens of sample texts unchanged.

        The samples are made to break the rule of `safe_cuts`. Up to 32 of the tokens are tested, spread over all.
        """
        for token in cuts[:: len(cuts) // 32 + 1]:
            for left in ("", "a", "a ", "a\n\n", "\u00e9 ", token[:-1], "'", "12", "\u4f60", token):
                for right in ("", "b", " b", "\nb", "'s", token[1:], "3"):
                    if self.encode(left + token + right) != self.encode(left) + self.encode(token + right):
                        log.warning("cutting before %r changes the tokens: nothing of a prompt is reused", token)
                        return False
        return True

    def opening(self, literal: str) -> bytes:
        """Return the tokens of a literal if any text after it can be tokenized by itself, else b"".

        For each text b, ids(literal + b) == ids(literal) + ids(b) then. By the rules that `safe_cuts` states, this
        holds if the literal ends with one of its tokens, and
        - that token takes no blanks from its right (rstrip), and no other lies inside it,
        - it is matched whatever text follows: no added token begins with an end of the literal and is longer,
        - no added token looks at what is before it (lstrip, single_word), or is matched on normalized text.
        The rule is tested on sample texts. It is not used where it saves little (`tokenizers`), or where engines look
        at the length of runs without blanks.
        """
        at = next((at for at in range(len(literal)) if literal[at:] in self._safe), None)
        if at is None or self._fast is None or self._run is not None or self._splits_special_tokens:
            return b""
        last, ends = literal[at:], [literal[start:] for start in range(len(literal))]
        for token in self._matched:
            text = token["content"]
            if token["lstrip"] or token["single_word"] or token["normalized"]:
                return b""
            if token["rstrip"] if text == last else text in last or any(text.startswith(end) for end in ends):
                return b""
        ids = self.encode(literal)
        rest = ("b", " b", "\nb", "'s", "3", "\u00e9", literal, literal[at + 1 :])
        return ids if all(self.encode(literal + one) == ids + self.encode(one) for one in rest) else b""

    def decode(self, ids: list[int]) -> str:
        """Return the text of these token ids, special tokens included."""
        backend = self._fast if self._fast is not None else self._slow
        return backend.decode(ids, skip_special_tokens=False)


def _changes_nothing(normalizer: dict[str, Any] | None) -> bool:
    return normalizer is None or (normalizer["type"] == "Sequence" and not normalizer["normalizers"])


def _standing_alone(added: list[dict[str, Any]]) -> frozenset[str]:
    """Return those added tokens that fulfil the conditions of `Tokenizer.safe_cuts`, before which texts may be cut.

    With the 800 tokens of DeepSeek this takes 20 ms; comparing each token with each would take 30 s.
    """
    texts = [token["content"] for token in added]
    words = any(token["single_word"] for token in added)
    fickle = [one["content"] for one in added if one["lstrip"] or one["normalized"] or one["single_word"]]
    tails = {text[i:] for text in texts for i in range(1, len(text))}
    insides = "\0".join(text[1:] for text in texts)

    def stands_alone(text: str) -> bool:
        if not text or text[0].isspace() or (words and (text[0].isalnum() or text[0] == "_")):
            return False
        if any(one.startswith(text) for one in fickle):
            return False
        # False if this token lies inside another one, or if the end of another one is the start of this one.
        return text not in insides and not any(text[:end] in tails for end in range(1, len(text) + 1))

    return frozenset(filter(stands_alone, texts))


def _pack(ids: list[int]) -> bytes:
    """Return token ids as uint32 little-endian bytes.

    The array type "I" has this form on every platform that vLLM runs on.
    """
    return array("I", ids).tobytes()
