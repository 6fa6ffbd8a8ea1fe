"""The translation of Responses (OpenAI) and Messages (Anthropic) bodies to the chat body that vLLM makes of them."""

from typing import Any

from .tokens import ATTRIBUTION, RequestError, listed

UNFINISHED = ("in_progress", "incomplete")


def responses(body: dict) -> dict:
    """Return the chat body that vLLM makes of a Responses body.

    If the last input item is an unfinished answer, the chat continues this answer.
    """
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError("`input` must be text or a list of items", param="input")
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    for item in items:
        _add_item(item, messages)
    go_on = bool(items) and items[-1].get("status") in UNFINISHED and items[-1].get("type") in (None, "message")
    tools = [tool for tool in listed(body.get("tools"), "tools") if tool.get("type") == "function"]
    return {
        "messages": messages,
        "tools": _functions(tools),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": not go_on,
        "continue_final_message": go_on,
        "add_special_tokens": True,
        "truncate_prompt_tokens": None if body.get("truncation", "disabled") == "disabled" else -1,
    }


def _add_item(item: dict, messages: list[dict]) -> None:
    """Add one input item of a Responses body to the chat's messages.

    Consecutive text, tool calls and reasoning of the assistant become one message.
    """
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _of_assistant(messages, "content").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        thought = _first_text(item.get("content")) or _first_text(item.get("summary"))
        _of_assistant(messages, "reasoning", thought)
    elif item.get("role") == "assistant":
        _of_assistant(messages, "content", _first_text(item.get("content")))
    else:
        messages.append({"role": item.get("role"), "content": item.get("content")})


def _of_assistant(messages: list[dict], field: str, text: str | None = None) -> dict:
    """Return the assistant's message at the end of `messages`, with `text` stored in its `field` (None: unchanged).

    A new message is added if the last one is not the assistant's, or if its `field` has a text already.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (text is not None and last.get(field) is not None):
        last = {"role": "assistant"}
        messages.append(last)
    if text is not None:
        last[field] = text
    return last


def _first_text(content: Any) -> str:
    if isinstance(content, list) and content:
        content = content[0].get("text", "") if isinstance(content[0], dict) else content[0]
    return content if isinstance(content, str) else ""


def anthropic(body: dict) -> dict:
    """Return the chat body that vLLM makes of a Messages body; tool results become messages of their own."""
    system = body.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    first = [] if isinstance(system, str) else [{"role": "system", "content": system}]
    for message in [*first, *listed(body.get("messages"), "messages")]:
        if not isinstance(message, dict):
            raise RequestError("`messages` must be a list of objects", param="messages")
        if message.get("role") != "system":
            _add_message(message, messages)
        elif texts := _system_texts(message.get("content")):
            messages.append({"role": "system", "content": "".join(texts)})
    tools = [_with_parameters(tool) for tool in listed(body.get("tools"), "tools")]
    return {"messages": messages, "tools": _functions(tools), "chat_template_kwargs": body.get("chat_template_kwargs")}


def _with_parameters(tool: dict) -> dict:
    schema = tool["input_schema"]
    return {**tool, "parameters": {**schema, "type": schema.get("type", "object")}}


def _functions(tools: list[dict]) -> list[dict] | None:
    return [{"type": "function", "function": tool} for tool in tools] or None


def _system_texts(content: Any) -> list[str]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, "system")
    texts = [block["text"] for block in blocks if block.get("type") == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(ATTRIBUTION)]


def _add_message(message: dict, messages: list[dict]) -> None:
    """Add a user's or an assistant's message of a Messages body to the chat's messages.

    Tool results in a user's message become messages of their own, before it.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"`role` must be 'user', 'assistant' or 'system', not {role!r}", param="messages")
    said, calls, thought = [], [], []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, "messages"):
        kind = block.get("type")
        if kind == "text":
            said += [{"type": "text", "text": block["text"]}] if block.get("text") else []
        elif kind == "thinking":
            thought.append(block.get("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            given = block.get("content")
            parts = [{"type": "text", "text": given}] if isinstance(given, str) else listed(given, "messages")
            text = "\n".join(part.get("text", "") for part in parts if part.get("type") == "text")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind != "redacted_thinking":
            raise RequestError(f"this model takes text only, not {kind!r}", param="messages")
    made = {"role": role, "reasoning": "".join(thought) or None, "tool_calls": calls or None, "content": said or None}
    if said or role == "assistant" or isinstance(content, str):
        messages.append(made)
