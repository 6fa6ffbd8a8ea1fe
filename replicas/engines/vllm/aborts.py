"""What vLLM's answers look like whose computation was aborted (`/pause`, `/abort_requests`), read in the sources of
0.28 and 0.32.

Chat and completions have the finish reason "abort". `/v1/messages` knows no such stop reason: a stream says null where
every other end has a reason, a whole answer leaves the field out. `/v1/responses` says "cancelled" for models with
Harmony's format (gpt-oss), and "completed" for all others, which nothing tells from an answer that is complete.
"""

import re
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import orjson

from replicas.engines.dialect import ANY_PATH

_STREAMED_MESSAGE = b'data: {"type":"message_delta","delta":{"stop_reason":null'
# The end of a whole message, where `stop_reason` stands between these two otherwise. Anchored, since a tool's input may
# hold any JSON.
_WHOLE_MESSAGE = re.compile(rb'"model":"(?:[^"\\]|\\.)*","usage":\{[^{}]*\}\}\s*\Z')
_CANCELLED = b'"status":"cancelled"'


def _is_aborted_message(answer: bytes) -> bool:
    return _STREAMED_MESSAGE in answer or _WHOLE_MESSAGE.search(answer) is not None


def _is_cancelled(answer: bytes) -> bool:
    """False where the answer is not here as a whole."""
    # A client's metadata and tools are in the answer as well, so the words alone show nothing.
    if _CANCELLED not in answer:
        return False
    _, streamed, event = answer.rpartition(b"\ndata: ")
    try:
        told: Any = orjson.loads(event if streamed else answer)
    except ValueError:
        return False
    response = told.get("response") if streamed and isinstance(told, dict) else told
    return isinstance(response, dict) and response.get("status") == "cancelled"


ABORTED: dict[str, Callable[[bytes], object]] = {
    "/v1/messages": _is_aborted_message,
    "/v1/responses": _is_cancelled,
    ANY_PATH: methodcaller("count", b'"finish_reason":"abort"'),
}
