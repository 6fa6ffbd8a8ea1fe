"""Limits on the number of objects, strings and values in a JSON body, checked before the body is parsed.

A JSON parser keeps all other threads from running until it has built everything that a text describes, and a text of
two-byte lists takes forty times its size in memory. So the structure of a body is counted first, in pieces between
which other threads can run.

orjson's CPU time for a body at one of the limits, on a busy 2-core cloud machine: 20 ms (and 60 MB) for objects and
lists, 85 ms for names of members, 45 ms for strings of 20 bytes (85 ms with escapes), 25 to 45 ms for 500,000 numbers.
Freeing the objects takes another fifth of the time. Ten thousand messages in parts with all their tool calls have some
100,000 objects and 200,000 strings. Token ids that fit the context are always allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

# The limits for one body.
MOST_OBJECTS = 250_000  # objects, lists and names of members together
MOST_STRINGS = 400_000  # strings, both names of members and values
MOST_VALUES = 500_000  # values of lists and objects; one more is allowed for each token of the context length
_PIECE = 256 * 1024
_VALUES = (b",", b"[", b"{")
_BEGIN, _END = (np.frombuffer(brackets, np.uint8) for brackets in (b"[{", b"]}"))


def too_much(text: bytes, context: int) -> bool:
    """Return whether a JSON text holds more objects, strings or values than a body may hold.

    The limits are 250,000 objects, lists and names of members, 400,000 strings, and 500,000 values plus `context`, the
    model's context length in tokens. The text need not be valid JSON.
    """
    if len(text) <= MOST_OBJECTS:
        return False
    # The first count is cheap but includes the contents of strings; prose of less than 10 MB has fewer than 250,000
    # brackets and colons.
    return _exceeds(_bytes_of(text), context) and _exceeds(_outside_strings(text), context)


def more_values(text: bytes, most: int) -> bool:
    """Return whether a short JSON text holds more than about `most` values, counting its commas, `[` and `{`."""
    if sum(map(text.count, _VALUES)) <= most:
        return False
    return sum(sum(map(piece.count, _VALUES)) for piece in _outside_strings(text)) > most


def arguments_too_much(request: dict[str, Any], context: int) -> bool:
    """Return whether the arguments of a request's tool calls together hold more than a JSON body may hold.

    The arguments are JSON texts within strings, which are parsed later, when the conversation is rendered. `context`:
    the model's context length in tokens, which is added to the limit on values.
    """
    return _exceeds((text.encode("utf-8", "replace") for text in arguments_of(request)), context)


def levels(text: bytes) -> int:
    """Return the number of levels to which the lists and objects of a JSON text are nested."""
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
    """Yield the parts of a JSON text that lie outside its strings, piece by piece, and both quotes of each string.

    The text is cut into pieces of 256 KiB, but not between a backslash and the character that it escapes.
    """
    at, inside = 0, 0  # `inside`: 1 if the piece begins within a string, else 0
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2]) + b'"' * (len(parts) - 1)
        inside = (inside + len(parts) - 1) % 2


def arguments_of(request: dict[str, Any]) -> Iterator[str]:
    """Yield the tool-call arguments in a request that are given as JSON text.

    `request`: the parsed body of a /v1/chat/completions or /v1/responses request.
    """
    for key in ("messages", "input"):
        given = request.get(key)
        for item in given if isinstance(given, list) else ():
            calls = item.get("tool_calls") if isinstance(item, dict) else None
            for call in (item, *(calls if isinstance(calls, list) else ())):
                function = call.get("function", call) if isinstance(call, dict) else None
                arguments = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(arguments, str):
                    yield arguments
