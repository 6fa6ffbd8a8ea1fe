"""Separation of a conversation into its shape and its texts.

The shape is all that a chat template can see of a conversation except its texts: roles, which keys each message has and
in what order, part types, tool-call structure. The texts (contents, reasoning, tool-call names, ids and arguments) are
called slots: a plan, which is the compiled form of a template for one shape, is filled with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TEXT_KEYS = frozenset({"content", "reasoning", "reasoning_content", "thinking", "tool_call_id", "name", "text", "id"})
# A function from a text (or a tool call's arguments) to its replacement.
Visit = Callable[[Any], Any]


def describe(conversation: list[dict[str, Any]]) -> tuple[tuple, list[Any]]:
    """Return a conversation's shape (all but its texts) and its texts in reading order.

    The shape has one item for each message: the role of a message that has only a role and a text, else nested tuples.
    """
    slots: list[Any] = []
    shape = []
    for message in conversation:
        if len(message) == 2 and type(message.get("content")) is str:
            slots.append(message["content"])
            shape.append(message["role"])
        else:
            shape.append(_structure(message, slots.append))
    return tuple(shape), slots


def put_in(conversation: list[dict[str, Any]], stand_ins: list[Any]) -> list[dict[str, Any]]:
    """Return a copy of the conversation with its texts replaced, in the order in which `describe` found them."""
    following = iter(stand_ins)
    return [_replace(message, lambda _: next(following)) for message in conversation]


def _structure(value: Any, visit: Visit) -> Any:
    """Return nested tuples that describe everything in a value but its texts, and call `visit` with each text."""
    if isinstance(value, dict):
        parts: list[Any] = []
        for key, item in value.items():
            if _is_slot(key, item):
                visit(item)
                parts += (key, str if type(item) is str else dict)  # a type stands for a text; no other value is a type
            else:
                parts += (key, _structure(item, visit))
        return tuple(parts)
    if isinstance(value, list):
        return (list, *[_structure(item, visit) for item in value])
    return (type(value).__name__, repr(value))  # repr tells 0.0 from -0.0


def _replace(value: Any, visit: Visit) -> Any:
    if isinstance(value, dict):
        return {key: visit(item) if _is_slot(key, item) else _replace(item, visit) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, visit) for item in value]
    return value


def _is_slot(key: str, item: Any) -> bool:
    return isinstance(item, str) if key in _TEXT_KEYS else key == "arguments" and isinstance(item, dict)
