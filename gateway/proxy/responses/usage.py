"""The token usage that an answer reports in its last bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

from .answers import USAGE, joined

# Paths whose answers never report cached tokens, however the engine was started.
NEVER_TELL_CACHED = frozenset(("/v1/embeddings",))
# The token counts in OpenAI's chats, completions and responses, and Anthropic's messages. No engine counts as far as 19
# digits.
COUNT = re.compile(
    rb'"((?:prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens)"\s*:\s*(\d{1,18})(?!\d)'
)


class Usage(NamedTuple):
    """The token counts that an answer reports, each None if not reported; `prompt` includes the `cached` tokens."""

    prompt: int | None
    completion: int | None
    cached: int | None


NOTHING = Usage(None, None, None)


# A JSON string, which may be cut off at its end.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACE = re.compile(rb"[{}]")
# The members of a usage that `_last_usage` reads, and the most bytes from that usage to the end of its line.
_OPENAI_COUNTS = frozenset(("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"))
_CACHED_OTHERWISE = frozenset(
    ("cache_read_input_tokens", "cache_creation_input_tokens", "prompt_tokens", "input_tokens")
)
LONGEST_REST = 1024
MOST_SEARCHED = 2**17  # last bytes in which usage is searched: if they are all short strings, that takes 3 ms


def _level(bare: bytes) -> int:
    """Return by how much the nesting of JSON objects and arrays grows over these bytes, which contain no strings."""
    return bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")


def read_usage(tail: bytes, depth: int = 1) -> Usage:
    """Return the token counts in the last bytes of an answer, which is a JSON object or a stream.

    Returns `NOTHING` (all counts None) if there are none. `depth`: how many nested JSON objects contain the usage: 1
    for most answers, 2 for events that contain a response.
    """
    if (usage := _last_usage(tail, depth)) is not None:
        return usage
    tail = joined(tail[-MOST_SEARCHED:])
    open_objects, end = 0, len(tail)
    for match in reversed([*USAGE.finditer(tail)]):  # nearly always one
        if tail[match.start() - 1 : match.start()] == b"\\":  # the end of another key
            continue
        open_objects -= 1 + _level(_TEXT.sub(b"", tail[match.end() : end]))
        if open_objects == depth:
            return counts_of(tail, match.end())
        end = match.start()
    return NOTHING


def _last_usage(tail: bytes, depth: int) -> Usage | None:
    """Return the token counts of an answer in OpenAI's format, or None if it does not end soon after its usage.

    Nearly all answers are of this kind. To make sure that the usage is the answer's own, it is parsed with the rest of
    its line as the end of `depth` nested JSON objects. That takes a tenth of the time of the general search in
    `read_usage`.
    """
    match = USAGE.match(tail, at) if (at := tail.rfind(b'"usage"')) >= 0 else None
    if match is None or tail[at - 1 : at] == b"\\":
        return None
    line_end = tail.find(b"\n", match.end())
    rest = tail[at : line_end if line_end >= 0 else len(tail)]
    if len(rest) > LONGEST_REST:
        return None
    try:
        found = orjson.loads(b"{" + rest if depth == 1 else b'{"":' * (depth - 1) + b"{" + rest)
        for _ in range(depth - 1):
            found = found[""]
        usage = found["usage"]
        if not usage.keys() <= _OPENAI_COUNTS:
            return None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # the bytes are not the rest of `depth` objects, or a name occurs twice in them
    details = usage.get("prompt_tokens_details") or {}
    if type(details) is not dict or details.keys() & _CACHED_OTHERWISE:
        return None
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens")
    for count in counts:
        if count is not None and not (type(count) is int and 0 <= count < 10**18):
            return None
    return Usage(*counts)


# `UsageSearch` applies these patterns to a read in which escapes are replaced, and which may end within a string.
# `_PLAIN_TEXT`: a string that is not the key of a usage. `_CUT_KEY`: that key at the end of the read. They have no
# groups, since a replacement with groups takes ten times as long.
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_PLAIN_TEXT = re.compile(rb'(?<!"usage)(?!%b)"[^"]*+"?' % USAGE.pattern)
_CUT_KEY = re.compile(rb'"usage"\s{0,8}(?::\s{0,8})?\Z')
# The most bytes kept of a usage, which may have counts for each turn of a response, and the most bytes of its key.
USAGE_BYTES, USAGE_KEY_BYTES = 4096, 25


def _cut_text(plain: bytes) -> bytes:
    """Return the unfinished string or key at the end of a read, or b"" if there is none.

    A long string is shortened to what is needed to parse the next read.
    """
    if plain.count(b'"') % 2:
        text = plain[plain.rfind(b'"') :]
        return text if len(text) <= USAGE_KEY_BYTES else b'"' + text[-1:].replace(b'"', b"")
    cut = _CUT_KEY.search(plain, max(0, len(plain) - USAGE_KEY_BYTES))
    return cut[0] if cut is not None else b""


class UsageSearch:
    """A search for the usage of an answer that comes in several reads.

    The answer may repeat the client's own text after its usage. That text may also contain a member `usage`, but deeper
    inside the JSON. So the search keeps the usage that stands in the fewest objects. It counts how many objects have
    ended since, to tell in how many that was.
    """

    __slots__ = ("_rest", "_level", "_found_at", "_usage")

    def __init__(self) -> None:
        self._usage: bytes | None = None
        self._rest = b""
        self._level = self._found_at = 0

    def feed(self, data: bytes) -> None:
        """Add the next read of the answer; the first one must contain a usage, and may begin anywhere before it."""
        if self._usage is not None and len(self._usage) < USAGE_BYTES:
            self._usage += data[: USAGE_BYTES - len(self._usage)]
        data = self._rest + joined(data)
        if self._usage is None:
            data = data[USAGE.search(data).start() :]  # type: ignore[union-attr]
        plain = _ESCAPE.sub(b"__", data) if b"\\" in data else data
        self._rest = _cut_text(plain)
        pieces = USAGE.split(_PLAIN_TEXT.sub(b"", plain))
        self._level += _level(pieces[0])
        for match, behind in zip(USAGE.finditer(plain), pieces[1:], strict=False):
            if self._usage is None or self._level <= self._found_at:
                self._found_at, self._usage = self._level, data[match.end() : match.end() + USAGE_BYTES]
            self._level += 1 + _level(behind)

    def usage(self, depth: int) -> Usage:
        """Return the usage of the complete answer, or `NOTHING` if the usage that was found is not the answer's own.

        `depth`: how many nested JSON objects contain the answer's own usage.
        """
        if self._usage is None or self._level != self._found_at - depth:
            return NOTHING
        return counts_of(self._usage)


def counts_of(data: bytes, at: int = 0) -> Usage:
    """Return the token counts of a usage object, which may be cut off. `at`: the offset after its opening brace."""
    end, level = len(data), 1
    for brace in _BRACE.finditer(data, at):
        level += 1 if brace[0] == b"{" else -1
        if not level:
            end = brace.start()
            break
    prompt = completion = cached = None
    besides = 0
    for name, digits in COUNT.findall(data, at, end):
        count = int(digits)
        if name == b"prompt_tokens" or name == b"input_tokens":
            prompt = count if prompt is None else prompt
        elif name == b"completion_tokens" or name == b"output_tokens":
            completion = count if completion is None else completion
        else:
            # Anthropic's API, and vLLM's version of it, counts cached tokens separately from input_tokens.
            if name != b"cached_tokens":
                besides += count
            if name != b"cache_creation_input_tokens":
                cached = count if cached is None else cached
    return Usage(prompt if prompt is None else prompt + besides, completion, cached)


def believed(usage: Usage, most_read: int, most_written: int) -> Usage:
    """Return the token counts, with None for impossible ones: above a limit, or more cached than prompt tokens.

    `most_read`, `most_written`: the limits for prompt tokens and for output tokens.
    """
    prompt, completion, cached = usage
    if prompt is not None and prompt > most_read:
        prompt = None
    if completion is not None and completion > most_written:
        completion = None
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return usage if usage == (prompt, completion, cached) else Usage(prompt, completion, cached)
