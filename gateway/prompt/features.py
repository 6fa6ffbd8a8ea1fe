"""Features of request bodies, by which bodies that an engine tokenizes differently are recognized.

Features are texts like `assistant.tool_calls`, `user: image_url` or `echo=True`: the API of a body, the roles of its
messages with their fields and types of parts, tools, and fields that may change the rendering. Once an engine counted
other tokens for a body than the gateway, every body that has all features of that body counts as inexact, because it
contains whatever caused the difference.
"""

from __future__ import annotations

from typing import Any

import orjson

from .forward import ANYWHERE
from .prompt import COMPLETIONS, Prompt

IDS, TEXT, TOOLS, EFFORT = "ids", "text", "tools=", "effort"
_MOST, _LONGEST = 64, 60  # features of a body; characters of one
_UNTOLD = ANYWHERE - {"add_special_tokens"} | {
    "input", "logprobs", "max_completion_tokens", "max_output_tokens", "messages", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt", "prompt_cache_key", "safety_identifier", "service_tier", "stop_sequences", "store",
    "tool_choice", "top_logprobs",
}  # fmt: skip


def features(path: str, request: dict[str, Any]) -> frozenset[str]:
    """Return the features of this body.

    At most 64 features are kept, in sorted order; the rest is ignored.
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
    """Return a number, a flag or a short text as text, and "" for other values, whose presence alone is a feature."""
    return str(value) if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) < 16) else ""


def features_of(prompt: Prompt, body: bytes) -> frozenset[str] | None:
    """Return the features of a prepared body, or None where they are unknown.

    The body is dropped (b"") once its answer begins; the rest of the prompt gives the features of common bodies only.
    """
    if body:
        return features(prompt.path, orjson.loads(body))
    if prompt.features is not None:
        return frozenset((prompt.path, *prompt.features))
    if prompt.path == COMPLETIONS and prompt.steered is None:
        return frozenset((COMPLETIONS, TEXT if prompt.rendered_chars else IDS))
    return None
