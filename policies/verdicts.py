"""What admission may say of a request, why, and by which rules. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .quotes import Quote

ADMITTED, QUEUED, REFUSED, OBSERVED = "admitted", "queued", "refused", "observed"
DEGRADED, SPILLED = "degraded", "spilled"  # sent, with a capped answer or to the slow pool
LEFT = "left"  # their clients, while they waited
DECISIONS = (ADMITTED, QUEUED, REFUSED, OBSERVED, DEGRADED, SPILLED, LEFT)
SENT = frozenset((ADMITTED, OBSERVED, DEGRADED, SPILLED))
CONTROL, SHUTTING_DOWN, NO_REPLICA = "control", "shutting_down", "no_replica"
# Why: there was room; limits are met without; its turn has come; or the limit that nobody can meet, no space in the
# queue, a higher class in its place, waited too long, the control of overload, the gateway's stop, no replica left that
# could take it; or the client left
REASONS = (
    "room", "met", "turn", "ttft", "tpot", "full", "queue_full", "shed", "deadline", CONTROL, SHUTTING_DOWN, NO_REPLICA, "client",
)  # fmt: skip
# What is done with a request that finds no room, see `admission`
WAIT, DEGRADE, SPILL, REJECT, OBSERVE = "wait", "degrade", "spill", "reject", "observe"
STEPS = (WAIT, DEGRADE, SPILL, REJECT, OBSERVE)


class Rules(NamedTuple):
    """Seconds and bytes. `when_full`: steps, in their order; `max_wait`: where no limit says how long a request may
    wait; `max_tokens_floor`: what the answers of degraded requests are capped at; `control_window`: see `control`, None
    for no control."""

    when_full: tuple[str, ...] = (WAIT,)
    engine_wait: float = 0.1
    max_wait: float = 30.0
    max_requests: int = 10_000
    max_bytes: int = 256 * 2**20
    max_tokens_floor: int = 128
    control_window: float | None = 30.0


class Verdict(NamedTuple):
    """`among`: the indices of the candidates that it may be sent to, of the slow pool's where it is spilled, empty
    where it is not sent; `retry_after`: seconds after which a refused one is predicted to be taken; `cap`: tokens that
    its answer may have, 0 for as many as it asks for."""

    decision: str
    reason: str
    among: Sequence[int] = ()
    retry_after: float = 0.0
    cap: int = 0


class Offers(Protocol):
    """What else a request can be given, see `offers.Offers`."""

    def may_cap(self, most: int) -> bool:
        """Whether its answer can be capped at so many tokens, and may have more as it is."""

    def capped(self, most: int) -> Sequence[Quote]:
        """The candidates' quotes for an answer of so many tokens; none where it asks for no more, or cannot be
        capped."""

    def spilled(self) -> Sequence[Quote]:
        """The quotes of the slow pool's replicas that can take it."""

    def spills_elsewhere(self) -> bool:
        """Whether the slow pool is not where it would go anyway, as all do while nobody else is left."""


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
