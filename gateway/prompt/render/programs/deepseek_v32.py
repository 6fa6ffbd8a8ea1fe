"""The conversation format of DeepSeek-V3.2: the rules of its `encoding_dsv32`, as vLLM 0.28 to 0.32 apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...quirks import VersionQuirks
from ..program import Message, Program, Refused
from .deepseek import ASSISTANT, BEGIN, DSML, END, NO_THINK, THINK, USER, calls, last_said_by_user, schemas

# The model's instructions on tools, a part of the format that it was trained on.
_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{THINK}...thinking about results{NO_THINK}
Here are the functions available in JSONSchema format:
<functions>
"""  # noqa: E501


def write(talk: list[Message], tools: list[Message] | None, variables: Mapping[str, Any], quirks: VersionQuirks) -> str:
    """Return the text that engines make of a conversation with DeepSeek-V3.2. Raises Refused.

    `talk`: the messages; `tools`: the tools as a template gets them; `variables`: the template variables; `quirks`: how
    the engine's version differs from the newest one.
    """
    thinks = bool(variables.get("thinking") or variables.get("enable_thinking"))
    if tools:
        talk = [{"role": "system", "tools": tools}, *talk]
    if thinks and talk[-1]["role"] == "user":
        talk = _without_old_reasoning(talk)
    last = last_said_by_user(talk)
    return BEGIN + "".join(_message(talk, i, last, thinks) for i in range(len(talk)))


def _without_old_reasoning(talk: list[Message]) -> list[Message]:
    """Return the messages without the reasoning before the last user or developer message.

    Raises Refused if an earlier message has another role than user, system, tool or assistant. The engine drops such
    messages, and then fails because they are missing.
    """
    last = last_said_by_user(talk)
    if any(one["role"] not in ("user", "system", "tool", "assistant") for one in talk[:last]):
        raise Refused("a message of a role that is dropped")
    return [
        {key: value for key, value in one.items() if key != "reasoning"} if i < last else one
        for i, one in enumerate(talk)
    ]


def _message(talk: Sequence[Message], i: int, last: int, thinks: bool) -> str:
    message = talk[i]
    role, content = message["role"], message.get("content")
    if role == "system":
        return (content or "") + _told_tools(message)
    if role in ("user", "developer"):
        if role == "developer":
            if not content:
                raise Refused("a developer's message is empty")
            content = f"{_told_tools(message)}\n\n# The user's message is: {content}"
        return f"{USER}{content}{ASSISTANT}{THINK if thinks and i == last else NO_THINK}"
    if role == "tool":
        return _result(talk, i, last, thinks)
    if role == "assistant":
        return _said(message, thinks and i > last)
    raise Refused(f"there is no role {role}")


def _told_tools(message: Message) -> str:
    tools = message.get("tools")
    return f"\n\n{_TOOLS}{schemas(tools)}\n</functions>\n" if tools else ""


def _said(message: Message, thought: bool) -> str:
    """Return the text of an assistant's message. Raises Refused.

    `thought`: the message comes after the last user message of a conversation with thinking on, so its reasoning is
    written.
    """
    asked, reasoning = message.get("tool_calls"), message.get("reasoning")
    if thought and not (reasoning or asked):
        raise Refused("an answer without reasoning and tool calls")
    before = f"{reasoning or ''}{NO_THINK}" if thought else ""
    return f"{before}{message.get('content') or ''}{calls(asked, 'function_calls') if asked else ''}{END}"


def _result(talk: Sequence[Message], i: int, last: int, thinks: bool) -> str:
    """Return the text of the tool result with the index `i`. Raises Refused for a result without a call.

    `last`: the index of the last user or developer message; `thinks`: thinking is on. The result of the first call of a
    turn opens the block of results, and that of the last call closes it.
    """
    asked = next((j for j in reversed(range(i)) if talk[j]["role"] != "tool"), -1)
    wanted = len(talk[asked].get("tool_calls") or ()) if asked >= 0 and talk[asked]["role"] == "assistant" else 0
    number = i - asked
    if number > wanted:
        raise Refused("a tool's result that no tool call asked for")
    text = ("\n\n<function_results>" if number == 1 else "") + f"\n<result>{talk[i].get('content')}</result>"
    if number < wanted:
        return text
    return f"{text}\n</function_results>\n\n{THINK if thinks and i >= last else NO_THINK}"


PROGRAM = Program(
    "DeepSeek-V3.2", BEGIN + END + USER + ASSISTANT + THINK + NO_THINK, takes_parts=lambda quirks: False, write=write
)
