"""What the bytes of an answer say about it: that it is an error in spite of its status, or that no engine wrote it.

An engine that streams sends its 200 before it computes anything, so a failure after that is an event in the stream: vLLM
0.32 answers a prompt with a token id outside the vocabulary, or the death of its core, with 200, one error event and
`[DONE]`. Such an answer takes a millisecond and must not be taken for a fast one.

Nothing here is called per chunk. The first bytes are looked at when they come, the last ones when the answer is over and
its usage is read. A line break inside generated text is escaped in JSON, so a line that begins like an event is one.
"""

from __future__ import annotations

import re

import orjson

# Chunk framing passes through untouched, so the size of the first chunk may come before the body.
_BEGINS = re.compile(rb"(?:[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?(?:\r\n|\r?\Z))?\s*")
# How an event of a stream begins: `data`, `event`, `id`, `retry`, or `:`, a comment that keeps the connection alive.
_EVENT_BYTES = b"deir:"
# OpenAI's chat and completions (`{"error": ...}`; before vLLM 0.10 `{"object": "error", ...}`), Responses, and Messages.
_ERROR_OBJECT = rb'\{\s*"(?:error"\s*:\s*[{"]|(?:object|type)"\s*:\s*"(?:error|response\.failed)")'
_ERROR_EVENT = re.compile(rb"\n(?:event: ?(?:error|response\.failed)\s|data: ?" + _ERROR_OBJECT + rb")")
_ERROR_BODY = re.compile(_BEGINS.pattern + _ERROR_OBJECT)
# HTTP's framing between two chunks, which may stand within an event; and what an event with an error holds somewhere.
_BETWEEN_CHUNKS = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?\r\n")
_ERROR_MEMBER = re.compile(rb'"error"\s*:\s*[{"]|:\s*"(?:error|response\.failed)"')
LONGEST_ERROR = 65_536  # of one event
MOST_HELD_BACK = 16_384  # bytes of a first event; one that is longer is no error
# What servers answer to whatever they are asked: a list of models, or that they are well. No prompt gets that.
_OTHER_ANSWER = re.compile(
    rb'\{\s*"(?:object"\s*:\s*"list"\s*,\s*"data"\s*:\s*\[\s*\{[^{}\[]{0,400}"object"\s*:\s*"model"|status"\s*:\s*"\w{1,20}"\s*\})'
)
_DONE = b"data: [DONE]"
# What some event of a stream of each API has, the last ones included. A quote inside generated text is escaped.
_EVENT_MARKS = re.compile(rb'"(?:choices|usage|delta|finish_reason)"\s*:|"(?:response|message|content_block)[._\w]*"')
_SHORT_TAIL = 256  # the last bytes of an answer that say nothing only for being cut from the middle of a long event are fewer
_CODE = re.compile(rb'"(?:code|status)"\s*:\s*"?([45]\d\d)\b')
_CLIENTS_FAULT = re.compile(rb'"(?:type|code)"\s*:\s*"\w*(?:bad_?request|invalid|not_?found|unprocessable|too_large|authentication|permission|rate_limit)', re.I)

# Events of /v1/responses that come before the first token.
_ANNOUNCEMENTS = (b"event: response.queued", b"event: response.created", b"event: response.in_progress")

# Statuses that a server which is no inference engine gives to a prompt. Others (401, 413, 429, 502) may come from a proxy
# before an engine, in whatever format it has.
FOREIGN_STATUSES = frozenset((200, 301, 302, 303, 307, 308, 404, 405, 501))
# Embeddings can be asked for as raw numbers.
_TYPES = (b"text/event-stream", b"application/json", b"application/octet-stream", b"multipart/")


def foreign_head(status: int, content_type: bytes) -> bool:
    """Whether no engine answers a prompt with this head. Without a content type its body decides."""
    return status in FOREIGN_STATUSES and bool(content_type) and not content_type.startswith(_TYPES)


def foreign_body(data: bytes, content_type: bytes) -> bool:
    """Whether a body that begins like this (b"": the whole body is empty) is no engine's answer to a prompt."""
    at = data.find(b"\n", 0, 12) + 1
    first = data[at : at + 1]  # behind the size of a chunk, if there is one
    if first == b"{":
        return _OTHER_ANSWER.match(data, at) is not None
    if first == b"d" or first == b"e":  # nearly all others there are
        return data.startswith(_DONE, at)  # a stream that ends before it has begun
    if not data or data.startswith(b"0\r\n\r\n"):  # no byte, or the last chunk
        return True
    at = _BEGINS.match(data).end()
    if at == len(data) or content_type.startswith(_TYPES[2:]):
        return False  # nothing of it is there yet, or it is no text
    if not content_type:
        return data[at] == 0x3C  # <, of markup; else nothing says what it should be
    return data[at] != 0x7B and data[at] not in _EVENT_BYTES  # 0x7B: {


def announces(data: bytes) -> bool:
    """Whether so much of a stream tells only that an answer is going to be made. vLLM begins each stream of /v1/responses
    like that, before it computes anything: measured with 0.32 at 21 ms, the first token at 200."""
    last = data.rfind(b"\nevent: ") + 1
    return data.startswith(_ANNOUNCEMENTS, last or _BEGINS.match(data).end())


def incomplete(data: bytes, streams: bool) -> bool:
    """Whether so much of a body does not tell yet what it is: an event whose end is missing, or only the size of a chunk.
    Engines write an event in one piece; a proxy between may not, and an error in two pieces must not pass for a token."""
    if not streams:
        return len(data) < 16 and _BEGINS.match(data).end() == len(data)
    return len(data) < MOST_HELD_BACK and b"\n\n" not in data and b"\r\n\r\n" not in data


def speaks_api(tail: bytes, whole: bool) -> bool:
    """Whether a stream that ends like this has been one of an inference API. `whole`: this is all of it."""
    return _EVENT_MARKS.search(tail) is not None or (not whole and len(tail) < _SHORT_TAIL)


def error_status(data: bytes, streams: bool) -> int:
    """The HTTP status that an error in a 200 amounts to, 0 if there is none. `data`: the first or last bytes of a stream's
    body, or the first ones of another answer's."""
    if not streams:
        return _status(data) if b'rror"' in data[:48] and _ERROR_BODY.match(data) else 0
    if data.count(b"\r\n") != 2 * data.count(b"\n\r\n"):  # some event begins in one chunk and ends in another
        data = _BETWEEN_CHUNKS.sub(b"", data)
    if b"error" not in data:  # a response that failed has an error, too
        return 0
    data = b"\n" + data
    found = _ERROR_EVENT.search(data)
    if found is not None:
        return _status(data[found.start() :])
    return next((_status(line) for line in data.split(b"\n") if _is_error(line)), 0) if _ERROR_MEMBER.search(data) else 0


def _is_error(line: bytes) -> bool:
    """Whether this line of a stream is an event whose object says that it is an error, in whatever order its members are."""
    if not line.startswith(b"data:") or len(line) > LONGEST_ERROR or not _ERROR_MEMBER.search(line):
        return False
    try:
        event = orjson.loads(line[5:])
    except orjson.JSONDecodeError:
        return False
    if not isinstance(event, dict):
        return False
    return bool(event.get("error")) or event.get("object") == "error" or event.get("type") in ("error", "response.failed")


def _status(error: bytes) -> int:
    """By its code, else by its type; an error that tells neither is the engine's."""
    if (code := _CODE.search(error)) is not None:
        return int(code[1])
    return 400 if _CLIENTS_FAULT.search(error) else 500
