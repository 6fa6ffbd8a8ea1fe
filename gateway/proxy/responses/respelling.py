"""The rewriting of engines' errors into the format of the API that the client called.

If vLLM's own checks refuse a request, it answers with OpenAI's error object, even at Anthropic's paths. Anthropic's
clients find no type and message in such an object.
"""

from __future__ import annotations

import orjson

from ...errors import error_body
from ...http.chunks import unframed
from ..exchange import Attempt, Exchange


def respelled(exchange: Exchange, attempt: Attempt, data: bytes) -> bytes:
    """Return the body of an engine's error in Anthropic's format, and give the attempt's head the new length.

    Returns the body as it is if it has that format already, or cannot be read.

    `data`: the complete body, with its chunked framing.
    """
    head, path = attempt.response_head, exchange.request.path
    message = None if head.get(b"content-encoding") else _message(unframed(data, head))
    if message is None:
        return data
    body = error_body(path, attempt.status, message)
    attempt.rewrite_head(head.with_length(len(body)))
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
