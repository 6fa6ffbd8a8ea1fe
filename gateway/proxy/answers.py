"""What an answer's bytes say about it: that it is an error in spite of its status, that no engine wrote it, its usage.

An engine that streams sends its 200 before it computes anything, so a failure after that is an event in the stream:
vLLM 0.32 answers a prompt with a token id outside the vocabulary, or the death of its core, with 200, one error event
and `[DONE]`. Such an answer takes a millisecond and must not be taken for a fast one.

Nothing here is called per chunk. The first bytes are looked at when they come, the last ones when the answer is over
and its usage is read. A line break or a quote inside generated text is escaped in JSON, so a line that begins like an
event is one, and a key with plain quotes around it is a key of the answer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import orjson

# Chunk framing passes through untouched, so the size of the first chunk may come before the body. A stream may begin
# with a byte order mark, which is none of it.
_SIZE = re.compile(rb"(?:0*[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?(?:\r\n|\r?\Z))?")
BOM = b"\xef\xbb\xbf"
_BEGINS = re.compile(_SIZE.pattern + rb"(?:" + BOM + rb")?\s*")
# How an event of a stream begins, the comment that keeps a connection alive included.
_FIELD = re.compile(rb":|data:|event:|id:|retry:")
# What an answer of each API cannot be without: a member of its JSON object, and its stream's first event. Quotes inside
# generated text are escaped, so this is never part of one.
MEMBERS = {
    "chat": b'"choices"',
    "completions": b'"choices"',
    "responses": b'"output"',
    "messages": b'"content"',
    "embeddings": b'"embedding"',
    "tokenize": b'"tokens"',
}
_EVENTS = {
    "chat": b'"choices"',
    "completions": b'"choices"',
    "responses": b'"response.',
    "messages": b'"message_start"',
}
# What else an engine's answer may have instead: those of one API are often given for another's.
_ANY_MEMBER = re.compile(rb'"(?:choices|output|content|embedding|results|tokens|prompt|text|usage)"\s*:')
# OpenAI's chat and completions (`{"error": ...}`; before vLLM 0.10 `{"object": "error", ...}`), Responses and Messages.
_ERROR_OBJECT = rb'\{\s*"(?:error"\s*:\s*[{"]|(?:object|type)"\s*:\s*"(?:error|response\.failed)")'
_ERROR_EVENT = re.compile(
    rb"\n(?:" + BOM + rb")?(?:event: ?(?:error|response\.failed)\s|data: ?" + _ERROR_OBJECT + rb")"
)
_ERROR_BODY = re.compile(_BEGINS.pattern + _ERROR_OBJECT)
# HTTP's framing between two chunks, which may stand within an event; and what an event with an error holds somewhere.
_BETWEEN_CHUNKS = re.compile(rb"\r\n0*[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?\r\n")
_ERROR_MEMBER = re.compile(rb'"error"\s*:\s*[{"]|:\s*"(?:error|response\.failed)"')
ERROR_MARK, ERROR_WITHIN = b'rror"', 48  # what an answer in one piece has near its beginning if it is an error
LONGEST_ERROR = 65_536  # of one event
MOST_HELD_BACK = 2**18  # bytes in which nothing of an answer is; instructions stand in what announces a response
# What servers answer to whatever they are asked: a list of models, or that they are well. No prompt gets that.
_OTHER_ANSWER = re.compile(
    rb'\{\s*"(?:object"\s*:\s*"list"\s*,\s*"data"\s*:\s*\[\s*\{[^{}\[]{0,400}"object"\s*:\s*"model"|status"\s*:\s*"\w{1,20}"\s*\})'
)
_DONE = re.compile(rb"data: ?\[DONE\]")
_ENDS_WITH_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]\s*\Z")
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")  # the end of an event
# What the last event of each API's streams has. That of a response is as long as all it wrote, and ends with its usage,
# which no other event of it has. A quote inside generated text is escaped.
_LAST_EVENTS = {
    "responses": re.compile(rb'"usage"\s*:\s*\{|"type"\s*:\s*"response\.(?:completed|incomplete|failed)"'),
    "messages": re.compile(rb'"type"\s*:\s*"message_stop"'),
}
# An event that says anything: neither the end of a stream nor a ping, and not empty.
_SAYS = re.compile(rb'data:(?!\s*(?:\[DONE\]|\{\s*"type"\s*:\s*"ping"\s*\})|[ \t]*(?:[\r\n]|\Z))')
# What some event of a stream of each API has, the last ones included. A quote inside generated text is escaped.
_EVENT_MARKS = re.compile(rb'"(?:choices|usage|delta|finish_reason)"\s*:|"(?:response|message|content_block)[._\w]*"')
# The last bytes of an answer that say nothing only for being cut from the middle of a long event are fewer
_SHORT_TAIL = 256
_CODE = re.compile(rb'"(?:code|status)"\s*:\s*"?([45]\d\d)\b')
_CLIENTS_FAULT = re.compile(
    rb'"(?:type|code)"\s*:\s*"\w*(?:bad_?request|invalid|not_?found|unprocessable|too_large|authentication|permission|rate_limit)',
    re.I,
)

# Events of /v1/responses and /v1/messages that come before the first token, and chat's chunk that has only a role.
_ANNOUNCEMENTS = (
    b"event: response.queued",
    b"event: response.created",
    b"event: response.in_progress",
    b"event: message_start",
    b"event: ping",
)
_ONLY_ROLE = re.compile(
    rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"\s*(?:,\s*"(?:content|reasoning|reasoning_content|refusal|tool_calls|function_call)"\s*:\s*(?:""|null|\[\s*\])\s*)*\}'
)
# What each event that brings output has once, and no other of its API but chat's that has only a role. Quotes inside
# generated text are escaped, so none of these is part of one.
_OUTPUT_MARKS = {
    "chat": b'"delta":{"',
    "completions": b'"text":',
    "responses": b'.delta"',
    "messages": b'"content_block_delta"',
}
_ANY_EVENT = b"\ndata: {"
_KEEPS_ALIVE = re.compile(rb"(?:^|\n)(?::|event: ping)")

# Statuses that a server which is no inference engine gives to a prompt. Others (401, 413, 429, 502) may come from a
# proxy before an engine, in whatever format it has.
FOREIGN_STATUSES = frozenset((200, 404, 405, 501))
# Embeddings can be asked for as raw numbers.
_TYPES = (b"text/event-stream", b"application/json", b"application/octet-stream", b"multipart/")


def media_type(content_type: bytes) -> str:
    """An answer's type, for a message."""
    return content_type.decode("latin-1")[:100] or "no content type"


