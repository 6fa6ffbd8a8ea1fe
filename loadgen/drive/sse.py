"""A parser of one OpenAI reply, streamed as server-sent events or whole, into a Record.

The parser has no I/O and no clock: it takes bytes and their arrival times and fills a `Record`. A chunk carries output
if one of its choices has text, content, reasoning, a refusal or tool calls; a chunk that only names the role is not the
first token.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from loadgen.drive.records import Record

_MAX_DETAIL = 300
_OTHER_OUTPUT = ("reasoning_content", "reasoning", "tool_calls", "refusal")


class Reply:
    """A parser of one reply into `record`.

    The client calls `begin` once, `feed` for each piece of the body, `end` when the body is complete, and `settle`
    last, even if there was no reply.
    """

    def __init__(self, record: Record):
        self.record = record
        self.started = False  # headers arrived
        self.streaming = False
        self.done = False  # [DONE] or a finish reason arrived
        self.body: list[bytes] = []
        self.rest = b""  # the beginning of a line whose end has not arrived
        self.data: list[bytes] = []  # data lines of the current event
        self.chunk = 0.0  # arrival time of the last output

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Record the response's status, and the replica and predicted cached tokens that a gateway's headers state.

        `headers`: values by lower-case name.
        """
        record = self.record
        self.started, record.status = True, status
        self.streaming = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        replica = headers.get(b"x-hitherto-replica")
        record.replica = replica.decode("latin-1") if replica else None
        predicted = headers.get(b"x-hitherto-cached-tokens", b"")
        record.predicted_tokens = int(predicted) if predicted.isdigit() else None

    def feed(self, data: bytes, now: float) -> None:
        """Parse a piece of the body, which arrived at `now` (seconds)."""
        if not self.streaming:
            self.body.append(data)
            return
        lines = (self.rest + data if self.rest else data).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self.data.append(line[5:].lstrip(b" "))
            elif not line and self.data:
                self._event(b"\n".join(self.data), now)
                self.data = []

    def end(self, now: float) -> None:
        """Finish parsing after the whole body has arrived; record an HTTP error, or a stream that was cut off.

        `now`: when the end of the body arrived (seconds).
        """
        record = self.record
        if self.streaming:
            if self.data:  # the last event lacks its empty line
                self._event(b"\n".join(self.data), now)
            if not self.done and record.error is None:
                record.error, record.detail = "truncated", "the stream ended without [DONE]"
            return
        body = b"".join(self.body)
        if record.status != 200:
            record.error, record.detail = f"http_{record.status}", _why(body)[:_MAX_DETAIL]
            return
        record.last = now
        self._message(body, now)

    def settle(self, error: str | None, now: float) -> None:
        """Complete the record when the exchange is over, with or without a reply.

        `error`: class of an error of the connection (`Record.error`), or None; `now`: when the exchange ended.
        """
        record = self.record
        record.error = error or record.error
        if record.error is None:
            record.detail = ""  # left from a first try on a connection that the server had closed
        if record.error or not record.last:
            record.last = now

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        self.record.last = now
        self._message(payload, now)

    def _message(self, payload: bytes, now: float) -> None:
        """Record the contents of one JSON message: an error, or output and usage.

        `payload`: the data of an event or the body of a whole reply; `now`: when it arrived (seconds).
        """
        record = self.record
        try:
            message = orjson.loads(payload)
            if message.get("error"):
                record.error, record.detail = "stream_error", str(message["error"])[:_MAX_DETAIL]
                return
            for choice in message.get("choices") or ():
                self._choice(choice, now)
            if usage := message.get("usage"):
                self._usage(usage)
        except (ValueError, TypeError, KeyError, AttributeError):
            record.error = "protocol"
            record.detail = f"not an OpenAI reply: {payload[:_MAX_DETAIL].decode('utf-8', 'replace')}"

    def _choice(self, choice: dict, now: float) -> None:
        """Record the text of a choice and, if it carries output of any kind, its arrival time `now` (seconds)."""
        record = self.record
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("content") or choice.get("text")
        if text:
            record.pieces.append(text)
        if text or any(part.get(key) for key in _OTHER_OUTPUT):
            if record.first is None:
                record.first = now
            else:
                record.gaps.append(now - self.chunk)
            self.chunk = now
        if choice.get("finish_reason"):
            self.done = True

    def _usage(self, usage: dict) -> None:
        record = self.record
        record.prompt_tokens = usage.get("prompt_tokens")
        record.output_tokens = usage.get("completion_tokens")
        if details := usage.get("prompt_tokens_details"):
            record.cached_tokens = details.get("cached_tokens")


def _why(body: bytes) -> str:
    """Return the message of an OpenAI error, or the whole body if it is no such error."""
    try:
        told = orjson.loads(body)
        why = told["error"]["message"] if "error" in told else told["message"]  # the latter is vLLM's older form
    except (ValueError, TypeError, LookupError):
        why = None
    return why if isinstance(why, str) and why else body.decode("utf-8", "replace")
