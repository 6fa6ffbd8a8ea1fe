"""Compilation of chat templates into plans, which render a conversation without running Jinja.

A *shape* is everything about a request that is not text: the roles, which fields each message has, the tools, the
template variables. Once requests of one shape have come a few times, the template is run on stand-ins: strings that
behave like the texts and record what the template does to them (`trace`). Its output becomes the shape's *plan*. A plan
is a list of segments, each of which is a text between literals that the template prints, and a list of the questions
that the template asked about the texts ("is it empty?"). A plan gives the same text as Jinja for all texts that give
the same answers, so the questions are asked again each time. Filling a plan takes microseconds, where Jinja takes tens
to hundreds.

Segments end only immediately before an added token before which a text may be cut (`Tokenizer.safe_cuts`), so the
tokens of the whole text are the tokens of the segments, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..tokens.prefixes import Plan, Segment
from .clock import Clock
from .shape import put_in
from .trace import MARKER, Pair, Question, Slot, Trace, Untraceable, raw_of, slots_in
from .tracing import TracingEnvironment

# Matches the characters that mark texts in a traced run, as they are and as repr writes them.
_RESERVED = re.compile("[\ufdd0-\ufdd2]|\\\\ufdd[0-2]")


class Compiler:
    """Compiles one chat template to plans, which render conversations without Jinja.

    A plan holds the literals that the template prints around the texts of conversations of one shape.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], cuts: Iterable[str], clock: Clock) -> None:
        """Compile the template so that it can run on stand-ins: strings that record what it does to the texts.

        `special_tokens`: texts by name (`bos_token`), for the template to print; `cuts`: the added tokens before which
        a text may be cut. Raises Untraceable, or Jinja's error on invalid source.
        """
        if _RESERVED.search(source + "".join(special_tokens.values())):
            raise Untraceable("the template contains Unicode non-characters")
        self._special_tokens = special_tokens
        alternatives = "|".join(map(re.escape, sorted(cuts, key=len, reverse=True)))
        self._cut = re.compile(alternatives or "(?!)")
        self._environment = TracingEnvironment(clock)
        self._template = self._environment.from_string(source)

    def plan(
        self,
        shape: Any,
        conversation: list[dict[str, Any]],
        slots: Sequence[Any],
        tools: Any,
        variables: dict[str, Any],
    ) -> Plan:
        """Trace the template on a conversation, and return its compiled form for similar conversations, a plan.

        The plan holds for conversations of the same shape whose texts give the same answers to the template's
        questions. `shape`: the roles, fields and other structure of the conversation and its request; `slots`: the
        texts that `shape.describe` found in the conversation. Raises Untraceable, or whatever the template raises. Not
        thread safe, because the run is recorded in the environment.
        """
        if _RESERVED.search(repr((shape, tools, variables))):
            raise Untraceable("the request contains Unicode non-characters outside its texts")
        self._environment.trace = trace = Trace(slots)
        messages = put_in(conversation, [trace.slot(i) for i in range(len(slots))])
        given = {**self._special_tokens, "documents": None, **variables, "messages": messages, "tools": tools}
        try:
            output = self._template.render(given)
        finally:
            self._environment.trace = Trace([])
        return self._plan_of(raw_of(output), trace)

    def _plan_of(self, output: str, trace: Trace) -> Plan:
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
        for i, questions in asked.items():
            # Sorted, so that segments of two plans that ask the same questions are equal.
            own = tuple(sorted(map(_renumber, questions), key=repr))
            segments[i] = replace(segments[i], questions=own)
        return Plan(segments, shared)

    def _segments(self, pieces: list[str], trace: Trace) -> list[Segment]:
        """Group the output of the traced template into segments, which can be tokenized separately.

        `pieces`: literals and numbers of markers in turn. A marker stands for a text of the conversation. If the
        literal after a text has an added token before which a text may be cut, the segment ends before the first such
        token.
        """
        segments: list[Segment] = []
        current: list[Any] = [pieces[0]]
        for number, literal in zip(pieces[1::2], pieces[2::2], strict=True):
            current.append(trace.expand(int(number)))
            if (cut := self._cut.search(literal)) is not None:
                segments.append(_segment([*current, literal[: cut.start()]]))
                current, literal = [], literal[cut.start() :]
            current.append(literal)
        return [*segments, _segment(current)]


def _segment(pieces: list[Any]) -> Segment:
    if len(pieces) == 1:
        return Segment(-1, pieces[0], "", (), ())
    if len(pieces) == 3:
        slot = pieces[1].index if isinstance(pieces[1], Slot) else -1
        return Segment(slot, pieces[0], pieces[2], () if slot >= 0 else (pieces[1],), ())
    return Segment(-1, "", "", tuple(pieces), ())


def _renumber(value: Any) -> Any:
    """Return a template's question about one text, with index 0 in place of the text's index in the conversation.

    In this form a segment asks the question about its own text. `value`: the question, or a part of it.
    """
    if isinstance(value, Slot):
        return Slot(0)
    if isinstance(value, Pair):
        return Pair(_renumber(value.left), _renumber(value.right))
    return tuple(map(_renumber, value)) if isinstance(value, tuple) else value
