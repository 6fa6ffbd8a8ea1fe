"""The plain data of admission: decisions, their reasons, and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .quotes import Quote

ADMITTED, QUEUED, REFUSED, OBSERVED = "admitted", "queued", "refused", "observed"
DEGRADED, SPILLED = "degraded", "spilled"  # sent, with a capped answer or to the overflow pool
LEFT = "left"  # the client disconnected while it waited
DECISIONS = (ADMITTED, QUEUED, REFUSED, OBSERVED, DEGRADED, SPILLED, LEFT)
SENT = frozenset((ADMITTED, OBSERVED, DEGRADED, SPILLED))
CONTROL, SHUTTING_DOWN, NO_REPLICA = "control", "shutting_down", "no_replica"
# Sent: there was room, its limits are met without room, or its turn came. Not sent: a limit that no replica meets, no
# room, a full queue, displaced by a higher class, waited too long, overload control, the gateway's shutdown, no replica
# left that could take it, or the client left
REASONS = (
    "room", "met", "turn", "ttft", "tpot", "full", "queue_full", "shed", "deadline", CONTROL, SHUTTING_DOWN, NO_REPLICA, "client",
)  # fmt: skip
# Steps for a request that finds no room, see `admission`
WAIT, DEGRADE, SPILL, REJECT, OBSERVE = "wait", "degrade", "spill", "reject", "observe"
STEPS = (WAIT, DEGRADE, SPILL, REJECT, OBSERVE)


class Rules(NamedTuple):
    """The settings of admission, in seconds and bytes.

    `when_full`: steps, in their order; `engine_wait`: the longest queue in an engine that still is room; `max_wait`:
    the longest wait where no limit bounds it; `max_requests`, `max_bytes`: bounds of the queue; `max_tokens_floor`: the
    cap of degraded answers; `control_window`: see `control`, None for no overload control.
    """

    when_full: tuple[str, ...] = (WAIT,)
    engine_wait: float = 0.1
    max_wait: float = 30.0
    max_requests: int = 10_000
    max_bytes: int = 256 * 2**20
    max_tokens_floor: int = 128
    control_window: float | None = 30.0


class Verdict(NamedTuple):
    """The decision on a request.

    `among`: the indices of the ways that it may be sent (of the overflow pool's candidates if it is spilled; empty: not
    sent, or any); `retry_after`: seconds after which a refused request is predicted to be admitted; `cap`: the most
    tokens that its answer may have, 0 for as many as it asks for.
    """

    decision: str
    reason: str
    among: Sequence[int] = ()
    retry_after: float = 0.0
    cap: int = 0


class Offers(Protocol):
    """The alternatives for a request, see `offers.Offers`."""

    def may_cap(self, most: int) -> bool:
        """Return whether its answer can be capped at `most` tokens, and might be longer otherwise."""

    def capped(self, most: int) -> Sequence[Quote]:
        """Return the candidates' quotes for an answer of at most `most` tokens; none if it cannot be capped.

        None either if the request asks for no more than that.
        """

    def spilled(self) -> Sequence[Quote]:
        """Return the quotes of the overflow pool's replicas that can take it."""

    def spills_elsewhere(self) -> bool:
        """Return whether the overflow pool is disjoint from its candidates; it is not where nobody else is left."""


class _Nothing:
    def may_cap(self, most: int) -> bool:
        return False

    def capped(self, most: int) -> Sequence[Quote]:
        return ()

    def spilled(self) -> Sequence[Quote]:
        return ()

    def spills_elsewhere(self) -> bool:
        return False


NO_OFFERS = _Nothing()
