"""Errors of engines, as the API that the client called spells them.

vLLM gives whatever its own checks refuse OpenAI's error object, at Anthropic's paths as well, and Anthropic's clients
find no type and no message in that.
"""

from __future__ import annotations

import orjson

from ..errors import error_body
from .chunks import unchunked
from .exchange import Attempt, Exchange


def respelled(exchange: Exchange, attempt: Attempt, data: bytes) -> bytes:
    """The body of an error at one of Anthropic's paths, all of which is `data`; the attempt's head fits what is
    returned."""
    head, path = attempt.response_head, exchange.request.path
    message = None if head.get(b"content-encoding") else _message(unchunked(data) if head.is_chunked else data)
    if message is None:
        return data
    body = error_body(path, attempt.status, message)
    attempt.response_head = head.with_length(len(body))
    return body


def _message(body: bytes) -> str | None:
    """What an error says; None where it is Anthropic's already, or nobody knows how to read it."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict) or told.get("type") == "error":
        return None
    error = told.get("error") or told
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
