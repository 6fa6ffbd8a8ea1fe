"""Messages to tokens and hashes, by the cheapest way that is exact.

Three ways, each checked against the next: a compiled plan with known prefixes (microseconds),
plain Jinja with known prefixes, plain Jinja and tokenizing everything. The last is what the
engine does; the first 32 requests of the first way and one in 256 after that are done both
ways, and the first difference ends the faster way for good.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import orjson

from ..api.conversation import PLAIN_ROLES, MediaPlacing, conversation, is_plain, messages_of, require_exact
from ..api.openai import Chat
from ..api.structure import more_values
from ..offload import TakesLong, event_loop
from ..tokens.prefixes import Found, Generations, Mismatch, Plan, Prefixes, bare, bytes_of, fits
from ..tokens.tokenizer import Tokenizer
from .compiler import Compiler
from .program import BOUNDARY, ProgramTemplate
from .shape import describe
from .template import ChatTemplate

log = logging.getLogger(__name__)


_FIRST_CHECKED = 32
_CHECK_MASK = 255
# What the event loop may render with Jinja and compile: some 5 ms at worst. Compiling takes 100 us a text, and 2 us and
# more for each value of tools, variables or what else there may be in messages.
_BRIEF_TEXTS = 64
_BRIEF_VALUES = 1500
_SHORT = 256  # bytes of tools and variables that a shape holds as they are; of more, their SHA-256
# Memory for the plans of one template, and for the shapes that wait for theirs: a plan of 40 messages and 20 kB of
# tools takes 40 kB, so some 1,500 of them.
PLANS_BYTES = 64 * 1024 * 1024
SEEN_BYTES = 4 * 1024 * 1024
# A shape that takes more is rendered by Jinja each time: 100 messages take 10 kB.
_LARGEST_SHAPE = 256 * 1024
_MAX_WAYS = 6  # plans per shape: ways its texts answered the template's questions
# Compiling takes as long as 4 to 6 renderings, and most shapes of agents (who called what when)
# come once or twice: wait until rendering has cost as much.
_PATIENCE = 5
_ENTRY_BYTES = 200  # an entry's places in the dictionaries, its pair and its size
_EXPONENT = re.compile(rb"\de\+?\d\d")  # as orjson writes what is rounded: 1.8446744073709552e+19


class Renderer:
    """One chat template with its plans. Thread safe."""

    def __init__(
        self, template: ChatTemplate | ProgramTemplate, tokenizer: Tokenizer, prefixes: Prefixes, cuts: frozenset[str]
    ) -> None:
        self.template = template
        self.compiled = Compiled(template.source, template.special_tokens, cuts, template.not_compiled)
        self._tokenizer = tokenizer
        self._prefixes = prefixes
        printed = template.source + " ".join(template.special_tokens.values())
        self._cuts = sorted(cut for cut in cuts if cut in printed)
        self._text_cut = ""
        self._runs = 0
        self.by_plan = 0  # requests rendered by a plan, of all

    def tokens(self, seed: int, chat: Chat, lead: bytes = b"") -> Found:
        """Raises ApiError, Multimodal, TemplateError, TakesLong on the event loop, or whatever the tokenizer raises.

        `lead` are special tokens put before the text.
        """
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
                self._runs = runs  # last: what is given up on the event loop is checked in a thread
                return result
        _weigh(chat, slots)
        if talk is None:
            talk = self._conversation(chat)
        variables = DEFAULTS if variables is None else variables
        text = self.template.render(talk, tools, variables)
        if not self.compiled.why_not and not variables.get("continue_final_message"):
            self.compiled.learn(shape, talk, slots, tools, variables)
        pieces = self._pieces(text)
        return self._prefixes.tokens(seed, bare(len(pieces)), pieces, lead)

    def text(self, chat: Chat, media: MediaPlacing | None = None) -> str:
        """The rendered text, by plain Jinja. Raises TakesLong on the event loop."""
        _weigh(chat, chat.messages if isinstance(chat.messages, list) else ())
        variables = DEFAULTS if chat.variables is None else chat.variables
        return self.template.render(self._conversation(chat, media), chat.tools, variables)

    def last_cut(self, text: str) -> int:
        """Where the last added token of `text` begins before which it may be cut, see `Tokenizer.safe_cuts`; 0 where
        there is none."""
        return max([0, *(text.rfind(cut) for cut in self._cuts)])

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
            template.reads_thinking,
            media,
        )

    def _by_plan(self, plan: Plan, seed: int, slots: Sequence[Any], lead: bytes) -> Found | None:
        if plan.questions and not fits(plan, slots):
            return None
        try:
            texts = plan.texts(slots)
        except (IndexError, ValueError):  # an item or a substring that this text does not have
            return None
        try:
            result = self._prefixes.tokens(seed, plan, texts, lead)
        except Mismatch:
            return None
        self.by_plan += 1
        return result

    def _checked(self, result: Found, plan: Plan, seed: int, slots: Sequence[Any], chat: Chat, lead: bytes) -> Found:
        """Do it the engine's way too; on a difference that is one give up the plans for good."""
        text = self.text(chat)
        if result[0] == lead + self._tokenizer.encode(text):
            return result
        again = self._by_plan(plan, seed, slots, lead)  # a template that prints the date may just have turned
        if again is not None and again[0] != lead + self._tokenizer.encode(self.text(chat)):
            self.compiled.give_up("a compiled prompt differed from the rendered one")
            log.error("the compiled chat template gave other tokens than Jinja: compiling is off from now on")
        self._prefixes.forget()
        return self._prefixes.tokens(seed, bare(1), [text], lead)

    def _pieces(self, text: str) -> list[str]:
        """Rendered text -> segments, cut before each occurrence of the token that occurs most, and where a program says
        that the engine cuts."""
        if self.template.as_received and BOUNDARY in text:
            return [piece for part in text.split(BOUNDARY) for piece in self._cut(part)]
        return self._cut(text)

    def _cut(self, text: str) -> list[str]:
        cut = self._text_cut
        if not cut:
            if not self._cuts:
                return [text]
            best = max(self._cuts, key=text.count)
            if text.count(best) < 2:
                return [text]
            cut = self._text_cut = best
        first, *rest = text.split(cut)
        pieces = [cut + one for one in rest]
        return [first, *pieces] if first or not pieces else pieces


