"""The plain data of admission: decisions, their reasons, and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .estimates import Estimate

ADMITTED, QUEUED, REFUSED, OBSERVED = "admitted", "queued", "refused", "observed"
DEGRADED, SPILLED = "degraded", "spilled"  # sent with a capped answer; sent to the overflow pool
LEFT = "left"  # the client disconnected while its request waited
DECISIONS = (ADMITTED, QUEUED, REFUSED, OBSERVED, DEGRADED, SPILLED, LEFT)
SENT = frozenset((ADMITTED, OBSERVED, DEGRADED, SPILLED))
CONTROL, SHUTTING_DOWN, NO_REPLICA = "control", "shutting_down", "no_replica"
# The reasons in order. For requests that are sent: there was room; its limits are met although there is no room; its
# turn in the queue came. For requests that are not sent: no replica meets the TTFT limit; none meets the TPOT limit; no
# room; a full queue; displaced by a higher class; waited too long; overload control; the gateway's shutdown; no replica
# left that could take it; the client left.
REASONS = (
    "room", "met", "turn", "ttft", "tpot", "full", "queue_full", "shed", "deadline", CONTROL, SHUTTING_DOWN, NO_REPLICA, "client",
)  # fmt: skip
# The steps for a request that finds no room: wait in the queue, cap the answer's length, use the overflow pool, refuse
# the request, or send it all the same (see `admission`).
WAIT, DEGRADE, SPILL, REJECT, OBSERVE = "wait", "degrade", "spill", "reject", "observe"
STEPS = (WAIT, DEGRADE, SPILL, REJECT, OBSERVE)


class Rules(NamedTuple):
    """The settings of admission (which requests are sent, wait or are refused), in seconds and bytes."""

    when_full: tuple[str, ...] = (WAIT,)  # the steps for a request that finds no room, in their order
    engine_wait: float = 0.1  # an engine has room for a request if its own queue is not longer than this, in seconds
    max_wait: float = 30.0  # the longest wait of a request without a TTFT limit
    max_requests: int = 10_000  # the most requests in the queue
    max_bytes: int = 256 * 2**20  # the most bytes of all requests in the queue
    max_tokens_floor: int = 128  # tokens at which answers are capped by `degrade` and by overload control
    control_window: float | None = 30.0  # seconds of one window of overload control; None: no overload control


class AdmissionDecision(NamedTuple):
    """Admission's decision on a request."""

    decision: str  # one of DECISIONS
    reason: str  # one of REASONS
    # The indices of the replicas, or pairs of them, to which it may be sent (SPILLED: of the overflow pool's
    # candidates). Empty: it is not sent, or may be sent to any.
    among: Sequence[int] = ()
    retry_after: float = 0.0  # seconds after which a refused request is predicted to be admitted
    cap: int = 0  # the most tokens that its answer may have; 0: as many as it asks for


class AdmissionOptions:
    """The alternatives for a request that no replica has room for: a capped answer, and the overflow pool.

    This base class offers none of them; its subclass RouterOptions does.
    """

    def may_cap(self, most: int) -> bool:
        """Return whether the request's answer may be capped at `most` tokens, and could be longer without that."""
        return False

    def capped(self, most: int) -> Sequence[Estimate]:
        """Return the candidates' predicted latencies for an answer of at most `most` tokens.

        Empty if the answer cannot be capped (`may_cap`).
        """
        return ()

    def in_overflow_pool(self) -> Sequence[Estimate]:
        """Return the predicted latencies of the overflow pool's replicas that can take the request."""
        return ()

    def has_separate_overflow_pool(self) -> bool:
        """Return whether the overflow pool has replicas, and none of them is already a candidate for the request."""
        return False


NO_OPTIONS = AdmissionOptions()
