"""The reading of answers' bytes: errors in the body of a 200, and answers that no engine wrote.

An engine that streams sends its 200 before it computes anything, so a later failure is an event in the stream. For
example, if a prompt has a token id outside the vocabulary, or its core dies, vLLM 0.32 answers with 200, one error
event and `[DONE]`. Such an answer takes a millisecond, and must not be taken for a fast success.

The first bytes of an answer are read when they come, the last ones when it is over. What comes between is only read for
metered answers, so that no other answer costs a call per chunk. Searches for bytes are enough for most questions. A
line break or a quote within generated text is escaped in JSON, so a line that begins like an event is one, and a key in
plain quotes is a key of the answer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from itertools import islice

import orjson

from ...http.chunks import CHUNK, Chunks

# The body is read with its chunked framing, so the size of the first chunk may come before it. A stream may begin with
# a byte order mark, which is not part of it.
_SIZE = re.compile(rb"0*[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?(?:\r\n|\r?\Z)")
BOM = b"\xef\xbb\xbf"
_BEGINS = re.compile(rb"(?:" + _SIZE.pattern + rb")?(?:" + BOM + rb")?\s*")
# The beginning of an event in a stream, or of a comment that keeps the connection alive.
_FIELD = re.compile(rb":|(?:data|event|id|retry)(?=[:\r\n]|\Z)")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", BOM)
# Bytes that every answer of an API contains, by its label in metrics: a member of its JSON object, and (below) a part
# of its stream's first event. Quotes within generated text are escaped, so that cannot contain these bytes.
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
# Members of engines' answers, of any API, since an engine may answer one API in another one's format.
_ANY_MEMBER = re.compile(rb'"(?:choices|output|content|embedding|results|tokens|prompt|text|usage)"\s*:')
# The beginning of an error object: in OpenAI's chat and completions (`{"error": ...}`; before vLLM 0.10
# `{"object": "error", ...}`), in Responses and in Messages.
_ERROR_OBJECT = rb'\{\s*"(?:error"\s*:\s*[{"]|(?:object|type)"\s*:\s*"(?:error|response\.failed)")'
_ERROR_EVENT = re.compile(
    rb"\n(?:" + BOM + rb")?(?:event: ?(?:error|response\.failed)\s|data: ?" + _ERROR_OBJECT + rb")"
)
_ERROR_BODY = re.compile(_BEGINS.pattern + _ERROR_OBJECT)
# The framing between two chunks, which may stand within an event; and a member that every error event has.
_BETWEEN_CHUNKS = re.compile(rb"\r\n0*[0-9A-Fa-f]{1,8}(?:;[^\r\n]*)?\r\n")
_ERROR_MEMBER = re.compile(rb'"error"\s*:\s*[{"]|:\s*"(?:error|response\.failed)"')
ERROR_MARK, ERROR_WITHIN = b'rror"', 48  # bytes of each non-streamed error, found among so many of its first bytes
LONGEST_ERROR = 65_536  # the most bytes of an error event
# The most bytes that are held back before the first output: the announcement of a response repeats its instructions.
MOST_HELD_BACK = 2**18
LOOKED_AT_FREELY = 4096  # up to so many bytes held back, parsing all of them at each read costs next to nothing
MOST_UNNUMBERED = 16  # the number of last events of a response's stream that are searched for a sequence number
# Answers that some servers give to any request: a list of models, or a health status. No prompt is answered so.
_OTHER_ANSWER = re.compile(
    rb'\{\s*"(?:object"\s*:\s*"list"\s*,\s*"data"\s*:\s*\[\s*\{[^{}\[]{0,400}"object"\s*:\s*"model"|status"\s*:\s*"\w{1,20}"\s*\})'
)
_DONE = re.compile(rb"data: ?\[DONE\]")
_ENDS_WITH_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]\s*\Z")
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")  # the end of an event
# The mark of the last event of each API's streams. The last event of a response repeats all of its text, so its
# beginning may no longer be kept. Then the usage at its end shows that it is the last one. In an event that is kept
# completely, usage shows nothing: other events repeat the client's tools, which may have a property of that name.
_LAST_EVENTS = {
    "responses": re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete|failed)"'),
    "messages": re.compile(rb'"type"\s*:\s*"message_stop"'),
}
# An event with content: neither a stream's `[DONE]` nor a ping, and not empty.
_SAYS = re.compile(rb'data:(?!\s*(?:\[DONE\]|\{\s*"type"\s*:\s*"ping"\s*\})|[ \t]*(?:[\r\n]|\Z))')
# Keys and event types that occur in streams of inference APIs, also in their last events.
_EVENT_MARKS = re.compile(rb'"(?:choices|usage|delta|finish_reason)"\s*:|"(?:response|message|content_block)[._\w]*"')
# Last bytes of a stream, if they are at least this many, contain such a mark; fewer may be the middle of a long event.
_SHORT_TAIL = 256
# An answer may repeat the client's metadata and tools, which may contain a key of this name. A quote within a text is
# escaped, so a match is always a key. In how many objects it stands shows whether it is the answer's own.
USAGE = re.compile(rb'"usage"\s{0,8}:\s{0,8}\{')
_CODE = re.compile(rb'"(?:code|status)"\s*:\s*"?([45]\d\d)\b')
_CLIENTS_FAULT = re.compile(
    rb'"(?:type|code)"\s*:\s*"\w*(?:bad_?request|invalid|not_?found|unprocessable|too_large|authentication|permission|rate_limit)',
    re.I,
)

# Events of /v1/responses and /v1/messages that come before the first token, and a chat's chunk that has only a role.
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
# Bytes that each output event of an API contains once, and no other event does, except a chat's chunk with only a role.
# Quotes within generated text are escaped, so that cannot contain these bytes.
OUTPUT_MARKS = {
    "chat": b'"delta":{"',
    "completions": b'"text":',
    "responses": b'.delta"',
    "messages": b'"content_block_delta"',
}
ANY_EVENT = b"\ndata: {"
_KEEPS_ALIVE = re.compile(rb"(?:^|\n)(?::|event: ping)")
# Comments and pings, each with the blank line after it, and further blank lines.
_KEEP_ALIVES = re.compile(
    rb"(?:(?::[^\r\n]*\r?\n|event: ?ping\r?\n|data: ?\{[ \t]*\"type\"[ \t]*:[ \t]*\"ping\"[ \t]*\}\r?\n)*\r?\n)*"
)

# Statuses with which a server that is no inference engine answers a prompt. Others (401, 413, 429, 502) may come from a
# proxy in front of an engine, in any format.
FOREIGN_STATUSES = frozenset((200, 404, 405, 501))
# Embeddings may be requested as raw numbers.
_TYPES = (b"text/event-stream", b"application/json", b"application/octet-stream", b"multipart/")


def media_type(content_type: bytes) -> str:
    """Return a content type as text for an error message."""
    return content_type.decode("latin-1")[:100] or "no content type"


def foreign_head(status: int, content_type: bytes) -> bool:
    """Return whether an answer's status and content type show that no inference engine answered the prompt.

    `content_type`: in lower case. Without one (b""), the body has to be looked at, unless the status is enough.
    """
    return 200 < status < 400 or (
        status in FOREIGN_STATUSES and bool(content_type) and not content_type.startswith(_TYPES)
    )


class Sight(Enum):
    """The kinds of what the first bytes of an answer's body with status 200 can be; each value says it in words."""

    ANSWER = "an answer, or an error"
    EARLY = "nothing of an answer yet"
    BLIND = "so much of what is no answer that it is held back no longer"
    FOREIGN = "what no engine writes"
    SILENT = "a stream that ends and has said nothing"


