"""What vLLM's answers look like whose computation was aborted (`/pause`, `/abort_requests`), read in the sources of
0.28 and 0.32.

Chat and completions have the finish reason "abort". `/v1/messages` knows no such stop reason: a stream says null where
every other end has a reason, a whole answer leaves the field out. `/v1/responses` says "cancelled" for models with
Harmony's format (gpt-oss), and "completed" for all others, which nothing tells from an answer that is complete.
"""

import re
from typing import Any

import orjson

_FINISH_REASON = b'"finish_reason":"abort"'
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"
_STREAMED_MESSAGE = b'data: {"type":"message_delta","delta":{"stop_reason":null'
# The end of a whole message, where `stop_reason` stands between these two otherwise. Anchored, since a tool's input may
# hold any JSON.
_WHOLE_MESSAGE = re.compile(rb'"model":"(?:[^"\\]|\\.)*","usage":\{[^{}]*\}\}\s*\Z')
_CANCELLED = b'"status":"cancelled"'


def aborted(path: str, answer: bytes) -> bool:
    if path == _MESSAGES:
        return _STREAMED_MESSAGE in answer or _WHOLE_MESSAGE.search(answer) is not None
    if path == _RESPONSES:
        # A client's metadata and tools are in the answer as well, so the words alone show nothing.
        return _CANCELLED in answer and _is_cancelled(answer)
    return answer.find(_FINISH_REASON) >= 0  # `in` raises a TypeError inside and drops it: 0.2 us more


def _is_cancelled(answer: bytes) -> bool:
    """False where the answer is not here as a whole."""
    _, streamed, event = answer.rpartition(b"\ndata: ")
    try:
        told: Any = orjson.loads(event if streamed else answer)
    except ValueError:
        return False
    response = told.get("response") if streamed and isinstance(told, dict) else told
    return isinstance(response, dict) and response.get("status") == "cancelled"