class Compiled:
    """The plans of one template. Thread safe."""

    def __init__(self, source: str, special_tokens: dict[str, str], cuts: Iterable[str], why_not: str = "") -> None:
        self.why_not = why_not  # set once compiling is given up for good
        # By shape, with their bytes; whether one of a shape's plans applies is for their questions to say.
        self._plans: Generations[Any, tuple[list[Plan], int]] = Generations(PLANS_BYTES, _size)
        # shapes that no plan fitted, how often
        self._seen: Generations[Any, tuple[int, int]] = Generations(SEEN_BYTES, _size)
        self._lock = threading.Lock()
        if why_not:
            return
        try:
            self._compiler = Compiler(source, special_tokens, cuts)
        except Exception as error:  # whatever is wrong, plain Jinja will do or say so
            self.why_not = f"{type(error).__name__}: {error}"

    def plans(self, shape: Any) -> Sequence[Plan]:
        found = self._plans.get(shape)
        return () if found is None else found[0]

    def give_up(self, why: str) -> None:
        self.why_not = why
        self._plans.clear()

    def learn(
        self,
        shape: Any,
        conversation: list[dict[str, Any]],
        slots: Sequence[Any],
        tools: Any,
        variables: dict[str, Any],
    ) -> None:
        """Note a request that no plan fitted; compile its shape if that is worth it."""
        size = bytes_of(shape) + _ENTRY_BYTES
        if size > _LARGEST_SHAPE:
            return
        with self._lock:
            known = self.plans(shape)
            if self.why_not or len(known) >= _MAX_WAYS:
                return
            seen = (self._seen.get(shape) or (0, 0))[0] + 1
            if seen < _PATIENCE:
                self._seen.put(shape, (seen, size))
                return
            self._seen.pop(shape)
            try:
                plan = self._compiler.plan(shape, conversation, slots, tools, variables)
            except Exception:  # Untraceable, or a refusal that plain Jinja will word
                plan = _NEVER
            if plan.size > PLANS_BYTES // 32:
                plan = _NEVER
            plans = [*known, plan]
            self._plans.put(shape, (plans, size + sum(one.size for one in plans)))


# Stands for a way that can't be compiled: it fits nothing.
_NEVER = Plan([], [("bool", ("",), (), True)])
# What vLLM passes when a chat request says nothing.
DEFAULTS: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}


def _size(shape: Any, entry: tuple[object, int]) -> int:
    """Entries have their size with them: it takes long to find."""
    return entry[1]


def _weigh(chat: Chat, texts: Sequence[Any] = ()) -> None:
    """Raises TakesLong where the event loop is not to render this."""
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


def _plain(messages: Any) -> tuple[tuple[str, ...], list[str]] | None:
    """(roles, contents) when every message is nothing but a known role and a text (0.12 us a message).

    A loop, since the same by `map`, `zip` and sets takes 1.6 times the instructions for 16 messages, 2.6 for two.
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
    except (KeyError, TypeError):  # not an object with both, or a role that is a list or an object
        return None
    return tuple(roles), contents