# `find` instead of `in`: `bytes in bytes` first tries its left side as a number and drops the TypeError, which costs
# 2,000 instructions.


def begins(label: str, data: bytes, streams: bool) -> bool:
    """Return whether the first bytes of a body show that an answer has begun; if not, `look` finds out what they are.

    Called for each answer; nearly all of them take one search for bytes.

    `label`: the API, such as "chat".
    `streams`: whether the answer is a stream.
    """
    if not streams:
        return data.find(MEMBERS.get(label, b"")) >= 0
    if data.find(_EVENTS.get(label, b"")) < 0:
        return False
    return not _is_announcement(label, data)


def _is_announcement(label: str, data: bytes) -> bool:
    """Return whether a stream's last complete event only announces an answer, and has no output.

    vLLM begins each stream of /v1/responses with such events, before it computes anything: with vLLM 0.32 they came
    after 21 ms, the first token after 200 ms.
    """
    if label == "chat":
        at = data.rfind(b'"role"')
        if at < 0:
            # the rest of an incomplete event may still be a role and nothing else
            return data.find(b'"content"') < 0 and _last_end(data) < data.find(_EVENTS[label])
        behind = data.find(b"data:", at)
        if behind >= 0:
            return _last_end(data) < behind
        return _last_end(data) < at or _ONLY_ROLE.search(data, data.rfind(b"data:", 0, at)) is not None
    if label == "responses" or label == "messages":
        return data.startswith(
            _ANNOUNCEMENTS, data.rfind(b"\nevent: ", 0, max(_last_end(data), 0)) + 1 or _body_at(data)
        )
    return False


