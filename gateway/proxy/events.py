"""Events of a streamed answer, as far as going on with it on another replica asks: which API's text is where, what
comes before it and behind it, and how an event of one stream is made one of another.

Streams are read as vLLM 0.28 and 0.32 write them. What is not known here is `STRANGE`: a stream that has any is not
gone on with.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, NamedTuple

import orjson

from ..prompt.api.continuable import exact
from .answers import BOM

_TOKEN_IDS = re.compile(rb'("(?:prompt_token_ids|token_ids)"\s*:\s*)\[[0-9,\s]*\]')
_LONGEST_NAME = 1000  # characters of a stream's id
_HIDDEN = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")
_OUTCOME = frozenset(("status", "output", "usage", "error", "incomplete_details", "completed_at"))  # of a response
_ENDS = frozenset(("response.completed", "response.incomplete"))


class Kind(Enum):
    OPENS = "before the text"
    TEXT = "of the text, perhaps empty"
    CLOSES = "behind the text"
    END = "the last one"
    ERROR = "says that the answer failed"
    BESIDE = "a ping, a comment or nothing"
    STRANGE = "of no stream that is known here"

    __hash__ = object.__hash__


class Event(NamedTuple):
    """`reason`: why generation ended, where it tells. `ids`: of the tokens that it brings, where it tells those."""

    kind: Kind
    data: Any = None
    text: str = ""
    reason: str | None = None
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None


END, BESIDE, STRANGE = Event(Kind.END), Event(Kind.BESIDE), Event(Kind.STRANGE)


def read(label: str, raw: bytes) -> Event:
    """One event without the blank line behind it."""
    at = 0 if raw.startswith(b"data:") else raw.find(b"\ndata:") + 1
    if at == 0 and not raw.startswith(b"data:"):
        if raw.startswith(BOM):
            return read(label, raw.removeprefix(BOM))
        return BESIDE if not raw.strip() or raw.startswith((b":", b"event: ping", b"id:", b"retry:")) else STRANGE
    told = raw[at + 5 :].strip()
    if not told:
        return BESIDE
    if told == b"[DONE]":
        return END
    try:
        data = orjson.loads(told)
    except orjson.JSONDecodeError:
        return STRANGE
    if not isinstance(data, dict):
        return STRANGE
    if data.get("error") or data.get("type") in ("error", "response.failed") or data.get("object") == "error":
        # a response that is well has an error as well: null
        return Event(Kind.ERROR, data)
    try:
        event = _READERS[label](data)
    except (KeyError, TypeError, AttributeError, IndexError):
        return Event(Kind.STRANGE, data)
    return event if event.kind is not Kind.STRANGE and _is_typed(event) else Event(Kind.STRANGE, data)


def _is_typed(event: Event) -> bool:
    """Whether all that an event brings is of the type that it is read as."""
    text, reason, ids, prompt_ids = event[2:]
    return (
        type(text) is str
        and (reason is None or type(reason) is str)
        and (ids is None or _are_ids(ids))
        and (prompt_ids is None or _are_ids(prompt_ids))
    )


def _are_ids(told: object) -> bool:
    """As `array("I")` takes them, but for true and false."""
    return type(told) is list and {*map(type, told)} <= {int} and (not told or (min(told) >= 0 and max(told) < 2**32))


def _openai(data: dict[str, Any], choice: dict[str, Any], text: str, opens: bool) -> Event:
    reason, ids = choice.get("finish_reason"), choice.get("token_ids")
    kind = (
        Kind.STRANGE if choice.get("logprobs") else Kind.OPENS if opens and not text and reason is None else Kind.TEXT
    )
    prompt_ids = data.get("prompt_token_ids")
    prompt_ids = choice.get("prompt_token_ids") if prompt_ids is None else prompt_ids
    return Event(kind, data, text, reason, ids, prompt_ids)


def _chat(data: dict[str, Any]) -> Event:
    if not data["choices"]:
        return Event(Kind.CLOSES, data)
    choice = data["choices"][0]
    delta = choice["delta"]
    if any(delta.get(name) for name in _HIDDEN):
        return STRANGE
    return _openai(data, choice, _said(delta.get("content")), "role" in delta and not choice.get("token_ids"))


def _completions(data: dict[str, Any]) -> Event:
    if not data["choices"]:
        return Event(Kind.CLOSES, data)
    return _openai(data, data["choices"][0], _said(data["choices"][0]["text"]), False)


def _said(told: Any) -> Any:
    return "" if told is None else told


def _messages(data: dict[str, Any]) -> Event:
    kind = data["type"]
    if kind == "content_block_delta":
        delta = data["delta"]
        return Event(Kind.TEXT, data, delta["text"]) if delta["type"] == "text_delta" else STRANGE
    if kind == "content_block_start":
        return Event(Kind.OPENS, data) if data["content_block"]["type"] == "text" and not data["index"] else STRANGE
    if kind in ("content_block_stop", "message_delta"):
        return Event(Kind.CLOSES, data, reason=(data.get("delta") or {}).get("stop_reason"))
    return _OTHER_MESSAGES.get(kind, STRANGE)._replace(data=data)


_OTHER_MESSAGES = {"message_start": Event(Kind.OPENS), "message_stop": END, "ping": BESIDE}


def _responses(data: dict[str, Any]) -> Event:
    kind = data["type"]
    if kind == "response.output_text.delta":
        return Event(Kind.TEXT, data, data["delta"]) if not data.get("logprobs") else STRANGE
    if kind in _ENDS:
        return Event(Kind.END, data, reason=data["response"].get("status"))
    if kind in ("response.created", "response.queued", "response.in_progress"):
        return Event(Kind.OPENS, data)
    if kind == "response.output_item.added":
        return Event(Kind.OPENS, data) if data["item"]["type"] == "message" and not data["output_index"] else STRANGE
    if kind == "response.content_part.added":
        return Event(Kind.OPENS, data) if data["part"]["type"] == "output_text" else STRANGE
    known = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
    return Event(Kind.CLOSES, data) if kind in known else STRANGE


_READERS = {"chat": _chat, "completions": _completions, "messages": _messages, "responses": _responses}


def write(label: str, data: Any) -> bytes:
    head = b"event: %b\n" % data["type"].encode() if label in ("messages", "responses") else b""
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


def with_text(label: str, data: dict[str, Any], text: str) -> None:
    """Let an event of the text bring this text."""
    if label == "chat":
        data["choices"][0]["delta"]["content"] = text
    elif label == "completions":
        data["choices"][0]["text"] = text
    elif label == "messages":
        data["delta"]["text"] = text
    else:
        data["delta"] = text


def without_ids(label: str, data: dict[str, Any]) -> None:
    """As engines write it that were not asked for token ids."""
    if label in ("chat", "completions"):
        for told in (data, *data["choices"]):
            for name in ("prompt_token_ids", "token_ids"):
                if told.get(name) is not None:
                    told[name] = None


def hide_ids(raw: bytes) -> bytes:
    """The same in an event that is not parsed for it."""
    return _TOKEN_IDS.sub(rb"\1null", raw)


class Events:
    """Splits a stream at the blank lines behind its events. `part`: what is not a whole event yet."""

    __slots__ = ("part",)

    def __init__(self) -> None:
        self.part = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are whole now, with line ends of one byte."""
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


