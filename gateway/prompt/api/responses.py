"""OpenAI's /v1/responses as a chat: translated to messages as vLLM does it before rendering."""

from __future__ import annotations

import json
from typing import Any

from ...errors import bad
from .conversation import Unroutable, tool_schemas
from .openai import Chat, template_variables


def from_responses(request: dict[str, Any]) -> Chat:
    """`/v1/responses`, as far as the request itself holds the conversation.

    vLLM adds the tokenizer's special tokens to what the template gives here (for many models a
    second BOS), unlike in chat completions.
    """
    refuse_kept_conversations(request)
    given = request.get("input")
    messages: list[dict[str, Any]] = []
    instructions = request.get("instructions")
    if instructions:
        if not isinstance(instructions, str):
            raise bad("'instructions' must be a string", "instructions")
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            if not isinstance(item, dict):
                raise bad("every item of 'input' must be an object", "input")
            _add_item(messages, item)
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
        responses_tools(request.get("tools")),
        template_variables(request, not unfinished, unfinished, effort),
        special=True,
        by_schema=False,
    )


def refuse_kept_conversations(request: dict[str, Any]) -> None:
    for key in ("previous_response_id", "conversation", "prompt", "previous_input_messages"):
        if request.get(key):
            raise Unroutable(f"the conversation is kept by the engine ({key})")


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """One input item; calls, reasoning and text of one assistant turn join its message."""
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
        if item.get("namespace"):
            raise Unroutable("a tool call in a namespace")
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


def responses_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad("'tools' must be a list of objects", "tools")
    if any(tool.get("type") not in ("function",) for tool in tools):
        raise Unroutable("a tool that is no function")
    return tool_schemas(
        [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
    )
