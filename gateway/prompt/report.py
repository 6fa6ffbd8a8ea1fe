"""The effect of a chat template on the prefix cache, for `hitherto doctor`.

An engine can reuse its KV cache only for the leading tokens that a prompt shares with an earlier one. A template that
rewrites earlier turns (drops old reasoning, moves the system prompt, prints the date) shortens this shared prefix,
whatever the router does. The report also says whether the gateway can compile the template or has to run Jinja, which
determines the CPU time of a request in the gateway.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from .api.openai import Chat, template_variables
from .pipeline import Pipeline
from .render.renderer import Renderer

_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
_LOOK_UP = {"name": "look_up", "description": "Look a word up.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _LOOK_UP}
_CALL = {"id": "call00001", "function": {"arguments": '{"word": "hitherto"}', "name": "look_up"}, "type": "function"}


@dataclass(frozen=True, slots=True)
class Turn:
    """How much of a conversation's first prompt the prompt of its second turn repeats, for one sort of conversation.

    An engine can reuse its KV cache for these `kept` leading tokens.
    """

    what: str  # the sort of conversation: "plain", "with reasoning" or "with tools"
    kept: int  # number of leading tokens that are equal in both prompts
    total: int  # number of tokens of the first turn's prompt

    @property
    def extends(self) -> bool:
        """Whether the second turn's prompt begins with the whole first one."""
        return self.kept == self.total


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The results of rendering test conversations with a chat template."""

    turns: list[Turn]  # one for each sort of conversation that the template does not refuse
    prints_date: bool  # the template prints the date, so prompts change at midnight
    prints_time: bool  # the template prints the time, so some prompts change more often
    refused: str  # why a plain conversation can't be rendered, or ""
    not_compiled: str  # why the template can't be compiled, so that Jinja runs for each request; or ""
    # The number of added tokens before which the gateway may cut a text, to reuse the tokens of the part before; 0:
    # every prompt is tokenized as a whole.
    cuts: int


def template_report(pipeline: Pipeline) -> TemplateReport:
    """Render two turns of three sorts of conversation with the default template, and return what they show."""
    renderer = pipeline.renderers.get("default")
    if renderer is None or pipeline.tokenizer is None:
        return TemplateReport([], False, False, pipeline.template_error or "there is no chat template", "", 0)
    turns, refused = [], ""
    for what, first, second, tools in _probes():
        try:
            before, after = (pipeline.tokenizer.encode(_text(renderer, talk, tools)) for talk in (first, second))
        except Exception as error:  # the template may fail in any way on an unexpected conversation
            if what == "plain":
                refused = error.message if isinstance(error, ApiError) else str(error)
            continue
        turns.append(Turn(what, _common(before, after), len(before) // 4))
    template, cuts = renderer.template, len(pipeline.tokenizer.safe_cuts())
    return TemplateReport(turns, template.prints_date, template.prints_time, refused, renderer.compiled.why_not, cuts)


def _probes() -> list[tuple[str, list[Any], list[Any], list[Any] | None]]:
    system = {"role": "system", "content": "Answer in one sentence."}
    ask, again = ({"role": "user", "content": f"What is {one} and {one}?"} for one in ("two", "three"))
    answer: dict[str, Any] = {"role": "assistant", "content": "Four."}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "up to now"}
    thinking = [system, ask, {**called, "reasoning": "I will look it up."}, result]
    return [
        ("plain", [system, ask], [system, ask, answer, again], None),
        # Templates that drop old reasoning keep it while tools are called and drop it at the user's next message.
        ("with reasoning", thinking, [*thinking, answer, again], [_TOOL]),
        ("with tools", [system, ask], [system, ask, called, result], [_TOOL]),
    ]


def _text(renderer: Renderer, talk: list[Any], tools: list[Any] | None) -> str:
    return renderer.text(Chat(talk, tools, template_variables({}, True, False, None)))


def _common(before: bytes, after: bytes) -> int:
    """Return the number of leading tokens that the prompts of two turns share.

    `before` and `after`: the prompts of the first and of the second turn, as uint32 token ids. The generation prompt at
    the end of `before` is counted too, because `after` also has it, before the assistant's answer.
    """
    pairs = zip(memoryview(before).cast("I"), memoryview(after).cast("I"))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
