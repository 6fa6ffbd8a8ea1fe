"""Jinja chat templates, rendered as the engine renders them.

vLLM passes the conversation to transformers, which runs the model's Jinja template in an immutable sandbox with a
handful of extra names. Here a template gets the same names (checked against vLLM 0.32 with transformers 5.23), and the
sandbox refuses the same operations: access to dunder attributes, and changes to the template's inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from ...errors import bad
from ..api.conversation import MAY_BE_UNLIKE
from ..quirks import NEWEST, VersionQuirks
from .bounds import Bounds, TemplateError
from .clock import Clock
from .content_format import takes_parts

# Marks the end of the message to be continued. If a template strips messages, it strips the blank at the end, too.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

# Seconds for which the reason is reported after a rendering was stopped for taking too much work or memory.
REPORTED_SECONDS = 900.0

# Matches a template's access to one of the keys of MAY_BE_UNLIKE, or to a message as a whole.
_READ = re.compile(
    rf"""[.'"]({"|".join(MAY_BE_UNLIKE)})\b|\b(?:messages?|msg|m)(?:\[[^\]]*\])?\s*(?:\|\s*(?:tojson|items)\b|\.items\b)"""
)


class _Generation(jinja2.ext.Extension):
    """The Jinja tag `{% generation %}...{% endgeneration %}`, which marks assistant text and does not change it."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON without Jinja's HTML escapes, and by default with non-ASCII characters unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# The strftime directives whose result does not change within a day.
_OF_THE_DAY = re.compile(r"%[-_0^#EO]*[aAwdbBhmyYGgVuUWjCxDFeZz%nt]")


def _tells_time(tree: jinja2.nodes.Template) -> bool:
    """Return whether the template may print a part of the time that changes within a day, such as the hour."""
    by_name = sum(one.name == "strftime_now" for one in tree.find_all(jinja2.nodes.Name))
    asked = [one.node for one in tree.find_all(jinja2.nodes.Test) if one.name in ("defined", "undefined")]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Name) and call.node.name == "strftime_now":
            by_name -= 1
            pattern = call.args[0] if call.args else None
            if not isinstance(pattern, jinja2.nodes.Const) or "%" in _OF_THE_DAY.sub("", str(pattern.value)):
                return True
    return by_name > sum(isinstance(one, jinja2.nodes.Name) and one.name == "strftime_now" for one in asked)


@jinja2.pass_context
def _unchanged(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


_DICT_ATTRIBUTES = frozenset(dir(dict))


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The Jinja sandbox with the names that transformers gives to a template."""

    def __init__(self, clock: Clock) -> None:
        # Without `optimized=False` and `finalize` Jinja would compute constant expressions while it compiles, such as
        # 'a' * 10 ** 9.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,
            finalize=_unchanged,
        )
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = clock.strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the value of `obj.attribute` in a template, faster than Jinja does for dicts and loops.

        Nearly all lookups are of an item of a dict or of an attribute of a loop. Jinja's own lookup takes 1.5 us and
        gives the same result: the item, if a dict has no attribute of that name, and the attribute of a loop, if its
        name does not begin with an underscore. A conversation of 30 messages with tools renders in half the time.
        """
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _DICT_ATTRIBUTES:
                return obj[attribute]
        elif kind is jinja2.runtime.LoopContext and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass  # undefined: Jinja's own lookup words the error
        return super().getattr(obj, attribute)


class BoundedSandbox(Bounds, Sandbox):
    """The sandbox in which requests are rendered, with limits on the work and memory that a template may use."""


class ChatTemplate:
    """One Jinja chat template, with the special tokens of the model's tokenizer that it may print."""

    not_compiled = ""  # why the template is not to be compiled into plans (`render.compiler`), or ""
    as_received = False  # whether the template gets a request's messages unchanged
    # Why a rendering was last stopped for taking too much work or memory, and until when that is reported.
    _exceeds = "", 0.0

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        quirks: VersionQuirks = NEWEST,
        clock: Clock | None = None,
    ) -> None:
        """Compile the template. Raises TemplateError if `source` is not valid Jinja, or has over 1,048,576 characters.

        `special_tokens`: texts by name (`bos_token`), for the template to print; `quirks`: how the engine's version
        differs from the newest one; `clock`: the engines' clock.
        """
        self.source = source
        self.clock = clock or Clock()
        self.quirks = quirks
        self.special_tokens = dict(special_tokens)
        self.prints_date = "strftime_now" in source
        self.prints_time = False  # whether it prints, in some conversations, a time that changes within a day
        # vLLM looks for the quoted word, too. In a template without it developer messages become system messages.
        self.knows_developer = '"developer"' in source or "'developer'" in source
        found = {match[1] for match in _READ.finditer(source)}
        self.reads = frozenset(MAY_BE_UNLIKE if None in found else found)
        env = BoundedSandbox(self.clock)
        try:
            self._template = env.from_string(source)
            tree = env.parse(source)
            self.takes_parts = takes_parts(tree, quirks.looks_into_macros, quirks.follows_namespaces)
            self.prints_time = self.prints_date and _tells_time(tree)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is not valid Jinja: {error}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # SyntaxError: too many nested blocks for Python
            raise TemplateError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error

    @property
    def exceeds(self) -> str:
        """Why a rendering of the last 15 minutes was stopped for taking too much work or memory (`bounds`), or ""."""
        reason, until = self._exceeds
        return reason if monotonic() < until else ""

    def render(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        at: datetime | None = None,
    ) -> str:
        """Return the text that the template makes of a conversation.

        `variables`: the template variables, which are `add_generation_prompt`, `continue_final_message`, `documents`
        and what the request's `chat_template_kwargs` sets; they override the special tokens. `at`: the time that is
        printed; None: the present time by the engines' clock. Raises TemplateError, and ApiError for variables that
        exclude each other.
        """
        values = {**self.special_tokens, "documents": None, "add_generation_prompt": False, **variables}
        if at is not None:
            values.setdefault("strftime_now", at.strftime)
        last = None
        if values.pop("continue_final_message", False):
            if values["add_generation_prompt"]:
                raise bad(
                    "'continue_final_message' and 'add_generation_prompt' exclude each other: set one of them to false",
                    "continue_final_message",
                )
            conversation, last = tag_final_message(conversation, self.source)
        values["messages"] = conversation
        values["tools"] = tools
        try:
            text = self._template.render(values)
        except TemplateError as error:
            self._exceeds = str(error), monotonic() + REPORTED_SECONDS
            raise
        except Exception as error:  # templates are programs: they may fail in any way
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return text if last is None else cut_at_tag(text, last)


