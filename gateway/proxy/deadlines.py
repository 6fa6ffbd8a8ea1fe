"""Deadlines of requests in progress, which the server's sweep checks a few times a second.

A replica is only blamed for time in which this process itself ran: each deadline is measured with `Pulse.ran`.
"""

from __future__ import annotations

from replicas import State
from replicas.progress import STALLED as STANDS_STILL

from ..errors import ApiError
from ..http.upstream import UpstreamError
from .exchange import Attempt, Exchange
from .handle import Handler
from .observers.figures import Figures
from .responses.answers import has_other_event, keeps_alive
from .retries import HUNG, NO_CRASHES, PREFILL_FAILED, STALLED, TIMEOUT, TRANSFER_STALLED
from .states import AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg

# For this time after a request was sent, comments and pings that keep the connection alive are held back, so that a
# failure can be reported by a status. Later ones are relayed as they come.
COMMENT_SECONDS = 1.0
# Keep-alives that follow an announcement (`response.created`, a chunk with only the role) are held for five seconds:
# once they are sent, no other replica can answer, because it would announce another id. Clients and proxies give up
# after 10 to 60 s of silence.
KEEP_ALIVE_SECONDS = 5.0
# Seconds that a request without a first byte stays at a replica in this state that shows no sign of computing.
PATIENCE = {State.DEGRADED: 10.0, State.LEAVING: STANDS_STILL, State.FAILED: 0.0}
FIRST_LEG_SECONDS = 10.0  # from the head of a first leg's answer, sent after the prefill, to the end of its few bytes
LOST_SILENCE = 10.0  # seconds without a byte after which a stream from a lost replica is given up


