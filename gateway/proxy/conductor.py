"""The actions that follow each event of an exchange and of its attempts.

The tables in `states` map an event to the next state and action; the state itself is in `Exchange` and `Attempt`. One
conductor serves all exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from ..errors import JSON, MESSAGES, ApiError, error_event
from ..http.downstream import Downstream
from ..http.messages import KEEP_ALIVE
from ..http.upstream import Upstream, UpstreamError
from . import retries
from .admission.priorities import HeadOf, Priorities
from .backend import Backend
from .blame import DOUBTFUL, OVERLOADED, agree, settled
from .disagg.legs import leg_head, second_leg
from .exactness.forwarding import TokenIdForwarding
from .exchange import NO_BUFFERING, Attempt, Exchange, meter, request_head
from .placement.placing import Placing
from .responses import answers
from .responses.answers import (
    ERROR_MARK,
    ERROR_WITHIN,
    MEMBERS,
    MOST_HELD_BACK,
    Beginning,
    Sight,
    begins,
    first_error,
    look,
)
from .responses.chunks import END_OF_BODY, ChunkDecodingSink, framed
from .responses.respelling import respelled
from .responses.stored import Responses
from .resume.resumer import Resumer, is_open_ended, rest_error
from .retries import KINDS, Failed, Next
from .settling import ABANDONED, STREAMING_APIS, Settling, cut_short
from .states import ATTEMPT_TRANSITIONS, TRANSITIONS, AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from .observers.traces import Traces

# The last bytes of a chunk that ends with a complete event, for engines that end lines with LF and with CRLF.
LF_CHUNK_END, CRLF_CHUNK_END = b"\n\n\r\n", b"\r\n\r\n\r\n"
AWAITING, ANSWERING, ANSWERED, FINISHED = (
    AttemptState.AWAITING,
    AttemptState.ANSWERING,
    ExchangeEvent.ANSWERED,
    ExchangeEvent.FINISHED,
)
CONNECTED, ATTEMPT_ANSWERED, ATTEMPT_FINISHED = AttemptEvent.CONNECTED, AttemptEvent.ANSWERED, AttemptEvent.FINISHED

# The event that ends an exchange whose client has no byte yet, by the exchange's state.
REFUSING = {
    ExchangeState.PREPARING: ExchangeEvent.REFUSED,
    ExchangeState.PLACING: ExchangeEvent.REFUSED,
    ExchangeState.TRYING: ExchangeEvent.TIMED_OUT,
}


# Statuses that may be due to what the gateway wrote into the request (token ids, a leg's parameters). The request is
# repeated as received, so that a client only sees errors that its own request caused.
MAY_BE_OURS = frozenset((400, 404, 413, 415, 422, 431))
# The clients of OpenAI and Anthropic retry a request after a 5xx unless they get this header.
NO_RETRY = (b"x-should-retry", b"false")


class Conductor:
    """The runner of exchanges: by the tables, it sets an exchange's state after an event and runs the action."""

    def __init__(
        self, placing: Placing, settling: Settling, forwarding: TokenIdForwarding, responses: Responses, metrics: Metrics,
        *, retries: int, traces: Traces | None, discreet: bool, names_replica: bool, tells_cached: bool, timed: bool,
    ):  # fmt: skip
        """Create a conductor.

        `retries`: the number of retries per request.
        `discreet`: errors name no replicas, since clients are tenants, who may share them.
        `names_replica`: add the replica's id to the headers of its answers.
        `tells_cached`: add the number of prompt tokens that the replica was predicted to have cached.
        `timed`: note when requests were prepared, for traces or figures.
        """
        self.placing, self.settling, self._eligible = placing, settling, placing.eligible
        self._forwarding, self._responses, self._metrics = forwarding, responses, metrics
        self._retries, self._traces, self.discreet = retries, traces, discreet
        self._names_replica, self._tells_cached, self._timed = names_replica, tells_cached, timed
        # Returns the header line of a degraded answer, where requests are admitted by class or limit.
        self.note: Callable[[Exchange, Attempt], bytes] | None = None
        self.priorities: Priorities | None = None
        self.under_way: set[Exchange] = set()
        self.draining = False
        self.resumer: Resumer | None = None  # with --continue-streams

    def begin(self, exchange: Exchange) -> None:
        """Start an exchange's trace, and list it as under way."""
        if self._traces is not None:
            self._traces.begin(exchange)
        self.under_way.add(exchange)

    def dispatch(self, exchange: Exchange, event: ExchangeEvent, detail: Any = None) -> None:
        """Change the exchange's state by this event, and run the action of that transition with `detail`.

        A pair of state and event that is not in the table is a bug and raises KeyError.
        """
        exchange.state, act = STEPS[exchange.state, event]
        act(self, exchange, detail)

    def refuse_unanswered(self, error: Callable[[], ApiError]) -> int:
        """Answer with `error()` every exchange whose client has no byte of an answer yet; return their number."""
        unanswered = [(one, event) for one in self.under_way if (event := REFUSING.get(one.state)) is not None]
        for exchange, event in unanswered:
            exchange.run_isolated(self.dispatch, exchange, event, error())
        return len(unanswered)

    def holds(self, engine: str) -> bool:
        """Return whether an attempt still has an open connection to this engine."""
        return any(
            attempt.backend.replica.engine == engine
            and attempt.state is not AttemptState.ENDED
            and attempt.upstream is not None
            and not attempt.upstream.closed
            for exchange in self.under_way
            for attempt in exchange.attempts
        )

    def end_streams(self) -> int:
        """End all streams that are under way with an error event, at shutdown; return their number.

        Other answers cannot carry an error once they have begun; they end with their connections.
        """
        streams = [
            one
            for one in self.under_way
            if one.state is ExchangeState.RESUMING
            or (one.state is ExchangeState.ANSWERING and one.attempts[-1].streams)
        ]
        for exchange in streams:
            exchange.run_isolated(self._stop_stream, exchange)
        return len(streams)

    def _stop_stream(self, exchange: Exchange) -> None:
        error = UpstreamError(retries.SHUT_DOWN, "the gateway is shutting down")
        if exchange.attempts[-1].state is not AttemptState.ENDED:
            exchange.attempts[-1].end_as(AttemptEvent.FAILED, error)
        self.dispatch(exchange, ExchangeEvent.TIMED_OUT, error)

    # --- called for an attempt's upstream connection

    def connected(self, attempt: Attempt, upstream: Upstream) -> None:
        """Send the request on a new connection, unless the attempt has ended or the replica has moved."""
        exchange = attempt.exchange
        if attempt.state is AttemptState.CONNECTING and upstream.pool is attempt.backend.pool:
            exchange.run_isolated(self._send, exchange, attempt, upstream)
            return
        upstream.pool.release(upstream)
        if attempt.state is AttemptState.CONNECTING:  # the replica has moved: this connection is to its old address
            exchange.run_isolated(self.start, exchange, attempt)

    def head(self, attempt: Attempt, body: bytes) -> None:
        """Check a response's head, and hold it back until the body shows that something was computed.

        Engines send the head before the prefill, and while the client has nothing, the request can still go elsewhere.
        """
        exchange, status = attempt.exchange, attempt.status
        content_type = attempt.response_head.get(b"content-type") or b""
        attempt.streams = content_type.startswith(b"text/event-stream")
        error = None
        if status != 200 or not (attempt.streams or content_type.startswith(b"application/json")):
            # names of media types have no case (RFC 9110, 8.3.1)
            error = self._head_error(exchange, attempt, content_type.lower())
        opened = exchange.opened
        if error is None and (opened is not None or exchange.state is ExchangeState.RESUMING):
            error = rest_error(attempt, opened)
        if error is not None:
            self.failed(attempt, error)
        elif body:
            self.on_body(attempt, body)

    def _head_error(self, exchange: Exchange, attempt: Attempt, content_type: bytes) -> UpstreamError | None:
        """Return why an answer with this head is not passed to the client; None if it may be passed."""
        status = attempt.status
        attempt.streams = content_type.startswith(b"text/event-stream")
        if status == 200 and (attempt.streams or content_type.startswith(b"application/json")):
            return None
        has_prompt, kind = exchange.prompt is not None, retries.of_status(status)
        if attempt.leg is not None and status >= 300 and exchange.legs is not None and exchange.legs.transfer.header:
            kind = retries.LEG_REFUSED if status in MAY_BE_OURS else retries.PREFILL_FAILED
            return UpstreamError(kind, f"answered {status} to a request that was to be computed elsewhere first")
        if has_prompt and not attempt.streams and answers.foreign_head(status, content_type):
            return _foreign(f"answered {status} with {answers.media_type(content_type)}")
        doubtful = status in DOUBTFUL and exchange.response is None and (has_prompt or kind in OVERLOADED)
        if (status in retries.RETRYABLE or doubtful) and self._unsettled(exchange, attempt, kind):
            return UpstreamError(kind, f"answered {status}")
        if status == 404 and exchange.response is not None and self.others(exchange, attempt):
            return UpstreamError(retries.ELSEWHERE, "answered 404")
        return self._ours(attempt, status, str(status))

    def _ours(self, attempt: Attempt, status: int, what: str) -> UpstreamError | None:
        """Return the error for an answer that may be due to what the gateway wrote into the request; else None."""
        if status not in MAY_BE_OURS:
            return None
        if attempt.sent_ids or attempt.asks_ids:
            return UpstreamError(retries.IDS, f"answered {what}")
        return None if attempt.leg is None else UpstreamError(retries.LEG_REFUSED, f"answered a second leg with {what}")

    def on_body(self, attempt: Attempt, data: bytes, whole: bool = False) -> None:
        """Judge bytes of a body of which nothing was relayed yet, and relay them if they show an answer.

        While too few bytes have arrived to tell, they are held back in `attempt.withheld`.

        `whole`: with these bytes the body is complete.
        """
        exchange, held_back, error = attempt.exchange, attempt.withheld, None
        path = exchange.request.path
        if held_back:
            data, attempt.withheld = held_back + data, b""
        if attempt.status == 200 and exchange.prompt is not None:
            # Nearly all non-streamed answers begin without an error, as two searches show.
            if (
                held_back
                or attempt.streams
                or data.find(MEMBERS.get(exchange.label, b"")) < 0
                or data.find(ERROR_MARK, 0, ERROR_WITHIN) >= 0
            ):
                found = self._judged(exchange, attempt, data, len(held_back), whole)
                if found is Sight.EARLY:
                    attempt.withheld = data
                    return
                if found is Sight.BLIND:
                    attempt.beginning = None
                    self.answered(exchange, attempt, data)
                    return
                error = found
        elif attempt.status >= 400 and path.startswith(MESSAGES):
            if not whole and len(data) < MOST_HELD_BACK:
                attempt.withheld = data
                return
            data = respelled(exchange, attempt, data)
        if error is None and cut_short(attempt, path, data):
            error = UpstreamError(retries.ABORTED, "aborted it")
        if error is not None:
            self.failed(attempt, error)
            return
        attempt.first_at, attempt.beginning = monotonic(), None
        attempt.state = ATTEMPT_TRANSITIONS[attempt.state, ATTEMPT_ANSWERED]
        self.dispatch(exchange, ANSWERED, data)

    def _judged(
        self, exchange: Exchange, attempt: Attempt, data: bytes, held_back: int, whole: bool
    ) -> UpstreamError | Literal[Sight.EARLY, Sight.BLIND] | None:
        """Judge the first bytes of an answer with status 200 to a prompt.

        Returns an error if the client gets nothing of this answer, EARLY if too few bytes have arrived to tell, BLIND
        if that many show nothing, else None.

        `held_back`: how many of the bytes were looked at before.
        """
        head = attempt.response_head
        began = not held_back and begins(exchange.label, data, attempt.streams)
        if not began and head.get(b"content-encoding") is None:
            sight = self._look(exchange, attempt, data, held_back, whole)
            if sight is Sight.FOREIGN:
                return _foreign(f"answered 200 with {repr(data[:40]) if data else 'an empty body'}")
            if sight is Sight.SILENT:
                self._unsettled(exchange, attempt, retries.ERROR_ANSWER)  # ignored: no client can read this answer
                return UpstreamError(retries.ERROR_ANSWER, "answered 200 with a stream without an event")
            if sight is Sight.EARLY or sight is Sight.BLIND:
                return sight
        fault = first_error(data if (seen := attempt.beginning) is None else seen.body, attempt.streams)
        kind = full if (full := retries.of_status(fault)) in OVERLOADED else retries.ERROR_ANSWER
        if (fault >= 500 or kind is full) and self._unsettled(exchange, attempt, kind):
            return UpstreamError(kind, f"answered 200 with an error that amounts to {fault}")
        if (error := self._ours(attempt, fault, f"200 and an error that amounts to {fault}")) is None:
            attempt.fault = fault
        return error

    def _look(self, exchange: Exchange, attempt: Attempt, data: bytes, held_back: int, whole: bool) -> Sight:
        """Return what the first bytes of a body show; the first `held_back` of them were looked at before."""
        head, label = attempt.response_head, exchange.label
        if attempt.streams:
            if (beginning := attempt.beginning) is None:
                beginning = attempt.beginning = Beginning(head.is_chunked)
                held_back = 0
            return beginning.look(label, data[held_back:], whole)
        if not whole and len(data) < MOST_HELD_BACK and not answers.has_grown(len(data), attempt.looked_at):
            return Sight.EARLY
        attempt.looked_at = len(data)
        return look(label, data, False, (head.get(b"content-type") or b"").lower(), whole)

    def may_retry(self, exchange: Exchange, attempt: Attempt, kind: str = "") -> bool:
        """Return whether a failed attempt may be replaced by another one.

        There must be a retry left, and another replica, or the same one if it is a decoder that could not fetch the
        prompt's cache, since it can compute the prompt. `kind`: of failure.
        """
        left = attempt.could_not_fetch(kind) or bool(self.others(exchange, attempt))
        return exchange.attempts_used < self._retries and left

    def others(self, exchange: Exchange, attempt: Attempt) -> list[Backend]:
        """Return the replicas that are left to try if this attempt fails."""
        return self._eligible.remaining(exchange.prompt, self.tried(exchange, attempt), exchange.model)

    def tried(self, exchange: Exchange, attempt: Attempt) -> tuple[Backend, ...]:
        """Return the replicas that are not sent the request again if this attempt fails.

        If no other replica is left, a decoder that only failed to fetch the cache may be asked again: it can compute
        the prompt itself.
        """
        tried = (*exchange.tried, attempt.backend)
        if self._eligible.remaining(exchange.prompt, tried, exchange.model):
            return tried
        last = {one.backend: one for one in exchange.attempts}
        able = {backend for backend, one in last.items() if one.could_not_fetch(getattr(one.error, "kind", ""))}
        return tuple(one for one in tried if one not in able)

    def _unsettled(self, exchange: Exchange, attempt: Attempt, kind: str) -> bool:
        """Record an error answer; return whether to ask another replica, instead of passing the error to the client."""
        self.settling.record_error(exchange, attempt, kind)
        if not settled(exchange.unattributed_errors) and self.may_retry(exchange, attempt, kind):
            return True
        if agree(exchange.unattributed_errors):
            attempt.response_head.add(NO_RETRY)
        return False

    def pass_keep_alives(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Forward comments and pings that were held back, so that the client's connection stays alive.

        While the client has nothing else of the stream, another replica can still answer. A failure is from then on
        reported within the stream.
        """
        head, data = attempt.response_head, attempt.withheld
        if (
            exchange.state is not ExchangeState.TRYING
            or attempt.beginning is None
            or not is_open_ended(head)
            or not answers.has_grown(len(data), attempt.looked_at)
            or not answers.keep_alives_end(attempt.beginning.body, False)
        ):
            return
        end = answers.keep_alives_end(data, head.is_chunked)
        data, attempt.withheld = data[:end], data[end:]
        attempt.looked_at = len(attempt.withheld)
        if not end:
            return
        attempt.beginning = Beginning(head.is_chunked, attempt.withheld) if attempt.withheld else None
        attempt.seen_at = now
        if exchange.opened is None:
            data = self._head(exchange, attempt) + data
            exchange.opened = head
        exchange.client.transport.write(data)

    def on_complete(self, attempt: Attempt) -> None:
        """Finish an attempt whose answer is complete."""
        if attempt.state is AWAITING:  # the bytes that were held back are the whole body
            self.on_body(attempt, b"", whole=True)
            if attempt.state is ANSWERING:
                attempt.end()  # the attempt is ANSWERING now; another replica may resume the answer
        elif attempt.state is ANSWERING:
            attempt.end_as(ATTEMPT_FINISHED)
            self.dispatch(attempt.exchange, FINISHED)

    def lost(self, attempt: Attempt, error: UpstreamError) -> None:
        """Fail an attempt whose connection failed, unless it has ended."""
        if attempt.state is not AttemptState.ENDED:
            attempt.exchange.run_isolated(self.failed, attempt, error)

    def answered(self, exchange: Exchange, attempt: Attempt, data: bytes) -> None:
        """Begin to relay an answer, with these first bytes."""
        attempt.state = ATTEMPT_TRANSITIONS[attempt.state, ATTEMPT_ANSWERED]
        self.dispatch(exchange, ANSWERED, data)

    def failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """End a failed attempt, and dispatch the event and the properties of its failure to the exchange."""
        if attempt.backend.replica.ends and attempt.state is not ANSWERING and error.kind in retries.CRASHES:
            error = UpstreamError(retries.LEFT, f"ends: {error}")
        # A pooled connection may time out under the request, which is no evidence against the replica.
        stale = attempt.upstream is not None and attempt.upstream.used and attempt.response_head is None
        attempt.end_as(AttemptEvent.FAILED, error)
        event, exchange = ExchangeEvent.FAILED, attempt.exchange
        replica = attempt.backend.replica
        failed = Failed(
            error.kind,
            stale,
            attempt.new_connection,
            # An engine that closed a connection, accepts none and has others open is shutting down gracefully, before
            # its state shows it. An engine that crashed would have closed all.
            attempt.had_whole and not (replica.ends or (error.kind == retries.CONNECT and self.holds(replica.engine))),
            unread=error.unread,
            alone=error.unread and not self.others(exchange, attempt),
            agreed=error.kind == retries.ERROR_ANSWER and bool(seen := exchange.unattributed_errors) and settled(seen),
        )
        if (legs := exchange.legs) is not None:
            beside = attempt is legs.first
            if beside and not self._first_leg_failed(exchange, attempt, error, stale):
                return
            second = attempt.leg is Leg.DECODE
            failed = failed._replace(
                handed_over=second,
                computes=not second,
                writes=second,
                still_kept=monotonic() < legs.until,
                beside=beside,
            )
        if self.resumer is not None and exchange.state is ExchangeState.ANSWERING:
            event = self.resumer.event_after(exchange)
        self.dispatch(exchange, event, failed)

    def _first_leg_failed(self, exchange: Exchange, first: Attempt, error: UpstreamError, stale: bool) -> bool:
        """Handle a failed first leg that ran at the same time as the second; return whether the exchange fails.

        If it fails, the second leg is dropped, so that its engine frees the blocks, and the first leg becomes the last
        attempt. Once the client has a byte, the answer goes on, since the client gets nothing of the first leg.

        `stale`: the leg was sent on a pooled connection that may have timed out.
        """
        legs, attempts, settling = exchange.legs, exchange.attempts, self.settling
        assert legs is not None
        legs.first = None
        if exchange.state is not ExchangeState.TRYING:
            settling.leg_ended(Leg.PREFILL, error.kind)
            if KINDS[error.kind].blamed:
                settling.failed(first.backend, error.kind)
            settling.abandon(first, computed=KINDS[error.kind].computed)
            return False
        if error.kind == retries.CLOSED and stale and not first.new_connection:
            self._metrics.retries.inc("reconnect")
            again = legs.first = first.repeat(new_connection=True, unread=error.unread)
            exchange.add_attempt(again)
            attempts[-2:] = attempts[:-3:-1]  # the leg that answers stays the last one
            self.start(exchange, again)
            return False
        second = attempts[-1]
        if second.state is not AttemptState.ENDED:
            second.end_as(AttemptEvent.DROPPED)
        settling.leg_ended(Leg.DECODE, ABANDONED)
        settling.abandon(second, computed=False)
        attempts.remove(first)
        attempts.append(first)
        return True

    # --- the actions of the tables

    def place(self, exchange: Exchange, _: Any) -> None:
        if self._timed and not exchange.prepared_at:
            exchange.prepared_at = monotonic()
        if self.resumer is not None and exchange.stream_record is None:
            self.resumer.begin(exchange)
        self.placing.place(exchange)

    def start(self, exchange: Exchange, attempt: Attempt | None = None) -> None:
        """Take a connection to an attempt's replica and send the request, or open a connection first.

        `attempt`: None for the last one, and the first leg before it if both legs are sent at the same time.
        """
        if attempt is None:
            attempt = exchange.attempts[-1]
            if attempt.leg is not None and (legs := exchange.legs) is not None and legs.first is not None:
                first = exchange.attempts[-2]
                if first is legs.first:  # otherwise the first leg is under way already
                    self.start(exchange, first)
        if self._traces is not None:
            self._traces.attempt(exchange, attempt)
        # If one idle connection was closed by a timeout, others in the pool may have been, too.
        upstream = None if attempt.new_connection else attempt.backend.pool.acquire()
        if upstream is not None:
            self._send(exchange, attempt, upstream)
        else:
            attempt.backend.connect(attempt)

    def _send(self, exchange: Exchange, attempt: Attempt, upstream: Upstream) -> None:
        attempt.state = ATTEMPT_TRANSITIONS[attempt.state, CONNECTED]
        attempt.upstream, attempt.sent_at = upstream, monotonic()
        request, prompt = exchange.request, attempt.prompt
        body = request.body
        head_of: HeadOf = request_head
        if attempt.body is not None:
            body, head_of = attempt.body, leg_head
        elif prompt is not None and prompt.kind:
            body = self._forwarding.body(attempt, prompt, body, not exchange.tried and not attempt.without_ids)
        if self.resumer is not None:
            body = self.resumer.body(exchange, attempt, body)
        if self.priorities is not None:
            body, head_of = self.priorities.write(exchange, attempt, body, head_of)
        parent = None if self._traces is None else self._traces.parent(exchange, attempt)
        sink = ChunkDecodingSink(attempt) if request.http10 else attempt
        upstream.send(sink, head_of(exchange, attempt, len(body), parent), body, request.method == "HEAD")

    def retry(self, exchange: Exchange, failed: Failed) -> None:
        attempt, kind = exchange.attempts[-1], failed.kind
        following = retries.after(failed, exchange.attempts_used, exchange.crashes, self._retries)
        if following is Next.SAME:
            exchange.attempts_used += failed.unread and not failed.stale
            as_text = kind == retries.IDS  # otherwise on a new connection
            self._metrics.retries.inc(retries.IDS if as_text else "reconnect")
            exchange.add_attempt(attempt.repeat(new_connection=not as_text, unread=failed.unread, without_ids=as_text))
            self.dispatch(exchange, ExchangeEvent.PLACED)
            return
        if KINDS[kind].blamed:
            self.settling.failed(attempt.backend, kind)
        self.settling.abandon(attempt, computed=KINDS[kind].computed)
        if exchange.legs is not None:
            self.settling.leg_failed(exchange, attempt, kind, following)
        self.placing.pulls.failed(exchange, attempt, kind)
        if following is not Next.ANEW and (following is not Next.WHOLE or KINDS[kind].counts):
            if following is not Next.LEGS:
                exchange.tried = self.tried(exchange, attempt)
            exchange.attempts_used += KINDS[kind].counts
        exchange.crashes = exchange.crashes.after(failed)
        if following is Next.LOST:
            why = f"{max(exchange.crashes)} replicas went down or hung with this request, so no other is tried"
            error = exchange.exhausted(why, again=False, code="replicas_lost")
            self.dispatch(exchange, ExchangeEvent.EXHAUSTED, error)
        elif following is Next.FULL:
            self.settling.on_traffic(attempt.backend.id, retries.OWN, 1)  # the replica is not blamed
            error = ApiError(503, str(attempt.error), code="gateway_full")
            self.dispatch(exchange, ExchangeEvent.EXHAUSTED, error)
        elif following is Next.EXHAUSTED:
            why = "two engines failed this request alike, so no third was asked"
            if not failed.agreed:
                why = f"no replica answered after {len(exchange.attempts)} attempt(s)"
            self.dispatch(exchange, ExchangeEvent.EXHAUSTED, exchange.exhausted(why, again=not failed.agreed))
        else:
            self._metrics.retries.inc(kind)
            demand = attempt.placement.demand
            if following is Next.DECODER and self.placing.legs.next_decoder(exchange, demand, monotonic()):
                self.dispatch(exchange, ExchangeEvent.PLACED)
            else:
                exchange.legs = None
                self.placing.place(exchange)

    def hand_over(self, exchange: Exchange, _: Any) -> None:
        """Settle the first leg and send the second one, whose engine fetches the prompt's cache from the prefiller."""
        first, legs = exchange.attempts[-1], exchange.legs
        assert legs is not None
        self.settling.handed_over(exchange, first, legs)
        first.body = None
        second_leg(exchange, monotonic())
        self.start(exchange)

    def relay(self, exchange: Exchange, data: bytes) -> None:
        attempt, error = exchange.attempts[-1], None
        if self.resumer is not None:
            data, error = self.resumer.begun(exchange, attempt, data)
        if exchange.metered:
            meter(attempt, data)
        else:
            attempt.tail.append(data)
            if attempt.streams and attempt.prompt is not None and not attempt.prompt.include_usage:
                attempt.count_events(data)
        if attempt.first_at:
            attempt.seen_at = attempt.first_at
            self.settling.answered(exchange, attempt)
        else:  # bytes were held back until the limit, and show no first token
            attempt.seen_at = monotonic()
            self.settling.close_unattributed(exchange)
        if ((makes := exchange.label == "responses") or exchange.response is not None) and attempt.status == 200:
            exchange.stored = self._responses.answered(attempt.backend.id, exchange.response, makes, data)
        client, attempt.pieces = exchange.client, 1
        client.transport.write(data if exchange.opened is not None else self._head(exchange, attempt) + data)
        upstream = attempt.upstream
        if upstream is not None and not upstream.complete and (attempt.prompt is None or not attempt.prompt.token_ids):
            exchange.forget_body()  # it is not needed again; with ids, `forwarding` may still read it
        if error is not None:
            self.failed(attempt, error)

    def _head(self, exchange: Exchange, attempt: Attempt) -> bytes:
        """Return the response head for the client, with the header lines that the gateway adds."""
        client, head, request = exchange.client, attempt.response_head, exchange.request
        lines = b"" if self.note is None else self.note(exchange, attempt)
        if head.get(b"x-request-id") is None:
            lines += b"x-request-id: %b\r\n" % exchange.id
        if attempt.streams and head.get(b"x-accel-buffering") is None:
            lines += NO_BUFFERING
        if self._names_replica:
            lines += b"x-hitherto-replica: %b\r\n" % attempt.backend.id.encode()
        if self._tells_cached and attempt.prompt is not None:
            held = attempt.placement.predicted if exchange.legs is None else exchange.legs.cached
            lines += b"x-hitherto-cached-tokens: %d\r\n" % held
        if exchange.charge is not None:
            lines += exchange.charge.header_lines()
        if self.draining or head.until_close or not request.keep_alive:
            lines += b"connection: close\r\n"
        elif request.http10:
            lines += b"%b: %b\r\n" % KEEP_ALIVE
        if (origins := client.clients.origins) is not None:  # replaces the engine's CORS headers
            head = head.without(b"access-control-")
            lines += origins.lines(request.header(b"origin"))
        client.ends_by_close = head.until_close
        return head.block(lines)

    def settle(self, exchange: Exchange, _: Any) -> None:
        self.under_way.discard(exchange)
        exchange.client.finish(not exchange.attempts[-1].response_head.until_close)
        self.settling.complete.add(exchange)

    def cut(self, exchange: Exchange, why: Failed | UpstreamError) -> None:
        attempt, client, path = exchange.attempts[-1], exchange.client, exchange.request.path
        error = exchange.error = attempt.error
        self._close(exchange)
        message = (
            "the answer broke off" if self.discreet else f"the answer broke off: replica {attempt.backend.id} {error}"
        )
        status, code = 502, None
        if why.kind == retries.SHUT_DOWN:
            status, code, message = 503, retries.SHUT_DOWN, f"the answer broke off: {error}"
        end = b"".join([piece[-len(CRLF_CHUNK_END) :] for piece in attempt.tail])
        number, record = answers.next_number(attempt.tail), exchange.stream_record
        if record is not None and record.breaks:  # the client's bytes end with a complete event
            end, number = LF_CHUNK_END if record.chunked else LF_CHUNK_END[:2], record.number + 1
        told = error_event(path, status, message, number, code=code)
        # An error event can only follow a complete chunk; elsewhere closing the connection must tell the client.
        if attempt.streams and end.endswith((LF_CHUNK_END, CRLF_CHUNK_END)) and attempt.response_head.is_chunked:
            _end_stream(client, told, True)
        elif attempt.streams and attempt.response_head.until_close and end.endswith((b"\n\n", b"\r\n\r\n")):
            _end_stream(client, told, False)
        else:
            client.abort()
        if why.kind not in (retries.DIFFERS, retries.SHUT_DOWN):
            self.settling.failed(attempt.backend, why.kind)
        self.settling.ended(exchange, "cut")

    def resume(self, exchange: Exchange, failed: Failed) -> None:
        attempt = exchange.attempts[-1]
        self.settling.failed(attempt.backend, failed.kind)
        self.settling.abandon(attempt, computed=True)
        if exchange.legs is not None:
            self.settling.leg_ended(Leg.DECODE, failed.kind)
            self.settling.drop_legs(exchange)
        assert self.resumer is not None
        self.resumer.resume(exchange)

    def join(self, exchange: Exchange, data: bytes) -> None:
        assert self.resumer is not None
        self.resumer.join(exchange, data)

    def give_up(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        assert self.resumer is not None
        self.resumer.give_up(exchange, error)

    def turn_away(self, exchange: Exchange, error: ApiError) -> None:
        self.settling.turned_away(error)
        self.report(exchange, error)

    def report(self, exchange: Exchange, error: ApiError) -> None:
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        exchange.forget_body()
        exchange.status, exchange.error = error.status, error
        if exchange.opened is not None:
            exchange.status = 200  # the client has this status already
            message = error.discreet if self.discreet else error.message
            told = error_event(exchange.request.path, error.status, message, code=error.code)
            _end_stream(exchange.client, told, exchange.opened.is_chunked)
            self.settling.ended(exchange, "cut")
            return
        headers = [*JSON, (b"x-request-id", exchange.id), *error.headers]
        if error.status == 503 or (error.status == 502 and error.again):
            headers.append((b"retry-after", b"1"))
        if not error.again:
            headers.append(NO_RETRY)
        self.settling.ended(exchange, "refused")  # first, so that the headers show what is left of the limits now
        if exchange.charge is not None and exchange.charge.granted:
            headers += exchange.charge.headers()
        exchange.client.reply(error.status, error.body(exchange.request.path, self.discreet), headers)

    def abandon(self, exchange: Exchange, cut: ConnectionAbortedError | None) -> None:
        """End an exchange whose client has left. `cut`: why the gateway itself ends it at shutdown, else None."""
        attempt = exchange.attempt
        if attempt is not None and attempt.state is ANSWERING and self._has_all(exchange, attempt):
            attempt.end_as(ATTEMPT_FINISHED)
            self.under_way.discard(exchange)
            self.settling.complete.add(exchange)
            return
        if cut is not None:
            exchange.error = cut
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        exchange.forget_body()
        self.settling.ended(exchange, "aborted" if cut is None or not exchange.answered_with else "cut")

    def _has_all(self, exchange: Exchange, attempt: Attempt) -> bool:
        """Return whether the client already has the last event of its stream.

        Many clients close then, before HTTP's last chunk, which engines send separately.
        """
        if attempt.status != 200 or exchange.label not in STREAMING_APIS or exchange.client.writing_paused:
            return False
        return attempt.streams and answers.has_end(exchange.label, b"".join(attempt.tail), True, b"", False)

    def _close(self, exchange: Exchange) -> None:
        """Release the connections and reservations of an exchange that ends without a complete answer."""
        self.under_way.discard(exchange)
        attempt = exchange.attempt
        if exchange.legs is not None:
            if attempt is not None and attempt.leg is not None:
                error = attempt.error  # None if the client left
                self.settling.leg_ended(
                    attempt.leg, ABANDONED if error is None else getattr(error, "kind", retries.TIMEOUT)
                )
            self.settling.drop_legs(exchange)
        if attempt is not None:
            if attempt.state is not AttemptState.ENDED:
                attempt.end_as(AttemptEvent.DROPPED)
            self.settling.abandon(attempt, computed=attempt.sent_at > 0)


def _foreign(what: str) -> UpstreamError:
    """Return the error for an answer that no engine wrote: something else listens at the replica's address."""
    return UpstreamError(retries.FOREIGN_ANSWER, f"{what}, which is no answer of an inference engine")


def _end_stream(client: Downstream, event: bytes, chunked: bool) -> None:
    """End a stream with this event and a complete HTTP message.

    A `chunked` stream's connection is kept: closing it would fail the client's next request on it.
    """
    client.write(framed(event) + END_OF_BODY if chunked else event)
    client.finish(keep_alive=chunked)


STEPS = {pair: (state, getattr(Conductor, action)) for pair, (state, action) in TRANSITIONS.items()}
