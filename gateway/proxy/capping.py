"""A limit on an answer's length, written into the request's body, which is not parsed again for it.

`min_tokens` beyond the limit would be refused, so none is asked for then.
"""

from __future__ import annotations

import re

import orjson

from ..members import with_members
from ..prompt.prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# What limits an answer of each API. A chat may have either; vLLM takes the second where both are there.
LIMITS = {
    CHAT: (b"max_tokens", b"max_completion_tokens"),
    COMPLETIONS: (b"max_tokens",),
    RESPONSES: (b"max_output_tokens",),
    MESSAGES: (b"max_tokens",),
}
LEAST = b"min_tokens"
_ESCAPE = b"\\u00"  # of a letter that needs none
_ESCAPED = re.compile(rb'"(?:[a-z_]|\\u00[0-7][0-9A-Fa-f])+"')


def capped(body: bytes, path: str, tokens: int) -> bytes:
    """The body, a JSON object posted to one of the paths of `LIMITS`, with this limit in the place of its own."""
    named = _named(body)
    limits, limit = LIMITS[path], b"%d" % tokens
    members = dict.fromkeys([name for name in limits if name in named] or limits[:1], limit)
    return with_members(body, {**members, LEAST: b"0"} if LEAST in named else members) or body


def _named(body: bytes) -> set[bytes]:
    """Which of our members' names a body has, here or there."""
    names = {name for limits in LIMITS.values() for name in limits} | {LEAST}
    found = {name for name in names if b'"%b"' % name in body}
    if _ESCAPE in body:
        found |= names & {orjson.loads(one).encode() for one in _ESCAPED.findall(body)}
    return found
