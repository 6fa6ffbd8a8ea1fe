"""What the engine says at the end of a response: read from its last bytes, without parsing the body.

A quote inside generated text is escaped in JSON (`\\"`), so a key found with plain quotes around it is
a key of the response itself. Absent or unknown: None, never a guess.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# OpenAI chat, completions and responses; Anthropic messages.
CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
# Anthropic's input_tokens are what is neither of these, and vLLM's Messages keep to that.
BESIDES = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d+)')


class Usage(NamedTuple):
    """`prompt`: all tokens of the prompt, cached or not."""

    prompt: int | None
    completion: int | None
    cached: int | None


NOTHING = Usage(None, None, None)


def read_usage(tail: bytes) -> Usage:
    """Token counts from the last bytes of a response (JSON or the last events of a stream)."""
    at = tail.rfind(b'"usage"')
    if at < 0:
        return NOTHING
    tail = tail[at:]
    prompt = _number(PROMPT, tail)
    if prompt is not None:
        prompt += sum(map(int, BESIDES.findall(tail)))
    return Usage(prompt, _number(COMPLETION, tail), _number(CACHED, tail))


def _number(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.search(data)
    return int(found[1]) if found else None