def foreign_head(status: int, content_type: bytes) -> bool:
    """Whether no engine answers a prompt with this head. Without a content type its body decides."""
    return 200 < status < 400 or (
        status in FOREIGN_STATUSES and bool(content_type) and not content_type.startswith(_TYPES)
    )


class Sight(Enum):
    """What so much of a body of status 200 shows."""

    ANSWER = "an answer, or an error"
    EARLY = "nothing of an answer yet"
    BLIND = "so much of what is no answer that it is held back no longer"
    FOREIGN = "what no engine writes"
    SILENT = "a stream that ends and has said nothing"


# `bytes in bytes` first takes the left side for a number, and drops the TypeError that this raises: 2,000 instructions
# that `find` does without.


def begins(label: str, data: bytes, streams: bool) -> bool:
    """Whether an answer has begun. False: `look` tells why not. Called for each answer: one search for nearly all."""
    if not streams:
        return data.find(MEMBERS.get(label, b"")) >= 0
    if data.find(_EVENTS.get(label, b"")) < 0:
        return False
    return not _is_announcement(label, data)


def _is_announcement(label: str, data: bytes) -> bool:
    """Whether the last complete event tells only that an answer is going to be made. vLLM begins each stream of
    /v1/responses like that, before it computes anything: measured with 0.32 at 21 ms, the first token at 200."""
    if label == "chat":
        at = data.rfind(b'"role"')
        if at < 0:
            return False
        behind = data.find(b"data:", at)
        if behind >= 0:
            return _last_end(data) < behind
        return _last_end(data) < at or _ONLY_ROLE.search(data, data.rfind(b"data:", 0, at)) is not None
    if label == "responses" or label == "messages":
        return data.startswith(
            _ANNOUNCEMENTS, data.rfind(b"\nevent: ", 0, max(_last_end(data), 0)) + 1 or _body_at(data)
        )
    return False


def output_events(label: str, data: bytes, first: bool) -> int:
    """Return how many events that begin in a read of a stream bring output. `first`: none did before, so those that
    announce an answer may be among them. Called for each read of a metered stream: one search."""
    count = data.count(_OUTPUT_MARKS.get(label, _ANY_EVENT))
    if first and count and label == "chat":
        return max(0, count - len(_ONLY_ROLE.findall(data)))
    return count