class Names:
    """What the client knows a stream by, and what every event of the rest has to say as well."""

    __slots__ = ("id", "created", "item", "number", "settings")

    def __init__(self) -> None:
        self.settings = b""  # of a response: what it says of its request, as a JSON object
        self.id: Any = None
        self.created: Any = None
        self.item: Any = None
        self.number = -1  # of the last event that was numbered

    def note(self, label: str, data: dict[str, Any]) -> None:
        """Of an event that goes to the client as it is."""
        self._learn(label, data)
        if label == "responses":
            self.number = _whole(data.get("sequence_number", self.number))

    def _learn(self, label: str, data: dict[str, Any]) -> None:
        told = data.get("response") if label == "responses" else data
        if self.id is None and told:
            self.id = _name(told.get("id"))
            self.created = _name(told.get("created_at" if label == "responses" else "created"))
            if label == "responses":
                self.settings = exact({name: value for name, value in told.items() if name not in _OUTCOME})
        if self.item is None and isinstance(data.get("item"), dict):
            self.item = _name(data["item"]["id"])

    def give(self, label: str, data: dict[str, Any]) -> None:
        """To an event of another stream."""
        self._learn(label, data)
        if label in ("chat", "completions"):
            data["id"], data["created"] = self.id, self.created
        elif label == "responses":
            self.number += 1
            data["sequence_number"] = self.number
            if "item_id" in data:
                data["item_id"] = self.item
            for item in (data.get("item"), *(data.get("response") or {}).get("output", ())):
                if item is not None:
                    item["id"] = self.item
            if "response" in data:
                data["response"] |= orjson.loads(self.settings or b"{}")
                if "store" in data["response"]:
                    data["response"]["store"] = False  # under this id no replica has it


def _name(told: Any) -> Any:
    """What a stream is known by is kept as long as it runs. Raises ValueError."""
    if not (told is None or type(told) in (int, float) or (type(told) is str and len(told) <= _LONGEST_NAME)):
        raise ValueError("a name that is neither a number nor a short text")
    return told


def _whole(told: Any) -> int:
    if type(told) is not int:
        raise ValueError("a number that is none")
    return told


def join_counts(label: str, data: dict[str, Any], written: int, prompt: int) -> None:
    """Let usage speak of the client's prompt and the whole answer, where the engine's prompt had `written` tokens of
    the answer in it. `prompt`: tokens of the client's."""
    usage = (data.get("response") or data).get("usage") if label == "responses" else data.get("usage")
    if not isinstance(usage, dict):
        return
    if label == "messages":
        over = written
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
            if isinstance(usage.get(name), int):
                taken = min(over, usage[name])
                usage[name] -= taken
                over -= taken
        usage["output_tokens"] += written
        return
    before, behind = ("input", "output") if label == "responses" else ("prompt", "completion")
    usage[f"{before}_tokens"] = prompt
    usage[f"{behind}_tokens"] += written
    details = usage.get(f"{before}_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        details["cached_tokens"] = min(details["cached_tokens"], prompt)


def put_before(data: Any, text: str) -> None:
    """Let the events with which a response closes have the whole text."""
    if isinstance(data, dict):
        if data.get("type") in ("output_text", "response.output_text.done") and isinstance(data.get("text"), str):
            data["text"] = text + data["text"]
        for value in data.values():
            put_before(value, text)
    elif isinstance(data, list):
        for value in data:
            put_before(value, text)
