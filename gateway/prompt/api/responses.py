"""Conversion of OpenAI's /v1/responses bodies to conversations, as vLLM does it before rendering.

`from_responses` is for models with a chat template. `from_items` is for gpt-oss, whose format has a message for each
input item.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...errors import bad
from ..quirks import NEWEST, VersionQuirks
from .conversation import Unknown, Unroutable, tool_schemas
from .openai import Chat, template_variables

# The parameters that the model sees for a `custom` tool, which takes one text.
_ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
_ITEM_TEXTS = frozenset(("text", "input_text", "output_text"))


def from_responses(request: dict[str, Any], quirks: VersionQuirks = NEWEST) -> Chat:
    """Return the conversation of a `/v1/responses` body, for a model with a chat template.

    Unlike in chat completions, vLLM adds the tokenizer's special tokens to the rendered text here, for many models a
    second BOS. If an input item cannot be converted, the chat ends before it, and `Chat.unknown` says why. Raises
    ApiError, or Unroutable if the engine has stored a part of the conversation.
    """
    refuse_kept_conversations(request)
    given = request.get("input")
    messages: list[dict[str, Any]] = []
    unknown: Unknown | None = None
    begun = 0
    instructions = request.get("instructions")
    if instructions:
        if not isinstance(instructions, str):
            raise bad("'instructions' must be a string", "instructions")
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        if not all(isinstance(item, dict) for item in given):
            raise bad("every item of 'input' must be an object", "input")
        unknown, begun = _add_items(messages, given)
    else:
        raise bad("'input' must be a string or a list of items", "input")
    last = given[-1] if isinstance(given, list) and given else {}
    is_turn, states = last.get("type", "message") in ("message", "reasoning"), ("in_progress", "incomplete")
    unfinished = is_turn and last.get("status") in states
    variables = template_variables(request, not unfinished, unfinished, _effort(request))
    tools = responses_tools(request.get("tools"), quirks)
    rest = given[begun:] if unknown is not None else ()
    return Chat(messages, tools, variables, special=True, by_schema=False, unknown=unknown, rest=rest)


def _effort(request: dict[str, Any]) -> Any:
    reasoning = request.get("reasoning")
    return reasoning.get("effort") if isinstance(reasoning, dict) else None


def refuse_kept_conversations(request: dict[str, Any]) -> None:
    """Raise Unroutable if the request refers to a conversation or prompt that the engine has stored."""
    for key in ("previous_response_id", "conversation", "prompt", "previous_input_messages"):
        if request.get(key):
            raise Unroutable(f"the conversation is kept by the engine ({key})")


def _add_items(messages: list[dict[str, Any]], given: list[dict[str, Any]]) -> tuple[Unknown | None, int]:
    """Convert input items to messages, append these to `messages`, and stop at the first item that cannot be converted.

    Returns (None, 0) if all items were converted. Otherwise returns the reason, and the index of the first item that is
    not part of `messages`. All items of an assistant's turn share one message. If the conversion stops at an item that
    may belong to such a turn, the whole turn is left out.
    """
    whole = len(messages)  # the number of messages that no further item can change
    of = 0  # the number of items that these messages were made of
    for i, item in enumerate(given):
        try:
            _add_item(messages, item)
        except Unknown as unknown:
            del messages[whole:]
            return unknown.with_traceback(None), of
        if messages[-1].get("role") != "assistant":
            whole, of = len(messages), i + 1
    return None, 0


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append the message of one input item to `messages`, or merge the item into the last message.

    The tool calls, reasoning and text of one assistant turn share a message. Raises Unroutable.
    """
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item, kind)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise Unroutable("encrypted reasoning")
        told = item.get("content") or item.get("summary") or [{}]
        _join(messages, last, "reasoning", told[0].get("text", ""))
    elif kind == "message" and "role" in item:
        text = _first_text(item.get("content")) if item["role"] == "assistant" else None
        if text is not None:
            _join(messages, last, "content", text)
        else:
            messages.append(item)
    else:
        raise Unroutable(f"input item of type {kind}")


