"""Roster: the candidates (replicas) for a model as arrays, for a policy that compares hundreds of them at once.

To other policies it is a sequence of candidates like any other. `columns` keeps, from one decision to the next, the
figures that such a policy computes for each candidate from its load and costs. Of 1,024 replicas two or three change
between two decisions, and only their figures are computed again: reading all loads would take 0.3 ms each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .costs import CostGroup
from .ledger import Ledger
from .vocabulary import Candidate


class Roster(Sequence[Candidate]):
    """The candidates of one ledger (loads) and one cost group (replicas that share learned costs), with arrays.

    `overlaps`: for each candidate the prompt tokens in its first tier, set for each decision.
    """

    def __init__(self, candidates: Sequence[Candidate], ledger: Ledger, group: CostGroup) -> None:
        self._candidates = list(candidates)
        self._changes = ledger.follow(), group.follow()
        self._row_by_replica = {one.replica: row for row, one in enumerate(candidates)}
        self._row_by_costs = {one.costs: row for row, one in enumerate(candidates)}
        self._heard = -1, -1
        self._columns = np.empty((0, 0))
        self.group = group
        self._overlaps = np.zeros(len(candidates))
        self.ones = np.ones(len(candidates))
        self._given = True  # whether the overlaps have been written to the candidates
        self.tiered = False  # whether some candidates hold parts of the prompt in slower tiers

    def __len__(self) -> int:
        return len(self._candidates)

    def __getitem__(self, index: int) -> Candidate:  # type: ignore[override]  # policies take one at a time, none slices
        candidate = self._candidates[index]
        if not self._given:
            candidate.overlap = int(self._overlaps[index])
        return candidate

    def __iter__(self) -> Iterator[Candidate]:
        if not self._given:
            for candidate, overlap in zip(self._candidates, self._overlaps.tolist()):
                candidate.overlap = int(overlap)
            self._given = True
        return iter(self._candidates)

    @property
    def overlaps(self) -> np.ndarray:
        return self._overlaps

    @overlaps.setter
    def overlaps(self, tokens: np.ndarray) -> None:
        self._overlaps, self._given = tokens, False

    def columns(self, of: Callable[[Candidate], tuple[float, ...]]) -> np.ndarray:
        """Return an array with a row for each figure that `of` returns, and a column for each candidate.

        Only columns of candidates whose load or costs changed since the last call are computed again. So `of` must
        depend on a candidate's load and costs alone, and be the same function in each call.
        """
        loads, costs = self._changes
        if self._heard == (loads.count, costs.count):
            return self._columns
        new_loads, new_costs = loads.since(self._heard[0]), costs.since(self._heard[1])
        self._heard = loads.count, costs.count
        if new_loads is None or new_costs is None:
            self._columns = np.array([of(one) for one in self._candidates], dtype=float).T.copy()
        else:
            stale = {*map(self._row_by_replica.get, new_loads), *map(self._row_by_costs.get, new_costs)}
            for row in stale:
                if row is not None:  # otherwise the replica is no candidate here
                    self._columns[:, row] = of(self._candidates[row])
        return self._columns