class Deadlines:
    """The deadlines of all requests under way."""

    def __init__(
        self, handler: Handler, figures: Figures | None, *, request_timeout: float, idle_timeout: float
    ) -> None:
        """Create the deadlines.

        `request_timeout`: seconds until the first byte of an answer.
        `idle_timeout`: seconds between two reads of an answer.
        """
        self._handler, self._figures = handler, figures
        self._failures = handler.failures
        self._request_timeout, self._idle_timeout = request_timeout, idle_timeout
        self._placing, self._settling = handler.placing, handler.settling
        self._ran = self._settling.pulse.ran

    def check(self, exchange: Exchange, now: float) -> None:
        """Check a request's deadlines, and act on those that have passed."""
        if exchange.state is ExchangeState.ENDED:
            return
        if exchange.state is ExchangeState.ANSWERING:
            answering = exchange.attempts[-1]
            if answering.pieces != answering.seen_pieces:
                self._settling.came(answering)
                if self._figures is not None:
                    self._figures.passing(exchange, answering, now)
                answering.seen_pieces, answering.seen_at = answering.pieces, now
            elif self._ran(answering.seen_at, now) > (limit := self._silence(answering, now)):
                self._stalled(exchange, limit)
            return
        attempt, since = exchange.attempt, exchange.begun
        if exchange.state is ExchangeState.RESUMING and exchange.stream_record is not None:
            since = exchange.stream_record.broke_at
        if attempt is not None and attempt.state is AttemptState.AWAITING:
            since = max(since, attempt.seen_at)  # when it last sent a keep-alive comment
        if self._ran(since, now) > self._request_timeout:
            self._settling.failed(attempt.backend if attempt else None, TIMEOUT)
            within = f"within {self._request_timeout:g} s"
            what = f"sent no byte of an answer {within}"
            late = ApiError(504, f"no replica was found for it {within}")
            if attempt is not None:
                late = ApiError(504, f"replica {attempt.backend.id} {what}", discreet=f"the replica {what}")
            self._time_out(exchange, late)
        elif attempt is not None and attempt.state is AttemptState.AWAITING:
            self._check_unanswered(exchange, attempt, now)

    def _check_unanswered(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        leg, legs, fail = attempt.leg, exchange.legs, self._failures.failed
        first_leg = leg is Leg.PREFILL  # its answer is not relayed
        ran = self._ran(attempt.sent_at, now)
        # An error is relayed as a whole, in the format of the client's API, so no part of it is sent early.
        passes = attempt.withheld and attempt.status == 200 and not first_leg
        if passes and ran > COMMENT_SECONDS and attempt.streams:
            self._handler.pass_keep_alives(exchange, attempt, now)
        # These keep-alives may end within a comment, whose rest follows in the next read. A resumed stream needs no
        # other event first, since only complete events of it are written.
        if (
            passes
            and ran > KEEP_ALIVE_SECONDS
            and attempt.beginning is not None
            and keeps_alive(attempt.withheld)
            and (exchange.state is ExchangeState.RESUMING or has_other_event(attempt.beginning.body))
        ):
            data, attempt.withheld, attempt.beginning = attempt.withheld, b"", None
            self._handler.answered(exchange, attempt, data)
        elif self._hangs(exchange, attempt, now):
            pass
        elif first_leg and attempt.status:
            attempt.seen_at = attempt.seen_at or now
            if self._ran(attempt.seen_at, now) > FIRST_LEG_SECONDS:
                what = f"sent the head of its answer to a first leg, and not its end for {FIRST_LEG_SECONDS:g} s"
                fail(attempt, UpstreamError(HUNG, what))
        elif leg is Leg.DECODE and ran > (limit := self._placing.legs.patience(exchange, attempt)):
            fail(attempt, UpstreamError(TRANSFER_STALLED, f"sent no byte of a second leg for {limit:.0f} s"))
        elif leg is Leg.DECODE and legs is not None and legs.first is not None:
            if legs.first.state is AttemptState.AWAITING:
                self._hangs(exchange, legs.first, now)
        elif leg is Leg.DECODE and legs is not None and legs.unsent is not None:
            if legs.prefiller.replica.state is State.FAILED:
                fail(attempt, UpstreamError(PREFILL_FAILED, f"waits for {legs.prefiller.id}, which is gone"))
            elif not attempt.streams and ran > legs.fetching:
                self._settling.prefilled_elsewhere(legs, computed=True)
        elif not first_leg:
            self._settling.still_unanswered(attempt, now)

    def _hangs(self, exchange: Exchange, attempt: Attempt, now: float) -> bool:
        """Fail an attempt whose request should move from a lost or unhealthy replica; return whether it has."""
        if not self._better_elsewhere(exchange, attempt, now):
            return False
        silent, state = self._ran(attempt.sent_at, now), attempt.backend.replica.state
        self._failures.failed(attempt, UpstreamError(HUNG, f"is {state} and sent no byte for {silent:.0f} s"))
        return True

    def _better_elsewhere(self, exchange: Exchange, attempt: Attempt, now: float) -> bool:
        """Return whether an unanswered request should move from a lost or unhealthy replica to a ready one.

        The other replica repeats all work, so slowness alone is no reason to move a request. An engine whose counters
        change is computing, even if it fails its probes. A request under which a replica has crashed or hung before is
        moved again only from a replica that has failed or is leaving.
        """
        state = attempt.backend.replica.state
        moves_again = state in (State.FAILED, State.LEAVING) or exchange.crashes == NO_CRASHES
        patience = PATIENCE.get(state) if moves_again else None
        if patience is None or self._stood_still(attempt, now) < patience:
            return False
        return (
            self._handler.judge.may_retry(exchange, attempt)
            and self._handler.judge.others(exchange, attempt)[0].replica.state is State.READY
        )

    def _stood_still(self, attempt: Attempt, now: float) -> float:
        """Return for how many seconds the replica has had the request and shown no sign of computing.

        For a replica that is leaving, this is known only up to the last time at which its metrics could be read.
        """
        replica, since = attempt.backend.replica, attempt.sent_at
        if replica.state is State.FAILED:
            return self._ran(since, now)
        if replica.state is State.LEAVING:
            now = replica.scrape.at if replica.scrape is not None else since
        return self._ran(max(since, min(replica.moved_at, now)), max(since, now))

    def _silence(self, attempt: Attempt, now: float) -> float:
        """Return after how many seconds without a byte a stream is given up.

        The time is shorter for a lost replica, one that has failed, or is leaving and stands still: an engine that was
        told to stop may have ended its core and wait until its clients close their connections, as is then done here.
        """
        state = attempt.backend.replica.state
        lost = state is State.FAILED or (
            state is State.LEAVING and self._stood_still(attempt, now) >= PATIENCE[State.LEAVING]
        )
        return min(self._idle_timeout, LOST_SILENCE) if lost else self._idle_timeout

    def _stalled(self, exchange: Exchange, seconds: float) -> None:
        error = UpstreamError(STALLED, f"no byte for {seconds:g} s")
        if (client := exchange.client).writing_paused:  # the client is the one that does not read
            self._handler.dispatch(exchange, ExchangeEvent.GONE)
            client.abort()
        elif self._handler.resumer is not None:
            self._failures.failed(exchange.attempts[-1], error)
        else:
            self._time_out(exchange, error)

    def _time_out(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        attempt = exchange.attempt
        if attempt is not None and attempt.state is not AttemptState.ENDED:
            attempt.end_as(AttemptEvent.FAILED, error)
        self._handler.dispatch(exchange, ExchangeEvent.TIMED_OUT, error)
