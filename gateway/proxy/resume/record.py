"""The record of a stream, from which another replica can resume the stream if its replica fails.

The stream is read event by event, and the client gets complete events only, so that its bytes always end with an event.
The record keeps the text that the client has and, where the engine reports them, the token ids of the prompt and of the
answer. After a failure another replica writes the rest in one of two ways:

- by ids: its engine gets these ids as its prompt. The last ids are left out, and generated again, if their text is
  incomplete (part of a character) or if several came in one event.
- by repetition: its engine gets the same request again. Decoding has to be greedy, unless the client has no text yet.

What the engine writes again is compared with the text that the client has, and not relayed. A difference ends the
stream: the client never gets text that does not continue what it has. Streams are read as vLLM 0.28 and 0.32 write
them. After an unknown event a stream can no longer be resumed, and its events are relayed unchanged.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from enum import Enum
from sys import getsizeof
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from ...http.chunks import Chunks, framed
from ...http.upstream import Head, UpstreamError
from ..failures.retries import ABORTED, CLOSED, DIFFERS, ERROR_ANSWER, PROTOCOL
from ..responses.answers import BOM, error_status

if TYPE_CHECKING:
    from ...prompt import Prompt
    from ...prompt.api.resumable import Terms

LONGEST_EVENT = 2**22  # the most bytes of an event, without the prompt's ids; engines write no longer ones
LONGEST_UNKEPT = 2**16  # bytes of an event, in a stream that cannot be resumed, after which its first part is relayed
ID_BYTES = 12  # the most bytes of a token id in an event: ten digits, a comma and a blank
OVERHEAD = 1024  # bytes of a record's objects without their contents: 900 with Python 3.11
# The ways to resume a stream: by ids, by repetition, or, if only its end is missing, by an end that the gateway writes.
IDS, REPEAT, OVER = "ids", "repeat", "over"
# Exceptions that parsing raises for an event that no known engine writes.
UNKNOWN = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
_TOKEN_IDS = re.compile(rb'("(?:prompt_token_ids|token_ids)"\s*:\s*)\[[0-9,\s]*\]')
_PARSED = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")


class Kind(Enum):
    """The kinds of events in a stream: what an event is, or does."""

    OPENS = "comes before the text"
    TEXT = "brings text, perhaps none"
    CLOSES = "comes after the text"
    END = "is the last one"
    ERROR = "says that the answer failed"
    BESIDE = "is a ping, a comment or nothing"
    STRANGE = "is of no stream that is known here"

    __hash__ = object.__hash__


class Event(NamedTuple):
    """A parsed event of a stream.

    `data`: its JSON object, None if it has none.
    `text`: the generated text in it; `holder[name]`: where the text stands in `data`.
    `reason`: the engine's reason for the end of generation, None if the event names none.
    `ids`: the token ids of the text; `prompt_ids`: those of the prompt; None if not reported.
    """

    kind: Kind
    data: Any = None
    text: str = ""
    holder: Any = None
    name: str = ""
    reason: str | None = None
    ids: array[int] | None = None
    prompt_ids: array[int] | None = None


END, BESIDE, STRANGE = Event(Kind.END), Event(Kind.BESIDE), Event(Kind.STRANGE)


def read(label: str, raw: bytes) -> Event:
    """Parse an event of an API's stream; one that no known engine writes is of kind STRANGE.

    `label`: the API, such as "chat" (`Exchange.label`).
    `raw`: the event without the blank line after it.
    """
    raw = raw.removeprefix(BOM)
    at = 0 if raw.startswith(b"data:") else raw.find(b"\ndata:") + 1
    if not raw.startswith(b"data:", at):
        return BESIDE if not raw.strip() or raw.startswith((b":", b"event: ping", b"id:", b"retry:")) else STRANGE
    payload = raw[at + 5 :].strip()
    if payload in (b"", b"[DONE]"):
        return END if payload else BESIDE
    data = None
    try:
        data = orjson.loads(payload)
        if data.get("error") or data.get("type") in ("error", "response.failed") or data.get("object") == "error":
            return Event(Kind.ERROR, data)  # a successful response has `"error": null`
        event = _READERS[label](data)
        return event if type(event.text) is str else Event(Kind.STRANGE, data)
    except UNKNOWN:
        return Event(Kind.STRANGE, data if isinstance(data, dict) else None)


def _ids(given: Any) -> array[int] | None:
    return None if given is None else array("I", given)


def _read_choice(data: dict[str, Any]) -> Event:
    """Parse an event of `/v1/chat/completions` or `/v1/completions`."""
    if not data["choices"]:
        return Event(Kind.CLOSES, data)
    choice = data["choices"][0]
    holder, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
    if choice.get("logprobs") or any(holder.get(one) for one in _PARSED):
        return Event(Kind.STRANGE, data)
    prompt_ids = data.get("prompt_token_ids")
    prompt_ids = _ids(choice.get("prompt_token_ids") if prompt_ids is None else prompt_ids)
    text, reason, ids = holder.get(name), choice.get("finish_reason"), _ids(choice.get("token_ids"))
    opens = "role" in holder and not text and reason is None and not ids
    text = "" if text is None else text
    return Event(Kind.OPENS if opens else Kind.TEXT, data, text, holder, name, reason, ids, prompt_ids)


def _read_message(data: dict[str, Any]) -> Event:
    """Parse an event of `/v1/messages`."""
    kind, reason = data["type"], None
    if kind == "content_block_delta" and data["delta"]["type"] == "text_delta":
        return Event(Kind.TEXT, data, data["delta"]["text"], data["delta"], "text")
    if kind == "content_block_start" and (data["index"] or data["content_block"]["type"] != "text"):
        return Event(Kind.STRANGE, data)
    if kind == "message_delta":
        reason = data["delta"].get("stop_reason") or "abort"
    return Event(_MESSAGES[kind], data, reason=reason)


def _read_response(data: dict[str, Any]) -> Event:
    """Parse an event of `/v1/responses`."""
    kind = data["type"].removeprefix("response.")
    if kind == "output_text.delta":
        return Event(Kind.TEXT if not data.get("logprobs") else Kind.STRANGE, data, data["delta"], data, "delta")
    added = data.get("item") or data.get("part") or {}
    if kind.endswith("added") and (added["type"] not in ("message", "output_text") or data.get("output_index")):
        return Event(Kind.STRANGE, data)
    reason = data["response"].get("status") if _RESPONSES[kind] is Kind.END else None
    return Event(_RESPONSES[kind], data, reason=reason)


_READERS = {"chat": _read_choice, "completions": _read_choice, "messages": _read_message, "responses": _read_response}
_MESSAGES = {
    "message_start": Kind.OPENS,
    "content_block_start": Kind.OPENS,
    "content_block_stop": Kind.CLOSES,
    "message_delta": Kind.CLOSES,
    "message_stop": Kind.END,
    "ping": Kind.BESIDE,
}
_RESPONSES = {
    **dict.fromkeys(("created", "queued", "in_progress", "output_item.added", "content_part.added"), Kind.OPENS),
    **dict.fromkeys(("output_text.done", "content_part.done", "output_item.done"), Kind.CLOSES),
    **dict.fromkeys(("completed", "incomplete"), Kind.END),
}


def write(label: str, data: Any) -> bytes:
    """Return the bytes of an event of an API's stream, with its blank line; `data`: its JSON object."""
    head = b"event: %b\n" % data["type"].encode() if label in ("messages", "responses") else b""
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


