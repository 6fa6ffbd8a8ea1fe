"""What becomes of the other leg of a request when one of them ends.

Of legs that follow each other only one is under way, and the other is no more than a reservation. Of legs that are sent
at once one computes and the other waits for it, each at its own replica: where one fails before the client has a byte,
the other is dropped, which makes its engine free what it holds, and the request is placed anew. After that only the
first leg can fail without the answer, which goes on: the client gets nothing of that leg.
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
    def begin_attempt(self, exchange: Exchange, attempt: Attempt) -> None: ...


class LegEnds:
    def __init__(self, conductor: Begins, settling: Settling, metrics: Metrics):
        self._conductor, self._settling, self._metrics = conductor, settling, metrics

    def what_failed(self, exchange: Exchange, attempt: Attempt, error: UpstreamError, failed: Failed) -> Failed | None:
        """What a failed leg is to its exchange; None: nothing, that goes on."""
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
        """One failed, and this follows."""
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
        """No leg but the last attempt is wanted any more: what they have is given back, and nothing is expected."""
        legs, exchange.legs = exchange.legs, None
        if legs is not None:
            self._settling.drop_first(legs)
            for placement in (legs.placement, legs.unsent):
                if placement is not None:
                    self._settling.release(placement)

    def _first_failed(self, exchange: Exchange, first: Attempt, error: UpstreamError, stale: bool) -> bool:
        """A first leg that ran beside the second one has failed; whether the exchange fails with it. It is its last
        attempt then. `stale`: it was sent on a kept connection that may have died of old age."""
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
