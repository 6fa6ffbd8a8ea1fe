"""What vLLM's answers look like whose computation was aborted (`/pause`, `/abort_requests`), read in the sources of
0.28 and 0.32.

Chat and completions have the finish reason "abort". `/v1/messages` knows no such stop reason: a stream says null where
every other end has a reason, a whole answer leaves the field out. `/v1/responses` says "cancelled" for models with
Harmony's format (gpt-oss), and "completed" for all others, which nothing tells from an answer that is complete.

An engine that was asked to stop aborts what it has, unless it is given time for that (`--shutdown-timeout`). What it is
newly sent it aborts too, or answers with 500 and Python's own words for an executor that takes no work any more (0.32).
Once its core has ended, and its server not yet, it says so in words of its own (0.28 to 0.33).
"""

import re
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import orjson

from replicas.engines.dialect import ANY_PATH, ERROR

_STREAMED_MESSAGE = b'data: {"type":"message_delta","delta":{"stop_reason":null'
# The end of a whole message, where `stop_reason` stands between these two otherwise. Anchored, since a tool's input may
# hold any JSON.
_WHOLE_MESSAGE = re.compile(rb'"model":"(?:[^"\\]|\\.)*","usage":\{[^{}]*\}\}\s*\Z')
# Anchored, since a model may write anything.
_STOPPING = re.compile(
    rb'\{(?:"type":"error",)?"error":\{[^{}]*?"message":"(?:cannot schedule new futures after shutdown"'
    rb"|EngineCore encountered an issue\.)"
)
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
    ERROR: _STOPPING.match,
    "/v1/messages": _is_aborted_message,
    "/v1/responses": _is_cancelled,
    ANY_PATH: methodcaller("count", b'"finish_reason":"abort"'),
}
