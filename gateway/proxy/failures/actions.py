"""What follows the failure of an attempt or a request: another attempt, an error, the end of a stream, or nothing.

`Failures.failed` turns the failure of an attempt into an event of its exchange, the client's request. Most other
methods are actions, which the table in `states` lists by state and event. They end a request that has no complete
answer, or go on with it; the actions of a request without failures are in `handle`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from ...errors import JSON, ApiError, error_event
from ...http.chunks import END_BYTES, ends_with_event
from ...http.upstream import UpstreamError
from ..exchange import Attempt, Exchange
from ..placement.placing import Placing
from ..responses import answers
from ..responses.judge import NO_RETRY, Judge
from ..resume.resumer import Resumer
from ..settling import ABANDONED, STREAMING_APIS, Settling
from ..states import AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg
from . import retries
from .blame import request_at_fault
from .retries import KINDS, Failed, Next

if TYPE_CHECKING:
    from ...ops.metrics import Metrics

# The event that ends an exchange whose client has no byte yet, by the exchange's state.
REFUSING = {
    ExchangeState.PREPARING: ExchangeEvent.REFUSED,
    ExchangeState.PLACING: ExchangeEvent.REFUSED,
    ExchangeState.TRYING: ExchangeEvent.TIMED_OUT,
}


class Failures:
    """The actions after failures: repeat a request, resume its stream, or end it without a complete answer."""

    def __init__(
        self, placing: Placing, settling: Settling, judge: Judge, metrics: Metrics, under_way: set[Exchange],
        start: Callable[..., None], resumer: Resumer | None, *, retries: int, discreet: bool,
    ):  # fmt: skip
        """Create the actions of a `Handler`, with which they share the other arguments.

        `under_way`: the exchanges that have not ended; those that end here are removed from it.
        `start(exchange, attempt)`: the `Handler`'s method of this name.
        `resumer`: with --continue-streams.
        `retries`: the number of retries per request.
        `discreet`: name no replicas in errors, because the clients are tenants, and several may share a replica.
        """
        self.placing, self.settling, self.judge, self._metrics = placing, settling, judge, metrics
        self.under_way, self._start, self._resumer = under_way, start, resumer
        self._retries, self.discreet = retries, discreet

    # --- an attempt fails

    def lost(self, attempt: Attempt, error: UpstreamError) -> None:
        """Fail an attempt whose connection or stream failed, unless the attempt has ended already."""
        if attempt.state is not AttemptState.ENDED:
            attempt.exchange.run_isolated(self.failed, attempt, error)

    def failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """End a failed attempt, and pass its failure to the exchange (the client's request) as an event.

        The next action of the exchange gets a `Failed`, with all that the rules in `retries` need to know of the
        failure, and decides what follows. Within a stream, the `Resumer` decides that before the event. If the attempt
        was a first leg (prefill) that ran at the same time as the second one, the exchange may go on without an event.

        `error`: its `kind` is one of `retries.KINDS`, or STALLED within an answer.
        """
        if (
            attempt.backend.replica.ends
            and attempt.state is not AttemptState.ANSWERING
            and error.kind in retries.CRASHES
        ):
            # A replica that shuts down closes its connections, which is no crash.
            error = UpstreamError(retries.LEFT, f"ends: {error}")
        # The replica may close an idle connection while a request is on its way: no evidence against the replica.
        stale = attempt.upstream is not None and attempt.upstream.used and attempt.response_head is None
        attempt.end_as(AttemptEvent.FAILED, error)
        event, exchange = ExchangeEvent.FAILED, attempt.exchange
        replica = attempt.backend.replica
        failed = Failed(
            error.kind,
            stale,
            attempt.new_connection,
            # An engine that has closed one connection and accepts no new one, but keeps others open, is shutting down
            # gracefully, even if its state does not show that yet. A crash would have closed all of them.
            attempt.had_whole and not (replica.ends or (error.kind == retries.CONNECT and self.holds(replica.engine))),
            unread=error.unread,
            alone=error.unread and not self.judge.left(exchange, attempt),
            agreed=error.kind == retries.ERROR_ANSWER
            and bool(seen := exchange.unattributed_errors)
            and request_at_fault(seen),
        )
        if (legs := exchange.legs) is not None:
            beside = attempt is legs.first
            if beside and not self._first_leg_failed(exchange, attempt, error, stale):
                return
            second = attempt.leg is Leg.DECODE
            failed = failed._replace(
                second_leg=second,
                computes=not second,
                writes=second,
                still_kept=monotonic() < legs.until,
                beside=beside,
            )
        if self._resumer is not None and exchange.state is ExchangeState.ANSWERING:
            event = self._resumer.event_after(exchange)
        exchange.happened(event, failed)

    def _first_leg_failed(self, exchange: Exchange, first: Attempt, error: UpstreamError, stale: bool) -> bool:
        """Handle the failure of a first leg (prefill) that ran at the same time as the second one (decode).

        Returns True if the exchange fails with it. The second leg is then dropped, so that its engine frees the KV
        cache blocks, and the first leg becomes the exchange's last attempt.

        Returns False if the exchange goes on: either the first leg is repeated on a new connection, or the client has
        already a part of the answer, which comes from the second leg alone.

        `stale`: whether the leg was sent on a pooled connection, which the replica may have closed as idle.
        """
        legs, attempts, settling = exchange.legs, exchange.attempts, self.settling
        assert legs is not None
        legs.take_first()
        if exchange.state is not ExchangeState.TRYING:
            settling.leg_ended(Leg.PREFILL, error.kind)
            if KINDS[error.kind].blamed:
                settling.blame(first.backend, error.kind)
            settling.release(first, computed=KINDS[error.kind].computed)
            settling.close_unattributed(exchange)
            return False
        if error.kind == retries.CLOSED and stale and not first.new_connection:
            self._metrics.retries.inc("reconnect")
            again = first.repeat(new_connection=True, unread=error.unread)
            legs.repeat_first(again)
            exchange.add_attempt(again)
            exchange.put_last(attempts[-2])  # the leg that answers
            self._start(exchange, again)
            return False
        second = attempts[-1]
        if second.state is not AttemptState.ENDED:
            second.end_as(AttemptEvent.DROPPED)
        settling.leg_ended(Leg.DECODE, ABANDONED)
        settling.release(second, computed=False)
        exchange.put_last(first)
        return True

    def holds(self, engine: str) -> bool:
        """Return whether a request under way still has an open connection to this engine."""
        return any(
            attempt.backend.replica.engine == engine
            and attempt.state is not AttemptState.ENDED
            and attempt.upstream is not None
            and not attempt.upstream.closed
            for exchange in self.under_way
            for attempt in exchange.attempts
        )

    # --- the actions of the tables

    def retry(self, exchange: Exchange, failed: Failed) -> None:
        """Send a request again after its last attempt failed, or end it with an error, as `retries.after` decides.

        If the same replica gets it once more, the reserved load is kept. Otherwise the load is released, and the
        failure is counted against the replica if its kind is known to be the replica's fault.
        """
        attempt, kind = exchange.attempts[-1], failed.kind
        crashes = exchange.crashes.after(failed)
        following = retries.after(failed, exchange.attempts_used, crashes, self._retries)
        if following is Next.SAME:
            exchange.used(failed.unread and not failed.stale)
            as_text = kind == retries.IDS  # otherwise on a new connection
            self._metrics.retries.inc(retries.IDS if as_text else "reconnect")
            exchange.add_attempt(attempt.repeat(new_connection=not as_text, unread=failed.unread, without_ids=as_text))
            exchange.happened(ExchangeEvent.PLACED)
            return
        if KINDS[kind].blamed:
            self.settling.blame(attempt.backend, kind)
        self.settling.release(attempt, computed=KINDS[kind].computed)
        if exchange.legs is not None:
            self.settling.leg_failed(exchange, attempt, kind, following)
        self.placing.pulls.failed(exchange, attempt, kind)
        if following is not Next.ANEW and (following is not Next.WHOLE or KINDS[kind].counts):
            if following is not Next.LEGS:
                exchange.rule_out(attempt, kind)
            exchange.used(KINDS[kind].counts)
        exchange.crashed(crashes)
        if following is Next.LOST:
            why = f"{max(exchange.crashes)} replicas went down or hung with this request, so no other is tried"
            error = exchange.exhausted(why, again=False, code="replicas_lost")
            exchange.happened(ExchangeEvent.EXHAUSTED, error)
        elif following is Next.FULL:
            self.settling.on_traffic(attempt.backend.id, retries.OWN, 1)  # the replica is not blamed
            error = ApiError(503, str(attempt.error), code="gateway_full")
            exchange.happened(ExchangeEvent.EXHAUSTED, error)
        elif following is Next.EXHAUSTED:
            why = "two engines failed this request alike, so no third was asked"
            if not failed.agreed:
                why = f"no replica answered after {len(exchange.attempts)} attempt(s)"
            exchange.happened(ExchangeEvent.EXHAUSTED, exchange.exhausted(why, again=not failed.agreed))
        else:
            exchange.looks_for_another(kind)
            demand = attempt.placement.demand
            if following is Next.DECODER and self.placing.legs.next_decoder(exchange, demand, monotonic()):
                exchange.happened(ExchangeEvent.PLACED)
            else:
                exchange.leave_legs()
                self.placing.place(exchange)

    def sent_again(self, exchange: Exchange) -> None:
        """Count a retry, since its request is being sent now, under the kind of the failure that it follows."""
        self._metrics.retries.inc(exchange.found_another())

    def resume(self, exchange: Exchange, failed: Failed) -> None:
        """Count the failure against the replica, release its load, and have another replica resume the stream.

        If only the stream's end was missing, the gateway writes that, and no other replica is asked.
        """
        attempt = exchange.attempts[-1]
        self.settling.blame(attempt.backend, failed.kind)
        self.settling.release(attempt, computed=True)
        if exchange.legs is not None:
            self.settling.leg_ended(Leg.DECODE, failed.kind)
            self.settling.drop_legs(exchange)
        assert self._resumer is not None
        self._resumer.resume(exchange)

    def give_up(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        """End a stream that broke off and that no replica has resumed; its last event tells the client `error`."""
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        assert self._resumer is not None
        self._resumer.give_up(exchange, error)

    def cut(self, exchange: Exchange, why: Failed | UpstreamError) -> None:
        """End an answer that broke off after its first bytes went to the client.

        A stream ends with an error event if its last event is complete. Any other answer ends with its connection, so
        that the client cannot take it for complete.
        """
        attempt, client, path = exchange.attempts[-1], exchange.client, exchange.request.path
        error = attempt.error
        exchange.broke_off(error)
        self._close(exchange)
        message = (
            "the answer broke off" if self.discreet else f"the answer broke off: replica {attempt.backend.id}: {error}"
        )
        status, code = 502, None
        if why.kind == retries.SHUT_DOWN:
            status, code, message = 503, retries.SHUT_DOWN, f"the answer broke off: {error}"
        head, record, number = attempt.response_head, exchange.stream_record, answers.next_number(attempt.tail)
        if record is not None and record.breaks:  # the client's bytes end with a complete event
            may_follow, number = True, record.number + 1
        else:
            may_follow = ends_with_event(b"".join([piece[-END_BYTES:] for piece in attempt.tail]), head)
        if attempt.streams and may_follow:
            client.end_stream(error_event(path, status, message, number, code=code))
        else:
            client.abort()
        if why.kind not in (retries.DIFFERS, retries.SHUT_DOWN):
            self.settling.blame(attempt.backend, why.kind)
        self.settling.ended(exchange, "cut")

    def turn_away(self, exchange: Exchange, error: ApiError) -> None:
        """Refuse a request that was sent to no replica: count the refusal, and answer with `error`."""
        self.settling.turned_away(error)
        self.answer_error(exchange, error)

    def answer_error(self, exchange: Exchange, error: ApiError) -> None:
        """End a request whose client has no output yet, with `error` as its answer.

        If comments and pings were relayed, the client has status 200 already, and gets the error as an event.
        """
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        exchange.forget_body()
        # The client may have the status 200 already.
        exchange.answered_by_gateway(error.status if exchange.opened is None else 200, error)
        if exchange.opened is not None:
            message = error.discreet if self.discreet else error.message
            told = error_event(exchange.request.path, error.status, message, code=error.code)
            exchange.client.end_stream(told)
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

    def client_left(self, exchange: Exchange, cut: ConnectionAbortedError | None) -> None:
        """End a request whose client has left, or that the gateway cuts off when it shuts down (`cut`).

        A client that leaves after the last event of its stream has a complete answer, which is accounted for as such.

        `cut`: the reason at shutdown, else None.
        """
        attempt = exchange.attempt
        if attempt is not None and attempt.state is AttemptState.ANSWERING and self._has_all(exchange, attempt):
            attempt.end_as(AttemptEvent.FINISHED)
            self.under_way.discard(exchange)
            self.settling.complete.add(exchange)
            return
        if cut is not None:
            exchange.broke_off(cut)
        self._close(exchange)
        self.settling.close_unattributed(exchange)
        exchange.forget_body()
        self.settling.ended(exchange, "aborted" if cut is None or not exchange.answered_with else "cut")

    def _has_all(self, exchange: Exchange, attempt: Attempt) -> bool:
        """Return whether the client already has the last event of its stream.

        Many clients close their connection then, before HTTP's last chunk comes, which engines send separately.
        """
        if attempt.status != 200 or exchange.label not in STREAMING_APIS or exchange.client.writing_paused:
            return False
        return attempt.streams and answers.has_end(exchange.label, b"".join(attempt.tail), True, b"", False)

    def _close(self, exchange: Exchange) -> None:
        """Release a request's connections to replicas and its reserved load, when it ends without a complete answer."""
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
            self.settling.release(attempt, computed=attempt.sent_at > 0)

    # --- the gateway shuts down

    def refuse_unanswered(self, error: Callable[[], ApiError]) -> int:
        """Answer every request whose client has no byte of an answer yet with `error()`; return their number."""
        unanswered = [(one, event) for one in self.under_way if (event := REFUSING.get(one.state)) is not None]
        for exchange, event in unanswered:
            exchange.run_isolated(exchange.happened, event, error())
        return len(unanswered)

    def end_streams(self) -> int:
        """Write an error event to all streams under way and end them, at shutdown; return their number.

        A non-streamed answer that has begun cannot carry an error, so it is left to end with its connection.
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
        """End one stream because the gateway shuts down; the client gets that as an error event."""
        error = UpstreamError(retries.SHUT_DOWN, "the gateway is shutting down")
        if exchange.attempts[-1].state is not AttemptState.ENDED:
            exchange.attempts[-1].end_as(AttemptEvent.FAILED, error)
        exchange.happened(ExchangeEvent.TIMED_OUT, error)
