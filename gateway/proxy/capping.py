"""A limit on an answer's length, written into the request's body.

It stands last in the object, since engines take the last of several members of one name: the body is not parsed again,
and a body of many MiB costs one copy. `min_tokens` beyond the limit would be refused, so none is asked for then.
"""

from __future__ import annotations

from ..prompt.prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# What limits an answer of each API. A chat may have either, and vLLM takes the first where both are there.
LIMITS = {
    CHAT: (b"max_completion_tokens", b"max_tokens"),
    COMPLETIONS: (b"max_tokens",),
    RESPONSES: (b"max_output_tokens",),
    MESSAGES: (b"max_tokens",),
}
LEAST = b'"min_tokens"'


def capped(body: bytes, path: str, tokens: int) -> bytes:
    """The body, a JSON object posted to one of the paths of `LIMITS`, with this limit in the place of its own."""
    members = dict.fromkeys(LIMITS[path], tokens)
    return with_members(body, {**members, b"min_tokens": 0} if LEAST in body else members)


def with_members(body: bytes, members: dict[bytes, int]) -> bytes:
    """The JSON object with these members, in the place of its own of these names."""
    end = body.rindex(b"}")
    comma = b"," if b":" in body else b""
    return b"".join((body[:end], comma, b",".join([b'"%b":%d' % one for one in members.items()]), b"}"))