def has_begun(label: str, tail: bytes) -> bool:
    """Return whether a stream has begun its output by now, for a stream whose first bytes contained none.

    `tail`: its last bytes so far.
    """
    data = b"\n" + joined(tail)
    if label == "responses" or label == "messages":
        at = data.rfind(b"\nevent: ", 0, max(_last_end(data), 0)) + 1
        return at > 0 and not data.startswith(_ANNOUNCEMENTS, at)
    return data.find(_EVENTS.get(label, b"")) >= 0 and not _is_announcement(label, data)


def output_events(label: str, data: bytes, first: bool) -> int:
    """Return how many output events a read of a stream contains.

    Each output event contains the API's mark (`OUTPUT_MARKS`) once, so the marks are counted.

    `first`: whether no output event came before. Then chunks with only a role may be among the marked ones, and are not
        counted.
    """
    count = data.count(OUTPUT_MARKS.get(label, ANY_EVENT))
    if first and label not in OUTPUT_MARKS and data.startswith(ANY_EVENT[1:]):
        count += 1
    if first and count and label == "chat":
        return max(0, count - len(_ONLY_ROLE.findall(data)))
    return count


def next_number(pieces: Iterable[bytes]) -> int:
    """Return the sequence number for an event that the gateway adds to a stream of `/v1/responses`.

    It is one more than the last number in `pieces`, the last reads of the stream, or 0 if they show none.
    """
    events = (line for line in reversed(b"".join(pieces).splitlines()) if line.startswith(b"data:"))
    for line in islice(events, MOST_UNNUMBERED):
        try:
            return int(orjson.loads(line[5:])["sequence_number"]) + 1
        except (ValueError, KeyError, TypeError):  # an incomplete event, or one without a number
            continue
    return 0


def _body_at(data: bytes) -> int:
    """Return the offset of a body's first byte of text, after the size line of its first chunk and white space."""
    found = _BEGINS.match(data)
    return found.end() if found is not None else 0  # always found: every part of the pattern is optional


def _unframed(data: bytes) -> bytes:
    """Return the first bytes of a body without their chunked framing, if they have any."""
    try:
        return Chunks().feed(data) if _SIZE.match(data) else data
    except ValueError:
        return data


def joined(data: bytes) -> bytes:
    """Return a piece of a stream's body without the chunked framing inside its events, so that each is in one piece."""
    if data.count(b"\r\n") != 2 * data.count(b"\n\r\n"):
        return _BETWEEN_CHUNKS.sub(b"", data)
    return data


def _last_end(data: bytes, since: int = 0) -> int:
    """Return at which byte the last complete event of a stream ends, before its blank line; -1 without one."""
    return max(data.rfind(b"\n\n", since), data.rfind(b"\r\n\r\n", since))


def has_grown(size: int, looked_at: int) -> bool:
    """Return whether enough new bytes are held back to parse all of them again.

    An engine may write one byte at a time. Parsing at each read would take time that grows with the square of the size.

    `size`: the number of bytes held back now.
    `looked_at`: their number when they were last parsed.
    """
    return size - looked_at > max(0, looked_at - LOOKED_AT_FREELY) >> 3


def look(label: str, data: bytes, streams: bool, content_type: bytes, whole: bool) -> Sight:
    """Return what the first bytes of a body with status 200 are, such as an answer, or what no engine writes.

    `label`: the API, such as "chat".
    `data`: the bytes.
    `streams`: whether the answer is a stream.
    `content_type`: the value of that header, in lower case.
    `whole`: whether the bytes are the complete body. If not, they may not show it yet (`Sight.EARLY`).
    """
    if streams:
        return Beginning(_SIZE.match(data) is not None).look(label, data, whole)
    at = _body_at(data)
    if at == len(data):
        if whole:
            return Sight.FOREIGN
        return Sight.EARLY if len(data) < MOST_HELD_BACK else Sight.BLIND
    if content_type.startswith(_TYPES[2:]):
        return Sight.ANSWER
    if data[at] != 0x7B:  # {
        # `<` begins markup; without a content type nothing else can be excluded
        return Sight.FOREIGN if content_type or data[at] == 0x3C else Sight.ANSWER
    if _OTHER_ANSWER.match(data, at):
        return Sight.FOREIGN
    if MEMBERS.get(label, b"") in data or _ERROR_BODY.match(data) or _ANY_MEMBER.search(data):
        return Sight.ANSWER
    if whole:
        return Sight.FOREIGN
    return Sight.EARLY if len(data) < MOST_HELD_BACK else Sight.ANSWER


