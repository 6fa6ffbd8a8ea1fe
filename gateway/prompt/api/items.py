"""OpenAI's /v1/responses as chat messages for gpt-oss, item by item as vLLM translates it.

The format of gpt-oss has a message for each item.
"""

from __future__ import annotations

from typing import Any

from .conversation import Unknown, Unroutable
from .openai import Chat
from .responses import function_tools, refuse_kept_conversations, tools_of

_TEXTS = frozenset(("text", "input_text", "output_text"))


def from_items(request: dict[str, Any]) -> Chat:
    """Return the chat of a body of `/v1/responses`, as far as the request itself holds the conversation.

    Raises ApiError or Unroutable.
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
            _add(messages, called, item, first=instructions is None and not messages)
        except Unknown as error:
            unknown, rest = error.with_traceback(None), items[i:]
            break
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Unroutable("an input without items")
    reasoning = request.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    tools = tools_of(request.get("tools") or [])
    if any(tool.get("type") != "function" for tool in tools):
        raise Unroutable("a tool that is no function, which the engine refuses or describes by itself")
    variables = {"reasoning_effort": effort} if effort else None
    return Chat(messages, function_tools(tools) or None, variables, unknown=unknown, rest=rest)


def _add(messages: list[dict[str, Any]], called: dict[Any, Any], item: dict[str, Any], first: bool) -> None:
    """Add the messages of one item.

    `called`: names of the functions called so far, by call id; `first`: no instructions or messages precede the item.
    """
    kind, call = item.get("type", "message"), item.get("call_id")
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"))}
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


def _content(content: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(p, dict) and p.get("type") in _TEXTS for p in parts):
        raise Unroutable("a part that is no text")
    return [{"type": "text", "text": part.get("text", "")} for part in parts]
