"""The signs in vLLM's answers that the engine aborted the request (`/pause`, `/abort_requests`, shutdown).

Read in the sources of 0.28 and 0.32. Chat and completions have the finish reason "abort". `/v1/messages` has no such
stop reason: a stream has null where every other end has a reason, and a whole answer lacks the field. `/v1/responses`
says "cancelled" for models with Harmony's format (gpt-oss), and "completed" for all other models, which cannot be
distinguished from a complete answer.

An engine that was asked to stop aborts its requests, unless it is given time for them (`--shutdown-timeout`). It aborts
new requests too, or answers them with 500 and Python's message for an executor that was shut down (0.32). Once its core
has ended, while its server still runs, it answers with a message of its own (0.28 to 0.33).
"""

import re
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import orjson

from replicas.engines.dialect import ANY_PATH, ERROR

_STREAMED_MESSAGE = b'data: {"type":"message_delta","delta":{"stop_reason":null'
# The end of a whole message without `stop_reason`, which otherwise stands between these two fields. The pattern is
# anchored at the end, since a tool's input may hold any JSON.
_WHOLE_MESSAGE = re.compile(rb'"model":"(?:[^"\\]|\\.)*","usage":\{[^{}]*\}\}\s*\Z')
# Matched at the start of the answer only, since a model may write anything.
_STOPPING = re.compile(
    rb'\{(?:"type":"error",)?"error":\{[^{}]*?"message":"(?:cannot schedule new futures after shutdown"'
    rb"|EngineCore encountered an issue\.)"
)
_CANCELLED = b'"status":"cancelled"'


def _is_aborted_message(answer: bytes) -> bool:
    return _STREAMED_MESSAGE in answer or _WHOLE_MESSAGE.search(answer) is not None


def _is_cancelled(answer: bytes) -> bool:
    """Return whether an answer of /v1/responses says "cancelled"; False if the answer cannot be read.

    `answer`: a whole answer, or the end of a stream with its last event.
    """
    # A client's metadata and tools are in the answer as well, so the text alone proves nothing.
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
