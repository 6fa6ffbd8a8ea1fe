"""Prompts in segments, and known prefixes: the tokens and block hashes of conversations seen before.

A prompt comes as the segments of a plan (`render.compiler` makes plans) with a text for each. Segments are cut only
where `tokenizer.safe_cuts` allows, so their tokens, one after the other, are the prompt's tokens. The parts of a
segment that the template always prints are its literals.

Segments form a tree: a node is a segment after a certain parent, with its own tokens and the hashes of the blocks that
these tokens complete. A node's key is (parent, SHA-256 of the literals around its text, text or, if that is long, its
SHA-256), all of which the dictionary compares for equality. Every part of the key is content, never a number that a
template assigned. So a known prefix gives exactly what tokenizing it again would, also where several templates, or a
template compiled again for another version of the engine, share one memo.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter
from sys import getsizeof
from typing import Any, Generic, NamedTuple, TypeVar

from cachemap import hash_blocks

from ..render.trace import Check, Question, answered, check_of, hold, text_of
from .tokenizer import Tokenizer

_SEGMENT_BYTES = 120  # a segment without what it refers to
_NODE_BYTES = 500  # a node, its key, its serial and its place in the dictionary

K = TypeVar("K")
V = TypeVar("V")

# Texts of this length or more are keyed by their SHA-256, or those of long prompts would take half of the memo and
# more: Python needs two to four times their bytes where one character is outside Latin 1. 420 kB cost 0.3 ms, not 0.1.
_LONG = 16_384  # characters

Key = tuple[int, bytes, str | bytes]  # parent's serial, digest of the literals, text
# A node: serial (never used twice); tokens; hashes of the blocks that these complete (uint64: Python ints would take
# five times the space, each in a cache line of its own); bytes of the prompt's tokens up to the node's end; the last of
# these tokens that fill no block; the prompt's characters up to there; digest of the questions that the text answered
# as its segment expects. A plain tuple of plain things: the garbage collector stops tracking it, so a memo of a million
# nodes costs nothing at each full collection.
Node = tuple[int, bytes, bytes, int, bytes, int, bytes]
_ASKED = 6
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Literals and texts that are tokenized together.

    Mostly a segment is one text between the literals `before` and `after`: the text of the conversation with number
    `slot` or, where `slot` is -1, the value of the one expression in `pieces`. A segment without a text has only
    `before`. Any other segment has no literals: its text is joined from `pieces`.

    `questions`: what the template asked about this segment's text alone, with the expected answers.
    `checks`: the questions in executable form.
    `literals`, `asks`: digests of the literals and of the questions, b"" where there are none, by which known prefixes
        are found. They depend on content alone, so one memo can serve any number of templates and versions: segments
        whose digests and texts are equal print the same, whoever compiled them.
    """

    slot: int
    before: str
    after: str
    pieces: tuple
    questions: tuple[Question, ...]
    literals: bytes = field(init=False)
    asks: bytes = field(init=False)
    checks: tuple[Check, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        literals = digest(f"{len(self.before)}:{self.before}{self.after}") if self.before or self.after else b""
        asks = digest(repr(self.questions)) if self.questions else b""
        object.__setattr__(self, "literals", literals)
        object.__setattr__(self, "asks", asks)
        object.__setattr__(self, "checks", tuple(map(check_of, self.questions)))

    def text(self, slots: Sequence[Any]) -> str:
        """Return this segment's text, without literals; `slots`: the texts of a conversation."""
        if self.pieces:
            return text_of(self.pieces, slots)
        return slots[self.slot] if self.slot >= 0 else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of all conversations of one shape, with the `literals` and `asks` of all segments in order."""

    segments: list[Segment]
    questions: list[Question]  # those that depend on more than one segment
    literals: tuple[bytes, ...] = field(init=False)
    asks: tuple[bytes, ...] = field(init=False)
    # Reads the texts from the slots and a final "", where each segment has a slot or no text at all
    _take: Callable[[Sequence[Any]], tuple] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        segments = self.segments
        simple = len(segments) > 1 and not any(one.pieces for one in segments)
        object.__setattr__(self, "literals", tuple(one.literals for one in segments))
        object.__setattr__(self, "asks", tuple(one.asks for one in segments))
        object.__setattr__(self, "_take", itemgetter(*(one.slot for one in segments)) if simple else None)

    def texts(self, slots: Sequence[Any]) -> Sequence[str]:
        """Return each segment's text, without literals; `slots`: the texts of a conversation."""
        if self._take is not None:
            return self._take((*slots, ""))
        return [segment.text(slots) for segment in self.segments]

    @property
    def size(self) -> int:
        """Memory in bytes."""
        parts = [
            (one.before, one.after, one.pieces, one.questions, one.literals, one.asks, *one.checks)
            for one in self.segments
        ]
        return _SEGMENT_BYTES * len(parts) + bytes_of(parts) + bytes_of(self.questions)


class Found(NamedTuple):
    """The tokens (uint32 LE), block hashes (uint64) and number of characters of a prompt."""

    tokens: bytes
    hashes: array[int]
    chars: int


class Mismatch(Exception):
    """Raised when a text does not answer a segment's questions as expected, so the plan does not fit."""


class Generations(Generic[K, V]):
    """A cache in two generations: entries in use stay in the young one, the others age and are dropped.

    When the young generation has half of the budget, it becomes the old one, and the previous old one is dropped.

    Thread safe: a race between two threads costs an entry or the count of its bytes until the next generation. Readers
    that cannot afford a call look at `young` and `old` themselves, in this order, and `keep` what they find in `old`.
    """

    __slots__ = ("young", "old", "young_bytes", "_old_bytes", "_gone", "_gone_bytes", "_half", "_size")

    def __init__(self, budget_bytes: int, size: Callable[[K, V], int]) -> None:
        """Create an empty cache. `size`: the bytes of an entry, its place in the dictionary included."""
        self._half, self._size = budget_bytes // 2, size
        self.clear()

    def clear(self) -> None:
        self.young: dict[K, V] = {}
        self.old: dict[K, V] = {}
        self._gone: dict[K, V] = {}  # dropped and not yet freed, see `_free`
        self.young_bytes = self._old_bytes = self._gone_bytes = 0

    @property
    def bytes(self) -> int:
        """The memory of all entries; an entry in both generations counts twice."""
        return self.young_bytes + self._old_bytes + self._gone_bytes

    def bound(self, budget_bytes: int) -> None:
        """Keep within this many bytes from the next generation on."""
        self._half = budget_bytes // 2

    def __len__(self) -> int:
        return len(self.young) + len(self.old)  # an entry in both generations counts twice

    def get(self, key: K) -> V | None:
        """Return an entry, which keeps it in use, or None."""
        found = self.young.get(key)
        if found is None and (found := self.old.get(key)) is not None:
            self.keep(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Store an entry, unless it would take a quarter of the budget."""
        self.pop(key)
        if 2 * self._size(key, value) <= self._half:
            self.keep(key, value)

    def pop(self, key: K) -> None:
        found = self.young.pop(key, None)
        if found is not None:
            self.young_bytes -= self._size(key, found)
        found = self.old.pop(key, None)
        if found is not None:
            self._old_bytes -= self._size(key, found)

    def keep(self, key: K, value: V) -> None:
        """Store an entry that is not in the young generation."""
        self.young[key] = value
        self.grow(self._size(key, value))

    def grow(self, size: int) -> None:
        """Count `size` more bytes in the young generation, and start a new one if it is full."""
        self.young_bytes += size
        if self._gone:
            self._free(2 * size)
        if self.young_bytes > self._half:
            self._gone, self.old, self.young = self.old, self.young, {}
            self._gone_bytes, self._old_bytes, self.young_bytes = self._old_bytes, self.young_bytes, 0

    def _free(self, least: int) -> None:
        """Free at least this many bytes of the dropped generation.

        Dropping all 150,000 nodes of known prefixes at once would take 40 ms, in which no request is answered. At twice
        the bytes that come in, the dropped generation is gone before the next one is dropped.
        """
        gone = self._gone
        while gone and least > 0:
            try:
                freed = self._size(*gone.popitem())
            except KeyError:  # another thread took the last one
                break
            least -= freed
            self._gone_bytes -= freed
        if not gone:
            self._gone_bytes = 0


class Prefixes:
    """A memo of prompts' tokens and block hashes, by segment. Thread safe: races only cost a segment's reuse."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._width = 4 * block_size
        self._nodes: Generations[Key, Node] = Generations(budget_bytes, _size)
        self._serials = itertools.count(1)

    @property
    def bytes(self) -> int:
        """The memory in bytes of the prompts seen before."""
        return self._nodes.bytes

    def bound(self, budget_bytes: int) -> None:
        """Keep within this many bytes from the next generation on."""
        self._nodes.bound(budget_bytes)

    def tokens(self, seed: int, plan: Plan, texts: Sequence[str], lead: bytes = b"") -> Found:
        """Return the tokens and hashes of a prompt whose segments have these texts. Raises Mismatch.

        `seed`: the hash that the chain of block hashes starts from; `lead`: special tokens (always the same) before the
        text.
        """
        nodes = self._nodes
        young, old = nodes.young.get, nodes.old.get
        # Negative, and so no node's serial, which are positive.
        parent = -1 - seed if not lead else -1 - (1 << 64) - seed
        found, packed = [lead], []
        end, tail, chars = len(lead), lead, 0
        for literals, asks, text in zip(plan.literals, plan.asks, texts):
            key = (parent, literals, text if len(text) < _LONG else digest(text))
            node = young(key)
            if node is None:
                node = old(key)
                if node is None:
                    break
                nodes.keep(key, node)
            if asks and asks != node[_ASKED]:
                if not hold(plan.segments[len(packed)].checks, text):
                    raise Mismatch
                nodes.young[key] = (*node[:_ASKED], asks)
            parent, ids, new, end, tail, chars, _ = node
            found.append(ids)
            packed.append(new)
        hashes = array("Q", b"".join(packed))
        known = len(packed)
        if known == len(texts):
            return Found(b"".join(found), hashes, chars)
        # Tokenize, hash and store the new segments.
        segments, texts = plan.segments[known:], texts[known:]
        rendered = []
        for segment, text in zip(segments, texts):
            if segment.checks and not hold(segment.checks, text):
                raise Mismatch
            rendered.append(segment.before + text + segment.after)
        tokens = self._tokenizer.encode_many(rendered)
        data = b"".join((tail, *tokens))
        new = array("Q", hash_blocks(data, self._block_size, hashes[-1] if hashes else seed))
        hashes += new
        width, start, begin, done, parent = self._width, end - len(tail), end, 0, 0
        size = 0  # the sum of `_size`
        for segment, text, print_, ids in zip(segments, texts, rendered, tokens):
            end += len(ids)
            chars += len(print_)
            full = (end - start) // width
            if parent:
                key = (parent, segment.literals, text if len(text) < _LONG else digest(text))
            parent = next(self._serials)
            mine = new[done:full].tobytes()
            # Read again: another thread may have changed the generations meanwhile.
            nodes.young[key] = (parent, ids, mine, end, data[full * width : end - start], chars, segment.asks)
            size += _NODE_BYTES + getsizeof(key[2])
            done = full
        nodes.grow(size + end - begin + _HASH_BYTES * done)
        return Found(b"".join((*found, *tokens)), hashes, chars)

    def resize(self, block_size: int) -> None:
        """Set another block size, which voids the hashes of all nodes."""
        self._block_size, self._width = block_size, 4 * block_size
        self.forget()

    def forget(self) -> None:
        self._nodes.clear()


def _size(key: Key, node: Node) -> int:
    return _NODE_BYTES + getsizeof(key[2]) + len(node[1]) + len(node[2])


def fits(plan: Plan, slots: Sequence[Any]) -> bool:
    """Return whether these texts answer the plan's questions as those did from which the plan was made."""
    return all(answered(question, slots) for question in plan.questions)


def bare(texts: int) -> Plan:
    """Return a plan for this many texts that are rendered already: without literals and questions."""
    return Plan([_BARE] * texts, [])


_BARE = Segment(-1, "", "", (), ())


def digest(text: str) -> bytes:
    """Return the SHA-256 of a text, unpaired surrogates included."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def bytes_of(value: Any) -> int:
    """Return the memory of nested tuples and lists of plain values; shared values count each time."""
    if isinstance(value, (tuple, list)):
        return getsizeof(value) + sum(map(bytes_of, value))
    return getsizeof(value) if isinstance(value, (str, bytes)) else 32
