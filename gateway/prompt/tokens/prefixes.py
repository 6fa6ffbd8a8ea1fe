"""A cache of the tokens and block hashes of prompt prefixes seen before.

A prompt comes as the segments of a plan, the compiled form of a chat template (`render.compiler`), with a text for each
segment. The parts of a segment that the template always prints are its literals. Segments are cut only where that does
not change the tokens (`Tokenizer.safe_cuts`), so the tokens of a prompt are the tokens of its segments, one after the
other.

The cached segments form a tree. A node is a segment after a certain parent node, with the segment's tokens and the
hashes of the blocks that these tokens complete. Its key has three parts, which the dictionary compares for equality:
the parent, the SHA-256 of the literals around the segment's text, and the text or, if that is long, its SHA-256. None
of them depends on which template or plan the segment came from. So a cached prefix gives exactly what tokenizing it
again would, even if several templates share the cache, or one that was compiled again for another engine version.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import add, itemgetter
from sys import getsizeof
from typing import Any, Generic, NamedTuple, TypeVar

from cachemap import hash_blocks

from ..render.trace import Check, Question, answered, check_of, hold, text_of
from .tokenizer import Tokenizer

_SEGMENT_BYTES = 120  # memory of a segment without the objects that it refers to
_NODE_BYTES = 650  # memory of a node, its key, its serial, and its places in the dictionary, also as the newest child

K = TypeVar("K")
V = TypeVar("V")

# Texts of this length or more are keyed by their SHA-256. Otherwise the texts of long prompts would take half of the
# cache's memory or more, because Python needs two to four bytes for each character of a text if one of them is outside
# Latin 1. Looking up a text of 420 kB takes 0.3 ms in this way, instead of 0.1 ms.
_LONG = 16_384  # characters

Key = tuple[int, bytes, str | bytes]  # the parent's serial, the digest of the literals, the text or its SHA-256
# A node of the tree of segments, as a tuple of:
# - its serial, which is never used twice;
# - the segment's tokens (uint32 bytes);
# - the hashes of the blocks that these tokens complete (uint64 bytes: Python ints would take five times the space, each
#   in a cache line of its own);
# - the length in bytes of the prompt's tokens up to the segment's end;
# - the last of these tokens that fill no block;
# - the number of the prompt's characters up to there;
# - the digest of the template's questions to which the text has given the answers that its segment expects.
# The garbage collector stops tracking a plain tuple of plain objects, so a cache of a million nodes costs nothing at
# each full collection.
Node = tuple[int, bytes, bytes, int, bytes, int, bytes]
_ASKED = 6
_MOST_OPENINGS, _LONGEST_OPENING = 1024, 64  # literals in memory, and the characters of one
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt that is tokenized as a whole: texts of the conversation with the literals around them.

    Most segments have one text between the literals `before` and `after`. It is the conversation's text with the index
    `slot` or, if `slot` is -1, the value of the one expression in `pieces`. A segment without a text has only `before`.
    A segment with several texts has no `before` and `after`: its text is joined from `pieces`.

    `questions`: what the template asked about this segment's text alone, with the expected answers.
    `checks`: the questions in executable form.
    `literals`, `asks`: digests of the literals and of the questions, b"" where there are none, by which cached prefixes
        are found. They depend on content alone, so one cache can serve any number of templates and engine versions:
        segments whose digests and texts are equal print the same, whichever template they come from.
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
        """Return this segment's text without its literals; `slots`: all texts of the conversation."""
        if self.pieces:
            return text_of(self.pieces, slots)
        return slots[self.slot] if self.slot >= 0 else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled form of a chat template for conversations of one shape, which differ only in their texts.

    `literals`, `asks`: for each segment, the digest of the literals around its texts, and that of the template's
    questions about its text. Cached prefixes are found by them.
    """

    segments: list[Segment]
    questions: list[Question]  # the template's questions about the texts of more than one segment
    literals: tuple[bytes, ...] = field(init=False)
    asks: tuple[bytes, ...] = field(init=False)
    # Returns the segments' texts, given the conversation's texts and ""; None: each segment's `text` has to be called.
    _take: Callable[[Sequence[Any]], tuple] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        segments = self.segments
        simple = len(segments) > 1 and not any(one.pieces for one in segments)
        object.__setattr__(self, "literals", tuple(one.literals for one in segments))
        object.__setattr__(self, "asks", tuple(one.asks for one in segments))
        object.__setattr__(self, "_take", itemgetter(*(one.slot for one in segments)) if simple else None)

    def texts(self, slots: Sequence[Any]) -> Sequence[str]:
        """Return the text of each segment without its literals; `slots`: all texts of the conversation."""
        if self._take is not None:
            return self._take((*slots, ""))
        return [segment.text(slots) for segment in self.segments]

    @property
    def size(self) -> int:
        """The memory that the plan takes, in bytes."""
        parts = [
            (one.before, one.after, one.pieces, one.questions, one.literals, one.asks, *one.checks)
            for one in self.segments
        ]
        return _SEGMENT_BYTES * len(parts) + bytes_of(parts) + bytes_of(self.questions)


class Found(NamedTuple):
    """A prompt's token ids (uint32 little-endian bytes), block hashes (uint64) and number of characters."""

    tokens: bytes
    hashes: array[int]
    chars: int


