"""The conversation format of DeepSeek-V4: the rules of its encoder, as vLLM 0.28 and 0.32 apply them.

The rules of the releases between these two are not known, so Refused is raised for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...quirks import VersionQuirks
from ..program import Message, Program, Refused
from .deepseek import ASSISTANT, BEGIN, DSML, END, NO_THINK, THINK, USER, calls, last_said_by_user, schemas

REMINDER = "<\uff5clatest_reminder\uff5c>"
TASKS = {name: f"<\uff5c{name}\uff5c>" for name in ("action", "query", "authority", "domain", "title", "read_url")}


# The model's instructions on tools and on thinking effort, a part of the format that it was trained on.
def _tools_head(gap: str, block: str) -> str:
    """Return the instructions on tools that come before the tools' schemas.

    `gap`: the text between the mark DSML, which begins each tag, and the tag's name; `block`: the name of the tag
    around a block of tool calls.
    """
    return f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}{gap}{block}>" block like the following:

<{DSML}{gap}{block}>
<{DSML}{gap}invoke name="$TOOL_NAME">
<{DSML}{gap}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}{gap}parameter>
...
</{DSML}{gap}invoke>
<{DSML}{gap}invoke name="$TOOL_NAME2">
...
</{DSML}{gap}invoke>
</{DSML}{gap}{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{NO_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {NO_THINK} with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501


_TOOLS_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_EFFORT = {
    "low": "",
    "high": "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"  # noqa: E501
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n",  # noqa: E501
    "max": "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n"  # noqa: E501
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n",  # noqa: E501
}
_KEPT = frozenset(("user", "system", "tool", "latest_reminder", "direct_search_results"))


class Rules(NamedTuple):
    """The rules in which DeepSeek-V4 and V4.1 differ, and in which vLLM's releases differ for each of them.

    `effort`: returns the text for a value of `reasoning_effort`; may raise Refused.
    `is_answered`: whether the assistant answers the message with this index of a conversation.
    `last_turn`: returns the index of the last message of a conversation that begins a turn, or -1.
    `tools_first`: the tools are written in a message of their own, even if there is a system message.
    `system`: the token before system messages, and before the text of the reasoning effort.
    `block`: the name of the tag around a block of tool calls.
    `gap`: the text between the mark DSML, which begins each tag, and the tag's name.
    """

    effort: Callable[[Any], str]
    is_answered: Callable[[Sequence[Message], int], bool]
    last_turn: Callable[[list[Message]], int]
    tools_first: bool = False
    system: str = ""
    block: str = "tool_calls"
    gap: str = ""


def encode(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], rules: Rules) -> str:
    """Return the text of a conversation by the rules of DeepSeek-V4 or V4.1. Raises Refused.

    `talk`: the messages; `tools`: the tools as a template gets them; `variables`: the template variables; `rules`: the
    rules in which the versions differ.
    """
    asked = [bool(variables[name]) for name in ("thinking", "enable_thinking") if name in variables]
    effort = variables.get("reasoning_effort")
    thinks = effort != "none" and (any(asked) or not asked)
    told = rules.effort(None if effort == "none" else effort)
    talk = [{**one, "content": _flat(one.get("content"))} for one in _with_tools(talk, tools, rules.tools_first)]
    talk = _with_results_of_tools(talk)
    drops = bool(variables.get("drop_thinking", True)) and not any(one.get("tools") for one in talk)
    if thinks and drops:
        talk = _without_old_reasoning(talk, rules.last_turn(talk))
    last = rules.last_turn(talk)
    return BEGIN + "".join(
        _message(talk, i, last, thinks, drops, rules, told if thinks and not i else "") for i in range(len(talk))
    )


def write(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks) -> str:
    """Return the text that engines make of a conversation with DeepSeek-V4. Raises Refused.

    `talk`: the messages; `tools`: the tools as a template gets them; `variables`: the template variables; `quirks`: how
    the engine's version differs from the newest one.
    """
    newer = quirks.deepseek_v4
    if newer is None:
        raise Refused("this release may write DeepSeek-V4's conversations in another way")

    def is_answered(talk: Sequence[Message], i: int) -> bool:
        before_reminder = i + 1 < len(talk) and talk[i + 1]["role"] == "latest_reminder"
        role = talk[i]["role"]
        return role in ("user", "developer") or (newer and role == "system" and not before_reminder)

    return encode(talk, tools, variables, Rules(_effort, is_answered, last_said_by_user, tools_first=not newer))


def _effort(effort: Any) -> str:
    return _EFFORT["max" if effort == "max" else "low" if effort in ("low", "minimal", "medium") else "high"]


def _with_tools(talk: list[Message], tools: list[Message] | None, tools_first: bool) -> list[Message]:
    """Return the messages with the tools added to the first system message.

    With `tools_first`, or if there is no system message, the tools get a new message at the front.
    """
    if not tools:
        return talk
    first = next((i for i, one in enumerate(talk) if one["role"] == "system"), None)
    if first is None or tools_first:
        return [{"role": "system", "tools": tools}, *talk]
    return [*talk[:first], {**talk[first], "tools": tools}, *talk[first + 1 :]]


def _flat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    if any(part["type"] != "text" for part in content):
        raise Refused("a part that is no text")
    return "\n\n".join(part["text"] for part in content)


def _with_results_of_tools(talk: list[Message]) -> list[Message]:
    """Return the messages with consecutive user and tool messages merged into one user message with `parts`.

    The parts keep the order of the messages, except that tool results are put into the order of their calls.
    """
    merged: list[Message] = []
    for message in talk:
        role, last = message["role"], merged[-1] if merged else {}
        if role == "tool":
            part = (message.get("tool_call_id", ""), f"<tool_result>{message.get('content', '')}</tool_result>")
        elif role == "user":
            part = (None, message["content"])
        else:
            merged.append(message)
            continue
        if "parts" in last and (role == "tool" or last.get("task") is None):
            last["parts"].append(part)
        else:
            task = {"task": message["task"]} if role == "user" and "task" in message else {}
            merged.append({"role": "user", "parts": [part], **task})
    _sort_results(merged)
    return merged


def _sort_results(talk: list[Message]) -> None:
    order: dict[Any, int] = {}
    for message in talk:
        if message["role"] == "assistant" and message.get("tool_calls"):
            asked = enumerate(message["tool_calls"])
            order = {id: i for i, call in asked if (id := call.get("id") or call["function"].get("id", ""))}
        elif "parts" in message and order:
            results = iter(
                sorted((one for one in message["parts"] if one[0] is not None), key=lambda one: order.get(one[0], 0))
            )
            message["parts"] = [next(results) if one[0] is not None else one for one in message["parts"]]


def _without_old_reasoning(talk: list[Message], last: int) -> list[Message]:
    """Return the messages without the reasoning in the assistant's messages before the index `last`.

    Other messages before `last` are dropped unless their role is one of `_KEPT`: user, system, tool, latest_reminder or
    direct_search_results.
    """
    return [
        {key: value for key, value in one.items() if key != "reasoning"}
        if i < last and one["role"] == "assistant"
        else one
        for i, one in enumerate(talk)
        if i >= last or one["role"] in _KEPT or one["role"] == "assistant"
    ]


def _message(talk: Sequence[Message], i: int, last: int, thinks: bool, drops: bool, rules: Rules, effort: str) -> str:
    task = talk[i].get("task")
    begins = rules.system if talk[i]["role"] == "system" or effort else ""
    text = begins + effort + _said(talk, i, last, thinks, drops, rules)
    if i + 1 < len(talk) and talk[i + 1]["role"] not in ("assistant", "latest_reminder"):
        return text
    if task is not None:
        if task not in TASKS:
            raise Refused(f"there is no task {task}")
        return text + (f"{ASSISTANT}{THINK if thinks else NO_THINK}" if task == "action" else "") + TASKS[task]
    if rules.is_answered(talk, i):
        return f"{text}{ASSISTANT}{THINK if thinks and (not drops or i >= last) else NO_THINK}"
    return text


def _said(talk: Sequence[Message], i: int, last: int, thinks: bool, drops: bool, rules: Rules) -> str:
    message = talk[i]
    role, content, tools = message["role"], message.get("content"), message.get("tools")
    told = f"\n\n{_tools_head(rules.gap, rules.block)}{schemas(tools)}{_TOOLS_END}" if tools else ""
    if role == "system":
        return (content or "") + told
    if role == "developer":
        if not content:
            raise Refused("a developer's message is empty")
        return USER + content + told
    if role == "user":
        return USER + "\n\n".join(part for _, part in message["parts"])
    if role == "latest_reminder":
        return f"{REMINDER}{content}"
    if role != "assistant":
        raise Refused(f"there is no role {role}")
    asked = message.get("tool_calls")
    thought = thinks and not (i and talk[i - 1].get("task") is not None) and (not drops or i > last)
    before = f"{message.get('reasoning') or ''}{NO_THINK}" if thought else ""
    return f"{before}{content or ''}{calls(asked, rules.block, rules.gap) if asked else ''}{END}"


PROGRAM = Program(
    "DeepSeek-V4",
    "".join((BEGIN, END, USER, ASSISTANT, THINK, NO_THINK, REMINDER, *TASKS.values())),
    takes_parts=lambda quirks: quirks.deepseek_v4 is True,
    write=write,
)
