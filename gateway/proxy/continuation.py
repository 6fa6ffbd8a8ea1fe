"""What is kept of one stream so that another replica can go on with it, and how the rest is joined to it.

The stream is read event by event. The client gets whole events only, so that whatever breaks off the client's part ends
where an event does. What it got is kept as text and, where the engine tells them, as token ids. After a break the rest
comes in one of four ways:

- by ids: another engine is asked for what follows prompt and ids. Ids at the end whose text is not complete (part of a
  character) or that came together with others are left to it to write again.
- by repetition: the same request once more, where the engine tells no ids and decoding is greedy.
- by text: as by ids, with those that the text is tokenized to; another stream than the engine had begun, perhaps.
- anew: the same request once more, where the client has no text yet.

Text that the client has is compared with what comes, and left out. A difference ends the stream: nothing is ever joined
to what does not lead there.
"""

from __future__ import annotations

from array import array
from enum import Enum
from sys import getsizeof
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ..http.upstream import Head, UpstreamError
from ..prompt.api.continuable import TOOLS, Terms
from .answers import error_status
from .chunks import END_OF_BODY, Chunks, framed
from .events import Event, Events, Kind, Names, hide_ids, join_counts, put_before, read, with_text, without_ids, write
from .retries import ABORTED, CLOSED, DIFFERS, ERROR_ANSWER, PROTOCOL

if TYPE_CHECKING:
    from ..prompt import Prompt
    from .interruptions import Interruption

LONGEST_EVENT = 2**22  # bytes, but for the prompt's ids; engines write no such event
ID_BYTES = 12  # of an id in an event at most: ten digits, a comma and a blank
LONGEST_FROZEN = 2**16  # bytes of an event of a stream that is over the budget
OVERHEAD = 1024  # bytes of a stream's objects, besides what they hold: 900 with Python 3.11
# What reading an event raises that no engine known here writes.
UNKNOWN = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


class Way(Enum):
    IDS = "ids"
    REPEAT = "repeat"
    TEXT = "text"
    AGAIN = "again"

    __hash__ = object.__hash__


class Unreadable(Exception):
    """The stream has what is not known here, so nobody goes on with it. `data`: what the client gets so far."""

    def __init__(self, data: bytes):
        super().__init__()
        self.data = data


class StreamHandler(Protocol):
    """Does what follows from each read of a stream that may be gone on with."""

    def streamed(self, attempt: Any, data: bytes) -> None: ...
    def ended(self, attempt: Any) -> None: ...


