"""Going on with streams whose replica broke off (`--continue-streams`): who may, how, and what follows.

What one stream is known by is its `Continuation`. Here are the decisions: whether a request's answer may be gone on
with, by which way, and the budget of what is kept. Another replica is chosen by `Placing` as for any request, with
prompt and written ids as one longer prompt, so the replica that holds most of them is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ..errors import ApiError, error_event
from ..http.upstream import Head, UpstreamError
from ..prompt import Prompt
from ..prompt.api.continuable import PATHS, terms_of
from ..prompt.long import LongPrompts
from ..prompt.longer import longer, repeated
from ..prompt.prompt import CHAT, COMPLETIONS
from .blanking import Blanking
from .continuation import Continuation, Unreadable, Way
from .exchange import Attempt, ContinuableAttempt, Exchange, MeteredAttempt
from .forwarding import process_of
from .interruptions import Interruption, Interruptions
from .placing import Eligibility, Placing
from .retries import CLOSED, DIFFERS, NO_CRASHES, SHUT_DOWN, Failed
from .settling import Settling
from .states import ExchangeEvent, ExchangeState

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from .answers import Usage
    from .backend import Backend

log = logging.getLogger("hitherto.proxy")

MOST_BYTES = 2**22  # of a body; reading a larger one once more would hold the event loop for milliseconds
MOST_BREAKS = 8  # of one stream
ASKS_IDS = b'"return_token_ids":true,'

# (path, body) -> the prompt as it is made now; raises whatever goes wrong.
Remake = Callable[[str, bytes], Prompt]
Take = Callable[..., tuple[bytes, UpstreamError | None]]
Encode = Callable[[Prompt, str], bytes]  # a text that stands behind this prompt -> ids (uint32 LE)


class StreamConductor(Protocol):
    placing: Placing
    settling: Settling
    discreet: bool

    def failed(self, attempt: Attempt, error: UpstreamError) -> None: ...
    def on_complete(self, attempt: Attempt) -> None: ...
    def dispatch(self, exchange: Exchange, event: ExchangeEvent, detail: object = None) -> None: ...
    def end_legs(self, exchange: Exchange, kind: str) -> None: ...


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
        long: LongPrompts,
    ):
        """`as_text`: go on by the text where ids are not known. `budget`: bytes that may be kept of all streams."""
        self._long = long
        self._conductor, self._eligible, self._metrics = conductor, eligible, metrics
        self._as_text, self._budget, self._remake, self._encode = as_text, budget, remake, encode
        self.kept = 0  # bytes
        self._refused: dict[Exchange, str] = {}  # why nobody would go on with its stream
        self._interruptions = Interruptions()

    # --- a stream begins, passes and ends

    def begin(self, exchange: Exchange) -> None:
        """Before its first attempt is made."""
        prompt, body = exchange.prompt, exchange.request.body
        if prompt is None or not prompt.stream or prompt.path not in PATHS or len(body) > MOST_BYTES:
            return
        if exchange in self._refused:
            return
        terms = terms_of(prompt, body)
        if terms is None:
            return
        if terms.refused:
            self._refused[exchange] = terms.refused
            return
        exchange.continuation = Continuation(self, terms, exchange.label, prompt)
        exchange.attempt_type = ContinuableAttempt

    def body(self, exchange: Exchange, attempt: Attempt, body: bytes) -> bytes:
        """What is sent instead of this body."""
        continuation = exchange.continuation
        if continuation is None or (attempt.leg is not None and not attempt.streams):
            return body
        terms = continuation.terms
        if not continuation.breaks:
            return self._first_body(exchange, continuation, attempt, body)
        if continuation.way is Way.REPEAT:
            return continuation.body
        if continuation.way is Way.AGAIN:
            return self._asking(continuation, attempt, continuation.body)
        around = attempt.backend.replica.dialect.chat_token_ids
        ids = continuation.prompt_ids + continuation.ids.tobytes()
        return terms.rest(ids, continuation.given, around or (b"", b""))

    def _first_body(self, exchange: Exchange, continuation: Continuation, attempt: Attempt, body: bytes) -> bytes:
        terms = continuation.terms
        may_ask = self._may_ask(continuation)
        told = may_ask and (terms.tells_ids or not self._is_silent(attempt))
        continuation.sent(exchange.request.body if (self._as_text or terms.greedy) and not told else b"")
        self._count(exchange, continuation)
        return body if exchange.continuation is None else self._asking(continuation, attempt, body)

    def _may_ask(self, continuation: Continuation) -> bool:
        """Whether ids would be of use: where the gateway does not know the prompt's, those of the engine may not be all
        that it has."""
        terms, prompt = continuation.terms, continuation.prompt
        return prompt.path in (CHAT, COMPLETIONS) and not terms.no_ids and prompt.mode == "exact"

    def _asking(self, continuation: Continuation, attempt: Attempt, body: bytes) -> bytes:
        """This body, which asks for the ids that are written, if that is of use."""
        at = body.find(b"{") + 1
        if continuation.terms.tells_ids or not at or self._is_silent(attempt) or not self._may_ask(continuation):
            return body
        assert isinstance(attempt, ContinuableAttempt)
        attempt.asks_ids = True
        return b"".join((body[:at], ASKS_IDS, body[at:]))

    def _is_silent(self, attempt: Attempt) -> bool:
        """Whether its engine refuses to be asked for ids, or has just refused these."""
        return attempt.without_ids or attempt.exchange.label in process_of(attempt.backend).silent_at

    def begun(self, exchange: Exchange, attempt: Attempt, data: bytes) -> tuple[bytes, UpstreamError | None]:
        """The first bytes of an answer: what the client gets of them."""
        continuation, head = exchange.continuation, attempt.response_head
        if continuation is None:
            return data, None
        assert isinstance(attempt, ContinuableAttempt)
        if attempt.status != 200 or not attempt.streams or attempt.fault:
            self._leave(exchange, "")
            return data, None
        if attempt.without_ids and exchange.label not in (silent := process_of(attempt.backend).silent_at):
            silent.add(exchange.label)
            log.warning("replica %s refuses to tell the token ids that it writes (%s): its streams are gone on with by "
                        "other ways or not at all", attempt.backend.id, continuation.prompt.path)  # fmt: skip
        encoded = head.get(b"content-encoding") is not None
        if encoded or head.get(b"content-length") is not None:
            self._leave(exchange, "framing")
            if encoded or not attempt.asks_ids:
                return data, None
            attempt.blanking = Blanking(None)
            return attempt.blanking.start(data), None
        continuation.begin(head, len(exchange.attempts) - 1, exchange.label in process_of(attempt.backend).says_why_at)
        continuation.body = continuation.body or exchange.request.body  # until there is text, if it is not kept
        return self._given(exchange, attempt, continuation, continuation.take, data)

    def streamed(self, attempt: Attempt, data: bytes) -> None:
        continuation = attempt.exchange.continuation
        assert continuation is not None
        self._write(attempt, *self._given(attempt.exchange, attempt, continuation, continuation.take, data))

    def _write(self, attempt: Attempt, written: bytes, error: UpstreamError | None) -> None:
        assert isinstance(attempt, ContinuableAttempt)
        attempt.note(written)
        if written:
            attempt.client.transport.write(written)
        if error is not None:
            self._conductor.failed(attempt, error)

    def ended(self, attempt: Attempt) -> None:
        """The replica's answer ended as HTTP has it."""
        exchange = attempt.exchange
        continuation = exchange.continuation
        assert continuation is not None
        written, error = self._given(exchange, attempt, continuation, continuation.take_last)
        if error is None and exchange.continuation is not None and continuation.lacks_end:
            written += continuation.framed(continuation.closing_events())
        if error is None and exchange.continuation is not None and not continuation.complete:
            error = UpstreamError(CLOSED, "ended its stream before the last event")
        if written or error is not None:
            self._write(attempt, written, error)
        if error is None:
            if exchange.continuation is not None:
                if continuation.finished is not None:
                    process_of(attempt.backend).says_why_at.add(exchange.label)
                attempt.client.transport.write(continuation.end)
            self._conductor.on_complete(attempt)

    def _given(
        self, exchange: Exchange, attempt: Attempt, continuation: Continuation, take: Take, *data: bytes
    ) -> tuple[bytes, UpstreamError | None]:
        """What the client gets of a read."""
        assert isinstance(attempt, ContinuableAttempt)
        shown = continuation.shown
        try:
            written, error = take(*data)
        except Unreadable as found:
            self._leave(exchange, continuation.why_strange)
            return _passed(attempt, continuation, b"", found.data), None
        if continuation.shown and not shown and continuation.way is not None:
            self._metrics.continue_gap_seconds.observe(continuation.way.value, monotonic() - continuation.broke_at)
            self._went_on(continuation, attempt)
        if error is not None and continuation.ignores_ids:  # it shows that at the end only, so not once more
            self._note_ignored_ids(exchange, attempt, error)
        self._count(exchange, continuation)
        if exchange.continuation is None and error is None:
            written = _passed(attempt, continuation, written, continuation.leave())
        return written, error

    def _note_ignored_ids(self, exchange: Exchange, attempt: Attempt, error: UpstreamError) -> None:
        ignores_ids_at = process_of(attempt.backend).ignores_ids_at
        if exchange.label not in ignores_ids_at:
            ignores_ids_at.add(exchange.label)
            log.warning("replica %s %s (%s): until another process is behind it, it goes on with no stream by token ids",
                        attempt.backend.id, error, exchange.request.path)  # fmt: skip

    def _count(self, exchange: Exchange, continuation: Continuation) -> None:
        size = continuation.size
        self.kept += size - continuation.counted
        continuation.counted = size
        if self.kept <= self._budget or continuation.is_frozen:
            return
        if not continuation.breaks:
            self._leave(exchange, "budget")
            return
        continuation.freeze()
        self.kept += continuation.size - size
        continuation.counted = continuation.size

    def _leave(self, exchange: Exchange, reason: str) -> None:
        """Nobody can go on with its stream any more, so it is not read from here on."""
        continuation, exchange.continuation = exchange.continuation, None
        assert continuation is not None
        self.kept -= continuation.counted
        exchange.attempt_type = MeteredAttempt if exchange.metered else Attempt
        if reason:
            self._refused[exchange] = reason

    def settled(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """An `on_end`, the first: to all others prompt and count of events are those of the whole."""
        self._refused.pop(exchange, None)
        continuation = exchange.continuation
        if continuation is None:
            return
        self.kept -= continuation.counted
        continuation.counted = 0
        if exchange.is_continued:
            if outcome == "complete":  # perhaps without more text
                self._went_on(continuation, exchange.attempts[-1])
            exchange.prompt = continuation.prompt
            exchange.attempts[-1].events = max(exchange.attempts[-1].events, continuation.events)

    def _went_on(self, continuation: Continuation, attempt: Attempt) -> None:
        """Say so, unless it was said of this break."""
        interruption, continuation.interruption = continuation.interruption, None
        if interruption is not None and continuation.way is not None:
            gap = monotonic() - continuation.broke_at
            how = f"replica {attempt.backend.id} went on with it {gap:.3f} s later ({continuation.way.value})"
            self._interruptions.over(interruption, how)

    # --- a stream breaks off

    def event_after(self, exchange: Exchange) -> ExchangeEvent:
        """What it is to the exchange that the attempt which answered has failed."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        if continuation is None:
            reason = self._refused.get(exchange, "")
        elif not (reason := self._refusal(exchange, continuation, attempt)):
            return ExchangeEvent.INTERRUPTED
        if reason:
            self._metrics.streams_not_continued.inc(reason)
        return ExchangeEvent.FAILED

    def _refusal(self, exchange: Exchange, continuation: Continuation, attempt: Attempt) -> str:
        """Why nobody goes on with it, or "": then the way is found."""
        if isinstance(attempt.error, UpstreamError) and attempt.error.kind == DIFFERS:
            return DIFFERS
        if continuation.complete or continuation.lacks_end:
            continuation.way = Way.IDS
            return ""
        if continuation.is_frozen:
            return "budget"
        if continuation.is_strange:
            return continuation.why_strange
        crashes = exchange.crashes
        exchange.crashes = crashes._replace(writing=crashes.writing + 1) if continuation.is_stuck else NO_CRASHES
        if exchange.crashes.too_many or continuation.breaks >= MOST_BREAKS:
            return "crashes"
        way, reason = self._way(continuation)
        if way is None:
            return reason
        over = way is Way.IDS and continuation.is_over()
        if not over and not self._eligible.remaining(continuation.prompt, self._unlike(attempt, way)):
            others = self._eligible.remaining(continuation.prompt, (attempt.backend,))
            return "unlike" if others else "no replica"
        continuation.way = way
        return ""

    def _way(self, continuation: Continuation) -> tuple[Way | None, str]:
        terms, prompt = continuation.terms, continuation.prompt
        if continuation.is_untouched and continuation.body:
            return Way.AGAIN, ""
        known = continuation.prompt_ids and continuation.ids and continuation.way is not Way.TEXT
        reason = terms.no_ids or ("ids" if not known else "")
        if not reason and (prompt.media or len(continuation.prompt_ids) != 4 * prompt.tokens):
            reason = "prompt"  # media, or another tokenizer: the ids are not all that the engine has
        whole = continuation.clean == (len(continuation.ids), len(continuation.text))
        if not reason and not whole and not terms.greedy and continuation.text[continuation.clean[1] :]:
            reason = "boundary"
        if not reason:
            return Way.IDS, ""
        if continuation.body and terms.greedy:
            return Way.REPEAT, ""
        if continuation.body and self._as_text and not terms.no_ids and not continuation.closing:
            return Way.TEXT, ""
        return None, reason

    def _unlike(self, attempt: Attempt, way: Way) -> tuple[Backend, ...]:
        """Replicas that are not to go on: the one that broke off, those that make other ids, and those that take or
        tell none where that is the way."""
        gone, label = attempt.backend, attempt.exchange.label

        def may(one: Backend) -> bool:
            return one.candidate.space == gone.candidate.space and (
                way in (Way.REPEAT, Way.AGAIN)
                or (
                    (label == "completions" or one.replica.dialect.chat_token_ids is not None)
                    and label not in process_of(one).silent_at | process_of(one).ignores_ids_at
                )
            )

        return (gone, *(one for one in self._eligible.backends.values() if one is not gone and not may(one)))

    def resume(self, exchange: Exchange, failed: Failed) -> None:
        """An action: have the rest placed."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        assert continuation is not None
        conductor = self._conductor
        conductor.settling.failed(attempt.backend, failed.kind)
        conductor.settling.abandon(attempt, computed=True)
        conductor.end_legs(exchange, failed.kind)
        continuation.interruption = Interruption(
            exchange.id.decode("latin-1"), attempt.backend.id, str(attempt.error), continuation.received
        )
        continuation.break_off()
        continuation.events = attempt.events
        if continuation.way is Way.TEXT:
            self._made_of_text(exchange, continuation)
        elif continuation.way is Way.IDS and (continuation.complete or continuation.is_over()):
            self._close(exchange, continuation)
        elif continuation.way is Way.IDS:
            self._place(exchange, continuation, continuation.go_by_ids())
        else:
            begin_anew = continuation.go_again if continuation.way is Way.AGAIN else continuation.go_by_repetition
            begin_anew()
            self._place(exchange, continuation, None)

    def _made_of_text(self, exchange: Exchange, continuation: Continuation) -> None:
        """Have the prompt's ids and the text's made, in a thread: of one replica's streams they are many at once."""
        path, body, text = continuation.prompt.path, continuation.body, (continuation.text + continuation.skip).decode()

        def make() -> tuple[bytes, bytes]:
            made = self._remake(path, body)
            if made.mode != "exact" or not made.token_ids:
                raise ValueError(made.note)
            return self._encode(made, text), made.token_ids

        def go_on(made: asyncio.Future[tuple[bytes, bytes]]) -> None:
            if exchange.state is not ExchangeState.RESUMING or made.cancelled():
                return
            if (error := made.exception()) is not None:  # it was made once; what has changed since is ours to know
                log.warning("a stream is not gone on with, since its prompt cannot be made once more: %s", error)
                failed = ApiError(502, "its prompt cannot be made once more")
                exchange.run_isolated(self._conductor.dispatch, exchange, ExchangeEvent.EXHAUSTED, failed)
                return
            exchange.run_isolated(self._by_text, exchange, continuation, *made.result())

        self._long.submit(len(body) + len(text), make).add_done_callback(go_on)

    def _by_text(self, exchange: Exchange, continuation: Continuation, ids: bytes, prompt_ids: bytes) -> None:
        rest = continuation.go_by_ids(ids, prompt_ids)
        if continuation.is_over() and continuation.prompt.path in (CHAT, COMPLETIONS):
            self._close(exchange, continuation)
        else:
            self._place(exchange, continuation, rest)

    def _place(self, exchange: Exchange, continuation: Continuation, ids: bytes | None) -> None:
        """`ids` (uint32 LE): what is gone on from; None: the request is repeated."""
        terms, prompt, way = continuation.terms, continuation.prompt, continuation.way
        assert way is not None
        exchange.prompt = repeated(prompt) if ids is None else longer(prompt, ids, terms.left(continuation.given))
        exchange.tried, exchange.attempts_used = self._unlike(exchange.attempts[-1], way), 0
        exchange.stays_whole = True
        self._conductor.placing.place(exchange)

    def _close(self, exchange: Exchange, continuation: Continuation) -> None:
        """The client has all of the text: what ends its stream is written here."""
        attempt = exchange.attempts[-1]
        data = continuation.framed(continuation.closing_events()) + continuation.end
        attempt.tail.append(data)  # without `note`: no event of it brings output
        exchange.client.transport.write(data)
        self._metrics.continued_streams.inc("over")
        if (interruption := continuation.interruption) is not None:
            continuation.interruption = None
            self._interruptions.over(interruption, "all of its text was there, and what ends it was written here")
        self._conductor.dispatch(exchange, ExchangeEvent.FINISHED)

    def join(self, exchange: Exchange, data: bytes) -> None:
        """An action: the first bytes of a replica that goes on."""
        continuation, attempt = exchange.continuation, exchange.attempts[-1]
        assert continuation is not None and continuation.head is not None and continuation.way is not None
        if continuation.way is Way.AGAIN:
            continuation.first = len(exchange.attempts) - 1
        attempt.events = continuation.events
        continuation.read_from(attempt.response_head, exchange.label in process_of(attempt.backend).says_why_at)
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
        crashed = isinstance(error, ApiError) and error.code == "replicas_lost"
        stopped = isinstance(error, UpstreamError) and error.kind == SHUT_DOWN
        reason = SHUT_DOWN if stopped else "timeout" if timed_out else "crashes" if crashed else "replicas"
        self._metrics.streams_not_continued.inc(reason)
        message = "the answer broke off, and nobody went on with it"
        if stopped or not self._conductor.discreet:
            message += f": {error}"
        elif isinstance(error, ApiError):
            message += f": {error.discreet}"
        status, code = (503, SHUT_DOWN) if stopped else (502, None)
        event = error_event(exchange.request.path, status, message, continuation.names.number + 1, code=code)
        exchange.client.write(continuation.framed(event) + continuation.end)
        exchange.client.finish(keep_alive=continuation.chunked)
        self._conductor.settling.ended(exchange, "cut")


def _passed(attempt: ContinuableAttempt, continuation: Continuation, written: bytes, held: bytes) -> bytes:
    """What the client gets behind what is written, now that its stream passes as it comes: what was held back of it."""
    chunks = continuation.chunks
    if attempt.asks_ids:
        attempt.blanking = Blanking(chunks)
        return written + attempt.blanking.start(held)
    return written + continuation.framed(held) + (b"" if chunks is None else chunks.resumption)


def is_open_ended(head: Head) -> bool:
    """Whether what another replica writes may follow what came behind this head."""
    return (head.is_chunked or head.until_close) and head.get(b"content-encoding") is None


def rest_error(attempt: Attempt, opened: Head | None = None) -> UpstreamError | None:
    """Why an answer with this head is not the rest of one that the client has a part of, if it is not. `opened`: the
    head that its client has, where the rest passes as it comes."""
    head = attempt.response_head
    if attempt.status == 200 and attempt.streams and head.get(b"content-encoding") is None:
        if opened is None or (opened.is_chunked, opened.until_close) == (head.is_chunked, head.until_close):
            return None
        return UpstreamError(DIFFERS, "frames its stream in another way than the replica before")
    return UpstreamError(DIFFERS, f"answered {attempt.status} where it was to go on with a stream")
