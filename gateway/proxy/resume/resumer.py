"""The resumption of streams on another replica, after theirs has failed (`--continue-streams`).

A stream's `StreamRecord` keeps what its client has. This module decides whether a stream is recorded, within a budget
of bytes, and how it is resumed after a failure. `Placing` chooses the other replica as for any request: the prompt and
the token ids written so far make one longer prompt, for which it is known which replica has most of it cached.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from ...errors import ApiError, error_event
from ...http.chunks import end_of_body, framed
from ...http.upstream import Head, UpstreamError
from ...prompt.api.resumable import repeated, terms_of, with_answer
from ...prompt.prompt import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from ..exactness.forwarding import process_of
from ..exchange import Attempt, Exchange, meter
from ..failures.retries import CLOSED, DIFFERS, NO_CRASHES, SHUT_DOWN
from ..outgoing import Outgoing
from ..placement.eligibility import Eligibility
from ..placement.placing import Placing
from ..settling import Settling
from ..states import AttemptState, ExchangeEvent, Leg
from .record import IDS, OVER, REPEAT, StreamRecord

if TYPE_CHECKING:
    from ...ops.metrics import Metrics
    from ..backend import Backend
    from ..responses.usage import Usage

log = logging.getLogger("hitherto.proxy")

PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
MOST_BYTES = 2**22  # the longest body: parsing a longer one again would block the event loop for milliseconds
MOST_BREAKS = 8  # after so many failures of replicas a stream is not resumed again
ASKS_IDS = b'"return_token_ids":true,'
LOG_SECONDS, MOST_LINES = 10.0, 10  # at most ten log lines in ten seconds: an engine that dies has hundreds of streams
LONGEST_ID = 200  # the most characters of a request's id in the log, since the client may choose it


class ResumableAttempt(Attempt):
    """An attempt whose stream is recorded, so that another replica can resume it."""

    __slots__ = ()

    @property
    def is_continued(self) -> bool:  # type: ignore[override]
        """Whether the stream has broken off, so that this attempt resumes it or is the one that failed."""
        return self.exchange.is_continued

    def data(self, data: bytes) -> None:
        record = self.exchange.stream_record
        if self.state is not AttemptState.ANSWERING:
            self.handler.on_body(self, data)
        elif record is not None:
            self.write(*record.resumer.account(self, record, record.take(data)))
        else:
            self.write(data)

    def end(self) -> None:
        self.upstream = None
        record = self.exchange.stream_record
        if self.state is AttemptState.ANSWERING and record is not None:
            record.resumer.finish(self, record)
        else:
            self.handler.on_complete(self)

    def write(self, data: bytes, error: UpstreamError | None = None) -> None:
        """Write the part of a read that the client gets (`data`), and fail the attempt if there is an error."""
        if not data:
            self.extra_events -= 1
        elif self.exchange.metered:
            meter(self, data)
        else:
            self.search(data)
        self.pieces += 1
        if data:
            self.client.write(data)
        if error is not None:
            self.handler.failures.lost(self, error)


class Resumer:
    """The recording of streams, and their resumption on another replica."""

    def __init__(
        self, placing: Placing, settling: Settling, eligible: Eligibility, metrics: Metrics, budget: int, discreet: bool
    ):
        """Create the resumer.

        `budget`: bytes that all records together may take.
        `discreet`: name no replicas in errors, because the clients are tenants.
        """
        self._placing, self._settling, self._eligible, self._metrics = placing, settling, eligible, metrics
        self._budget, self._discreet = budget, discreet
        self.kept = 0  # bytes that all records take
        self._refused: dict[Exchange, str] = {}  # a stream under way without a record -> why, the label in metrics
        self._lines, self._lines_since = 0, 0.0

    # --- the begin, course and end of a stream

    def begin(self, exchange: Exchange) -> None:
        """Give a request a record of its stream, if that can be resumed; called before its first attempt is created."""
        prompt, body = exchange.prompt, exchange.request.body
        if prompt is None or not prompt.stream or prompt.path not in PATHS or exchange in self._refused:
            return
        if len(body) > MOST_BYTES:
            self._refused[exchange] = "budget"
            return
        if (terms := terms_of(prompt, body)) is None:
            return
        record = StreamRecord(self, terms, exchange.label, prompt)
        reason = "n" if prompt.several else "stored" if terms.stored else ""
        if reason or self.kept + record.size > self._budget:
            self._refused[exchange] = reason or "budget"
            return
        exchange.record_stream(record, ResumableAttempt)
        self._count(record)

    def before_send(self, exchange: Exchange, attempt: Attempt, outgoing: Outgoing) -> None:
        """Write into a request what is needed to resume its stream.

        If the attempt is to resume a stream, the body becomes one that asks for the stream's rest, or the request's own
        body once more. If the engine can report token ids from which the stream could be resumed, a request for them is
        added.
        """
        record = exchange.stream_record
        if record is None or attempt.leg is Leg.PREFILL:
            return
        if record.breaks and record.way == IDS:
            ids = (record.prompt_ids + record.ids).tobytes()
            around = attempt.backend.replica.dialect.chat_token_ids or (b"", b"")
            outgoing.body = record.terms.rest(record.prompt.path, ids, record.given, record.limit, around)
            return
        body = outgoing.body = record.body if record.breaks else outgoing.body
        at = body.find(b"{") + 1
        if at and not record.terms.tells_ids and self._may_have_ids(record, attempt):
            attempt.ask_ids()
            outgoing.body = b"".join((body[:at], ASKS_IDS, body[at:]))

    def _may_have_ids(self, record: StreamRecord, attempt: Attempt) -> bool:
        """Return whether this attempt's engine may report token ids from which the stream could be resumed.

        They are of no use unless the gateway itself knows the prompt's tokens exactly, because the engine's prompt may
        contain more than ids, such as images.
        """
        return (
            record.prompt.path in (CHAT, COMPLETIONS)
            and not record.terms.no_ids
            and record.prompt.mode == "exact"
            and not attempt.without_ids
            and record.label not in process_of(attempt.backend).silent_at
        )

    def begun(self, exchange: Exchange, attempt: Attempt, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """Begin to record an answer; return (its first bytes for the client, None or the error that ends the answer).

        If the answer is no stream that can be resumed, its record is dropped.
        """
        record, head = exchange.stream_record, attempt.response_head
        if record is None:
            return data, None
        is_stream = attempt.status == 200 and attempt.streams and not attempt.fault
        if not is_stream or not is_open_ended(head):
            self._drop(exchange, record, "framing" if is_stream else "")
            return data, None
        has_ids = self._may_have_ids(record, attempt)
        if attempt.without_ids and exchange.label not in (silent := process_of(attempt.backend).silent_at):
            silent.add(exchange.label)
            log.warning("replica %s refuses to report the token ids that it writes (%s): its streams are resumed by "
                        "repetition or not at all", attempt.backend.id, record.prompt.path)  # fmt: skip
        keeps_body = record.terms.greedy and not has_ids
        record.begin(head, len(exchange.attempts) - 1, exchange.request.body, keeps_body)
        return self.account(attempt, record, record.take(data))

    def finish(self, attempt: ResumableAttempt, record: StreamRecord) -> None:
        """Finish a stream whose HTTP message is complete, or fail the attempt if an event is missing.

        If only the last event is missing, the gateway writes it.
        """
        head = record.head
        assert head is not None
        written, error = self.account(attempt, record, record.take_last())
        if error is None and not record.is_unread and record.lacks_end:
            written += framed(record.closing_events(), head)
        if error is None and not record.complete and not record.is_unread:
            error = UpstreamError(CLOSED, "ended its stream before the last event")
        if written or error is not None:
            attempt.write(written, error)
        if error is None:
            attempt.client.write(end_of_body(head))
            attempt.handler.on_complete(attempt)

    def account(
        self, attempt: Attempt, record: StreamRecord, taken: tuple[bytes, UpstreamError | None]
    ) -> tuple[bytes, UpstreamError | None]:
        """Update the budget and the metrics after a call of `StreamRecord.take`.

        `taken`: the result of that call, which is returned unchanged.
        """
        if record.shown and record.broke:
            self._metrics.continue_gap_seconds.observe(record.way, monotonic() - record.broke_at)
            self._log(record, f"replica {attempt.backend.id} resumed it")
        self._count(record)
        return taken

    def _count(self, record: StreamRecord) -> None:
        """Update the budget by a record's size; if the budget is exceeded, that stream can no longer be resumed."""
        size = record.size
        # As long as a replica that resumes the stream has not shown that it uses the ids that it was given, the record
        # is needed to compare them.
        if self.kept + size - record.counted > self._budget and record.proven and not record.lost:
            record.lose("budget")
            size = record.size
        self.kept += size - record.counted
        record.counted = size

    def _drop(self, exchange: Exchange, record: StreamRecord, reason: str) -> None:
        """Drop the record, so that the answer is relayed without being parsed from here on.

        `reason`: why, the label in metrics; "" for an answer that is not counted there.
        """
        exchange.record_stream(None)
        self.kept -= record.counted
        if reason:
            self._refused[exchange] = reason

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """Release the record at the end of a request, and set the prompt and the number of events of the whole stream.

        The other `on_end` callbacks need these, so this is the first one.
        """
        self._refused.pop(exchange, None)
        record = exchange.stream_record
        if record is None:
            return
        self.kept -= record.counted
        record.counted = 0
        if exchange.is_continued:
            if outcome == "complete" and record.broke:  # resumed without more text
                self._log(record, f"replica {exchange.attempts[-1].backend.id} resumed it")
            exchange.told_whole(record.prompt, record.events)

    def _log(self, record: StreamRecord, how: str) -> None:
        """Log that a stream was resumed, for at most ten streams in ten seconds; the metrics count all of them.

        `how`: what resumed it, in words.
        """
        now = monotonic()
        if now - self._lines_since > LOG_SECONDS:
            self._lines, self._lines_since = 0, now
        if self._lines < MOST_LINES:
            log.info("%s; %s %.3f s later (%s)", record.broke, how, now - record.broke_at, record.way)
        self._lines, record.broke = self._lines + 1, ""

    # --- the failure of a replica

    def event_after(self, exchange: Exchange) -> ExchangeEvent:
        """Decide how a stream whose attempt has failed goes on, and return the exchange's event.

        INTERRUPTED: another replica resumes the stream, in the way that is set in its record now. FAILED: no replica
        does, which is counted with its reason.
        """
        record, attempt = exchange.stream_record, exchange.attempts[-1]
        if record is None:
            reason = self._refused.get(exchange, "")
        elif not (reason := self._decide(exchange, record, attempt)):
            return ExchangeEvent.INTERRUPTED
        if reason:
            self._metrics.streams_not_continued.inc(reason)
        return ExchangeEvent.FAILED

    def _decide(self, exchange: Exchange, record: StreamRecord, attempt: Attempt) -> str:
        """Choose the way to resume a stream, set it in `record.way`, and return "".

        If it is not resumed, the reason is returned, as the label in metrics. If the replica failed before it wrote new
        text, this counts as a crash under the request; otherwise earlier crashes are forgotten.
        """
        if isinstance(attempt.error, UpstreamError) and attempt.error.kind == DIFFERS:
            return DIFFERS
        if not record.is_unread and (record.complete or record.lacks_end):
            record.way = OVER
            return ""
        if record.lost:
            return record.lost
        crashes = exchange.crashes
        exchange.crashed(crashes._replace(writing=crashes.writing + 1) if record.is_stuck else NO_CRASHES)
        if exchange.crashes.too_many or record.breaks >= MOST_BREAKS:
            return "crashes"
        way, reason = self._way(record)
        if way and way != OVER and not self._eligible.remaining(record.prompt, self._unlike(attempt, way)):
            others = self._eligible.remaining(record.prompt, (attempt.backend,))
            return "unlike" if others else "no replica"
        record.way = way or record.way
        return reason

    def _way(self, record: StreamRecord) -> tuple[str, str]:
        """Return (the way to resume a stream, ""), or ("", the reason why there is none, as the label in metrics)."""
        terms, prompt = record.terms, record.prompt
        reason = terms.no_ids or ("" if record.prompt_ids and record.ids else "ids")
        if not reason and (prompt.media or len(record.prompt_ids) != prompt.tokens):
            reason = "prompt"  # with images, or if the engine has another tokenizer, the ids are not its whole prompt
        if not reason and not terms.greedy and len(record.text) > record.clean[1]:
            reason = "boundary"
        if record.body and (record.is_untouched or (reason and terms.greedy)):
            return REPEAT, ""
        return ("", reason) if reason else (OVER if record.has_all_text else IDS, "")

    def _unlike(self, attempt: Attempt, way: str) -> tuple[Backend, ...]:
        """Return the replicas that cannot resume a stream in this way.

        These are the replica that has failed and those that make other token ids of the prompt. To resume by ids, they
        are also those that do not accept or report ids.
        """
        gone, label = attempt.backend, attempt.exchange.label

        def may(one: Backend) -> bool:
            takes_ids = label == "completions" or one.replica.dialect.chat_token_ids is not None
            reports_ids = label not in process_of(one).silent_at
            return one.candidate.space == gone.candidate.space and (way == REPEAT or (takes_ids and reports_ids))

        return (gone, *(one for one in self._eligible.backends.values() if one is not gone and not may(one)))

    def resume(self, exchange: Exchange) -> None:
        """Have another replica chosen for the rest of a stream, or end the stream if only its end is missing."""
        record, attempt = exchange.stream_record, exchange.attempts[-1]
        assert record is not None
        stream = exchange.id.decode("latin-1")[:LONGEST_ID]
        where = f"stream {stream} of replica {attempt.backend.id} broke off after {record.received}"
        record.break_off(f"{where}: {attempt.error}", attempt.events)
        if record.way == OVER:
            self._close(exchange, record)
            return
        if record.way == IDS:
            ids = record.go_by_ids()
            left = None if record.limit is None else record.limit - record.given
            prompt = with_answer(record.prompt, ids, left)
        else:
            record.go_by_repetition()
            prompt = repeated(record.prompt)
        exchange.resume_elsewhere(prompt, self._unlike(attempt, record.way))
        self._placing.place(exchange)

    def _close(self, exchange: Exchange, record: StreamRecord) -> None:
        """Write the end of a stream whose client has all of its text, and finish the request."""
        assert record.head is not None
        data = framed(record.closing_events(), record.head) + end_of_body(record.head)
        exchange.attempts[-1].tail.append(data)  # not by `meter`, since these are no output events
        exchange.client.write(data)
        self._metrics.continued_streams.inc(OVER)
        self._log(record, "the gateway wrote its end")
        exchange.happened(ExchangeEvent.FINISHED)

    def join(self, exchange: Exchange, data: bytes) -> None:
        """Begin to relay the answer of a replica that resumes the stream, with its first bytes (`data`)."""
        record, attempt = exchange.stream_record, exchange.attempts[-1]
        assert record is not None and record.head is not None and isinstance(attempt, ResumableAttempt)
        if record.way == REPEAT and not record.skip:
            record.first = len(exchange.attempts) - 1
        record.read_from(attempt.response_head)
        mark = next((one.mark for one in exchange.attempts if one.mark is not None), None)
        attempt.continue_stream(record.events, mark, record.head)
        self._settling.joined(attempt)
        self._metrics.continued_streams.inc(record.way)
        if exchange.client.writing_paused:
            exchange.pause_reading()
        attempt.data(data)

    def give_up(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        """End a stream that no replica has resumed, with an error event that tells the client why.

        Called after the exchange's connections and reserved loads are released.
        """
        record = exchange.stream_record
        assert record is not None
        exchange.broke_off(error)
        timed_out = isinstance(error, ApiError) and error.status == 504
        crashed = isinstance(error, ApiError) and error.code == "replicas_lost"
        stopped = isinstance(error, UpstreamError) and error.kind == SHUT_DOWN
        reason = SHUT_DOWN if stopped else "timeout" if timed_out else "crashes" if crashed else "replicas"
        self._metrics.streams_not_continued.inc(reason)
        message = "the answer broke off, and no replica resumed it"
        if stopped or not self._discreet:
            message += f": {error}"
        elif isinstance(error, ApiError):
            message += f": {error.discreet}"
        status, code = (503, SHUT_DOWN) if stopped else (502, None)
        event = error_event(exchange.request.path, status, message, record.number + 1, code=code)
        exchange.client.end_stream(event)
        self._settling.ended(exchange, "cut")


def is_open_ended(head: Head) -> bool:
    """Return whether a response with this head may have a body of any length, in plain bytes.

    If so, bytes of another replica can follow those that the client has. The head then states no content-length and no
    content-encoding (compression): the body ends with its last chunk, or with the connection.
    """
    return (head.is_chunked or head.until_close) and head.get(b"content-encoding") is None


def rest_error(attempt: Attempt, opened: Head | None = None) -> UpstreamError | None:
    """Return the error if an answer with this status and head cannot continue the client's stream; else None.

    `opened`: the head that the client has, if the answer is to be relayed with its own framing; else None.
    """
    head = attempt.response_head
    if attempt.status == 200 and attempt.streams and head.get(b"content-encoding") is None:
        if opened is None or (opened.is_chunked, opened.until_close) == (head.is_chunked, head.until_close):
            return None
        return UpstreamError(DIFFERS, "frames its stream in another way than the replica before")
    return UpstreamError(DIFFERS, f"answered {attempt.status} where it was to resume a stream")
