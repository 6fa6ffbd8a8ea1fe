"""The conversation format of DeepSeek-V4.1: the rules of its encoder, as vLLM 0.32 and 0.33 apply them.

They differ from the rules of V4. A token precedes system messages, which may stand anywhere, reasoning efforts are
numbers, and a blank precedes the names of tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...api.conversation import call_arguments, reasoning_of
from ...quirks import VersionQuirks
from ..program import Message, Program, Refused
from .deepseek import ASSISTANT, BEGIN, END, NO_THINK, THINK, USER
from .deepseek_v4 import REMINDER, TASKS, Rules, encode

_SYSTEM = "<\uff5cSystem\uff5c>"
_EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
# Fields of a message that are refused, because their rules are not implemented here.
_OTHERS = ("content_blocks", "wo_eos", "response_format", "tools")


def write(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks) -> str:
    """Return the text that engines make of a conversation with DeepSeek-V4.1. Raises Refused.

    `talk`: the messages as received; `tools`: the tools as a template gets them; `variables`: the template variables;
    `quirks`: how the engine's version differs from the newest one.
    """
    if quirks.deepseek_v4 is not True:
        raise Refused("this release may not know DeepSeek-V4.1")

    def begins_turn(talk: Sequence[Message], i: int) -> bool:
        results_alone = all(id is not None for id, _ in talk[i].get("parts", [(None, "")]))
        return _is_answered(talk, i) and not (quirks.deepseek_v41_results_continue and results_alone)

    def last_turn(talk: list[Message]) -> int:
        return next((i for i in reversed(range(len(talk))) if begins_turn(talk, i)), -1)

    rules = Rules(_effort, _is_answered, last_turn, system=_SYSTEM, block="calls", gap=" ")
    return encode([_message(one, quirks) for one in talk], tools, variables, rules)


def _is_answered(talk: Sequence[Message], i: int) -> bool:
    return talk[i]["role"] in ("user", "developer") or (talk[i]["role"] == "system" and i > 0)


def _effort(effort: Any) -> str:
    given = "high" if effort is None else effort
    level = _EFFORTS.get(given) if isinstance(given, str) else given
    if type(level) is not int or not 1 <= level <= 100:
        raise Refused(f"there is no effort {effort}")
    return f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def _message(given: Message, quirks: VersionQuirks) -> Message:
    role, content = given.get("role"), given.get("content", "")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refused(f"there is no role {role}")
    if any(given.get(key) for key in _OTHERS):
        raise Refused("a message says more than is followed here")
    if isinstance(content, list):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in content):
            raise Refused("a part that is no text")
        content = "\n\n".join(part.get("text", "") for part in content)
    made: Message = {**given, "content": content, "reasoning": reasoning_of(given)}
    if given.get("tool_calls"):
        made["tool_calls"] = [_call(call, quirks) for call in given["tool_calls"]]
    return made


def _call(call: Mapping[str, Any], quirks: VersionQuirks) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"), quirks)}}


PROGRAM = Program(
    "DeepSeek-V4.1",
    "".join((BEGIN, END, USER, ASSISTANT, _SYSTEM, THINK, NO_THINK, REMINDER, *TASKS.values())),
    takes_parts=lambda quirks: False,
    write=write,
    raw_messages=True,
)
