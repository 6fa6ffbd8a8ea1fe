"""OpenAI's Responses and Anthropic's Messages as the chat request that vLLM makes of them."""

import json
from collections.abc import Iterator
from typing import Any

from .tokens import RequestError, listed

# What a model is told of a tool that takes one text (`custom`).
ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def responses(body: dict) -> dict:
    """Instructions, items and flat tools. An unfinished last assistant item is continued."""
    messages: list[dict] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            if not isinstance(item, dict):
                raise RequestError("each input item must be an object", param="input")
            _item(item, messages)
    else:
        raise RequestError("`input` must be text or a list of items", param="input")
    last = given[-1] if isinstance(given, list) and given else {}
    go_on = last.get("type", "message") in ("message", "reasoning") and last.get("status") in (
        "in_progress",
        "incomplete",
    )
    tools = [
        {"type": "function", "function": function}
        for tool in listed(body.get("tools"), "tools")
        for function in _functions(tool)
    ]
    return {
        "messages": messages,
        "tools": tools or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": not go_on,
        "continue_final_message": go_on,
        "add_special_tokens": True,
        "truncate_prompt_tokens": None if body.get("truncation", "disabled") == "disabled" else -1,
    }


def _functions(tool: Any) -> Iterator[dict]:
    """What the model is shown of a tool: functions, those of a namespace under both names, and `custom` tools as
    functions of one text. The others run at the server, which has none of them."""
    if not isinstance(tool, dict):
        return
    name = tool.get("name")
    if tool.get("type") == "function":
        yield {name: tool[name] for name in tool if name != "type"}
    elif tool.get("type") == "namespace":
        for function in listed(tool.get("tools"), "tools"):
            if isinstance(function, dict) and function.get("type") == "function":
                yield {**function, "name": f"{name}__{function.get('name')}"}
    elif tool.get("type") == "custom":
        yield {"name": name, "description": tool.get("description"), "parameters": ONE_TEXT}


def _item(item: dict, messages: list[dict]) -> None:
    """One input item; what an assistant said, called and thought in a row is one message."""
    kind = item.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        name, arguments = item.get("name"), item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input") or ""})
        elif space := item.get("namespace"):
            name = f"{space}__{name}"
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
        if messages and messages[-1].get("role") == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        _assistant(messages, "reasoning", _first_text(item.get("content")) or _first_text(item.get("summary")))
    elif item.get("role") == "assistant":
        _assistant(messages, "content", _first_text(item.get("content")))
    else:
        messages.append({"role": item.get("role"), "content": item.get("content")})


def _assistant(messages: list[dict], field: str, text: str) -> None:
    if messages and messages[-1].get("role") == "assistant" and messages[-1].get(field) is None:
        messages[-1][field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _first_text(content: Any) -> str:
    if isinstance(content, list) and content:
        content = content[0].get("text", "") if isinstance(content[0], dict) else content[0]
    return content if isinstance(content, str) else ""


def anthropic(body: dict) -> dict:
    """System text in front, wherever it stood; tool results as messages of their own."""
    given = body.get("messages")
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise RequestError("`messages` must be a list of objects", param="messages")
    system = [
        text
        for content in (
            body.get("system"),
            *(message.get("content") for message in given if message.get("role") == "system"),
        )
        for text in _system_texts(content)
    ]
    messages = [{"role": "system", "content": "".join(system)}] if system else []
    for message in given:
        if message.get("role") != "system":
            _message(message, messages)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
                "defer_loading": tool.get("defer_loading"),
            },
        }
        for tool in listed(body.get("tools"), "tools")
        if isinstance(tool, dict)
    ]
    choice = body.get("tool_choice")
    return {
        "messages": messages,
        "tools": tools or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "tool_choice": choice.get("type") if isinstance(choice, dict) else None,
    }


def _system_texts(content: Any) -> list[str]:
    """Without the attribution block one client sends, which is never the same twice."""
    if isinstance(content, str):
        return [content] if content else []
    return [
        block["text"]
        for block in listed(content, "system")
        if isinstance(block, dict)
        and block.get("type") == "text"
        and block.get("text")
        and not block["text"].startswith("x-anthropic-billing-header")
    ]


def _message(message: dict, messages: list[dict]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"`role` must be 'user', 'assistant' or 'system', not {role!r}", param="messages")
    made: dict = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    elif isinstance(content, list):
        said, calls, thought = [], [], []
        for block in content:
            _block(block if isinstance(block, dict) else {}, role, said, calls, thought, messages)
        if thought:
            made["reasoning"] = "".join(thought)
        if calls:
            made["tool_calls"] = calls
        if said:
            made["content"] = said[0]["text"] if len(said) == 1 else said
    else:
        raise RequestError("`content` must be text or a list of blocks", param="messages")
    if role != "user" or "content" in made:
        messages.append(made)


def _block(block: dict, role: str, said: list, calls: list, thought: list, messages: list[dict]) -> None:
    kind = block.get("type")
    if kind == "text":
        if block.get("text"):
            said.append({"type": "text", "text": block["text"]})
    elif kind == "thinking":
        if not isinstance(thinking := block.get("thinking") or "", str):
            raise RequestError("`thinking` must be text", param="messages")
        thought.append(thinking)
    elif kind == "tool_use":
        calls.append(
            {
                "id": block.get("id"),
                "type": "function",
                "function": {"name": block.get("name") or "", "arguments": block.get("input") or {}},
            }
        )
    elif kind == "tool_result" and role == "user":
        answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
        messages.append({**answer, "content": _result(block.get("content"))})
        if references := _references(block.get("content")):
            messages.append({**answer, "content": references})
    elif kind == "tool_result":
        said.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    elif kind not in ("redacted_thinking", "tool_reference"):
        raise RequestError(f"this model takes text only, not {kind!r}", param="messages")


def _result(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"
        )
    return content if isinstance(content, str) else ""


def _references(content: Any) -> list[dict]:
    """The tools that a search for tools found."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    names = [part.get("tool_name") or part.get("name") for part in parts if part.get("type") == "tool_reference"]
    return [{"type": "tool_reference", "name": name} for name in names if name]