class Beginning:
    """The first bytes of a stream that are held back, as long as they contain no output.

    Each chunk is decoded once and each event is parsed once, since an engine may send 256 KiB of announcements in
    chunks of one byte.

    `body`: these bytes without chunked framing.
    """

    __slots__ = ("body", "_chunks", "_read", "_searched", "_looked", "_speaks")

    def __init__(self, chunked: bool, data: bytes = b"") -> None:
        self.body = b""
        self._chunks = Chunks() if chunked else None
        self._read = self._searched = self._looked = 0  # bytes read with framing, searched for an end, and parsed
        self._speaks = False
        self._add(data)

    def _add(self, data: bytes) -> None:
        """Append a read to `body`, without its chunked framing; invalid framing is kept as it is."""
        self._read += len(data)
        if self._chunks is not None:
            try:
                data = self._chunks.feed(data)
            except ValueError:
                self._chunks = None
        self.body += data

    def look(self, label: str, data: bytes, whole: bool) -> Sight:
        """Add the next bytes of the stream, and return what all bytes so far are.

        `label`: the API, such as "chat".
        `data`: the next bytes.
        `whole`: whether the bytes so far are the complete body.
        """
        self._add(data)
        body = self.body
        at = _body_at(body)
        early = Sight.EARLY if self._read < MOST_HELD_BACK else Sight.BLIND
        if at == len(body):
            return Sight.SILENT if whole else early
        if not whole and any(
            name.startswith(body[at : at + len(name)]) for name in _FIELDS if len(body) - at < len(name)
        ):
            return early  # perhaps a field's name that is not complete yet
        if _DONE.match(body, at):
            return Sight.SILENT
        if not _FIELD.match(body, at):
            return Sight.FOREIGN
        # Only complete events are parsed: the first half of an error must not be taken for output.
        end = len(body) if whole else _last_end(body, max(self._looked, self._searched - 3))
        self._searched = len(body)
        if end <= self._looked and not whole:
            return early
        events, self._looked = body[self._looked : end], end
        if error_status(events, True):
            return Sight.ANSWER
        self._speaks = self._speaks or _EVENTS.get(label, b"") in events or _EVENT_MARKS.search(events) is not None
        if whole:
            return Sight.ANSWER if self._speaks else Sight.FOREIGN if says_anything(body) else Sight.SILENT
        return Sight.ANSWER if self._speaks and not _is_announcement(label, body) else early


def says_anything(stream: bytes) -> bool:
    """Return whether a stream contains any event other than pings and `[DONE]`.

    A stream without such an event may come from an engine, or from a proxy whose engine has failed. So it does not show
    that another kind of server listens at the address.
    """
    return _SAYS.search(_BETWEEN_CHUNKS.sub(b"", stream)) is not None


def keeps_alive(data: bytes) -> bool:
    """Return whether a stream's bytes contain comments or pings, by which the engine keeps the connection alive."""
    return _KEEPS_ALIVE.search(data) is not None


def has_other_event(data: bytes) -> bool:
    """Return whether a stream's first bytes contain a complete event that is neither a comment nor a ping."""
    body = _unframed(data)
    return any(body.find(end, keep_alives_end(body, False)) >= 0 for end in _BLANK_LINES)


def keep_alives_end(data: bytes, chunked: bool) -> int:
    """Return how many of a stream's first bytes are nothing but comments and pings, and can be relayed by themselves.

    These bytes end with a complete comment or ping and, in a body with chunked framing, with a complete chunk.
    """
    if not chunked:
        return len(_KEEP_ALIVES.match(data)[0])  # type: ignore[index]  # it matches the empty string
    at, pieces, length, ends = 0, [b"\n"], 1, []  # a line end in front, so that each event ends with a blank line
    while (size := CHUNK.match(data, at)) is not None and (count := int(size[1] or b"0", 16)):
        at = size.end() + count + 2
        if at > len(data):
            break
        pieces.append(data[size.end() : at - 2])
        length += count
        ends.append((length, at))
    body = b"".join(pieces)
    last = _KEEP_ALIVES.match(body, 1).end()  # type: ignore[union-attr]  # as above
    return next((at for end, at in reversed(ends) if end <= last and body.endswith(_BLANK_LINES, 0, end)), 0)


