"""Reserved load per replica: what has been sent there and has not ended.

A reservation is made in the same step as the choice, moves once (first byte seen) and ends once.
Each of these is idempotent, so whichever of retry, cancel, crash and normal end comes first may
settle it and the others do no harm. Not thread safe: one event loop owns a ledger.
"""
from __future__ import annotations

from dataclasses import dataclass, fields

from .vocabulary import Load

_COUNTS = tuple(f.name for f in fields(Load) if f.name not in ("waiting", "kv_usage", "capacity_tokens"))


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's share of a replica's load. `before` is the load it met, without itself."""
    replica: str
    load: Load
    before: Load
    uncached: int
    tokens: int
    stage: str = "prefill"    # then "decode", then "done"


class Ledger:
    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._leaving: list[Load] = []    # replicas removed while requests were still on them

    def add(self, replica: str) -> Load:
        """The replica's load; the same object until `remove`."""
        return self._loads.setdefault(replica, Load())

    def remove(self, replica: str) -> None:
        """Forget a replica. Requests still on it settle against its old load."""
        load = self._loads.pop(replica, None)
        self._leaving = [one for one in (*self._leaving, load) if one and one.requests]

    def load(self, replica: str) -> Load:
        """KeyError if it was never added."""
        return self._loads[replica]

    def reserve(self, replica: str, uncached: int, tokens: int) -> Reservation:
        """Count a request of `tokens` prompt tokens, `uncached` of which must be computed."""
        load = self._loads[replica]
        reservation = Reservation(replica, load, load.copy(), uncached, tokens)
        load.requests += 1
        load.prefilling += 1
        load.prefill_tokens += uncached
        return reservation

    def first_byte(self, reservation: Reservation) -> None:
        """Its prefill is done; it decodes from now on."""
        if reservation.stage != "prefill":
            return
        reservation.stage = "decode"
        load = reservation.load
        load.prefilling -= 1
        load.prefill_tokens -= reservation.uncached
        load.decoding += 1
        load.context_tokens += reservation.tokens

    def release(self, reservation: Reservation) -> None:
        """It has ended, however it ended."""
        load, stage = reservation.load, reservation.stage
        if stage == "done":
            return
        reservation.stage = "done"
        load.requests -= 1
        if stage == "prefill":
            load.prefilling -= 1
            load.prefill_tokens -= reservation.uncached
        else:
            load.decoding -= 1
            load.context_tokens -= reservation.tokens

    def total(self) -> Load:
        """The sum over all replicas, removed ones with requests left included: zero when idle."""
        loads = (*self._loads.values(), *self._leaving)
        return Load(**{name: sum(getattr(load, name) for load in loads) for name in _COUNTS})