class Mismatch(Exception):
    """Raised when a text gives another answer to a template's question than its plan expects, so the plan is wrong."""


class Generations(Generic[K, V]):
    """A cache in two generations: entries in use are copied to the young one, and unused entries are dropped.

    When the young generation reaches half of the memory budget, it becomes the old one, and the previous old one is
    dropped.

    Thread safe: in a race between two threads an entry may be lost, or its bytes miscounted until the next generation.
    Code that cannot afford the time of a method call reads `young` and then `old` itself, and calls `keep` for an entry
    that it finds in `old`.
    """

    __slots__ = ("young", "old", "young_bytes", "_old_bytes", "_gone", "_gone_bytes", "_half", "_size")

    def __init__(self, budget_bytes: int, size: Callable[[K, V], int]) -> None:
        """Create an empty cache with a memory budget in bytes.

        `size`: a function that returns the bytes that an entry takes, with its place in the dictionary.
        """
        self._half, self._size = budget_bytes // 2, size
        self.clear()

    def clear(self) -> None:
        """Drop all entries."""
        self.young: dict[K, V] = {}
        self.old: dict[K, V] = {}
        self._gone: dict[K, V] = {}  # the dropped generation, whose entries `_free` frees gradually
        self.young_bytes = self._old_bytes = self._gone_bytes = 0

    @property
    def bytes(self) -> int:
        """The memory of all entries in bytes; an entry in both generations is counted twice."""
        return self.young_bytes + self._old_bytes + self._gone_bytes

    def bound(self, budget_bytes: int) -> None:
        """Set the memory budget in bytes, which is kept to from the next generation on."""
        self._half = budget_bytes // 2

    def __len__(self) -> int:
        return len(self.young) + len(self.old)  # an entry in both generations is counted twice

    def get(self, key: K) -> V | None:
        """Return the entry of this key, or None; an entry of the old generation is copied to the young one."""
        found = self.young.get(key)
        if found is None and (found := self.old.get(key)) is not None:
            self.keep(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Store an entry in place of an earlier one of its key, unless it takes more than a quarter of the budget."""
        self.pop(key)
        if 2 * self._size(key, value) <= self._half:
            self.keep(key, value)

    def pop(self, key: K) -> None:
        """Drop the entry of this key, if there is one, from both generations."""
        found = self.young.pop(key, None)
        if found is not None:
            self.young_bytes -= self._size(key, found)
        found = self.old.pop(key, None)
        if found is not None:
            self._old_bytes -= self._size(key, found)

    def keep(self, key: K, value: V) -> None:
        """Store an entry in the young generation, in which its key must not be."""
        self.young[key] = value
        self.grow(self._size(key, value))

    def grow(self, size: int) -> None:
        """Add `size` bytes to the size of the young generation, and start a new generation if it is full."""
        self.young_bytes += size
        if self._gone:
            self._free(2 * size)
        if self.young_bytes > self._half:
            self._gone, self.old, self.young = self.old, self.young, {}
            self._gone_bytes, self._old_bytes, self.young_bytes = self._old_bytes, self.young_bytes, 0

    def _free(self, least: int) -> None:
        """Free at least this many bytes of the dropped generation, or all that is left of it.

        Freeing all 150,000 entries of a large cache at once would take 40 ms, in which no request is answered. `grow`
        asks for twice the bytes that are added, so the dropped generation is gone before the next one is dropped.
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
    """A cache of the tokens and block hashes of prompts seen before, for one tokenizer and block size.

    Prompts are stored as trees of segments, parts that are tokenized separately, so that prompts share their common
    beginnings. Thread safe: in a race between two threads a segment may have to be tokenized again.
    """

    def __init__(self, tokenizer: Tokenizer, block_size: int, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._width = 4 * block_size
        # By key, the nodes. By its parent's serial, the newest child of a node, with the digest of its literals and its
        # text: to compare the text takes a tenth of the time of hashing it, and a conversation that goes on finds all
        # its segments so. They are young only, so a node in use is looked up by its key once in each generation.
        self._nodes: Generations[Key | int, Any] = Generations(budget_bytes, _size)
        self._serials = itertools.count(1)
        self._openings: dict[str, bytes] = {}  # what `_opening` has returned

    @property
    def bytes(self) -> int:
        """The memory in bytes that the cached prompts take."""
        return self._nodes.bytes

    def bound(self, budget_bytes: int) -> None:
        """Set the memory budget in bytes, which is kept to from the cache's next generation on."""
        self._nodes.bound(budget_bytes)

    def tokens(self, seed: int, plan: Plan, texts: Sequence[str], lead: bytes = b"") -> Found:
        """Return the tokens and block hashes of a prompt, and store those of its segments that are new.

        `seed`: the hash that the chain of block hashes starts from. `plan` and `texts`: the segments and the text of
        each. `lead`: special tokens (uint32 bytes) to put before the text; all calls that give any must give the same.
        Raises Mismatch, and what the tokenizer raises.
        """
        nodes = self._nodes
        young, old = nodes.young.get, nodes.old.get
        # The parent of the first segment. It is negative, so it is no node's serial.
        parent = -1 - seed if not lead else -1 - (1 << 64) - seed
        found, packed = [lead], []
        end, tail, chars = len(lead), lead, 0
        for literals, asks, text in zip(plan.literals, plan.asks, texts):
            newest = young(parent)
            if newest is not None and newest[0] == literals and newest[1] == text:
                node = newest[2]
            else:
                key = (parent, literals, text if len(text) < _LONG else digest(text))
                node = young(key)
                if node is None:
                    node = old(key)
                    if node is None:
                        break
                    nodes.keep(key, node)
                    if len(text) < _LONG:
                        nodes.young[parent] = literals, text, node
            if asks and asks != node[_ASKED]:
                if not hold(plan.segments[len(packed)].checks, text):
                    raise Mismatch
                node = (*node[:_ASKED], asks)
                nodes.young[parent, literals, text if len(text) < _LONG else digest(text)] = node
                if newest is not None and newest[1] == text:
                    nodes.young[parent] = literals, newest[1], node  # the text that the key has, too
            parent, ids, new, end, tail, chars, _ = node
            found.append(ids)
            packed.append(new)
        hashes = array("Q", b"".join(packed))
        known = len(packed)
        if known == len(texts):
            return Found(b"".join(found), hashes, chars)
        # Tokenize, hash and store the new segments.
        segments, texts = plan.segments[known:], texts[known:]
        rendered, opened = [], []
        for segment, text in zip(segments, texts):
            if segment.checks and not hold(segment.checks, text):
                raise Mismatch
            # A text that is not ASCII is not tokenized by itself: the cache's key may hold this string, in which Python
            # would keep the UTF-8 copy that the tokenizer needs.
            opening = self._openings.get(segment.before) if text.isascii() else b""
            if opening is None:
                opening = self._opening(segment.before)
            opened.append(opening)
            rendered.append(text + segment.after if opening else segment.before + text + segment.after)
        tokens = [*map(add, opened, self._tokenizer.encode_many(rendered))]
        data = b"".join((tail, *tokens))
        new = array("Q", hash_blocks(data, self._block_size, hashes[-1] if hashes else seed))
        hashes += new
        width, start, begin, done, parent = self._width, end - len(tail), end, 0, 0
        size = 0  # the memory of the new nodes, as `_size` computes it, without their tokens and hashes
        for segment, text, ids in zip(segments, texts, tokens):
            end += len(ids)
            chars += len(segment.before) + len(text) + len(segment.after)
            full = (end - start) // width
            if parent:
                key = (parent, segment.literals, text if len(text) < _LONG else digest(text))
            parent = next(self._serials)
            mine = new[done:full].tobytes()
            # `nodes.young` is read for each segment, because another thread may have started a new generation.
            node = parent, ids, mine, end, data[full * width : end - start], chars, segment.asks
            nodes.young[key] = node
            if len(text) < _LONG:
                nodes.young[key[0]] = segment.literals, text, node
            size += _NODE_BYTES + getsizeof(key[2])
            done = full
        nodes.grow(size + end - begin + _HASH_BYTES * done)
        return Found(b"".join((*found, *tokens)), hashes, chars)

    def _opening(self, literal: str) -> bytes:
        """Return the tokens of a literal to which those of any text after it can be added, or b"".

        b"" is also returned for ASCII literals: the text is joined with them. A text after another literal, such as
        `<｜User｜>`, would take two bytes for each character, and be converted to UTF-8 again.
        """
        if len(self._openings) >= _MOST_OPENINGS:
            self._openings.clear()
        usual = literal.isascii() or len(literal) > _LONGEST_OPENING
        found = self._openings[literal] = b"" if usual else self._tokenizer.opening(literal)
        return found

    def resize(self, block_size: int) -> None:
        """Set another block size in tokens, and empty the cache, because the block hashes depend on the size."""
        self._block_size, self._width = block_size, 4 * block_size
        self.forget()

    def forget(self) -> None:
        """Empty the cache."""
        self._nodes.clear()


def _size(key: Key | int, node: Node) -> int:
    if type(key) is int:  # counted with the child's node
        return 0
    return _NODE_BYTES + getsizeof(key[2]) + len(node[1]) + len(node[2])


def fits(plan: Plan, slots: Sequence[Any]) -> bool:
    """Return whether the texts `slots` of a conversation give the answers that the plan's questions expect.

    Only the questions about several segments are asked here; those about one segment are asked by `Prefixes.tokens`.
    """
    return all(answered(question, slots) for question in plan.questions)


def bare(texts: int) -> Plan:
    """Return a plan for a prompt that consists of `texts` rendered texts; it has no literals and no questions."""
    return Plan([_BARE] * texts, [])


_BARE = Segment(-1, "", "", (), ())


def digest(text: str) -> bytes:
    """Return the SHA-256 of a text, unpaired surrogates included."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def bytes_of(value: Any) -> int:
    """Return the memory in bytes of nested tuples and lists; a value that occurs several times is counted each time."""
    if isinstance(value, (tuple, list)):
        return getsizeof(value) + sum(map(bytes_of, value))
    return getsizeof(value) if isinstance(value, (str, bytes)) else 32
