"""One map in several processes: a `LeadingMap` takes in what engines report, `FollowingMap`s look things up.

Confirmed blocks lie in tables that the leading process alone writes and the others read where they lie. What a
follower predicts is known to all within a look-up: it goes round in rings, a run of hashes a prompt, and each follower keeps
it as it keeps its own. So does what only the leader hears: that a block is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np

from cachemap.chains import EngineModel
from cachemap.lookup import Lookup
from cachemap.map import LEAST_BUDGET, PREDICTED_SECONDS, UNKNOWN_CAPACITY, CacheMap, Match, _Replica
from cachemap.memory import SharedMemory, mapped
from cachemap.ring import Reader, Ring

EXPECTED, LEARNED, DROPPED, TAKEN_BACK = range(4)  # kinds of news


class LeadingMap(CacheMap):
    """`on_layout` hears that `tables` are others than before; `on_clear(slot)`, that a replica holds nothing, or is
    observed or not from now on."""

    def __init__(self, budget_bytes: int, ring: Ring, on_layout: Callable[[], None], on_clear: Callable[[int], None]):
        self._shared = SharedMemory(on_layout)
        super().__init__(budget_bytes, memory=self._shared)
        self._ring, self._on_clear = ring, on_clear

    def tables(self) -> dict[str, list[tuple[str, int, int]]]:
        """By tier, the arrays of each table: type, a descriptor that is open as long as the array is, and a number that
        no other array ever has."""
        tables = {"gpu": self._gpu, **self._lower}
        return {tier: [(array.dtype.str, *self._shared.descriptor(array)) for array in table.arrays] for tier, table in tables.items()}

    def observes(self, slot: int) -> bool:
        return self._replica(slot).observed

    def _dropped(self, slot: int, replica: _Replica, hashes: np.ndarray) -> None:
        if len(hashes):
            self._ring.write(DROPPED, slot, 0.0, array("Q", hashes.tobytes()))

    def _clear(self, slot: int, replica: _Replica) -> None:
        super()._clear(slot, replica)
        self._on_clear(slot)


class FollowingMap(CacheMap):
    """Prompts' hashes are arrays, as they lie in memory. `ring` is its own, `others` are the leader's and its siblings'. `clear(slot)` asks the leader to."""

    def __init__(self, budget_bytes: int, ring: Ring, others: list[Reader], clear: Callable[[int], None]):
        super().__init__(max(budget_bytes, LEAST_BUDGET))
        self._gpu: Lookup = Lookup()  # until the leader tells where its tables lie
        self._lower: dict[str, Lookup] = {}
        self._ring, self._others, self.clear = ring, others, clear

    def look_at(self, tier: str, arrays: list[tuple[str, int]]) -> None:
        """The leader's table of this tier, types and descriptors as `LeadingMap.tables` gave them; the latter are closed."""
        table = self._gpu if tier == "gpu" else self._lower.setdefault(tier, Lookup())
        # of all these only the epochs (the first) may be marked by who reads
        table.look_at([mapped(descriptor, dtype, number == 0) for number, (dtype, descriptor) in enumerate(arrays)])
        # It may speak of replicas that we are about to be told of.
        slots = 64 * table.holders.width
        self._replicas += [None] * (slots - len(self._replicas))

    def place(self, slot: int, name: str, capacity_blocks: int | None, observed: bool) -> None:
        """A replica joins in the leader's slot, or is observed or not from now on."""
        self._replicas += [None] * (slot + 1 - len(self._replicas))
        replica = self._replicas[slot]
        if replica is None:
            self._replicas[slot] = _Replica(name, EngineModel(capacity_blocks or UNKNOWN_CAPACITY), observed)
        elif replica.observed != observed:
            self.cleared(slot)
            replica.observed = observed
        else:
            return
        self._recount()

    def detach(self, slot: int) -> None:
        self._replica(slot)
        self._routed.clear(slot)
        self._replicas[slot] = None
        self._recount()

    def cleared(self, slot: int) -> None:
        """The leader says that the replica holds nothing; nor does what was predicted before count."""
        self.catch_up()
        self._routed.clear(slot)
        self._replica(slot).model.clear()
        self._last = ([], [])

    def match(self, hashes: Sequence[int], now: float) -> Match:
        self.catch_up()
        try:
            return CacheMap.match(self, hashes, now)  # super() takes 1,000 instructions
        except (IndexError, ValueError):
            # Torn: a block that moved while its bucket was copied was seen twice. Nothing is known this time.
            self._last = ([], [])
            nothing = [0] * len(self._replicas)
            return Match(nothing, nothing, {})

    def _expected(self, slot: int, replica: _Replica, hashes: array, now: float) -> None:
        CacheMap._expected(self, slot, replica, hashes, now)
        self._ring.write(EXPECTED, slot, now, hashes)

    def take_back(self, slot: int, hashes: Sequence[int], held: int, now: float) -> None:
        super().take_back(slot, hashes, held, now)
        self._ring.write(TAKEN_BACK, slot, now, array("Q", (held, *hashes)))

    def learn(self, slot: int, hashes: list[int], predicted_blocks: int, reported_blocks: int) -> None:
        super().learn(slot, hashes, predicted_blocks, reported_blocks)
        if not self._replica(slot).observed and predicted_blocks != reported_blocks:
            self._ring.write(LEARNED, slot, 0.0, array("Q", (predicted_blocks, reported_blocks)))

    def catch_up(self) -> None:
        """Take in what the others told."""
        replicas = self._replicas
        for other in self._others:
            for kind, slot, at, words in other.read():
                replica = replicas[slot] if slot < len(replicas) else None
                if replica is None:
                    continue
                if kind == EXPECTED:
                    if not replica.observed:
                        replica.model.add(words)
                    elif at + PREDICTED_SECONDS > monotonic():
                        self._routed.add(slot, words, at)
                elif kind == DROPPED:
                    self._routed.discard(slot, words)
                elif kind == TAKEN_BACK:
                    super().take_back(slot, words[1:], words[0], at)
                elif not replica.observed:
                    replica.model.learn(*words)

    def modelled(self) -> dict[int, int]:
        """Blocks by slot of those whose cache is modelled."""
        return {slot: len(model) for slot, model in self._modelled}
