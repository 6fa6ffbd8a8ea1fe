"""Features of a request body, by which the gateway recognizes bodies that an engine tokenizes differently.

Features are texts like `assistant.tool_calls`, `user: image_url` or `echo=True`. They name the API path, the roles of
the messages with their fields and content part types, the tools, and the fields that may change the rendered prompt.
Once an engine reports another token count for a body than the gateway computed, every body that has all features of
that body is treated as inexact, because it contains whatever caused the difference.
"""

from __future__ import annotations

from typing import Any

import orjson

from .forward import ANYWHERE
from .prompt import COMPLETIONS, Prompt

IDS, TEXT, TOOLS, EFFORT = "ids", "text", "tools=", "effort"
# Features that bodies of all clients have.
PLAIN = frozenset({IDS, TEXT, "system", "developer", "user", "assistant", "tool"})
_MOST, _LONGEST = 64, 60  # features of a body; characters of one
_UNTOLD = ANYWHERE - {"add_special_tokens"} | {
    "input", "logprobs", "max_completion_tokens", "max_output_tokens", "messages", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt", "prompt_cache_key", "safety_identifier", "service_tier", "stop_sequences", "store",
    "tool_choice", "top_logprobs",
}  # fmt: skip


def features(path: str, request: dict[str, Any]) -> frozenset[str]:
    """Return the features of a request body: short texts that name what may change how an engine tokenizes it.

    `path`: the API path; `request`: the parsed body. At most 64 features are returned: the path, then the others in
    alphabetical order, each cut to 60 characters.
    """
    found = {path}
    if any(request.get(name) is not None for name in ("reasoning_effort", "reasoning", "thinking", "output_config")):
        found.add(EFFORT)
    for name in request.keys() - _UNTOLD:
        value = request[name]
        if isinstance(value, dict):
            found.update(f"{name}.{key}={_short(one)}" for key, one in value.items())
        elif value not in (None, [], ""):
            found.add(f"{name}={_short(value)}")
    given = request.get("prompt" if path == COMPLETIONS else "messages" if "messages" in request else "input")
    if path == COMPLETIONS or not isinstance(given, list):
        found.add(IDS if isinstance(given, list) and given and not isinstance(given[0], str) else TEXT)
    else:
        for one in given:
            found.update(_of_message(one))
    kept = sorted(found, key=lambda one: (one != path, one))[:_MOST]
    return frozenset(one[:_LONGEST] for one in kept)


def _of_message(message: Any) -> set[str]:
    if not isinstance(message, dict):
        return {type(message).__name__}
    role, content = str(message.get("role") or message.get("type")), message.get("content")
    others = message.keys() - {"role", "type", "content"}
    found = {role, *(f"{role}.{key}" for key in others if message[key] is not None)}
    if isinstance(content, list):
        found.update(f"{role}: {one.get('type') if isinstance(one, dict) else 'text'}" for one in content)
    return found


def _short(value: Any) -> str:
    """Return a field's value as a feature names it: a number, a boolean or a text of fewer than 16 characters.

    For any other value it is "", so the feature says only that the field is present.
    """
    return str(value) if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) < 16) else ""


def features_of(prompt: Prompt, body: bytes) -> frozenset[str] | None:
    """Return the features of a request whose Prompt was made before, or None if they are not known any more.

    Features are short texts that name what may change how an engine tokenizes a body. `body`: the request body, or b""
    once the gateway has dropped it, which happens when the answer begins. Without the body, the features are taken from
    the Prompt, which keeps them for common bodies only, like plain chats.
    """
    if body:
        return features(prompt.path, orjson.loads(body))
    if prompt.features is not None:
        return frozenset((prompt.path, *prompt.features))
    if prompt.path == COMPLETIONS and prompt.steered is None:
        return frozenset((COMPLETIONS, TEXT if prompt.rendered_chars else IDS))
    return None
