"""DeepSeek-V4.1: the rules of its encoder, as vLLM 0.32 and 0.33 apply them.

They differ from V4's rules: a token precedes system messages, which may stand anywhere, efforts are numbers, and the
names of tags have blanks in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...api.conversation import call_arguments, reasoning_of
from ...quirks import VersionQuirks
from ..program import Message, Program, Refused
from .deepseek import ASSISTANT, BEGIN, END, NO_THINK, THINK, USER, calls, schemas
from .deepseek_v4 import KEPT, REMINDER, TASKS, TOOLS_END, tools_head, with_results_of_tools

_SYSTEM = "<\uff5cSystem\uff5c>"
_GAP = " "  # between the mark of a tag and its name
_TOOLS = tools_head(_GAP, "calls")
_EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
# Fields of a message that are refused, because their rules are not implemented here.
_OTHERS = ("content_blocks", "wo_eos", "response_format", "tools")


def write(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks) -> str:
    """Return the text that engines make of a conversation. Raises Refused."""
    if quirks.deepseek_v4 is not True:
        raise Refused("this release may not know DeepSeek-V4.1")
    effort = variables.get("reasoning_effort")
    thinks = bool(variables.get("thinking") or variables.get("enable_thinking"))
    if "thinking" not in variables and "enable_thinking" not in variables:
        thinks = True
    if effort == "none":
        thinks, effort = False, None
    told = (
        f"Reasoning Effort: {_level(effort)} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )
    talk = with_results_of_tools(_with_tools([_message(one, quirks) for one in talk], tools))
    drops = bool(variables.get("drop_thinking", True)) and not tools
    if thinks and drops:
        talk = _without_old_reasoning(talk, quirks)
    last = _last_said(talk, quirks)
    text = "".join(_written(talk, i, last, thinks, drops, told if thinks and not i else "") for i in range(len(talk)))
    return BEGIN + text


def _level(effort: Any) -> int:
    if effort is None:
        effort = "high"
    if type(effort) is int and 1 <= effort <= 100:
        return effort
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise Refused(f"there is no effort {effort}")
    return _EFFORTS[effort]


def _message(given: Message, quirks: VersionQuirks) -> Message:
    role = given.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refused(f"there is no role {role}")
    if any(given.get(key) for key in _OTHERS):
        raise Refused("a message says more than is followed here")
    made: Message = {**given, "content": _flat(given.get("content", ""))}
    if "reasoning" in given:
        made["reasoning_content"] = reasoning_of(given)
    if given.get("tool_calls"):
        made["tool_calls"] = [_call(call, quirks) for call in given["tool_calls"]]
    return made


def _call(call: Mapping[str, Any], quirks: VersionQuirks) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": call_arguments(function.get("arguments"), quirks)}}


def _flat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if any(part["type"] not in ("text", "input_text", "output_text") for part in content):
        raise Refused("a part that is no text")
    return "\n\n".join(part.get("text", "") for part in content)


def _with_tools(talk: list[Message], tools: list[Message] | None) -> list[Message]:
    """Add the tools to the first system message, or in a new one at the front."""
    if not tools:
        return talk
    first = next((i for i, one in enumerate(talk) if one["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "content": "", "tools": tools}, *talk]
    return [*talk[:first], {**talk[first], "tools": tools}, *talk[first + 1 :]]


def _last_said(talk: Sequence[Message], quirks: VersionQuirks) -> int:
    """Return the index of the last message that begins a turn, or -1."""

    def begins(i: int) -> bool:
        results_alone = quirks.deepseek_v41_results_continue and all(
            id is not None for id, _ in talk[i].get("parts", [(None, "")])
        )
        return _is_answered(talk, i) and not results_alone

    return next((i for i in reversed(range(len(talk))) if begins(i)), -1)


def _is_answered(talk: Sequence[Message], i: int) -> bool:
    return talk[i]["role"] in ("user", "developer") or (talk[i]["role"] == "system" and i > 0)


def _without_old_reasoning(talk: list[Message], quirks: VersionQuirks) -> list[Message]:
    last, kept = _last_said(talk, quirks), []
    for i, message in enumerate(talk):
        if i >= last or message["role"] in KEPT:
            kept.append(message)
        elif message["role"] == "assistant":
            kept.append({key: value for key, value in message.items() if key != "reasoning_content"})
    return kept


def _written(talk: Sequence[Message], i: int, last: int, thinks: bool, drops: bool, effort: str) -> str:
    leads = _SYSTEM if talk[i]["role"] == "system" or effort else ""
    text = leads + effort + _said(talk, i, last, thinks, drops)
    following = talk[i + 1]["role"] if i + 1 < len(talk) else None
    if following not in (None, "assistant", "latest_reminder"):
        return text
    task = talk[i].get("task")
    if task is not None:
        if task not in TASKS:
            raise Refused(f"there is no task {task}")
        return text + (f"{ASSISTANT}{THINK if thinks else NO_THINK}" if task == "action" else "") + TASKS[task]
    if _is_answered(talk, i):
        return f"{text}{ASSISTANT}{THINK if thinks and (not drops or i >= last) else NO_THINK}"
    return text


def _said(talk: Sequence[Message], i: int, last: int, thinks: bool, drops: bool) -> str:
    message = talk[i]
    role, content, tools = message["role"], message.get("content"), message.get("tools")
    if role == "system":
        told = f"\n\n{tools_head(_GAP, 'calls')}{schemas(tools)}{TOOLS_END}" if tools else ""
        return (content or "") + told
    if role == "developer":
        if not content:
            raise Refused("a developer's message is empty")
        return USER + content
    if role == "user":
        return USER + "\n\n".join(part for _, part in message["parts"])
    asked = message.get("tool_calls")
    thought = thinks and not (i and talk[i - 1].get("task") is not None) and (not drops or i > last)
    before = f"{message.get('reasoning_content') or ''}{NO_THINK}" if thought else ""
    return f"{before}{content or ''}{calls(asked, 'calls', _GAP) if asked else ''}{END}"


PROGRAM = Program(
    "DeepSeek-V4.1",
    "".join((BEGIN, END, USER, ASSISTANT, _SYSTEM, THINK, NO_THINK, REMINDER, *TASKS.values())),
    takes_parts=lambda quirks: False,
    write=write,
    raw_messages=True,
)
