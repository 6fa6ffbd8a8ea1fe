"""Limits on the structure of a JSON body, counted before it is parsed.

A parser keeps all other threads from running until it has built everything that a text describes, and a text of
two-byte lists takes forty times its size. So bodies are counted first, in pieces between which other threads can run.

orjson's CPU time for a body at one of the limits, on a busy 2-core cloud machine: 20 ms (and 60 MB) for objects and
lists, 85 ms for names of members, 45 ms for strings of 20 bytes (85 ms with escapes), 25 to 45 ms for 500,000 numbers;
freeing them takes another fifth. Ten thousand messages in parts with all their tool calls have some 100,000 objects and
200,000 strings. Token ids that fit the context are always allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

MOST_OBJECTS = 250_000  # objects, lists and names of members
MOST_STRINGS = 400_000  # names of members and values
MOST_VALUES = 500_000  # values of lists and objects, besides one per token of the context
_PIECE = 256 * 1024
_VALUES = (b",", b"[", b"{")
_BEGIN, _END = (np.frombuffer(brackets, np.uint8) for brackets in (b"[{", b"]}"))


def too_much(text: bytes, context: int) -> bool:
    """Return whether a JSON text exceeds the limits; an invalid text is counted up to the fault.

    `context`: the model's context length in tokens, which is added to MOST_VALUES.
    """
    if len(text) <= MOST_OBJECTS:
        return False
    # A first, cheap count includes strings; prose has no 250,000 brackets and colons in less than 10 MB.
    return _exceeds(_bytes_of(text), context) and _exceeds(_outside_strings(text), context)


def more_values(text: bytes, most: int) -> bool:
    """Return whether a short JSON text holds more than about `most` values; separators and openings are counted."""
    if sum(map(text.count, _VALUES)) <= most:
        return False
    return sum(sum(map(piece.count, _VALUES)) for piece in _outside_strings(text)) > most


def arguments_too_much(request: dict[str, Any], context: int) -> bool:
    """Return whether the arguments of a conversation's tool calls together exceed the limits.

    Arguments are JSON texts within strings, which are parsed for the template.
    """
    return _exceeds((text.encode("utf-8", "replace") for text in arguments_of(request)), context)


def levels(text: bytes) -> int:
    """Return how deeply a JSON text is nested."""
    deepest = here = 0
    for piece in _outside_strings(text):
        data = np.frombuffer(piece, np.uint8)
        begun = np.isin(data, _BEGIN).astype(np.int64) - np.isin(data, _END)
        if len(begun):
            course = here + np.cumsum(begun)
            deepest, here = max(deepest, int(course.max())), int(course[-1])
    return deepest


def _exceeds(pieces: Iterator[bytes], context: int) -> bool:
    objects = quotes = values = 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        objects += sum(int(np.count_nonzero(data == one)) for one in b"[{:")
        quotes += int(np.count_nonzero(data == ord('"')))
        values += int(np.count_nonzero(data == ord(",")))
        if objects > MOST_OBJECTS or quotes > 2 * MOST_STRINGS or values > MOST_VALUES + context:
            return True
    return False


def _bytes_of(text: bytes) -> Iterator[bytes]:
    view = memoryview(text)
    return (view[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the text outside strings, with the quotes, piece by piece.

    A backslash begins an escape of two bytes, and no piece ends within one.
    """
    at, inside = 0, 0  # `inside`: 1 within a string
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2]) + b'"' * (len(parts) - 1)
        inside = (inside + len(parts) - 1) % 2


def arguments_of(request: dict[str, Any]) -> Iterator[str]:
    """Yield the tool-call arguments that are JSON texts, from /v1/chat/completions and /v1/responses."""
    for key in ("messages", "input"):
        given = request.get(key)
        for item in given if isinstance(given, list) else ():
            calls = item.get("tool_calls") if isinstance(item, dict) else None
            for call in (item, *(calls if isinstance(calls, list) else ())):
                function = call.get("function", call) if isinstance(call, dict) else None
                arguments = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(arguments, str):
                    yield arguments