def tag_final_message(conversation: list[dict[str, Any]], source: str) -> tuple[list[dict[str, Any]], str]:
    """Add a tag to the end of the last message, which the answer is to continue, so that its end can be found again.

    Returns a copy of the conversation with the tag, and the text of the last message without it. `source`: the
    template's source. Raises TemplateError if the last message has no text, or the template reads no content.
    """
    if not conversation or conversation[-1].get("content") is None:
        raise TemplateError("continue_final_message: the final message has no content to continue")
    if "content" not in source:
        raise TemplateError("continue_final_message: the template does not read message content")
    final = dict(conversation[-1])
    content = final["content"]
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
        return [*conversation[:-1], final], content
    parts = list(content)
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], dict) and "text" in parts[i]:
            text = parts[i]["text"]
            parts[i] = {**parts[i], "text": text + _CONTINUE_TAG}
            final["content"] = parts
            return [*conversation[:-1], final], text
    raise TemplateError("continue_final_message: the final message has no text to continue")


def cut_at_tag(rendered: str, final_text: str) -> str:
    """Return a rendered conversation up to the tag that `tag_final_message` put at the last message's end.

    The tag ends with a blank. If this blank is missing in the rendered text, the template strips messages. It would
    then have stripped the blanks at the end of the untagged message as well, so these are removed here. `final_text`:
    the message's text without the tag. Raises TemplateError if the template drops the message.
    """
    bare = _CONTINUE_TAG.strip()
    at = rendered.rfind(bare)
    if at < 0 or final_text.strip() not in rendered:
        raise TemplateError("continue_final_message: the template drops the final message")
    if rendered[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return rendered[:at]
    return rendered[:at].rstrip()
