"""A body's JSON and its plain fields, taken as generously as vLLM takes them.

vLLM reads JSON as Python does (NaN, lone surrogates, UTF-16) and fields as pydantic does ("true", 1.0, "16"). A
gateway that refused what the engine behind it takes would break clients that work without it.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import orjson

from ...errors import ApiError
from ..offload import TakesLong, event_loop
from .structure import MOST_OBJECTS, MOST_STRINGS, MOST_VALUES, arguments_too_much, too_much

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_WHOLE = re.compile(r"\s*[+-]?\d+(?:_\d+)*(?:\.0*)?\s*", re.ASCII)
# Strings that leave this room: in metrics, logs and other requests they must be text that can be encoded.
_NAMES = ("model", "cache_salt", "session_id", "prompt_cache_key", "user")
_MAX_TOKEN_ID = 0xFFFFFFFF
_BEYOND_64_BITS = 2.0**63
_LEAST, _MOST = -(2**63), 2**64 - 1  # vLLM takes no integer beyond; older ones fail with a 5xx
_BRIEF_IDS = 4096  # ids or prompts: 0.6 us each
_LONGEST_NUMBER = 100  # characters; 64 bits take 20
# What engines read as an integer and the gateway only passes on.
INTEGERS = frozenset({
    "best_of", "dimensions", "logprobs", "max_logprobs", "max_tool_calls", "min_tokens", "priority", "prompt_logprobs", "seed",
    "stream_interval", "thinking_token_budget", "top_k", "top_logprobs", "truncate_prompt_tokens",
})  # fmt: skip


class Rounded(Exception):
    """The request holds a number that may have been an integer of more than 64 bits; `parse_exactly` tells."""


class ExactFloat(float):
    """A number that was written with a point or an exponent, so it is what Python makes of it too."""


def bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def parse(body: bytes, context: int = 0) -> tuple[dict[str, Any], str]:
    """The object that the body holds, and what is unusual about it, or "". Raises ApiError, and TakesLong on the event
    loop if what came before has taken all its time: then nothing is read, since a thread reads it.

    `context`: the most tokens that a prompt may have, as far as is known."""
    event_loop.begin_prompt()
    large = len(body) > MOST_OBJECTS
    if large:
        _bounded(too_much(body, context), context)
    note = ""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            request = _as_python_reads(body, context)
        except (ValueError, RecursionError):
            raise bad(f"the body is not valid JSON: {error}") from None
        note = f"JSON that only Python reads ({error})"
    if type(request) is not dict:
        raise bad("the body must be a JSON object")
    if large:
        _bounded(arguments_too_much(request, context), context)
    if note:
        for name in _NAMES:
            if isinstance(request.get(name), str):
                request[name] = request[name].encode("utf-8", "replace").decode()
    return request, note


def _as_python_reads(body: bytes, context: int) -> Any:
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        _bounded(too_much(body, context), context)
    return json.loads(body)


def _bounded(too_much: bool, context: int) -> None:
    if too_much:
        raise bad(
            f"the body holds more than {MOST_OBJECTS:,} objects, lists and members, {MOST_STRINGS:,} strings or {MOST_VALUES + context:,} values "
            "in all: send fewer of them in a request"
        )


def parse_exactly(body: bytes) -> dict[str, Any]:
    """What `parse` took for usual, as Python reads it: integers of any length, and an ExactFloat for any other number.

    Several times as slow, so only for the few bodies in which `require_exact` finds such a number.
    """
    return json.loads(body, parse_float=ExactFloat)


def boolean(value: Any, key: str) -> bool:
    if type(value) is bool:
        return value
    if isinstance(value, str) and (said := value.lower()) in _TRUE | _FALSE:
        return said in _TRUE
    if type(value) in (int, float) and value in (0, 1):
        return bool(value)
    raise bad(f"'{key}' must be true or false", key)


def integer(value: Any) -> int | None:
    """None when it is none, or has more than 64 bits."""
    if isinstance(value, str):
        value = int(value.partition(".")[0]) if len(value) <= _LONGEST_NUMBER and _WHOLE.fullmatch(value) else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and _LEAST <= value <= _MOST else None


def count(value: Any, key: str) -> int | None:
    """A number of at least 0, or None for null."""
    if value is None or (type(value) is int and 0 <= value <= _MOST):
        return value
    number = integer(value)
    if number is None or number < 0:
        raise bad(f"'{key}' must be an integer of at least 0 and at most 64 bits", key)
    return number


def bounded_integers(request: dict[str, Any]) -> None:
    """Raises ApiError for numbers that no engine's integer can hold; whatever else is wrong with them, the engine
    says."""
    for key in INTEGERS & request.keys():
        value = request[key]
        if isinstance(value, str):
            beyond = len(value) > _LONGEST_NUMBER or (_WHOLE.fullmatch(value) is not None and integer(value) is None)
        else:
            beyond = isinstance(value, int | float) and not _LEAST <= value <= _MOST
        if beyond:
            raise bad(f"'{key}' must be an integer of at most 64 bits", key)


def prompts_of(given: Any, key: str) -> list[str | bytes]:
    """A text, texts, ids or lists of ids -> texts and packed ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if len(given) > _BRIEF_IDS and event_loop.holds:
            raise TakesLong
        if not isinstance(given[0], (str, list)):
            return [packed(given, key)]
        if all(isinstance(one, str) for one in given):
            return given
        if all(isinstance(one, list) and one for one in given):
            return [packed(one, key) for one in given]
    raise bad(f"'{key}' must be a string, a list of strings, a list of token ids or a list of such lists", key)


def packed(ids: list[Any], key: str) -> bytes:
    if not all(type(one) is int for one in ids):
        ids = [integer(one) for one in ids]
    if not all(one is not None and 0 <= one <= _MAX_TOKEN_ID for one in ids):
        raise bad(f"'{key}': token ids must be integers of at least 0", key)
    return array("I", ids).tobytes()


def require_exact(value: Any) -> None:
    """Raise Rounded where a number may have been an integer of more than 64 bits, which orjson makes a float.

    For whatever a template may print: there an integer shows all its digits.
    """
    if isinstance(value, dict):
        for item in value.values():
            require_exact(item)
    elif isinstance(value, list):
        for item in value:
            require_exact(item)
    elif type(value) is float and abs(value) >= _BEYOND_64_BITS:
        raise Rounded
