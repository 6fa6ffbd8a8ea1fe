"""The cap on an answer's tokens, written into the request's body without parsing all of it.

Engines refuse a `min_tokens` above the cap, so a `min_tokens` in the body is set to 0.
"""

from __future__ import annotations

import re

import orjson

from ...members import with_members
from ...prompt.prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# The members that limit an answer's tokens, by path. A chat may have either; vLLM uses the second if both are present.
LIMITS = {
    CHAT: (b"max_tokens", b"max_completion_tokens"),
    COMPLETIONS: (b"max_tokens",),
    RESPONSES: (b"max_output_tokens",),
    MESSAGES: (b"max_tokens",),
}
LEAST = b"min_tokens"
_ESCAPE = b"\\u00"  # an escape of an ASCII letter
_ESCAPED = re.compile(rb'"(?:[a-z_]|\\u00[0-7][0-9A-Fa-f])+"')


def capped(body: bytes, path: str, tokens: int) -> bytes:
    """Return a request's JSON body with its answer limited to `tokens` output tokens.

    A `min_tokens` in the body is set to 0. `path`: the path of the request, one of those at which text is generated.
    """
    named = _named(body)
    limits, limit = LIMITS[path], b"%d" % tokens
    members = dict.fromkeys([name for name in limits if name in named] or limits[:1], limit)
    return with_members(body, {**members, LEAST: b"0"} if LEAST in named else members) or body


def _named(body: bytes) -> set[bytes]:
    """Return the names of token limits (such as `max_tokens`, and `min_tokens`) that occur as a string in a JSON body.

    A name counts at any depth, and also if it is spelt with escapes.
    """
    names = {name for limits in LIMITS.values() for name in limits} | {LEAST}
    found = {name for name in names if b'"%b"' % name in body}
    if _ESCAPE in body:
        found |= names & {orjson.loads(one).encode() for one in _ESCAPED.findall(body)}
    return found