def speaks_api(tail: bytes, whole: bool) -> bool:
    """Return whether the last bytes of a stream show that it was a stream of an inference API.

    `whole`: whether these bytes are the whole stream. If not, and they are too few to show anything, the result is
        True.
    """
    return _EVENT_MARKS.search(tail) is not None or (not whole and len(tail) < _SHORT_TAIL)


def has_end(label: str, tail: bytes, streams: bool, content_type: bytes, whole: bool) -> bool:
    """Return whether an answer may be complete that ended when its connection was closed.

    HTTP does not show that then, so the answer's last bytes are checked. A stream must end with its API's last event or
    with an error, and JSON with a closing bracket. Other bodies cannot be checked, and count as complete.

    `tail`: the answer's last bytes.
    `whole`: whether these are all of it; otherwise JSON is assumed to begin with a bracket.
    """
    if streams:
        tail = _without_comments(tail)
        if label not in _EVENTS or _ENDS_WITH_DONE.search(_BETWEEN_CHUNKS.sub(b"", b"\n" + tail)) is not None:
            return True
        return tail.endswith(_BLANK_LINES) and (_ends_with_last_event(label, tail) or error_status(tail, True) > 0)
    if not content_type.lower().startswith(b"application/json"):
        return True
    tail = tail.strip()
    return tail.endswith((b"}", b"]")) or (whole and bool(tail) and not tail.startswith((b"{", b"[")))


def _without_comments(tail: bytes) -> bytes:
    """Return a stream's last bytes without the comments after its last event."""
    if b"\n:" not in tail:
        return tail
    lines = _BETWEEN_CHUNKS.sub(b"", b"\r\n" + tail).split(b"\n")
    behind = 0  # blank lines after the last event
    for at in range(len(lines) - 1, -1, -1):
        if lines[at] in (b"", b"\r"):
            behind += at < len(lines) - 1
        elif not lines[at].startswith(b":"):
            return b"\n".join(lines[: at + 1]) + b"\n\n" if behind else tail
    return b""


def _ends_with_last_event(label: str, tail: bytes) -> bool:
    """Return whether the event at the end of a stream's last bytes is the one with which its API's streams end."""
    if (mark := _LAST_EVENTS.get(label)) is None:
        return False
    event = _BETWEEN_CHUNKS.sub(b"", b"\r\n" + tail).rstrip()
    for blank_line in _BLANK_LINES:
        event = event.rpartition(blank_line)[2]
    is_whole = event.lstrip().startswith(_FIELDS)
    return mark.search(event) is not None or (label == "responses" and not is_whole and USAGE.search(event) is not None)


def first_error(data: bytes, streams: bool) -> int:
    """Return the HTTP status that an error in the first bytes of a 200's body amounts to; 0 if there is no error.

    The bytes may still have their chunked framing. It is removed before the search, since `error_status` alone would
    take a chunk that consists of `d` or `da`, the beginning of `data:`, for a chunk's size.
    """
    if streams and data.count(b"\r\n") != 2 * data.count(b"\n\r\n"):
        data = _unframed(data)
    return error_status(data, streams)


def error_status(data: bytes, streams: bool) -> int:
    """Return the HTTP status that an error inside an answer with status 200 amounts to; 0 if there is no error.

    `data`: the first or last bytes of a stream's body, or the first bytes of a body that is not streamed.
    `streams`: whether the answer is a stream.
    """
    if not streams:
        return _status(data) if data.find(ERROR_MARK, 0, ERROR_WITHIN) >= 0 and _ERROR_BODY.match(data) else 0
    data = joined(data)
    if data.find(b"error") < 0:  # a failed response contains it, too
        return 0
    data = b"\n" + data
    found = _ERROR_EVENT.search(data)
    if found is not None:
        return _status(data[found.start() :])
    return (
        next((_status(line) for line in data.split(b"\n") if _is_error(line)), 0) if _ERROR_MEMBER.search(data) else 0
    )


def _is_error(line: bytes) -> bool:
    """Return whether a line of a stream is an error event, whatever the order of its members."""
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
    """Return the HTTP status that an error object names as its code, else one that fits its type (400 or 500)."""
    if (code := _CODE.search(error)) is not None:
        return int(code[1])
    return 400 if _CLIENTS_FAULT.search(error) else 500
