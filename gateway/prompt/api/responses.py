"""OpenAI's /v1/responses as a chat, translated to messages as vLLM does before rendering."""

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


def from_responses(request: dict[str, Any], quirks: VersionQuirks = NEWEST) -> Chat:
    """Return the chat of a body of `/v1/responses`, as far as the request itself holds the conversation.

    vLLM adds the tokenizer's special tokens to what the template gives here (for many models a second BOS), unlike in
    chat completions. Raises ApiError or Unroutable.
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
    unfinished = last.get("type", "message") in ("message", "reasoning") and last.get("status") in (
        "in_progress",
        "incomplete",
    )
    reasoning = request.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return Chat(
        messages,
        responses_tools(request.get("tools"), quirks),
        template_variables(request, not unfinished, unfinished, effort),
        special=True,
        by_schema=False,
        unknown=unknown,
        rest=given[begun:] if unknown is not None else (),
    )


def refuse_kept_conversations(request: dict[str, Any]) -> None:
    """Raise Unroutable if the request refers to a conversation that the engine has stored."""
    for key in ("previous_response_id", "conversation", "prompt", "previous_input_messages"):
        if request.get(key):
            raise Unroutable(f"the conversation is kept by the engine ({key})")


def _add_items(messages: list[dict[str, Any]], given: list[dict[str, Any]]) -> tuple[Unknown | None, int]:
    """Add the items to `messages`, and stop at the first whose conversion is not known.

    Returns why conversion stopped and the index of the first item that is not in `messages`, or None and 0 if all are.
    An assistant's turn to which the unknown item may belong is left out as a whole.
    """
    whole = len(messages)  # messages that no further item can change; `of`: the number of their items
    of = 0
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
    """Add one input item; calls, reasoning and text of one assistant turn share a message."""
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
    """Return the tools that the template gets.

    They are functions, the functions in namespaces as `namespace__function`, and `custom` tools as functions that take
    one text. The model sees no other tools.
    """
    if not tools:
        return None
    return function_tools([function for tool in tools_of(tools) for function in _shown(tool, quirks)])


def function_tools(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions as the tools that a template gets."""
    shown = [{"type": "function", "function": function} for function in functions]
    return (tool_schemas(shown) if shown else None) or []


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Return `tools` as a list of objects. Raises ApiError."""
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
