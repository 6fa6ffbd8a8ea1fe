"""Deadlines of requests in progress, which the server's sweep checks a few times a second.

Time in which the gateway's own event loop was stalled is not blamed on a replica: each deadline counts only the seconds
in which the loop ran (`Pulse.ran`).
"""

from __future__ import annotations

from replicas import State
from replicas.progress import STALLED as STANDS_STILL

from ...errors import ApiError
from ...http.upstream import UpstreamError
from ..exchange import Attempt, Exchange
from ..handle import Handler
from ..observers.figures import Figures
from ..responses.answers import has_grown, has_other_event, keep_alives_end, keeps_alive
from ..resume.resumer import is_open_ended
from ..states import AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg
from .retries import HUNG, NO_CRASHES, PREFILL_FAILED, STALLED, TIMEOUT, TRANSFER_STALLED

# An engine's comments and pings, which keep the connection alive, are held back for this time after a request was sent,
# so that a failure within it can be reported by a status. Later ones are relayed as they come.
COMMENT_SECONDS = 1.0
# Comments and pings after an announcement (`response.created`, a chunk with only the role) are held back for five
# seconds: once they are sent, no other replica can answer, because it would announce another id. Clients and proxies
# give up after 10 to 60 s of silence.
KEEP_ALIVE_SECONDS = 5.0
# How many seconds a request without a first byte stays at a replica in this state that shows no sign of computing.
PATIENCE = {State.DEGRADED: 10.0, State.LEAVING: STANDS_STILL, State.FAILED: 0.0}
# The time from the head of a first leg's answer, which is sent after the prefill, to the end of its few bytes.
FIRST_LEG_SECONDS = 10.0
LOST_SILENCE = 10.0  # seconds without a byte after which a stream from a lost replica is given up


