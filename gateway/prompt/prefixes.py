"""Known prefixes: the tokens and block hashes of conversations seen before.

A prompt comes as segments whose tokens, one after the other, are the prompt's tokens (cut only
where `tokenizer.safe_cuts` allows). Segments form a tree: a node is a segment behind a certain
parent, with its own tokens and the hashes of the blocks it completes. A node is used only if
its parent is the very node before, its literals are the same kind and its text is *equal*
(compared, not only hashed), so a known prefix gives exactly what tokenizing it again would.

Bounded in bytes by two generations: what is used is in the young one; when that has half of
the budget it becomes the old one, and what was old and unused is gone.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from cachemap import hash_blocks

from .plan import Segment
from .tokenizer import Tokenizer
from .trace import Question, answered

_NODE_BYTES = 400          # a node and its place in the dictionary, beside text, tokens and hashes
_HASH_BYTES = 40           # a Python int above 2**60 and its pointer


class Node:
    """A segment behind its parent. `serial` is never used twice; `asked` are questions it has answered well."""

    __slots__ = ("parent", "kind", "text", "serial", "asked", "tokens", "hashes", "chars")

    def __init__(self, parent: int, segment: Segment, text: str, serial: int, tokens: bytes, hashes: list[int],
                 chars: int) -> None:
        self.parent, self.kind, self.text, self.serial = parent, segment.kind, text, serial
        self.asked, self.tokens, self.hashes, self.chars = segment.questions, tokens, hashes, chars

    def bytes(self) -> int:
        return _NODE_BYTES + len(self.text) * (1 if self.text.isascii() else 2) + len(self.tokens) \
            + _HASH_BYTES * len(self.hashes)


class Mismatch(Exception):
    """The texts answer a segment's questions otherwise: the plan is not for them."""


class Prefixes:
    """Tokens and hashes of prompts in segments. Thread safe: races only cost a segment's reuse."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._width = 4 * block_size
        self._block_size = block_size
        self._half = budget_bytes // 2
        self._young: dict[int, Node] = {}
        self._old: dict[int, Node] = {}
        self._young_bytes = 0
        self._serials = itertools.count(1)
        self.hit_chars = 0                 # characters of prompts found here, of all that came
        self.all_chars = 0

    def tokens(self, seed: int, segments: Sequence[Segment], slots: list[Any],
               lead: bytes = b"") -> tuple[bytes, list[int], int]:
        """(ids as uint32 LE bytes, block hashes, characters). Raises Mismatch.

        `lead` are special tokens (always the same ones) that the tokenizer puts before the text.
        """
        young, old = self._young, self._old
        # Serials are positive, so that no chain's start is ever taken for a node.
        parent = -1 - seed if not lead else -1 - (1 << 64) - seed
        found: list[bytes] = [lead] if lead else []
        hashes: list[int] = []
        chars = known = 0
        for segment in segments:
            slot = segment.slot
            text = slots[slot] if slot >= 0 else segment.text(slots)
            kind = segment.kind
            key = _key(parent, kind, text)
            node = young.get(key)
            if node is None:
                node = old.get(key)
                if node is None:
                    break
                self._keep(key, node)
            if node.parent != parent or node.kind != kind or node.text != text:
                break
            questions = segment.questions
            if questions and questions is not node.asked:
                _ask(questions, text)
                node.asked = questions
            found.append(node.tokens)
            hashes += node.hashes
            chars += node.chars
            parent = node.serial
            known += 1
        self.hit_chars += chars
        if known < len(segments):
            chars += self._add(parent, segments[known:], slots, found, hashes, seed)
        self.all_chars += chars
        return b"".join(found), hashes, chars

    def _add(self, parent: int, segments: Sequence[Segment], slots: list[Any], found: list[bytes],
             hashes: list[int], seed: int) -> int:
        """Tokenize and hash what is new, append it to `found` and `hashes`, remember it -> characters."""
        own = [segment.text(slots) for segment in segments]
        for segment, text in zip(segments, own, strict=True):
            if segment.questions:
                _ask(segment.questions, text)
        texts = [segment.before + text + segment.after for segment, text in zip(segments, own, strict=True)]
        tokens = self._tokenizer.encode_many(texts)
        width = self._width
        before = sum(map(len, found))                      # bytes of tokens
        tail = _tail(found, before - len(hashes) * width)
        new = hash_blocks(b"".join((tail, *tokens)), self._block_size, hashes[-1] if hashes else seed)
        done = len(hashes)
        end = before
        for segment, text, rendered, ids in zip(segments, own, texts, tokens, strict=True):
            end += len(ids)
            first, done_now = done, end // width
            mine = new[first - len(hashes):done_now - len(hashes)]
            done = done_now
            node = Node(parent, segment, text, next(self._serials), ids, mine, len(rendered))
            self._keep(_key(parent, segment.kind, text), node)
            parent = node.serial
        found += tokens
        hashes += new
        return sum(map(len, texts))

    def _keep(self, key: int, node: Node) -> None:
        self._young[key] = node
        self._young_bytes += node.bytes()
        if self._young_bytes > self._half:
            self._old, self._young, self._young_bytes = self._young, {}, 0

    def forget(self) -> None:
        self._young, self._old, self._young_bytes = {}, {}, 0

    def stats(self) -> dict[str, int]:
        return {"segments": len(self._young) + len(self._old), "young_bytes": self._young_bytes,
                "hit_chars": self.hit_chars, "all_chars": self.all_chars}


def _ask(questions: tuple[Question, ...], text: str) -> None:
    if not all(answered(question, (text,)) for question in questions):
        raise Mismatch


def _key(parent: int, kind: int, text: str) -> int:
    """Where a node is looked up; equality is checked on the node itself.

    xxh3 over ASCII costs a tenth of Python's own hash (32 kB: 1.3 against 8 us), but needs bytes:
    for other text encoding eats the gain.
    """
    if text.isascii():
        return xxh3_64_intdigest(text.encode(), (parent * 1000003 + kind) & 0xFFFFFFFFFFFFFFFF)
    return hash((parent, kind, text))


def _tail(pieces: list[bytes], size: int) -> bytes:
    """The last `size` bytes of the pieces, one after the other."""
    tail = b""
    for piece in reversed(pieces):
        if len(tail) >= size:
            break
        tail = piece + tail
    return tail[len(tail) - size:]
