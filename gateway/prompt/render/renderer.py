"""Rendering a conversation to tokens and block hashes, in the cheapest way that gives the engine's tokens.

There are three ways: a compiled plan with cached tokens of prompts seen before (microseconds); Jinja with these cached
tokens; and, as the engine does it, Jinja and tokenizing everything. The first 32 requests that a plan renders, and one
in 256 after that, are also rendered and tokenized as the engine does it. If the tokens differ, and differ again when
the comparison is repeated, plans are not used any more.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import reduce
from hashlib import sha256
from typing import Any

import orjson

from ..api.conversation import PLAIN_ROLES, MediaPlacing, conversation, is_plain, messages_of, require_exact
from ..api.openai import Chat
from ..api.structure import more_values
from ..offload import TakesLong, event_loop
from ..tokens.prefixes import Found, Generations, Mismatch, Plan, Prefixes, bare, bytes_of, fits
from ..tokens.tokenizer import Tokenizer
from .clock import Clock, another_time
from .compiler import Compiler
from .program import BOUNDARY, ProgramTemplate
from .shape import describe
from .template import ChatTemplate, TemplateError

log = logging.getLogger(__name__)


_FIRST_CHECKED = 32
_CHECK_MASK = 255
# The most texts and values of a request that the event loop renders with Jinja and compiles, which takes some 5 ms at
# worst. Compiling takes 100 us a text, and 2 us or more for each value in tools, variables and messages.
_BRIEF_TEXTS = 64
_BRIEF_VALUES = 1500
_SHORT = 256  # the most bytes of tools and variables that a shape holds as they are; more are replaced by their SHA-256
# Memory in bytes for the plans of one template, and for the shapes that have no plan yet. A plan of 40 messages and
# 20 kB of tools takes 40 kB, so there is room for some 1,500 of them.
PLANS_BYTES = 64 * 1024 * 1024
BEGINNINGS_BYTES = 8 * 1024 * 1024  # memory for the rendered beginnings of conversations that are known only in part
# Bytes; conversations with larger shapes are rendered by Jinja each time. The shape of 100 messages takes 10 kB.
_LARGEST_SHAPE = 256 * 1024
_MAX_WAYS = 6  # the most plans per shape, one for each set of answers to the template's questions
# A plan is compiled at the request of this number with the same shape. Compiling takes as long as 4 to 6 renderings,
# and most shapes of agents' conversations come once or twice only.
_PATIENCE = 5
_ENTRY_BYTES = 200  # overhead of a cache entry: dictionary slots, tuple and size
_EXPONENT = re.compile(rb"\de\+?\d\d")  # how orjson writes a rounded integer: 1.8446744073709552e+19


class Renderer:
    """One chat template with its compiled plans; renders conversations and tokenizes them. Thread safe."""

    def __init__(
        self, template: ChatTemplate | ProgramTemplate, tokenizer: Tokenizer, prefixes: Prefixes, cuts: frozenset[str]
    ) -> None:
        self.template = template
        self.compiled = Compiled(template.source, template.special_tokens, cuts, template.not_compiled, template.clock)
        self.tokenizer = tokenizer
        self._prefixes = prefixes
        printed = template.source + " ".join(template.special_tokens.values())
        self._cuts = sorted(cut for cut in cuts if cut in printed)
        self._text_cut = ""
        self._beginnings: Generations[bytes, tuple[str, int]] = Generations(BEGINNINGS_BYTES, _size)
        self._runs = 0
        self.by_plan = 0  # the number of requests that a plan has rendered

    def tokens(self, seed: int, chat: Chat, lead: bytes = b"") -> Found:
        """Render and tokenize a conversation; return its tokens, block hashes and length in characters.

        `seed`: the hash that the chain of block hashes starts from; `lead`: special tokens (uint32 bytes) to put before
        the text's tokens. Also sets `chat.roles`. Raises ApiError, Multimodal, TemplateError, TakesLong on the event
        loop, or whatever the tokenizer raises.
        """
        if chat.at is not None:
            return self.cut_tokens(seed, self.text(chat), lead)
        tools, variables = chat.tools, chat.variables
        extra = None if variables is None and tools is None else _dumped(tools, variables)
        known = _plain(chat.messages)
        talk = None
        if known is None:
            _weigh(chat)
            talk = self._conversation(chat)
            known = describe(talk)
        else:
            chat.roles = known[0]
        roles, slots = known
        shape = (roles, extra)
        for plan in self.compiled.plans(shape):
            result = self._by_plan(plan, seed, slots, lead)
            if result is not None:
                runs = self._runs + 1
                if runs <= _FIRST_CHECKED or not runs & _CHECK_MASK:
                    result = self._checked(result, plan, seed, slots, chat, lead)
                self._runs = runs  # set last, so that a comparison that raised TakesLong is repeated in a thread
                return result
        _weigh(chat, slots)
        if talk is None:
            talk = self._conversation(chat)
        variables = DEFAULTS if variables is None else variables
        text = self.template.render(talk, tools, variables)
        if not self.compiled.why_not and not variables.get("continue_final_message"):
            self.compiled.learn(shape, talk, slots, tools, variables)
        return self.cut_tokens(seed, text, lead)

    def text(self, chat: Chat, media: MediaPlacing | None = None) -> str:
        """Return the text of a conversation as the Jinja template renders it, without a compiled plan (the shortcut).

        `media`: decides what replaces content parts that are not text; if it is None, such a part raises Multimodal.
        Raises ApiError, Unroutable, TemplateError, or TakesLong on the event loop.
        """
        _weigh(chat, chat.messages if isinstance(chat.messages, list) else ())
        variables = DEFAULTS if chat.variables is None else chat.variables
        return self.template.render(self._conversation(chat, media), chat.tools, variables, chat.at)

    def beginning(self, *texts: str) -> str:
        """Return the common beginning of these texts, shortened so that it has the same tokens in each of them.

        It ends before an added token before which a text may be cut without changing its tokens
        (`Tokenizer.safe_cuts`), and is "" if there is no such token.
        """
        same = reduce(_common, texts)
        return same[: max([0, *(same.rfind(cut) for cut in self._cuts)])]

    def known_beginning(self, chat: Chat, known: int, rest: Sequence[Any]) -> str:
        """Return the part of a conversation's rendered text that its first `known` messages determine on their own.

        This text stays the same whatever messages follow, and may be "". `rest`: the later messages, as received. Only
        their roles are used, because some templates print all system texts at the front. Raises Unknown if engines may
        render one of the first messages in a way that is not known here.
        """
        roles = {one.get("role") for one in rest if isinstance(one, dict)}
        tails = _TAILS if roles.isdisjoint(_FIRST) else _LATE_TAILS
        variables = {**(chat.variables or {}), **DEFAULTS}
        # The text is cached, because the conversation's next turn repeats these messages: rendering 31 messages with
        # each tail took 5.6 ms a turn.
        given = chat.messages[:known], chat.tools, variables, chat.by_schema, len(tails)
        key = None if self.template.prints_date or self.template.prints_time else _digest(given)
        if key is not None and (found := self._beginnings.get(key)) is not None:
            return found[0]
        texts: list[str] = []
        written = 0
        moments = self._moments(chat.at) or [chat.at]
        for tail in tails:
            messages = [*chat.messages[:known], *tail]
            try:
                for at in moments if not texts else moments[:1]:
                    texts.append(self.text(replace(chat, messages=messages, variables=variables, at=at)))
            except TemplateError:  # a template may not take these roles in a row
                continue
            written += 1
        text = self.beginning(*texts) if written > 1 else ""
        if key is not None:
            self._beginnings.put(key, (text, 4 * len(text) + _ENTRY_BYTES))
        return text

    def before_the_date(self, chat: Chat) -> str | None:
        """Return the rendered text before the first date or time in it that is uncertain; None: all of it is certain.

        A date is uncertain while the engines' time zones allow several dates. A time of day is always uncertain.
        """
        texts = [self.text(replace(chat, at=moment)) for moment in self._moments(chat.at)]
        return self.beginning(*texts) if any(one != texts[0] for one in texts) else None

    def is_certain(self) -> bool:
        """Return whether it is known which date and time the engines now print; True if the template prints none."""
        return not self._moments(None)

    def _moments(self, at: datetime | None) -> list[datetime]:
        """Return the dates and times that engines may print if they render now; [] if what they print is certain.

        `at`: a time on the day that engines print, or None if the day depends on their time zones. The time of the day
        is not known in either case.
        """
        if not self.template.prints_date:
            return []
        moments = [at] if at is not None else self.template.clock.moments()
        if self.template.prints_time:
            moments = moments * 2 if len(moments) == 1 else moments
            return [another_time(one, hours) for hours, one in enumerate(moments)]
        return moments if len(moments) > 1 else []

    def cut_tokens(self, seed: int, text: str, lead: bytes) -> Found:
        """Return the tokens, block hashes and length in characters of a rendered text.

        The text is cut before occurrences of an added token where that does not change its tokens, so that the tokens
        of pieces seen before can be reused. `seed`: the hash that the chain of block hashes starts from; `lead`:
        special tokens (uint32 bytes) to put before the text's tokens.
        """
        pieces = self._pieces(text)
        return self._prefixes.tokens(seed, bare(len(pieces)), pieces, lead)

    def _conversation(self, chat: Chat, media: MediaPlacing | None = None) -> list[dict[str, Any]]:
        template = self.template
        if template.as_received:
            return messages_of(chat.messages)
        return conversation(
            chat.messages,
            template.takes_parts,
            template.knows_developer,
            chat.by_schema,
            template.quirks,
            template.reads,
            media,
        )

    def _by_plan(self, plan: Plan, seed: int, slots: Sequence[Any], lead: bytes) -> Found | None:
        if plan.questions and not fits(plan, slots):
            return None
        try:
            texts = plan.texts(slots)
        except (IndexError, ValueError):  # this text lacks an item or substring of the plan
            return None
        try:
            result = self._prefixes.tokens(seed, plan, texts, lead)
        except Mismatch:
            return None
        self.by_plan += 1
        return result

    def _checked(self, result: Found, plan: Plan, seed: int, slots: Sequence[Any], chat: Chat, lead: bytes) -> Found:
        """Compare the result of a plan with rendering and tokenizing as the engine does it; return the correct result.

        `plan`: the compiled form of the template that was used; `result`: what it gave; `slots`: the conversation's
        texts; `lead`: special tokens before the text's tokens. If the comparison is repeated and fails again, all plans
        of the template are dropped, and no more are compiled.
        """
        text = self.text(chat)
        if result[0] == lead + self.tokenizer.encode(text):
            return result
        # The comparison is repeated, because the date that the template prints may just have changed.
        again = self._by_plan(plan, seed, slots, lead)
        if again is not None and again[0] != lead + self.tokenizer.encode(self.text(chat)):
            self.compiled.give_up("a compiled prompt differed from the rendered one")
            log.error("the compiled chat template gave other tokens than Jinja: compiling is off from now on")
        self._prefixes.forget()
        return self._prefixes.tokens(seed, bare(1), [text], lead)

    def _pieces(self, text: str) -> list[str]:
        """Return rendered text in pieces, cut where that does not change its tokens.

        It is cut before each occurrence of one added token. This token is chosen once, as the most frequent one in the
        first text that has one several times. The text is also cut at the boundaries that a Program writes between
        separately tokenized texts.
        """
        parts = text.split(BOUNDARY) if self.template.as_received else [text]
        if not self._text_cut and self._cuts:
            best = max(self._cuts, key=text.count)
            self._text_cut = best if text.count(best) > 1 else ""
        cut, pieces = self._text_cut, []
        for part in parts:
            first, *rest = part.split(cut) if cut else [part]
            pieces += [first] if first or not rest else []
            pieces += [cut + one for one in rest]
        return pieces


class Compiled:
    """The compiled plans of one chat template, by shape of conversation (everything but its texts). Thread safe."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        cuts: Iterable[str],
        why_not: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.why_not = why_not  # why no plans are compiled, or ""
        # By shape: its plans; how many requests no plan fitted since the last was compiled; the bytes of the entry. A
        # plan fits if the conversation's texts give the expected answers to its questions.
        self._known: Generations[Any, tuple[tuple[Plan, ...], int, int]] = Generations(PLANS_BYTES, _size)
        self._lock = threading.Lock()
        if why_not:
            return
        try:
            self._compiler = Compiler(source, special_tokens, cuts, clock or Clock())
        except Exception as error:  # plain Jinja will render it, or raise the error
            self.why_not = f"{type(error).__name__}: {error}"

    def plans(self, shape: Any) -> Sequence[Plan]:
        """Return the compiled plans of a shape, one for each set of answers to the template's questions seen so far."""
        found = self._known.get(shape)
        return () if found is None else found[0]

    def give_up(self, why: str) -> None:
        """Drop all plans and compile no more; `why`: the reason, for reports."""
        self.why_not = why
        self._known.clear()

    def learn(
        self,
        shape: Any,
        conversation: list[dict[str, Any]],
        slots: Sequence[Any],
        tools: Any,
        variables: dict[str, Any],
    ) -> None:
        """Count a request that no plan fitted, and compile a plan at every fifth such request of the same shape.

        `shape`: everything about the request but its texts; `slots`: the texts of the conversation, in the order of
        `shape.describe`. No plan is compiled for a shape that has six already.
        """
        size = bytes_of(shape) + _ENTRY_BYTES
        if size > _LARGEST_SHAPE:
            return
        with self._lock:
            plans, seen, _ = self._known.get(shape) or ((), 0, 0)
            if self.why_not or len(plans) >= _MAX_WAYS:
                return
            seen += 1
            if seen == _PATIENCE:
                try:
                    plan = self._compiler.plan(shape, conversation, slots, tools, variables)
                except Exception:  # Untraceable, or a refusal that plain Jinja raises again
                    plan = _NEVER
                seen, plans = 0, (*plans, plan if plan.size <= PLANS_BYTES // 32 else _NEVER)
            self._known.put(shape, (plans, seen, size + sum(one.size for one in plans)))


# Takes the place of a plan that can't be compiled, and fits no conversation.
_NEVER = Plan([], [("bool", ("",), (), True)])
# Possible continuations of a conversation. It is rendered with each of them, and the common beginning of the texts is
# taken not to depend on the messages that follow.
_TAILS: tuple[list[dict[str, Any]], ...] = (
    [],
    [{"role": "user", "content": "a"}],
    [{"role": "assistant", "content": "b"}],
    [{"role": "tool", "content": "c", "tool_call_id": "d"}],
)
_FIRST = ("system", "developer")
_LATE_TAILS = (*_TAILS, *([{"role": role, "content": "e"}] for role in _FIRST))
# vLLM's defaults for a chat request.
DEFAULTS: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts.

    Bisection is used, because comparing character by character took 10 ms for 100 kB.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def _size(shape: Any, entry: tuple[Any, ...]) -> int:
    """Return the size of a cache entry in bytes: its last item, stored there because computing it takes long."""
    return entry[-1]


def _weigh(chat: Chat, texts: Sequence[Any] = ()) -> None:
    """Raise TakesLong on the event loop if rendering a conversation would take too long there.

    `texts`: the texts or messages of the conversation, of which only the number is used.
    """
    if event_loop.holds and (len(texts) > _BRIEF_TEXTS or more_values(chat.body, _BRIEF_VALUES)):
        raise TakesLong


def _dumped(tools: Any, variables: Any) -> bytes:
    try:
        extra = orjson.dumps((tools, variables))
    except TypeError:  # numbers as `parse_exactly` gives them
        extra = json.dumps((tools, variables)).encode()
    else:
        if _EXPONENT.search(extra):
            require_exact([tools, variables])
    return extra if len(extra) <= _SHORT else sha256(extra).digest()


def _digest(given: Any) -> bytes | None:
    """Return a digest of these values as a cache key, or None if a number among them may have been rounded."""
    try:
        dumped = orjson.dumps(given)
    except TypeError:  # numbers as `parse_exactly` gives them, half a surrogate pair
        dumped = json.dumps(given).encode()
    return None if _EXPONENT.search(dumped) else sha256(dumped).digest()


def _plain(messages: Any) -> tuple[tuple[str, ...], list[str]] | None:
    """Return the roles and the contents of messages if each consists of a known role and a text only, else None.

    This takes 0.12 us for each message. The code is a loop because `map`, `zip` and sets would need 1.6 times as many
    instructions for 16 messages, and 2.6 times as many for two.
    """
    if type(messages) is not list or not messages:
        return None
    roles = []
    contents = []
    try:
        for message in messages:
            role, content = message["role"], message["content"]
            if (
                type(content) is not str
                or len(message) != 2
                or role not in PLAIN_ROLES
                or (role == "system" and not is_plain(content))
            ):
                return None
            roles.append(role)
            contents.append(content)
    except (KeyError, TypeError):  # no object, a missing key, or an unhashable role
        return None
    return tuple(roles), contents