def _call(item: dict[str, Any], kind: str) -> dict[str, Any]:
    name = item.get("name")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments")
        if space := item.get("namespace"):
            name = f"{space}__{name}"
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _join(messages: list[dict[str, Any]], last: dict[str, Any] | None, key: str, text: str) -> None:
    if last is not None and last.get(key) is None:
        last[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _first_text(content: Any) -> str | None:
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def responses_tools(tools: Any, quirks: VersionQuirks) -> list[dict[str, Any]] | None:
    """Return the tools of a `/v1/responses` body as the template gets them.

    The template gets functions, the functions of a namespace under the name `namespace__function`, and each `custom`
    tool as a function that takes one text. Tools of other types are not shown to the model. Raises ApiError or
    Unroutable.
    """
    if not tools:
        return None
    return function_tools([function for tool in tools_of(tools) for function in _shown(tool, quirks)])


def function_tools(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions wrapped as the tools that a template gets; [] if there are none. Raises ApiError."""
    shown = [{"type": "function", "function": function} for function in functions]
    return (tool_schemas(shown) if shown else None) or []


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Return `tools` unchanged. Raises ApiError unless it is a list of objects."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad("'tools' must be a list of objects", "tools")
    return tools


def _shown(tool: dict[str, Any], quirks: VersionQuirks) -> Iterator[dict[str, Any]]:
    kind, name = tool.get("type"), tool.get("name")
    if kind == "function":
        yield tool
    elif not quirks.rules_are_known:
        raise Unroutable(f"what this engine makes of a tool of type {kind} is not known")
    elif kind == "namespace":
        for one in tools_of(tool.get("tools") or []):
            if one.get("type") == "function":
                yield {**one, "name": f"{name}__{one.get('name')}"}
    elif kind == "custom" and quirks.shows_custom_tools is not False:
        if quirks.shows_custom_tools is None:
            raise Unroutable("this release may not show custom tools")
        yield {"name": name, "description": tool.get("description"), "parameters": _ONE_TEXT}


def from_items(request: dict[str, Any]) -> Chat:
    """Return the conversation of a `/v1/responses` body, for gpt-oss.

    If an input item cannot be converted, the chat ends before it, and `Chat.unknown` says why. Raises ApiError, or
    Unroutable if the conversation or its tools cannot be converted at all.
    """
    refuse_kept_conversations(request)
    given, instructions = request.get("input"), request.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unroutable("an input that is neither a text nor a list of items")
    messages: list[dict[str, Any]] = []
    called: dict[Any, Any] = {}
    rest: list[dict[str, Any]] = []
    unknown: Unknown | None = None
    for i, item in enumerate(items):
        try:
            _add_to_items(messages, called, item, first=instructions is None and not messages)
        except Unknown as error:
            unknown, rest = error.with_traceback(None), items[i:]
            break
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Unroutable("an input without items")
    tools = tools_of(request.get("tools") or [])
    if any(tool.get("type") != "function" for tool in tools):
        raise Unroutable("a tool that is no function, which the engine refuses or describes by itself")
    effort = _effort(request)
    variables = {"reasoning_effort": effort} if effort else None
    return Chat(messages, function_tools(tools) or None, variables, unknown=unknown, rest=rest)


def _add_to_items(messages: list[dict[str, Any]], called: dict[Any, Any], item: dict[str, Any], first: bool) -> None:
    """Append the message of one input item to `messages`, if the engine makes one. Raises Unroutable.

    `called`: the names of the functions called so far, by call id; a call is added to it. `first`: neither instructions
    nor messages precede the item.
    """
    kind, call = item.get("type", "message"), item.get("call_id")
    if kind == "message":
        message = {"role": item.get("role"), "content": _item_content(item.get("content"))}
        if not any(part["text"] for part in message["content"]):
            if message["role"] == "assistant":
                raise Unroutable("an empty answer")
            if message["role"] in ("system", "developer") and not first:
                return
        messages.append(message)
    elif kind == "function_call":
        name = item.get("name")
        if called.setdefault(call, name) != name:
            raise Unroutable("two calls of one id")
        messages.append({"role": "assistant", "tool_calls": [{"id": call, "function": item}]})
    elif kind == "function_call_output":
        if call not in called or not isinstance(item.get("output"), str):
            raise Unroutable("an output that is no text, or of no call")
        messages.append({"role": "tool", "tool_call_id": call, "content": item["output"]})
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise Unroutable("encrypted reasoning")
        if content := item.get("content"):
            messages.append({"role": "assistant", "reasoning": "\n".join(part["text"] for part in content)})
    else:
        raise Unroutable(f"input item of type {kind}")


def _item_content(content: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(p, dict) and p.get("type") in _ITEM_TEXTS for p in parts):
        raise Unroutable("a part that is no text")
    return [{"type": "text", "text": part.get("text", "")} for part in parts]
