"""Compiled chat templates: per shape of conversation, the literals around its texts.

A *shape* is everything about a request that is not text: the roles, which fields each message
has, the tools, the template variables. When a shape has come a few times, the template is run
on stand-ins (`trace`), and what it printed becomes a plan: segments of literals and places for
texts, and the questions it asked of them. Filling a plan takes microseconds where Jinja
takes tens to hundreds, and gives the same text, because the questions are asked again each time.

Segments end only immediately before an added token that may be cut at (`tokenizer.safe_cuts`),
so the tokens of the whole are the tokens of the segments, one after the other.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import itemgetter
from typing import Any

from ..bounded import Bounded, bytes_of
from .shape import put_in
from .trace import (
    MARKER,
    Check,
    Pair,
    Question,
    Slot,
    Trace,
    Untraceable,
    answered,
    check_of,
    raw_of,
    slots_in,
    text_of,
)
from .tracing import TracingEnvironment

# Memory for the plans of one template, and for the shapes that wait for theirs: a plan of 40 messages and 20 kB of
# tools takes 40 kB, so some 1,500 of them.
PLANS_BYTES = 64 * 1024 * 1024
SEEN_BYTES = 4 * 1024 * 1024
# A shape that takes more is rendered by Jinja each time: 100 messages take 10 kB.
_LARGEST_SHAPE = 256 * 1024
_SEGMENT_BYTES = 120  # a segment without what it refers to
_MAX_WAYS = 6  # plans per shape: ways its texts answered the template's questions
# Compiling takes as long as 4 to 6 renderings, and most shapes of agents (who called what when)
# come once or twice: wait until rendering has cost as much.
_PATIENCE = 5
_RESERVED = re.compile("[\ufdd0-\ufdd2]|\\\\ufdd[0-2]")  # as they are, and as repr writes them


@dataclass(frozen=True, slots=True)
class Segment:
    """Literals and texts that are tokenized together.

    Mostly one text with a literal on either side: a slot as it is, or (`slot` -1) what an
    expression makes of it (`pieces`, just that); or one literal and no text at all. Anything else
    is all text, put together of `pieces`. `questions` are those asked of this text alone.

    `literals` and `asks` are what the search for known prefixes reads: digests of the literals and of the
    questions (b"" where there are none). They name content, not an order of arrival, so one memo can serve any
    number of templates and versions: segments whose digests and texts are equal print the same, whoever
    compiled them. `checks` are the questions in the form in which they are asked.
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
        """What this segment's own text is (without the literals)."""
        if self.pieces:
            return text_of(self.pieces, slots)
        return slots[self.slot] if self.slot >= 0 else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of a shape. `literals` and `asks` are those of all segments, one after the other."""

    segments: list[Segment]
    questions: list[Question]  # those that no single segment can answer
    literals: tuple[bytes, ...] = field(init=False)
    asks: tuple[bytes, ...] = field(init=False)
    # Takes the texts out of the slots and "" behind them, where each segment has a slot or no text at all
    _take: Callable[[Sequence[Any]], tuple] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        segments = self.segments
        simple = len(segments) > 1 and not any(one.pieces for one in segments)
        object.__setattr__(self, "literals", tuple(one.literals for one in segments))
        object.__setattr__(self, "asks", tuple(one.asks for one in segments))
        object.__setattr__(self, "_take", itemgetter(*(one.slot for one in segments)) if simple else None)

    def texts(self, slots: Sequence[Any]) -> Sequence[str]:
        """The own text of each segment."""
        if self._take is not None:
            return self._take((*slots, ""))
        return [segment.text(slots) for segment in self.segments]

    @property
    def size(self) -> int:
        """Bytes of memory."""
        parts = [
            (one.before, one.after, one.pieces, one.questions, one.literals, one.asks, *one.checks)
            for one in self.segments
        ]
        return _SEGMENT_BYTES * len(parts) + bytes_of(parts) + bytes_of(self.questions)


class Compiled:
    """The plans of one template. Thread safe."""

    def __init__(self, source: str, special_tokens: dict[str, str], cuts: Iterable[str]) -> None:
        self.why_not = ""  # set once compiling is given up for good
        self._special_tokens = special_tokens
        alternatives = "|".join(map(re.escape, sorted(cuts, key=len, reverse=True)))
        self._cut = re.compile(alternatives or "(?!)")
        # By shape; whether one of its plans applies is for their questions to say.
        self.plans: Bounded[Any, list[Plan]] = Bounded(PLANS_BYTES)
        self._seen: Bounded[Any, int] = Bounded(SEEN_BYTES)  # shapes that no plan fitted, how often
        self._lock = threading.Lock()
        try:
            if _RESERVED.search(source + "".join(special_tokens.values())):
                raise Untraceable("the template contains Unicode non-characters")
            self._environment = TracingEnvironment()
            self._template = self._environment.from_string(source)
        except Exception as error:  # whatever is wrong, plain Jinja will do or say so
            self.why_not = f"{type(error).__name__}: {error}"

    def give_up(self, why: str) -> None:
        self.why_not = why
        self.plans.clear()

    def learn(
        self,
        shape: Any,
        conversation: list[dict[str, Any]],
        slots: Sequence[Any],
        tools: Any,
        variables: dict[str, Any],
    ) -> None:
        """Note a request that no plan fitted; compile its shape if that is worth it."""
        size = bytes_of(shape)
        if size > _LARGEST_SHAPE:
            return
        with self._lock:
            known = self.plans.get(shape) or _NONE
            if self.why_not or len(known) >= _MAX_WAYS:
                return
            seen = (self._seen.get(shape) or 0) + 1
            if seen < _PATIENCE:
                self._seen.put(shape, seen, size)
                return
            self._seen.pop(shape)
            try:
                plan = self._compile(shape, conversation, slots, tools, variables)
            except Exception:  # Untraceable, or a refusal that plain Jinja will word
                plan = _NEVER
            if plan.size > PLANS_BYTES // 32:
                plan = _NEVER
            plans = [*known, plan]
            self.plans.put(shape, plans, size + sum(one.size for one in plans))

    def _compile(
        self,
        shape: Any,
        conversation: list[dict[str, Any]],
        slots: Sequence[Any],
        tools: Any,
        variables: dict[str, Any],
    ) -> Plan:
        if _RESERVED.search(repr((shape, tools, variables))):
            raise Untraceable("the request contains Unicode non-characters outside its texts")
        trace = Trace(slots)
        stand_ins = [trace.slot(i) for i in range(len(slots))]
        self._environment.trace = trace
        try:
            output = self._template.render(
                {
                    **self._special_tokens,
                    "documents": None,
                    **variables,
                    "messages": put_in(conversation, stand_ins),
                    "tools": tools,
                }
            )
        finally:
            self._environment.trace = Trace([])
        return self._plan(raw_of(output), trace)

    def _plan(self, output: str, trace: Trace) -> Plan:
        segments = self._segments(MARKER.split(output), trace)
        owner = {segment.slot: i for i, segment in reversed(list(enumerate(segments))) if segment.slot >= 0}
        asked: dict[int, list[Question]] = {}
        shared: list[Question] = []
        for question in map(trace.expand_question, dict.fromkeys(trace.questions)):
            slots = slots_in(question)
            if len(slots) == 1 and (own := owner.get(next(iter(slots)))) is not None:
                asked.setdefault(own, []).append(question)
            else:
                shared.append(question)
        return Plan([_asking(segment, asked.get(i, [])) for i, segment in enumerate(segments)], shared)

    def _segments(self, pieces: list[str], trace: Trace) -> list[Segment]:
        """Literals and marker numbers, alternating -> segments, each cut at the first chance after a text."""
        segments: list[Segment] = []
        current: list[Any] = [pieces[0]]
        for number, literal in zip(pieces[1::2], pieces[2::2], strict=True):
            current.append(trace.expand(int(number)))
            cut = self._cut.search(literal)
            if cut is None:
                current.append(literal)
            else:
                segments.append(_segment([*current, literal[: cut.start()]]))
                current = [literal[cut.start() :]]
        segments.append(_segment(current))
        return segments


def _asking(segment: Segment, questions: list[Question]) -> Segment:
    """The segment with the questions asked of its text alone, in an order that does not depend on the plan."""
    return replace(segment, questions=tuple(sorted(map(_renumber, questions), key=repr))) if questions else segment


def _segment(pieces: list[Any]) -> Segment:
    if len(pieces) == 1:
        return Segment(-1, pieces[0], "", (), ())
    if len(pieces) == 3:
        slot = pieces[1].index if isinstance(pieces[1], Slot) else -1
        return Segment(slot, pieces[0], pieces[2], () if slot >= 0 else (pieces[1],), ())
    return Segment(-1, "", "", tuple(pieces), ())


def digest(text: str) -> bytes:
    """The SHA-256 of a text, unpaired surrogates included."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _renumber(value: Any) -> Any:
    """The same question about slot 0, which is how a segment asks its own text."""
    if isinstance(value, Slot):
        return Slot(0)
    if isinstance(value, Pair):
        return Pair(_renumber(value.left), _renumber(value.right))
    return tuple(map(_renumber, value)) if isinstance(value, tuple) else value


def fits(plan: Plan, slots: Sequence[Any]) -> bool:
    return all(answered(question, slots) for question in plan.questions)


def bare(texts: int) -> Plan:
    """The plan of so many texts that are rendered already: no literals, no questions."""
    return Plan([_BARE] * texts, [])


_BARE = Segment(-1, "", "", (), ())
_NONE: list[Plan] = []
# Stands for a way that can't be compiled: it fits nothing.
_NEVER = Plan([], [("bool", ("",), (), True)])
