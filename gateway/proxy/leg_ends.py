"""The effect of a failed leg on the other leg of its request.

Of two legs that run one after the other, only one is under way, and the other is just a reservation. Of two legs that
run at the same time, the prefill leg computes while the decode leg waits for the cache at its own replica. If one of
these fails before the client has a byte, the other is dropped, so that its engine frees the blocks, and the request is
placed again. Once the client has a byte, a failure of the prefill leg does not end the answer, since the client gets
nothing of that leg.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ..http.upstream import UpstreamError
from .exchange import Attempt, Exchange
from .retries import CLOSED, HUNG, KINDS, Failed, Next
from .settling import ABANDONED, Settling
from .states import AttemptEvent, AttemptState, ExchangeState, Leg

if TYPE_CHECKING:
    from ..ops.metrics import Metrics


class Begins(Protocol):
    """The part of `Conductor` that starts attempts."""

    def begin_attempt(self, exchange: Exchange, attempt: Attempt) -> None: ...


class LegEnds:
    """The handler of failed legs."""

    def __init__(self, conductor: Begins, settling: Settling, metrics: Metrics):
        self._conductor, self._settling, self._metrics = conductor, settling, metrics

    def what_failed(self, exchange: Exchange, attempt: Attempt, error: UpstreamError, failed: Failed) -> Failed | None:
        """Return a leg's failure with what it means for the exchange; None if the exchange goes on in spite of it."""
        legs = exchange.legs
        if legs is None:
            return failed
        beside = attempt is legs.first
        if beside and not self._first_failed(exchange, attempt, error, failed.stale):
            return None
        return failed._replace(
            handed_over=attempt.leg is Leg.DECODE,
            computes=attempt.leg is Leg.PREFILL,
            writes=attempt.leg is Leg.DECODE,
            still_kept=monotonic() < legs.until,
            beside=beside,
        )

    def failed(self, exchange: Exchange, attempt: Attempt, kind: str, following: Next) -> None:
        """Account for a leg that failed in this way (`kind`), given what follows for the request."""
        legs, leg = exchange.legs, attempt.leg
        if legs is None or leg is None:
            return
        self._settling.leg_ended(leg, kind)
        exchange.stays_whole = following is Next.WHOLE
        if following is Next.LEGS or attempt.could_not_fetch(kind) or (leg is Leg.DECODE and kind == HUNG):
            self._settling.transfer_failed(legs)
        if following is not Next.DECODER:
            self.drop(exchange)

    def drop(self, exchange: Exchange) -> None:
        """Release the reservations and the first leg of a request that goes on without legs."""
        legs, exchange.legs = exchange.legs, None
        if legs is not None:
            self._settling.drop_first(legs)
            for placement in (legs.placement, legs.unsent):
                if placement is not None:
                    self._settling.release(placement)

    def _first_failed(self, exchange: Exchange, first: Attempt, error: UpstreamError, stale: bool) -> bool:
        """Handle a failed first leg that ran at the same time as the second; return whether the exchange fails.

        If the exchange fails, the first leg becomes its last attempt. `stale`: the leg was sent on a pooled connection
        that may have timed out.
        """
        legs, attempts = exchange.legs, exchange.attempts
        assert legs is not None
        legs.first = None
        if exchange.state is not ExchangeState.TRYING:
            self._settling.leg_ended(Leg.PREFILL, error.kind)
            if KINDS[error.kind].blamed:
                self._settling.failed(first.backend, error.kind)
            self._settling.abandon(first, computed=KINDS[error.kind].computed)
            return False
        if error.kind == CLOSED and stale and not first.new_connection:
            self._metrics.retries.inc("reconnect")
            again = legs.first = first.repeat(new_connection=True, unread=error.unread)
            exchange.add_attempt(again)
            attempts[-2:] = attempts[:-3:-1]  # the leg that answers stays the last one
            self._conductor.begin_attempt(exchange, again)
            return False
        second = attempts[-1]
        if second.state is not AttemptState.ENDED:
            second.end_as(AttemptEvent.DROPPED)
        self._settling.leg_ended(Leg.DECODE, ABANDONED)
        self._settling.abandon(second, computed=False)
        attempts.remove(first)
        attempts.append(first)
        return True