class Deadlines:
    """The deadlines of all requests under way, which `check` enforces."""

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
        """Check a request's deadlines, and end the request, fail its attempt or relay comments as they require.

        For an answer under way, new reads since the last call are counted as tokens. `now`: in monotonic seconds.
        """
        if exchange.state is ExchangeState.ENDED:
            return
        if exchange.state is ExchangeState.ANSWERING:
            answering = exchange.attempts[-1]
            if answering.pieces != answering.seen_pieces:
                self._settling.came(answering)
                if self._figures is not None:
                    self._figures.passing(exchange, answering, now)
                answering.swept(now)
            elif self._ran(answering.seen_at, now) > (limit := self._silence(answering, now)):
                self._stalled(exchange, limit)
            return
        attempt, since = exchange.attempt, exchange.begun
        if exchange.state is ExchangeState.RESUMING and exchange.stream_record is not None:
            since = exchange.stream_record.broke_at
        if exchange.opened is not None:  # the last keep-alive comment counts, also one of an earlier attempt
            since = max(since, *(one.seen_at for one in exchange.attempts))
        if self._ran(since, now) > self._request_timeout:
            if exchange.client.writing_paused:  # it does not read the comments that it is sent
                self._give_up(exchange)
            else:
                self._time_out(exchange, self._late(exchange, attempt, now))
        elif attempt is not None and attempt.state is AttemptState.AWAITING:
            self._check_unanswered(exchange, attempt, now)

    def _late(self, exchange: Exchange, attempt: Attempt | None, now: float) -> ApiError:
        """Return the error for a request without an answer in time; blame a replica that had most of the time.

        `attempt`: the last one, if a replica was found.
        """
        within = f"within {self._request_timeout:g} s"
        if attempt is None:
            return ApiError(504, f"no replica was found for it {within}")
        begun = min(one.begun_at for one in exchange.attempts if one.backend is attempt.backend)
        if attempt.state is AttemptState.ENDED or 2 * self._ran(begun, now) < self._request_timeout:
            return ApiError(504, f"no replica sent a byte of an answer {within}")
        self._settling.blame(attempt.backend, TIMEOUT)
        what = f"sent no byte of an answer {within}"
        return ApiError(504, f"replica {attempt.backend.id} {what}", discreet=f"the replica {what}")

    def _check_unanswered(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Check the deadlines of an attempt that was sent, and of whose answer no byte has gone to the client.

        The attempt is failed if another replica should answer instead. Comments and pings that were held back long
        enough are relayed.
        """
        leg, legs, fail = attempt.leg, exchange.legs, self._failures.failed
        first_leg = leg is Leg.PREFILL  # its answer is not relayed
        ran = self._ran(attempt.sent_at, now)
        # Only an answer with status 200 is relayed early: an error is rewritten to the format of the client's API as a
        # whole.
        passes = attempt.withheld and attempt.status == 200 and not first_leg
        if passes and ran > COMMENT_SECONDS and attempt.streams:
            self._pass_keep_alives(exchange, attempt, now)
        # From here on all bytes are relayed as they come. They may end within a comment, whose rest follows in the next
        # read. A resumed stream need not have announced anything, since only complete events of it are written.
        if (
            passes
            and ran > KEEP_ALIVE_SECONDS
            and attempt.beginning is not None
            and keeps_alive(attempt.withheld)
            and (exchange.state is ExchangeState.RESUMING or has_other_event(attempt.beginning.body))
        ):
            data = attempt.withheld
            attempt.answer(shows_output=False)
            exchange.happened(ExchangeEvent.ANSWERED, data)
        elif self._hangs(exchange, attempt, now):
            pass
        elif first_leg and attempt.status:
            if not attempt.seen_at:
                attempt.swept(now)
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

    def _pass_keep_alives(self, exchange: Exchange, attempt: Attempt, now: float) -> None:
        """Send the client the head and the comments and pings that were held back, so that its connection stays alive.

        These belong to no particular answer, so another replica can still answer. But the client then has the status
        200, so an error can only be reported as an event of the stream.

        `now`: in monotonic seconds.
        """
        head, data = attempt.response_head, attempt.withheld
        if (
            exchange.state is not ExchangeState.TRYING
            or attempt.beginning is None
            or not is_open_ended(head)
            or not has_grown(len(data), attempt.looked_at)
            or not keep_alives_end(attempt.beginning.body, False)
        ):
            return
        data = attempt.release_keep_alives(keep_alives_end(data, head.is_chunked), now)
        if not data:
            return
        if exchange.opened is None:
            exchange.client.begin_answer(head, self._handler.lines(exchange, attempt), data)
            exchange.opens(head)
        else:
            exchange.client.write(data)

    def _hangs(self, exchange: Exchange, attempt: Attempt, now: float) -> bool:
        """Fail an attempt if its request should move from a lost or unhealthy replica; return whether it was failed."""
        if not self._better_elsewhere(exchange, attempt, now):
            return False
        silent, state = self._ran(attempt.sent_at, now), attempt.backend.replica.state
        self._failures.failed(attempt, UpstreamError(HUNG, f"is {state} and sent no byte for {silent:.0f} s"))
        return True

    def _better_elsewhere(self, exchange: Exchange, attempt: Attempt, now: float) -> bool:
        """Return whether an unanswered request should move from a lost or unhealthy replica to a ready one.

        The other replica repeats all work, so slowness alone is no reason to move a request. An engine whose counters
        change is computing, even if it fails its probes, and keeps its requests. If a replica has crashed or hung with
        the request before, it is moved again only from a replica that has failed or is shutting down (leaving).
        """
        state = attempt.backend.replica.state
        moves_again = state in (State.FAILED, State.LEAVING) or exchange.crashes == NO_CRASHES
        patience = PATIENCE.get(state) if moves_again else None
        if patience is None or self._stood_still(attempt, now) < patience:
            return False
        return (
            self._handler.judge.may_retry(exchange, attempt)
            and self._handler.judge.left(exchange, attempt)[0].replica.state is State.READY
        )

    def _stood_still(self, attempt: Attempt, now: float) -> float:
        """Return for how many seconds the replica has had the request and shown no sign of computing.

        For a replica that is shutting down, the seconds end when its metrics could last be read.
        """
        replica, since = attempt.backend.replica, attempt.sent_at
        if replica.state is State.FAILED:
            return self._ran(since, now)
        if replica.state is State.LEAVING:
            now = replica.scrape.at if replica.scrape is not None else since
        return self._ran(max(since, min(replica.moved_at, now)), max(since, now))

    def _silence(self, attempt: Attempt, now: float) -> float:
        """Return after how many seconds without a byte a stream from this attempt's replica is given up.

        For a lost replica, these are at most `LOST_SILENCE` (10) seconds. A replica is lost if it has failed. It is
        also lost if it is shutting down and shows no sign of computing: its engine may have ended its core and only
        wait until its clients close their connections.
        """
        state = attempt.backend.replica.state
        lost = state is State.FAILED or (
            state is State.LEAVING and self._stood_still(attempt, now) >= PATIENCE[State.LEAVING]
        )
        return min(self._idle_timeout, LOST_SILENCE) if lost else self._idle_timeout

    def _stalled(self, exchange: Exchange, seconds: float) -> None:
        """End an answer that has stalled, or have another replica resume it.

        If the stall is due to the client, which does not read, the client is treated as one that has left.

        `seconds`: the time without a byte after which an answer counts as stalled.
        """
        error = UpstreamError(STALLED, f"no byte for {seconds:g} s")
        if exchange.client.writing_paused:  # the client is the one that does not read
            self._give_up(exchange)
        elif self._handler.resumer is not None:
            self._failures.failed(exchange.attempts[-1], error)
        else:
            self._time_out(exchange, error)

    def _give_up(self, exchange: Exchange) -> None:
        """Treat a client that does not read as one that has left."""
        exchange.happened(ExchangeEvent.GONE)
        exchange.client.abort()

    def _time_out(self, exchange: Exchange, error: ApiError | UpstreamError) -> None:
        """End the last attempt, and with it the request, because a deadline has passed."""
        attempt = exchange.attempt
        if attempt is not None and attempt.state is not AttemptState.ENDED:
            attempt.end_as(AttemptEvent.FAILED, error)
        exchange.happened(ExchangeEvent.TIMED_OUT, error)
