"""What the engine says at the end of a response: read from its last bytes, without parsing the body.

A quote inside generated text is escaped in JSON (`\\"`), so a key found with plain quotes around it is
a key of the response itself. Absent or unknown: None, never a guess.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# OpenAI chat, completions and responses; Anthropic messages. No engine counts as far as 19 digits.
COUNT = re.compile(rb'"((?:prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens)"\s*:\s*(\d{1,18})(?!\d)')


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
    prompt = completion = cached = None
    besides = 0
    for name, digits in COUNT.findall(tail, at):
        count = int(digits)
        if name == b"prompt_tokens" or name == b"input_tokens":
            prompt = count if prompt is None else prompt
        elif name == b"completion_tokens" or name == b"output_tokens":
            completion = count if completion is None else completion
        else:
            if name != b"cached_tokens":  # Anthropic's input_tokens are what is neither of these, and vLLM's Messages keep to that
                besides += count
            if name != b"cache_creation_input_tokens":
                cached = count if cached is None else cached
    return Usage(prompt if prompt is None else prompt + besides, completion, cached)