@dataclass(slots=True, eq=False)
class StreamRecord:
    """The record of one client's stream, from its first replica to the last one that resumes it."""

    resumer: Any  # the `Resumer`, which accounts for each read
    terms: Terms  # the properties of the request that decide how its stream may be resumed
    label: str  # the API, such as "chat"
    prompt: Prompt
    body: bytes = b""  # the request's body, as long as it may be sent again
    keeps_body: bool = False  # keep the body even when the client has text, since decoding is greedy
    # What the client has: the head of the first replica's answer, the index of that attempt, and the number of output
    # events.
    head: Head | None = None
    first: int = 0
    events: int = 0
    # The parsing of the present replica's answer: the decoder of chunked framing (None without framing), and the bytes
    # of an incomplete event.
    chunks: Chunks | None = None
    part: bytearray = field(default_factory=bytearray)
    # The answer as far as the client has it. `clean`: numbers of ids, and of text bytes (UTF-8), that belong together:
    # the last ones at which it was certain which text the ids are for.
    text: bytearray = field(default_factory=bytearray)
    ids: array[int] = field(default_factory=lambda: array("I"))
    prompt_ids: array[int] = field(default_factory=lambda: array("I"))
    clean: tuple[int, int] = (0, 0)
    reports_ids: bool = False  # the engine reports token ids
    names: tuple[Any, Any] | None = None  # the stream's id and its time of creation, by which the client knows it
    item: Any = None  # the id of a response's message
    number: int = -1  # the sequence number of a response's last event
    passed: int = 0  # how many events the client has of those that come before and after the text
    has_usage: bool = False  # the client has an event of those after the text, which report usage
    reason: str | None = None  # why generation ended, once the client knows
    complete: bool = False  # the client has the last event
    # Since the last failure. `way`: how the stream is resumed. `skip`: the text that the client has and the present
    # replica must still repeat. `came`: how many events this replica has written before and after the text. `given`:
    # the number of ids of the answer in its prompt. `proven`: it has shown that it uses them. `shown`: it has written
    # new text. `knew_reason`: the client had the reason for the end already.
    way: str = ""
    skip: bytearray = field(default_factory=bytearray)
    came: int = 0
    given: int = 0
    proven: bool = True
    shown: bool = False
    knew_reason: bool = False
    breaks: int = 0  # how many replicas have failed within the stream
    broke_at: float = 0.0  # when the last one did, in monotonic seconds
    broke: str = ""  # the last failure in words, until the stream is resumed
    lost: str = ""  # why the stream can no longer be resumed; "" if it can
    counted: int = 0  # the `size` that the budget for all records has counted last

    @property
    def size(self) -> int:
        """The bytes of memory that this record takes, as counted in the budget for all records."""
        if self.is_unread:
            return len(self.part)
        held = OVERHEAD + len(self.body) + len(self.terms.kept) + (len(self.chunks.rest) if self.chunks else 0)
        kept = (self.part, self.text, self.skip, self.ids, self.prompt_ids, self.item, *(self.names or ()))
        return held + sum(map(getsizeof, kept))

    @property
    def is_unread(self) -> bool:
        """Whether events are relayed without being parsed.

        They are if the stream can no longer be resumed, and no replica has failed within it so far.
        """
        return bool(self.lost) and not self.breaks

    @property
    def received(self) -> str:
        """How much of the answer the client has, in words for the log."""
        return f"{len(self.ids)} tokens" if self.ids else f"{len(self.text + self.skip)} bytes of text"

    # --- the stream of the first replica

    def begin(self, head: Head, first: int, body: bytes, keeps_body: bool) -> None:
        """Begin to record the answer of the first replica.

        `head`: the answer's head.
        `first`: the index of that replica's attempt in `Exchange.attempts`.
        `body`: the request's body, kept until the client has text, or to the end with `keeps_body`.
        """
        self.head, self.first, self.body, self.keeps_body = head, first, body, keeps_body
        self.read_from(head)

    def read_from(self, head: Head) -> None:
        """Begin to parse the answer that has this head."""
        self.chunks, self.part = Chunks() if head.is_chunked else None, bytearray()

    def take(self, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """Record a read of the replica's answer; return (bytes for the client, None or the error that ends the answer).

        The client gets complete events only, without the text that it has already.
        """
        try:
            body = data if self.chunks is None else self.chunks.feed(data)
        except ValueError as broken:
            return b"", UpstreamError(PROTOCOL, f"broke HTTP's framing: {broken}")
        out: list[bytes] = []
        error: UpstreamError | None = None
        for raw in self._events(body):
            try:
                out.append(self._passed(raw))
            except UpstreamError as found:
                error = found
                break
        longest = LONGEST_UNKEPT if self.lost else LONGEST_EVENT + ID_BYTES * self.prompt.tokens
        if error is None and len(self.part) > longest:
            if self.breaks:
                error = UpstreamError(PROTOCOL, f"sent an event of more than {longest} bytes")
            else:  # it is valid, so it is relayed in parts
                self.lose(self.lost or "events")
                out.append(self._shown(bytes(self.part)))
                self.part.clear()
        assert self.head is not None
        return framed(b"".join(out), self.head), error

    def take_last(self) -> tuple[bytes, UpstreamError | None]:
        """Record the end of the body, and return what `take` returns; the last event may lack its blank line.

        It is dropped if it may be torn: if it cannot be parsed, or has no data, for example if only `data:` has come.
        Where events are not parsed, it is passed on as it came.
        """
        self.chunks, part = None, bytes(self.part)
        if self.is_unread:
            assert self.head is not None
            self.part.clear()
            return framed(self._shown(part), self.head), None
        passes = part and read(self.label, part).kind not in (Kind.STRANGE, Kind.BESIDE)
        return self.take(b"\n\n") if passes else (b"", None)

    def _events(self, data: bytes) -> list[bytes]:
        """Return the events that a read of the body completes, with LF as line end; keep the rest in `part`."""
        part = self.part
        if part.endswith(b"\r"):
            del part[-1:]
            data = b"\r" + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        known = len(part)
        part += data
        if part.find(b"\n\n", max(0, known - 1)) < 0:
            return []
        *events, rest = bytes(part).split(b"\n\n")
        self.part = bytearray(rest)
        return events

    def _shown(self, raw: bytes) -> bytes:
        """Return an event without the token ids that the client did not request."""
        return raw if self.terms.tells_ids else _TOKEN_IDS.sub(rb"\1null", raw)

    def _passed(self, raw: bytes) -> bytes:
        """Record an event and return what the client gets of it.

        Raises UpstreamError if the event shows that the replica failed, or does not continue the client's text.
        """
        if self.is_unread:
            return self._shown(raw + b"\n\n")
        event = read(self.label, raw)
        kind = event.kind
        if kind is Kind.BESIDE:
            return raw + b"\n\n"
        if kind is Kind.ERROR and (status := error_status(raw + b"\n\n", True)) >= 500:
            raise UpstreamError(ERROR_ANSWER, f"ended its stream with an error that amounts to {status}")
        if event.reason == "abort":
            raise UpstreamError(ABORTED, "aborted it")
        self.reports_ids |= bool(event.ids or event.prompt_ids)
        # Engines that report ids also report a reason for the end, and messages and responses end with an event of
        # their own. Where neither came before `[DONE]`, the engine failed.
        says_why = self.reports_ids or self.label in ("messages", "responses")
        if kind is Kind.END and event.data is None and self.reason is None and says_why and not self.lost:
            raise UpstreamError(CLOSED, "ended its stream without saying why")
        try:
            if self.breaks:
                return self._joined(event)
            if kind in (Kind.STRANGE, Kind.ERROR) or (kind is Kind.OPENS and self.text):
                raise ValueError(kind)
            if event.data is not None:
                self._rename(event.data)
            self._keep(event)
        except UNKNOWN:
            if self.breaks:
                raise UpstreamError(DIFFERS, "went on with events of another kind") from None
            self.lose(self.terms.why_strange)
        return self._shown(raw + b"\n\n")

    def lose(self, reason: str) -> None:
        """Mark the stream as one that can no longer be resumed, and free the memory that this would need.

        `reason`: the label in metrics.
        """
        self.lost, self.body, self.text = reason, b"", bytearray()
        self.ids = self.prompt_ids = array("I")

    def _keep(self, event: Event) -> None:
        """Record an event that the client gets, or has already."""
        kind, begins = event.kind, not self.breaks or self.way == REPEAT
        if kind in (Kind.OPENS, Kind.CLOSES) and not self.breaks:
            self.passed += 1
        self.has_usage |= kind is Kind.CLOSES
        self.complete |= kind is Kind.END
        self.reason = event.reason or self.reason
        if self.lost:
            return
        if event.prompt_ids and begins:
            self.prompt_ids = event.prompt_ids
        if event.ids:
            self.ids.extend(event.ids)
        elif event.text and begins:
            self.prompt_ids = array("I")  # some text has no ids, so they cannot be used
        self.text += event.text.encode()
        if event.text and event.ids and len(event.ids) == 1:
            self.clean = len(self.ids), len(self.text)
        if self.body and not self.keeps_body and not self.is_untouched:
            self.body = b""

    def _rename(self, data: dict[str, Any]) -> None:
        """Give an event the id, times and numbers that continue the stream's first events, as the client expects."""
        if self.label in ("chat", "completions"):
            self.names = self.names or (data.get("id"), data.get("created"))
            data["id"], data["created"] = self.names
        if self.label != "responses":
            return
        self.number += 1
        data["sequence_number"] = self.number
        response, items = data.get("response"), [data["item"]] if "item" in data else []
        if response is not None:
            self.names = self.names or (response["id"], response.get("created_at"))
            response["id"], response["created_at"] = self.names
            if self.breaks and "store" in response:
                response["store"] = False  # no replica has stored it under this id
            items += response.get("output") or ()
        for item in items:
            self.item = self.item or item["id"]
            item["id"] = self.item
        if "item_id" in data:
            data["item_id"] = self.item

    # --- the rest of the stream, from another replica

    def _joined(self, event: Event) -> bytes:
        """Return what the client gets of an event from a replica that resumes the stream; b"" if it has all of that.

        Raises UpstreamError if the event does not continue what the client has, and ValueError if it is of an unknown
        kind that cannot be relayed.
        """
        kind, text = event.kind, event.text
        if not self.proven:
            self._prove(event)
        if kind in (Kind.STRANGE, Kind.ERROR):
            # An unknown event is relayed unchanged if no part of it can be in what the client has, such as a tool call
            # that follows the client's text in a repetition: all of the call is from this replica.
            if kind is Kind.ERROR or self.way != REPEAT or self.skip or self.label == "responses" or not event.data:
                raise ValueError(kind)
            self.lose(self.terms.why_strange)
        elif kind is Kind.TEXT:
            if self.skip and text:
                new = text.encode()
                same = min(len(new), len(self.skip))
                if new[:same] != self.skip[:same]:
                    raise UpstreamError(DIFFERS, "wrote another text than the client has")
                del self.skip[:same]
                text = new[same:].decode()
            self._keep(event)
            if not text and (event.reason is None or self.knew_reason):
                return b""
            event.holder[event.name] = text
        elif self.skip and kind is not Kind.OPENS:
            raise UpstreamError(DIFFERS, "ended before the text that the client has")
        else:
            self._keep(event)
            if kind is not Kind.END:
                self.came += 1
                if self.came <= self.passed:
                    return b""
                self.passed = self.came
        self.shown |= bool(text)
        if event.data is None:
            return b"data: [DONE]\n\n"
        self._rename(event.data)
        if self.way == IDS and isinstance(usage := event.data.get("usage"), dict):
            self._join_counts(usage)
        return self._shown(write(self.label, event.data))

    def _prove(self, event: Event) -> None:
        """Check that the engine continues the token ids that it was given as its prompt, as far as an event shows that.

        An engine that ignores the ids would answer a prompt that nobody wrote. Raises UpstreamError if the event
        reports other prompt ids, or has text although no event has reported them.
        """
        if event.prompt_ids:
            if event.prompt_ids != self.prompt_ids + self.ids:
                raise UpstreamError(DIFFERS, "was given token ids, and went on from others")
            self.proven = True
        elif event.kind is Kind.TEXT:
            raise UpstreamError(DIFFERS, "was given token ids, and does not report what it goes on from")

    def _join_counts(self, usage: dict[str, Any]) -> None:
        """Correct a usage in place, so that it counts the client's prompt and the whole answer.

        The engine got the begin of the answer as a part of its prompt, and has counted it there.
        """
        usage["prompt_tokens"] = self.prompt.tokens
        usage["completion_tokens"] += self.given
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], self.prompt.tokens)

    # --- the failure of a replica

    @property
    def limit(self) -> int | None:
        """The most tokens that the answer may have; None if only the context limits it."""
        default = 16 if self.label == "completions" else None
        return default if self.prompt.max_tokens is None else self.prompt.max_tokens

    @property
    def has_all_text(self) -> bool:
        """Whether the client has all of the text, as the reason for the end or the number of its token ids shows."""
        return self.reason is not None or (self.limit is not None and self.clean[0] >= self.limit > 0)

    @property
    def lacks_end(self) -> bool:
        """Whether the client lacks only the last event: it has the reason for the end, and usage if it asked for it."""
        if self.reason is None or self.complete or self.skip or self.label in ("messages", "responses"):
            return False
        return self.has_usage or not self.prompt.include_usage

    @property
    def is_untouched(self) -> bool:
        """Whether the client has nothing of the answer except events that announce it."""
        has_ids = self.ids and self.terms.tells_ids
        return not (self.text or self.skip or self.has_usage or self.complete or self.reason is not None or has_ids)

    @property
    def is_stuck(self) -> bool:
        """Whether the last replica has written no text that was new to the client."""
        return not (self.shown if self.breaks else self.text)

    def break_off(self, why: str, events: int) -> None:
        """Note that the replica has failed within the stream.

        `why`: the failure in words, for the log.
        `events`: the number of output events that the client has.
        """
        self.breaks, self.broke_at, self.broke, self.events = self.breaks + 1, monotonic(), why, events
        self.chunks, self.part, self.came, self.shown = None, bytearray(), 0, False

    def go_by_ids(self) -> bytes:
        """Prepare to resume the stream by ids; return the next engine's prompt.

        These are the token ids of the prompt and of the answer so far, as uint32 in little endian.
        """
        count, end = self.clean
        self.skip = self.text[end:] + self.skip
        del self.ids[count:], self.text[end:]
        self.given, self.proven = count, False
        return (self.prompt_ids + self.ids).tobytes()

    def go_by_repetition(self) -> None:
        """Prepare to resume the stream by repetition: the next engine writes again all that the client has."""
        self.skip, self.text = self.text + self.skip, bytearray()
        self.ids, self.prompt_ids, self.clean, self.given, self.proven = array("I"), array("I"), (0, 0), 0, True
        self.knew_reason, self.reason = self.knew_reason or self.reason is not None, None

    def closing_events(self) -> bytes:
        """Return the events that are missing at the end of a chat's or completion's stream with complete text.

        These are the reason for the end, usage if the client asked for it, and `[DONE]`. b"" if none is missing.
        """
        if self.complete:
            return b""
        object_ = "chat.completion.chunk" if self.label == "chat" else "text_completion"
        id_, created = self.names or (None, None)
        frame = {"id": id_, "object": object_, "created": created, "model": self.prompt.model}
        events, written = b"", len(self.ids) if self.limit is None else min(len(self.ids), self.limit)
        if self.reason is None:
            empty = {"delta": {"content": ""}} if self.label == "chat" else {"text": ""}
            choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length", "stop_reason": None}
            events += write(self.label, {**frame, "choices": [choice]})
        if self.prompt.include_usage and not self.has_usage:
            prompt = self.prompt.tokens
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + written, "completion_tokens": written}
            events += write(self.label, {**frame, "choices": [], "usage": usage})
        self.complete = True
        return events + b"data: [DONE]\n\n"