class Continuation:
    """A stream that can be gone on with. One that cannot, or can no longer, has none."""

    __slots__ = (
        "terms", "label", "prompt", "body", "way", "head", "chunked",
        # which of its exchange's attempts began the answer; events that the client has got of those before the last one
        "first", "events",
        # read and not passed on: of HTTP's framing, None without one, and of an event
        "chunks", "unread",
        # what the client has; `clean`: how many ids, and bytes of the text, up to which both say the same
        "names", "text", "ids", "prompt_ids", "opened", "opening", "closing", "finished", "complete", "clean",
        # since the last break: text and closing events that the client has already, whether this engine has shown that
        # it goes on from the ids, or at its end that it did not, how many ids it was given, and how many bytes of text
        # there were
        "skip", "skip_closing", "told_reason", "shown", "given", "proven", "ignores_ids", "begun_at",
        # the last break, until somebody went on
        "interruption",
        "breaks", "broke_at", "counted", "handler", "is_frozen", "is_strange", "keeps_body", "says_why",
    )  # fmt: skip

    def __init__(self, handler: StreamHandler, terms: Terms, label: str, prompt: Prompt):
        self.handler, self.body, self.keeps_body = handler, b"", False
        self.terms, self.label, self.prompt = terms, label, prompt
        self.way: Way | None = None
        self.head: Head | None = None
        self.chunked = False
        self.first = self.events = 0
        self.chunks: Chunks | None = None
        self.unread = Events()
        self.names = Names()
        self.text = bytearray()  # UTF-8
        self.ids = array("I")
        self.prompt_ids = b""
        self.opened = self.opening = self.closing = 0
        self.finished: str | None = None
        self.complete = False
        self.clean = (0, 0)
        self.skip, self.skip_closing, self.told_reason, self.shown = bytearray(), 0, False, False
        self.given, self.proven, self.ignores_ids = 0, True, False
        self.begun_at = 0
        self.breaks, self.broke_at = 0, 0.0
        self.interruption: Interruption | None = None
        self.counted = 0  # bytes of `size` that are in the budget
        self.is_frozen = False  # over the budget: joined as before, and after another break nobody goes on with it
        self.is_strange = False  # has had what only its engine's parser can go on with
        self.says_why = False  # the engine that writes now says why a stream ends, as far as is known

    @property
    def size(self) -> int:
        """Bytes that are kept of it."""
        held = OVERHEAD + len(self.body) + len(self.terms.kept) + len(self.names.settings) + len(self.prompt_ids)
        if self.chunks is not None:
            held += len(self.chunks.rest)
        return held + getsizeof(self.unread.part) + getsizeof(self.text) + getsizeof(self.ids) + getsizeof(self.skip)

    @property
    def received(self) -> str:
        """What the client has of the answer, in words."""
        if self.ids:
            return f"{len(self.ids)} tokens"
        text = (self.text + self.skip).decode(errors="replace")
        return f"{len(text)} characters" if text else "nothing"

    @property
    def longest_event(self) -> int:
        """Bytes of an event that is waited for. One has the prompt's ids."""
        return LONGEST_FROZEN if self.is_frozen else LONGEST_EVENT + ID_BYTES * self.prompt.tokens

    # --- the stream as it passes

    def sent(self, body: bytes) -> None:
        """It goes to the first replica. `body`: without the gateway's fields, where it may have to be sent once more or
        tokenized; else b""."""
        self.terms.limit = self.terms.limit_of(self.prompt)
        self.body, self.keeps_body = body, bool(body)

    def begin(self, head: Head, first: int, says_why: bool = False) -> None:
        """The first replica's head goes to the client. `first`: which attempt that is."""
        self.head, self.first = head, first
        self.read_from(head, says_why)
        self.chunked = self.chunks is not None

    def read_from(self, head: Head, says_why: bool = False) -> None:
        """What comes now is framed as this head says. `says_why`: its engine has said why another stream of that API
        ended; in the two newer APIs another event than [DONE] ends a stream."""
        self.chunks, self.unread = Chunks() if head.is_chunked else None, Events()
        self.says_why = says_why or self.label in ("responses", "messages")

    def take(self, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """A read of the replica's: what the client gets of it, and why nothing more follows, if so. Raises Unreadable
        where the replica that began writes what is not known here."""
        if self.chunks is not None:
            try:
                data = self.chunks.feed(data)
            except ValueError as error:
                return b"", UpstreamError(PROTOCOL, f"broke HTTP's framing: {error}")
        return self._read(data)

    def take_last(self) -> tuple[bytes, UpstreamError | None]:
        """As `take`, of a last event without the blank line behind it."""
        part = bytes(self.unread.part)
        if not part or read(self.label, part).kind is Kind.STRANGE:
            return b"", None
        return self._read(b"\n\n")

    def _read(self, body: bytes) -> tuple[bytes, UpstreamError | None]:
        events = self.unread.feed(body)
        out: list[bytes] = []
        error = None
        for at, raw in enumerate(events):
            try:
                out.append(self._passed(raw))
            except UpstreamError as found:
                error = found
                break
            except UNKNOWN:
                if not self.breaks:
                    raise Unreadable(b"".join((*out, *(one + b"\n\n" for one in events[at:]), self.leave()))) from None
                error = UpstreamError(DIFFERS, "went on with events of another kind")
                break
        if error is None and len(self.unread.part) > self.longest_event:
            if not self.breaks:  # nothing is wrong with it
                raise Unreadable(b"".join((*out, self.leave())))
            error = UpstreamError(PROTOCOL, f"sent an event of more than {self.longest_event} bytes")
        return self.framed(b"".join(out)), error

    def leave(self) -> bytes:
        """What was held back, so that all that follow may pass as they come."""
        part, self.unread = bytes(self.unread.part), Events()
        return part

    def framed(self, events: bytes) -> bytes:
        return framed(events) if self.chunked else events

    @property
    def end(self) -> bytes:
        """What ends the body."""
        return END_OF_BODY if self.chunked else b""

    def _passed(self, raw: bytes) -> bytes:
        """An event -> what the client gets of it. Raises UpstreamError, or one of UNKNOWN."""
        event = read(self.label, raw)
        kind = event.kind
        if kind is Kind.BESIDE:
            return raw + b"\n\n"
        if kind is Kind.ERROR and (status := error_status(raw + b"\n\n", True)) >= 500:
            raise UpstreamError(ERROR_ANSWER, f"ended its stream with an error that amounts to {status}")
        if event.reason == "abort" or (self.label == "messages" and _aborts(event)):
            raise UpstreamError(ABORTED, "aborted it")
        if event.ids or event.prompt_ids:
            self.says_why = True  # as all engines do that tell ids
        if kind is Kind.END and event.data is None and self.finished is None and self.says_why and not self.is_strange:
            raise UpstreamError(CLOSED, "ended its stream without saying why")
        if kind is Kind.STRANGE and self.may_be_strange and event.data:
            self.is_strange = True
            return self._mended(event, "")
        if kind in (Kind.STRANGE, Kind.ERROR) or (kind is Kind.OPENS and self.text and not self.breaks):
            raise ValueError(kind)
        return self._joined(event) if self.breaks else self._first(event, raw)

    def _first(self, event: Event, raw: bytes) -> bytes:
        """An event of the replica that began."""
        self._keep(event)
        if event.data is not None:
            self.names.note(self.label, event.data)
        told = event.ids is not None or event.prompt_ids is not None
        return (hide_ids(raw) if told and not self.terms.tells_ids else raw) + b"\n\n"

    def freeze(self) -> None:
        """Keep only what the rest of this replica is joined by."""
        self.is_frozen, self.body = True, b""
        del self.ids[self.given :], self.text[self.begun_at if self.label == "responses" else 0 :]

    def _keep(self, event: Event) -> None:
        kind = event.kind
        begins = not self.breaks or self.way is Way.AGAIN
        if event.prompt_ids and begins:
            self.prompt_ids = array("I", event.prompt_ids).tobytes()
        if kind is Kind.TEXT and not self.is_frozen:
            if event.ids:
                self.ids.extend(event.ids)
            elif event.text and begins:
                self.prompt_ids = b""  # not all of its text has ids
            if event.text:
                self.text += event.text.encode()
                if event.ids and len(event.ids) == 1:
                    self.clean = len(self.ids), len(self.text)
        elif kind is Kind.OPENS:
            self.opened += 1
        elif kind is Kind.CLOSES:
            self.closing += 1
        elif kind is Kind.END:
            self.complete = True
        self.finished = event.reason or self.finished
        if self.body and not self.keeps_body and not self.is_untouched:
            self.body = b""

    def _joined(self, event: Event) -> bytes:
        """An event of a replica that goes on."""
        kind, data = event.kind, event.data
        if not self.proven:
            self._prove(event)
        if kind is Kind.OPENS:
            self.opening += 1
            if self.way is Way.AGAIN and event.prompt_ids:
                self.prompt_ids = array("I", event.prompt_ids).tobytes()
            if self.opening <= self.opened:
                return b""
            self.opened = self.opening
        text = event.text
        if kind is Kind.TEXT:
            if self.skip and text:
                told = text.encode()
                same = min(len(told), len(self.skip))
                if told[:same] != self.skip[:same]:
                    raise UpstreamError(DIFFERS, "wrote another text than the client has")
                del self.skip[:same]
                text = told[same:].decode()
            self._keep(event)
            if not text and (event.reason is None or self.told_reason):
                return b""
        elif self.skip and kind is not Kind.OPENS:
            raise UpstreamError(DIFFERS, "ended before the text that the client has")
        elif kind is not Kind.OPENS:
            self._keep(event)
            if kind is Kind.CLOSES and self.closing <= self.skip_closing:
                return b""
        self.shown = self.shown or bool(text)
        if data is None:
            return b"data: [DONE]\n\n"
        return self._mended(event, text)

    def _mended(self, event: Event, text: str) -> bytes:
        data = event.data
        self.names.give(self.label, data)
        if event.kind is Kind.TEXT:
            with_text(self.label, data, text)
        if not self.terms.tells_ids:
            without_ids(self.label, data)
        if self.way in (Way.IDS, Way.TEXT):
            join_counts(self.label, data, self.given, len(self.prompt_ids) // 4)
            if self.label == "responses" and event.kind in (Kind.CLOSES, Kind.END):
                put_before(data, self.text[: self.begun_at].decode())
        return write(self.label, data)

    def _prove(self, event: Event) -> None:
        """An engine that does not take ids would answer a prompt that nobody wrote."""
        expected = self.prompt_ids + self.ids[: self.given].tobytes()
        if event.prompt_ids:
            if array("I", event.prompt_ids).tobytes() != expected:
                raise UpstreamError(DIFFERS, "was given token ids, and went on from others")
            self.proven = True
        elif event.kind is Kind.OPENS and "message" in event.data:
            usage = event.data["message"]["usage"]
            parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            if sum(usage.get(name) or 0 for name in parts) != len(expected) // 4:
                raise UpstreamError(DIFFERS, "was given token ids, and counts another number of them")
            self.proven = True
        elif event.kind is Kind.END and self.label == "responses":
            counted = (event.data["response"].get("usage") or {}).get("input_tokens")
            if counted != len(expected) // 4:
                self.ignores_ids = True
                told = "does not count its prompt" if counted is None else "counted another number of them"
                raise UpstreamError(DIFFERS, f"was given token ids, and {told}")
            self.proven = True
        elif event.kind is Kind.TEXT and self.label in ("chat", "completions"):
            raise UpstreamError(DIFFERS, "was given token ids, and does not tell what it goes on from")

    # --- the break

    def is_over(self) -> bool:
        """Whether the client has all of the text, and only what follows it is missing."""
        limit = self.terms.limit
        return self.finished is not None or (limit is not None and self.clean[0] >= limit > 0)

    @property
    def lacks_end(self) -> bool:
        """Whether only the event is missing with which a stream ends that has told why, and its usage."""
        if self.finished is None or self.complete or self.skip:
            return False
        if self.label in ("chat", "completions"):
            return self.closing > 0 or not self.prompt.include_usage
        return False

    @property
    def may_be_strange(self) -> bool:
        """Whether what is not known here may pass: all of it is the replica's that goes on, such as the call of a tool
        behind a text that the client has."""
        return self.way in (Way.AGAIN, Way.REPEAT) and not self.skip and self.label != "responses"

    @property
    def why_strange(self) -> str:
        """Why nobody goes on with a stream that has had what is not known here."""
        return TOOLS if self.terms.no_ids == TOOLS else "events"

    @property
    def is_untouched(self) -> bool:
        """Whether its client has nothing of the answer but what announces it."""
        told = self.text or self.skip or self.closing or self.complete or self.finished is not None
        return not (told or (self.ids and self.terms.tells_ids))

    @property
    def is_stuck(self) -> bool:
        """Whether the replica that wrote it last wrote nothing that the client did not have."""
        return not (self.shown if self.breaks else self.text)

    def break_off(self) -> None:
        """The replica is gone; what the client has stands."""
        self.breaks += 1
        self.broke_at = monotonic()
        self.chunks, self.unread, self.opening = None, Events(), 0

    def go_by_ids(self, ids: bytes | None = None, prompt_ids: bytes = b"") -> bytes:
        """From now on the rest comes by ids; returns all that it follows. `ids`, `prompt_ids`: those of the text, where
        the engine told none."""
        if ids is None:
            count, end = self.clean
            self.way, self.skip = Way.IDS, self.text[end:] + self.skip
            del self.ids[count:], self.text[end:]
        else:
            self.text += self.skip
            self.way, self.skip, self.ids = Way.TEXT, bytearray(), array("I", ids)
            self.prompt_ids = prompt_ids
            self.clean = len(self.ids), len(self.text)
        self.given, self.begun_at = len(self.ids), len(self.text)
        self.skip_closing, self.shown, self.proven = 0, False, False
        return self.prompt_ids + self.ids.tobytes()

    def go_again(self) -> None:
        """What comes now is the answer from its beginning, of which the client has nothing."""
        self.way, self.prompt_ids, self.ids, self.clean = Way.AGAIN, b"", array("I"), (0, 0)
        self.given, self.begun_at, self.shown, self.proven = 0, 0, False, True

    def go_by_repetition(self) -> None:
        self.way, self.skip = Way.REPEAT, self.text + self.skip
        self.skip_closing = max(self.closing, self.skip_closing)
        self.told_reason = self.told_reason or self.finished is not None
        self.text, self.closing, self.given, self.begun_at = bytearray(), 0, 0, 0
        self.finished, self.shown, self.proven = None, False, True

    def closing_events(self) -> bytes:
        """What is missing where all of the text is there: of chats and completions, whose ids are known or that lack no
        usage. Nothing of a stream that is complete."""
        if self.complete:
            return b""
        events, prompt, written = b"", len(self.prompt_ids) // 4, len(self.ids)
        if self.terms.limit is not None:
            written = min(written, self.terms.limit)
        frame = {
            "id": self.names.id,
            "object": "chat.completion.chunk" if self.label == "chat" else "text_completion",
            "created": self.names.created,
            "model": self.prompt.model,
        }
        if self.finished is None:
            empty = {"delta": {"content": ""}} if self.label == "chat" else {"text": ""}
            choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length", "stop_reason": None}
            events += write(self.label, {**frame, "choices": [choice]})
        if self.prompt.include_usage and not self.closing:
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + written, "completion_tokens": written}
            events += write(self.label, {**frame, "choices": [], "usage": usage})
        self.complete = True
        return events + b"data: [DONE]\n\n"


def _aborts(event: Event) -> bool:
    data = event.data
    return bool(data) and data.get("type") == "message_delta" and data["delta"].get("stop_reason") is None
