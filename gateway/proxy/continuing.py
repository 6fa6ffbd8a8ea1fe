"""Going on with streams whose replica broke off (`--continue-streams`): who may, how, and what follows.

What one stream is known by is its `Continuation`. Here are the decisions: whether a request's answer may be gone on
with, by which way, and the budget of what is kept. Another replica is chosen by `Placing` as for any request, with
prompt and written ids as one longer prompt, so the replica that holds most of them is known.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ..errors import ApiError, error_event
from ..http.upstream import UpstreamError
from ..prompt import Prompt
from ..prompt.api.continuable import PATHS, terms_of
from ..prompt.longer import longer, repeated
from ..prompt.prompt import CHAT, COMPLETIONS
from .continuation import Continuation, Way
from .exchange import Attempt, ContinuableAttempt, Exchange
from .placing import Eligibility, Placing
from .retries import CLOSED, DIFFERS, MOST_CRASHES, Failed
from .settling import Settling
from .states import ExchangeEvent

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from .answers import Usage
    from .backend import Backend

MOST_BYTES = 2**22  # of a body; reading a larger one once more would hold the event loop for milliseconds
MOST_BREAKS = 8  # of one stream
ASKS_IDS = b'"return_token_ids":true,'

# (path, body) -> the prompt as it is made now; raises whatever goes wrong.
Remake = Callable[[str, bytes], Prompt]
Encode = Callable[[Prompt, str], bytes]  # a text that stands behind this prompt -> ids (uint32 LE)


class StreamConductor(Protocol):
    placing: Placing
    settling: Settling

    def failed(self, attempt: Attempt, error: UpstreamError) -> None: ...
    def on_complete(self, attempt: Attempt) -> None: ...
    def dispatch(self, exchange: Exchange, event: ExchangeEvent, detail: object = None) -> None: ...
    def end_legs(self, exchange: Exchange) -> None: ...


class Continuing:
    def __init__(
        self,
        conductor: StreamConductor,
        eligible: Eligibility,
        metrics: Metrics,
        *,
        as_text: bool,
        budget: int,
        remake: Remake,
        encode: Encode,
    ):
        """`as_text`: go on by the text where ids are not known. `budget`: bytes that may be kept of all streams."""
        self._conductor, self._eligible, self._metrics = conductor, eligible, metrics
        self._as_text, self._budget, self._remake, self._encode = as_text, budget, remake, encode
        self.kept = 0  # bytes

    # --- a stream begins, passes and ends

    def begin(self, exchange: Exchange) -> None:
        """Before its first attempt is made."""
        prompt, body = exchange.prompt, exchange.request.body
        if prompt is None or not prompt.stream or prompt.path not in PATHS or len(body) > MOST_BYTES:
            return
        terms = terms_of(prompt, body)
        if terms is None:
            return
        tells_ids = prompt.path in (CHAT, COMPLETIONS) and not terms.no_ids and prompt.mode == "exact"
        keeps = (self._as_text or terms.greedy) and not tells_ids
        continuation = Continuation(self, terms, exchange.label, prompt, keeps)
        exchange.continuation = continuation
        if not continuation.refused:
            exchange.attempt_type = ContinuableAttempt

    def body(self, exchange: Exchange, attempt: Attempt, body: bytes) -> bytes:
        """What is sent instead of this body."""
        continuation = exchange.continuation
        if continuation is None or continuation.refused or (attempt.leg is not None and not attempt.streams):
            return body
        terms = continuation.terms
        if not continuation.breaks:
            continuation.sent(exchange.request.body)
            self._count(continuation)
            asks = exchange.label in ("chat", "completions") and not terms.no_ids and not terms.tells_ids
            at = body.find(b"{") + 1
            return b"".join((body[:at], ASKS_IDS, body[at:])) if asks and at and len(body) > 2 else body
        if continuation.way is Way.REPEAT:
            return continuation.body
        around = attempt.backend.replica.dialect.chat_token_ids
        ids = continuation.prompt_ids + continuation.ids.tobytes()
        return terms.rest(ids, continuation.given, around or (b"", b""))

    def begun(self, exchange: Exchange, attempt: Attempt, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """The first bytes of an answer: what the client gets of them."""
        continuation = exchange.continuation
        if (
            continuation is None
            or continuation.refused
            or attempt.status != 200
            or not attempt.streams
            or attempt.fault
        ):
            if continuation is not None and not continuation.refused:
                self._release(continuation)
                exchange.continuation = None
            return data, None
        continuation.begin(attempt.response_head)
        return self._take(continuation, data)

    def streamed(self, attempt: Attempt, data: bytes) -> None:
        exchange = attempt.exchange
        continuation = exchange.continuation
        assert isinstance(attempt, ContinuableAttempt) and continuation is not None
        written, error = self._take(continuation, data)
        attempt.note(written)
        if written:
            attempt.client.transport.write(written)
        if error is not None:
            self._conductor.failed(attempt, error)

    def ended(self, attempt: Attempt) -> None:
        """The replica's answer ended as HTTP has it."""
        continuation = attempt.exchange.continuation
        assert continuation is not None
        told = continuation.complete or (continuation.finished and attempt.exchange.label in ("chat", "completions"))
        if told or (continuation.refused and not continuation.breaks):
            attempt.client.transport.write(continuation.end)
            self._conductor.on_complete(attempt)
        else:
            self._conductor.failed(attempt, UpstreamError(CLOSED, "ended its stream before the last event"))

    def _take(self, continuation: Continuation, data: bytes) -> tuple[bytes, UpstreamError | None]:
        shown = continuation.shown
        written, error = continuation.take(data)
        if not continuation.refused:
            self._count(continuation)
        if continuation.shown and not shown and continuation.way is not None:
            self._metrics.continue_gap_seconds.observe(continuation.way.value, monotonic() - continuation.broke_at)
        return written, error

    def _count(self, continuation: Continuation) -> None:
        self.kept += continuation.size - continuation.counted
        continuation.counted = continuation.size
        if self.kept > self._budget and not continuation.breaks:
            self._release(continuation)
            continuation.refused = "budget"
            continuation.texts, continuation.body, continuation.prompt_ids = [], b"", b""
            del continuation.ids[:]

    def _release(self, continuation: Continuation) -> None:
        self.kept -= continuation.counted
        continuation.size = continuation.counted = 0

    def settled(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """An `on_end`, the first: to all others the prompt is the client's."""
        if exchange.continuation is not None:
            self._release(exchange.continuation)
            if exchange.is_continued:
                exchange.prompt = exchange.continuation.prompt

    # --- a stream breaks off

    def event_after(self, exchange: Exchange) -> ExchangeEvent:
        """What it is to the exchange that the attempt which answered has failed."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        assert continuation is not None
        reason = self._refusal(exchange, continuation, attempt)
        if not reason:
            return ExchangeEvent.INTERRUPTED
        self._metrics.streams_not_continued.inc(reason)
        return ExchangeEvent.FAILED

    def _refusal(self, exchange: Exchange, continuation: Continuation, attempt: Attempt) -> str:
        """Why nobody goes on with it, or "": then the way is found."""
        if continuation.refused:
            return continuation.refused
        if isinstance(attempt.error, UpstreamError) and attempt.error.kind == DIFFERS:
            return DIFFERS
        exchange.crash_count = exchange.crash_count + 1 if continuation.is_stuck else 1
        if exchange.crash_count >= MOST_CRASHES or continuation.breaks >= MOST_BREAKS:
            return "crashes"
        way, reason = self._way(continuation)
        if way is None:
            return reason
        over = way is Way.IDS and continuation.is_over()
        if not over and not self._eligible.remaining(continuation.prompt, self._unlike(attempt)):
            return "no replica"
        continuation.way = way
        return ""

    def _way(self, continuation: Continuation) -> tuple[Way | None, str]:
        terms, prompt = continuation.terms, continuation.prompt
        known = continuation.prompt_ids and continuation.ids and continuation.way is not Way.TEXT
        reason = terms.no_ids or ("ids" if not known else "")
        if not reason and len(continuation.prompt_ids) != 4 * prompt.tokens:
            reason = "prompt"  # media, or another tokenizer: the ids are not all that the engine has
        whole = continuation.clean == (len(continuation.ids), len(continuation.texts))
        if not reason and not whole and not terms.greedy and "".join(continuation.texts[continuation.clean[1] :]):
            reason = "boundary"
        if not reason:
            return Way.IDS, ""
        if continuation.body and terms.greedy:
            return Way.REPEAT, ""
        if continuation.body and self._as_text and not terms.no_ids and not continuation.closing:
            return Way.TEXT, ""
        return None, reason

    def _unlike(self, attempt: Attempt) -> tuple[Backend, ...]:
        """Replicas that are not to go on: the one that broke off, and those that make other ids."""
        space = attempt.backend.candidate.space
        others = (one for one in self._eligible.backends.values() if one.candidate.space != space)
        return (attempt.backend, *others)

    def resume(self, exchange: Exchange, failed: Failed) -> None:
        """An action: have the rest placed."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        assert continuation is not None
        conductor = self._conductor
        conductor.settling.failed(attempt.backend, failed.kind)
        conductor.settling.abandon(attempt, computed=True)
        conductor.end_legs(exchange)
        continuation.break_off()
        if continuation.way is Way.IDS and continuation.is_over():
            self._close(exchange, continuation)
            return
        try:
            exchange.prompt = self._prompt(continuation)
        except Exception:  # the prompt was made once; what has changed since is not the client's to know
            conductor.dispatch(exchange, ExchangeEvent.EXHAUSTED, ApiError(502, "its prompt cannot be made once more"))
            return
        exchange.tried, exchange.attempts_used, exchange.stays_whole = self._unlike(attempt), 0, True
        conductor.placing.place(exchange)

    def _prompt(self, continuation: Continuation) -> Prompt:
        terms, prompt = continuation.terms, continuation.prompt
        if continuation.way is Way.REPEAT:
            continuation.go_by_repetition()
            return repeated(prompt)
        if continuation.way is Way.IDS:
            ids = continuation.go_by_ids()
        else:
            made = self._remake(prompt.path, continuation.body)
            if made.mode != "exact" or not made.token_ids:
                raise ValueError(made.note)
            text = continuation.text + continuation.skip
            ids = continuation.go_by_ids(self._encode(made, text), made.token_ids)
        return longer(prompt, ids, None if terms.limit is None else terms.limit - continuation.given)

    def _close(self, exchange: Exchange, continuation: Continuation) -> None:
        """The client has all of the text: what ends its stream is written here."""
        attempt = exchange.attempts[-1]
        data = continuation.framed(continuation.closing_events()) + continuation.end
        assert isinstance(attempt, ContinuableAttempt)
        attempt.note(data)
        exchange.client.transport.write(data)
        self._metrics.continued_streams.inc("over")
        self._conductor.dispatch(exchange, ExchangeEvent.FINISHED)

    def join(self, exchange: Exchange, data: bytes) -> None:
        """An action: the first bytes of a replica that goes on."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        assert continuation is not None and continuation.head is not None and continuation.way is not None
        attempt.events = exchange.attempts[-2].events
        attempt.response_head = continuation.head
        attempt.seen_at = monotonic()
        self._conductor.settling.joined(attempt)
        self._metrics.continued_streams.inc(continuation.way.value)
        if exchange.client.writing_paused:
            exchange.pause()
        self.streamed(attempt, data)

    def give_up(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        """An action, once nothing is connected or reserved any more."""
        continuation = exchange.continuation
        assert continuation is not None
        exchange.error = error
        timed_out = isinstance(error, ApiError) and error.status == 504
        self._metrics.streams_not_continued.inc("timeout" if timed_out else "replicas")
        event = error_event(exchange.request.path, 502, f"the answer broke off, and nobody went on with it: {error}")
        exchange.client.write(continuation.framed(event) + continuation.end)
        exchange.client.finish(keep_alive=continuation.chunked)
        self._conductor.settling.ended(exchange, "cut")


def rest_error(attempt: Attempt) -> UpstreamError | None:
    """Why an answer with this head is not the rest of one that the client has a part of, if it is not."""
    if attempt.status == 200 and attempt.streams and attempt.response_head.get(b"content-encoding") is None:
        return None
    return UpstreamError(DIFFERS, f"answered {attempt.status} where it was to go on with a stream")