def next_number(pieces: Iterable[bytes]) -> int:
    """The number of the event that follows these last pieces of a response's stream; 0 where they tell none."""
    for line in reversed(b"".join(pieces).splitlines()):
        if line.startswith(b"data:"):
            try:
                return int(orjson.loads(line[5:])["sequence_number"]) + 1
            except (ValueError, KeyError, TypeError):  # a part of an event, or one that is not numbered
                continue
    return 0


def _body_at(data: bytes) -> int:
    """Where the body begins, behind the size of its first chunk and white space."""
    found = _BEGINS.match(data)
    return found.end() if found is not None else 0  # always found: nothing in it has to be there


def _unframed(data: bytes) -> bytes:
    """The body, without the sizes of its chunks. It may be one that is not in chunks."""
    found = _SIZE.match(data)
    return _BETWEEN_CHUNKS.sub(b"", data[found.end() if found is not None else 0 :])


def _joined(data: bytes) -> bytes:
    """A piece of a body without the framing within its events: of one that begins in one chunk and ends in another."""
    if data.count(b"\r\n") != 2 * data.count(b"\n\r\n"):
        return _BETWEEN_CHUNKS.sub(b"", data)
    return data


def _last_end(data: bytes) -> int:
    """Where the last complete event ends; -1 without one."""
    return max(data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n"))


def look(label: str, data: bytes, streams: bool, content_type: bytes, whole: bool) -> Sight:
    """What the first bytes of a body show, or all of them (`whole`)."""
    if streams:
        data = _unframed(data)  # what has nothing may be chunks of nothing but blank lines
    at = _body_at(data)
    if at == len(data):
        if whole:
            return Sight.SILENT if streams else Sight.FOREIGN
        return Sight.EARLY if len(data) < MOST_HELD_BACK else Sight.BLIND
    if streams:
        return _look_at_stream(label, data, at, whole)
    if content_type.startswith(_TYPES[2:]):
        return Sight.ANSWER
    if data[at] != 0x7B:  # {
        # <, of markup; else nothing says what it should be
        return Sight.FOREIGN if content_type or data[at] == 0x3C else Sight.ANSWER
    if _OTHER_ANSWER.match(data, at):
        return Sight.FOREIGN
    if MEMBERS.get(label, b"") in data or _ERROR_BODY.match(data) or _ANY_MEMBER.search(data):
        return Sight.ANSWER
    if whole:
        return Sight.FOREIGN
    return Sight.EARLY if len(data) < MOST_HELD_BACK else Sight.ANSWER


def _look_at_stream(label: str, data: bytes, at: int, whole: bool) -> Sight:
    if not whole and len(data) - at < len("event:"):
        return Sight.EARLY
    if _DONE.match(data, at):
        return Sight.SILENT
    if not _FIELD.match(data, at):
        return Sight.FOREIGN
    events = data if whole else data[: max(_last_end(data), 0)]  # an error in two pieces must not pass for a token
    if error_status(events, True):
        return Sight.ANSWER
    speaks = _EVENTS.get(label, b"") in events or _EVENT_MARKS.search(events) is not None
    if whole:
        return Sight.ANSWER if speaks else Sight.FOREIGN if says_anything(data) else Sight.SILENT
    if speaks and not _is_announcement(label, data):
        return Sight.ANSWER
    return Sight.EARLY if len(data) < MOST_HELD_BACK else Sight.BLIND


def says_anything(stream: bytes) -> bool:
    """Whether a stream has any event but pings and its end. An engine may end without one, and so may a proxy whose
    engine fails: unlike what no engine writes, that does not show that something else answers at the address."""
    return _SAYS.search(_BETWEEN_CHUNKS.sub(b"", stream)) is not None


def keeps_alive(data: bytes) -> bool:
    """Whether comments or pings are in what was held back: the engine wants its client to know that it is alive."""
    return _KEEPS_ALIVE.search(data) is not None


def speaks_api(tail: bytes, whole: bool) -> bool:
    """Whether a stream that ends like this has been one of an inference API. `whole`: this is all of it."""
    return _EVENT_MARKS.search(tail) is not None or (not whole and len(tail) < _SHORT_TAIL)


def has_end(label: str, tail: bytes, streams: bool, content_type: bytes, whole: bool) -> bool:
    """Whether an answer that ends like this may be whole, where the end of its connection is all that tells: a stream
    has its API's last event to its end, or an error, and JSON that begins with a bracket a last one. Nobody knows it of
    other bodies. `whole`: this is all of it; where it is not, it is taken for JSON that begins with a bracket."""
    if streams:
        if label not in _EVENTS or _ENDS_WITH_DONE.search(b"\n" + tail) is not None:
            return True
        last = _LAST_EVENTS.get(label)
        is_last = last is not None and last.search(tail) is not None
        return tail.endswith(_BLANK_LINES) and (is_last or error_status(tail, True) > 0)
    if not content_type.lower().startswith(b"application/json"):
        return True
    tail = tail.strip()
    return tail.endswith((b"}", b"]")) or (whole and bool(tail) and not tail.startswith((b"{", b"[")))


def error_status(data: bytes, streams: bool) -> int:
    """The HTTP status that an error in a 200 amounts to, 0 if there is none. `data`: the first or last bytes of a
    stream's body, or the first ones of another answer's."""
    if not streams:
        return _status(data) if data.find(ERROR_MARK, 0, ERROR_WITHIN) >= 0 and _ERROR_BODY.match(data) else 0
    data = _joined(data)
    if data.find(b"error") < 0:  # a response that failed has an error, too
        return 0
    data = b"\n" + data
    found = _ERROR_EVENT.search(data)
    if found is not None:
        return _status(data[found.start() :])
    return (
        next((_status(line) for line in data.split(b"\n") if _is_error(line)), 0) if _ERROR_MEMBER.search(data) else 0
    )


def _is_error(line: bytes) -> bool:
    """Whether this line of a stream is an event whose object says that it is an error, whatever its members' order."""
    line = line.removeprefix(BOM)
    if not line.startswith(b"data:") or len(line) > LONGEST_ERROR or not _ERROR_MEMBER.search(line):
        return False
    try:
        event = orjson.loads(line[5:])
    except orjson.JSONDecodeError:
        return False
    if not isinstance(event, dict):
        return False
    return (
        bool(event.get("error")) or event.get("object") == "error" or event.get("type") in ("error", "response.failed")
    )


def _status(error: bytes) -> int:
    """By its code, else by its type; an error that tells neither is the engine's."""
    if (code := _CODE.search(error)) is not None:
        return int(code[1])
    return 400 if _CLIENTS_FAULT.search(error) else 500


# Answers to these have no count of cached tokens, however the engine was started.
NEVER_TELL_CACHED = frozenset(("/v1/embeddings",))
# OpenAI chat, completions and responses; Anthropic messages. No engine counts as far as 19 digits.
COUNT = re.compile(
    rb'"((?:prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens)"\s*:\s*(\d{1,18})(?!\d)'
)


class Usage(NamedTuple):
    """`prompt`: all tokens of the prompt, cached or not."""

    prompt: int | None
    completion: int | None
    cached: int | None


NOTHING = Usage(None, None, None)


# An answer repeats what its client wrote, such as metadata and tools. A quote within a text is escaped, so this is a
# key, and its depth tells whose it is.
USAGE = re.compile(rb'"usage"\s{0,8}:\s{0,8}\{')
_TEXT = re.compile(rb'(%b)|"[^"\\]*+(?:\\.[^"\\]*+)*+"' % USAGE.pattern, re.DOTALL)
_BRACE = re.compile(rb"[{}]")
MOST_SEARCHED = 2**17  # bytes: one of nothing but short texts takes 3 ms


def read_usage(tail: bytes, depth: int = 1) -> Usage:
    """Token counts from the last bytes of a response (JSON or the last events of a stream). `depth`: in how many
    objects the usage stands."""
    tail = _joined(tail[-MOST_SEARCHED:])
    found = list(USAGE.finditer(tail))
    if not found:
        return NOTHING
    bare = _TEXT.sub(rb"\1", tail[found[0].start() :])  # without texts and all keys but these
    behind = USAGE.split(bare)[1:]
    open_objects = 0
    for match, rest in zip(reversed(found), reversed(behind), strict=False):
        open_objects += rest.count(b"}") + rest.count(b"]") - rest.count(b"{") - rest.count(b"[") - 1
        if open_objects == depth:
            return counts_of(tail, match.end())
    return NOTHING


def counts_of(data: bytes, at: int = 0) -> Usage:
    """The counts of the usage whose object begins before `at`, as far as it is there."""
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
            # Anthropic's input_tokens are what is neither of these, and vLLM's Messages keep to that
            if name != b"cached_tokens":
                besides += count
            if name != b"cache_creation_input_tokens":
                cached = count if cached is None else cached
    return Usage(prompt if prompt is None else prompt + besides, completion, cached)


def believed(usage: Usage, most: int) -> Usage:
    """These counts without those that cannot be: more tokens written than `most`, more found than the prompt has."""
    prompt, completion, cached = usage
    if completion is not None and completion > most:
        completion = None
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return usage if usage == (prompt, completion, cached) else Usage(prompt, completion, cached)
