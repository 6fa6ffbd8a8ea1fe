"""Conversations that an engine writes by rules of its own, where other models have a Jinja template.

A `Program` is such a set of rules, one file in `programs/` for each family of models. `ProgramTemplate` gives it the
interface of a `ChatTemplate`, so that everything after the template (known prefixes, checks, forwarded ids) is the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..quirks import NEWEST, Transformers, VersionQuirks
from .clock import Clock
from .template import TemplateError

Message = dict[str, Any]
# A version of transformers that edits no conversations: a program gets them without its edits.
_UNTOUCHED = Transformers(below=(5, 20))


# Put between texts that the engine tokenizes separately although no special token separates them.
BOUNDARY = "\ufdd0"
# Begins the names of special tokens where no text of a request may be taken for one.
UNSPOKEN = "\ufdd1"


class Refused(Exception):
    """Raised for a conversation that the engine refuses, or whose rules are not certain."""


@dataclass(frozen=True, slots=True)
class Program:
    """The rules by which engines write the conversations of one family of models.

    `prints`: all special tokens that the program may print, joined.
    `takes_parts`: whether it gets texts as lists of parts, by the engine's quirks.
    `write`: turns a conversation, its tools and the template variables into text, as an engine with these quirks does;
        raises any exception where the engine refuses.
    `as_received`: it gets a request's messages unchanged, and ignores the request's template variables, special tokens
        and truncation.
    `prints_date`: it gets the date from the variable `strftime_now`.
    `raw_messages`: it gets messages unchanged, and all else as a template does.
    `makes_tokens`: it writes all special tokens itself, whatever the request says of them.
    `to_be_shown`: its prompts count as exact only once an engine's ids for the fixed chats equal the gateway's.
    """

    family: str
    prints: str
    takes_parts: Callable[[VersionQuirks], bool]
    write: Callable[[list[Message], list[Message] | None, Mapping[str, Any], VersionQuirks], str]
    as_received: bool = False
    prints_date: bool = False
    raw_messages: bool = False
    makes_tokens: bool = False
    to_be_shown: bool = False


class ProgramTemplate:
    """A program with the interface of a `ChatTemplate`."""

    knows_developer = True
    reads: frozenset[str] = frozenset()
    prints_time = False
    exceeds = ""

    def __init__(self, program: Program, quirks: VersionQuirks = NEWEST, clock: Clock | None = None) -> None:
        self.program, self.clock = program, clock or Clock()
        self.source, self.takes_parts = program.prints, program.takes_parts(quirks)
        self.as_received, self.prints_date = program.as_received or program.raw_messages, program.prints_date
        self.special_tokens: dict[str, str] = {}
        self.quirks = replace(quirks, transformers=_UNTOUCHED)
        self.not_compiled = f"the engine writes {program.family}'s conversations by rules of its own"

    def render(
        self,
        conversation: list[Message],
        tools: list[Message] | None,
        variables: Mapping[str, Any],
        at: datetime | None = None,
    ) -> str:
        """Return the text of a conversation. Raises TemplateError.

        `at`: the time that is printed, or None for the time now by the engines' clock.
        """
        if not self.quirks.rules_are_known:
            raise TemplateError(f"this engine may write {self.program.family}'s conversations by other rules")
        if "tokenize" in variables:
            raise TemplateError("the request says how its text is to be tokenized")
        if self.prints_date:
            variables = {**variables, "strftime_now": at.strftime if at is not None else self.clock.strftime_now}
        try:
            return self.program.write(conversation, tools, variables, self.quirks)
        except Exception as error:  # the engine would refuse it, too
            raise TemplateError(f"{type(error).__name__}: {error}") from error
