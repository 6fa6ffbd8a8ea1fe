"""From a request's JSON to prompts and limits, per endpoint, with vLLM's checks."""
from dataclasses import dataclass, field
from typing import Any

import orjson

from .tokens import RequestError, Tokens


@dataclass(slots=True)
class Asked:
    """What the engine is asked for: each prompt `n` times, at most `max_tokens` (None: as many as fit) each."""
    prompts: list[list[int]]
    max_tokens: int | None
    n: int = 1
    stream: bool = False
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    salt: str | None = None


def parse(raw: bytes) -> dict:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _whole_number(body: dict, name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise RequestError(f"`{name}` must be a whole number of at least {least}, got {value!r}", param=name)
    return value


def _common(body: dict, prompts: list[list[int]], max_tokens: int | None, stop: Any) -> Asked:
    if not all(prompts):
        raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list | None) or not all(isinstance(word, str) for word in stop or ()):
        raise RequestError("`stop` must be a string or a list of strings", param="stop")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    return Asked(prompts, max_tokens, _whole_number(body, "n", 1) or 1, bool(body.get("stream")),
                 [word for word in stop or () if word], bool(body.get("ignore_eos")),
                 _whole_number(body, "min_tokens", 0) or 0, salt)


def chat(body: dict, tokens: Tokens) -> Asked:
    given = body.get("kv_transfer_params")
    ids = given.get("prompt_token_ids") if isinstance(given, dict) else None
    prompt = _ids(ids, "kv_transfer_params") if ids is not None else tokens.chat(body)
    most = _whole_number(body, "max_completion_tokens", 1)
    return _common(body, [prompt], most if most is not None else _whole_number(body, "max_tokens", 1),
                   body.get("stop"))


def completion(body: dict, tokens: Tokens) -> Asked:
    most = _whole_number(body, "max_tokens", 1)
    special = body.get("add_special_tokens")
    prompts = texts(body.get("prompt"), tokens, True if special is None else bool(special))
    return _common(body, prompts, 16 if most is None else most, body.get("stop"))


def texts(prompt: Any, tokens: Tokens, add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
    """A prompt is text, ids, or a list of either."""
    if isinstance(prompt, str):
        return [tokens.encode(prompt, add_special_tokens)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return [tokens.encode(part, add_special_tokens) for part in prompt]
        if all(isinstance(part, list) for part in prompt):
            return [_ids(part, param) for part in prompt]
        return [_ids(prompt, param)]
    raise RequestError(f"`{param}` must be text, a list of texts, a list of token ids or a list of these", param=param)


def _ids(given: Any, param: str) -> list[int]:
    if not isinstance(given, list) or not all(type(id) is int and 0 <= id < 1 << 32 for id in given):
        raise RequestError(f"`{param}` holds something that is not a token id", param=param)
    return given


def embeddings(body: dict, tokens: Tokens) -> Asked:
    if body.get("messages") is not None:
        prompts = [tokens.chat({"add_generation_prompt": False, **body})]
    else:
        prompts = texts(body.get("input"), tokens, body.get("add_special_tokens") is not False, "input")
    return _common({"cache_salt": body.get("cache_salt")}, prompts, 1, None)


def responses(body: dict, tokens: Tokens) -> Asked:
    messages: list[dict] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _response_item(item, messages)
    else:
        raise RequestError("`input` must be text or a list of items", param="input")
    wanted = [{"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}
              for tool in body.get("tools") or () if isinstance(tool, dict) and tool.get("type") == "function"]
    prompt = tokens.chat({"messages": messages, "tools": wanted or None,
                          "chat_template_kwargs": body.get("chat_template_kwargs")})
    return _common(body, [prompt], _whole_number(body, "max_output_tokens", 1), None)


def _response_item(item: Any, messages: list[dict]) -> None:
    """Append an input item as a chat message; consecutive function calls are one assistant message."""
    if not isinstance(item, dict):
        raise RequestError("each input item must be an object", param="input")
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        return
    else:
        messages.append({"role": item.get("role"), "content": item.get("content")})


def anthropic(body: dict, tokens: Tokens) -> Asked:
    messages: list[dict] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _joined(body["system"])})
    if not isinstance(body.get("messages"), list):
        raise RequestError("`messages` must be a list", param="messages")
    for message in body["messages"]:
        _anthropic_message(message, messages)
    wanted = [{"type": "function", "function": {"name": tool.get("name"), "description": tool.get("description"),
                                                "parameters": tool.get("input_schema")}}
              for tool in body.get("tools") or () if isinstance(tool, dict)]
    prompt = tokens.chat({"messages": messages, "tools": wanted or None})
    most = _whole_number(body, "max_tokens", 1)
    if most is None:
        raise RequestError("`max_tokens` is required", param="max_tokens")
    return _common(body, [prompt], most, body.get("stop_sequences"))


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def _anthropic_message(message: Any, messages: list[dict]) -> None:
    if not isinstance(message, dict):
        raise RequestError("each message must be an object", param="messages")
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str) or content is None:
        messages.append({"role": role, "content": content})
        return
    said, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            said.append({"type": "text", "text": block.get("text", "")})
        elif kind == "tool_use":
            calls.append({"id": block.get("id"), "type": "function",
                          "function": {"name": block.get("name"), "arguments": block.get("input") or {}}})
        elif kind == "tool_result":
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"),
                             "content": _joined(block.get("content"))})
        elif kind not in ("thinking", "redacted_thinking"):
            raise RequestError(f"this model takes text only, not {kind!r}", param="messages")
    if said or calls:
        made: dict = {"role": role}
        if calls:
            made["tool_calls"] = calls
        made["content"] = said[0]["text"] if len(said) == 1 else said or None
        messages.append(made)
