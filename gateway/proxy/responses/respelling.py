"""The rewriting of engines' errors into the format of the API that the client called.

vLLM reports requests that its own checks refuse with OpenAI's error object, even at Anthropic's paths, whose clients
find no type and message in that object.
"""

from __future__ import annotations

import orjson

from ...errors import error_body
from ...http.chunks import unchunked
from ..exchange import Attempt, Exchange


def respelled(exchange: Exchange, attempt: Attempt, data: bytes) -> bytes:
    """Return the body of an error at one of Anthropic's paths in Anthropic's format, and adapt the attempt's head.

    `data`: the complete body of the engine's error.
    """
    head, path = attempt.response_head, exchange.request.path
    message = None if head.get(b"content-encoding") else _message(unchunked(data) if head.is_chunked else data)
    if message is None:
        return data
    body = error_body(path, attempt.status, message)
    attempt.response_head = head.with_length(len(body))
    return body


def _message(body: bytes) -> str | None:
    """Return an error's message; None if it is in Anthropic's format already or cannot be read."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict) or told.get("type") == "error":
        return None
    error = told.get("error") or told
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
