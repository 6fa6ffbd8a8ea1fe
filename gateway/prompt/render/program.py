"""Models whose conversations engines write by rules in their own code, not by a Jinja chat template.

A `Program` implements the rules for one family of models; each has a file in `programs/`. `ProgramTemplate` gives a
Program the interface of a `ChatTemplate`, so that tokenizing, checking and forwarding work as with templates.
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
# A range of transformers releases that do not edit conversations: transformers does not edit them for a program.
_UNTOUCHED = Transformers(below=(5, 20))


# A character that is put between texts that the engine tokenizes separately although no special token separates them.
BOUNDARY = "\ufdd0"
# A character that begins the names of special tokens in formats where no text of a request may spell a special token.
UNSPOKEN = "\ufdd1"


class Refused(Exception):
    """Raised for a conversation that the engine refuses, or that it may write in a way that is not known here."""


@dataclass(frozen=True, slots=True)
class Program:
    """The rules by which engines write the conversations of one family of models, in place of a chat template.

    `prints`: all special tokens that the rules may print, joined.
    `takes_parts`: returns whether the rules get contents as lists of parts, for an engine with these quirks.
    `write`: turns a conversation, its tools and the template variables into text, as an engine with these quirks does.
        Raises any exception if the engine refuses the conversation.
    `as_received`: the rules get a request's messages unchanged, and ignore its template variables, special tokens and
        truncation.
    `prints_date`: the rules print the date, which they get from the variable `strftime_now`.
    `raw_messages`: the rules get a request's messages unchanged, and everything else as a template does.
    `makes_tokens`: the rules write all special tokens themselves, and ignore the request's `add_special_tokens`.
    `to_be_shown`: prompts count as exact only once an engine's ids of fixed test chats have equalled the gateway's
        (`ops.chats`).
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
    """Rules that write a model's conversations in place of a template, with the interface of a `ChatTemplate`."""

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
        """Return the text that engines make of a conversation. Raises TemplateError if they refuse it.

        `at`: the time that is printed; None: the present time by the engines' clock. TemplateError is also raised if it
        is not known how an engine writes the conversation.
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
