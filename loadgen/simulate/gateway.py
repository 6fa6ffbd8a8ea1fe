"""One gateway of a simulated fleet: its map, its policy, its learned costs, and the load it knows of.

Requests are placed by the Router that the gateway has. Each gateway gets the engines' events on its
own connections, so each may miss others. What a lost batch held comes with the next one (its number shows the gap, and
the gateway asks for a replay), or never, if losses go unseen. The gateway's rule for healing a map that is wrong is not
here.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from policies import CostGroup, Demand, Evaluation, Ledger, Placement, Policy, Router, Targets
from replicas.simulated.engine import Cleared, Removed, Stored
from replicas.simulated.profile import Profile

from .holders import Holders
from .truth import Truth
from .turns import Turn

LEAST_OUTPUT = 8  # tokens; costs learn from streams that are longer than this
Events = list[Stored | Removed | Cleared]


@dataclass(frozen=True, slots=True)
class Wire:
    """How an engine's events reach a gateway. `delay`: seconds from the end of their step; None: engines send none, and
    caches are modelled. `loss`: share of batches that get lost; `unseen`: without a gap in their numbers. `tiers`:
    whether they tell of slower tiers."""

    delay: float | None = 0.005
    loss: float = 0.0
    unseen: bool = False
    tiers: bool = True


class Gateway:
    def __init__(
        self,
        names: Sequence[str],
        profiles: Sequence[Profile],
        policy: Policy,
        ledger: Ledger,
        wire: Wire,
        truth: Truth,
        seed: int,
    ) -> None:
        self.holders = Holders([profile.num_blocks for profile in profiles], wire.delay is not None)
        self.router = Router(policy, self.holders, ledger, CostGroup())
        self.candidates = [self.router.add(name, index) for index, name in enumerate(names)]
        self.truth, self._size = truth, profiles[0].block_size
        self._wire, self._random, self._order = wire, random.Random(f"events {seed}").random, count()
        # of its own: which events get lost must not decide which replica is chosen
        self._draw = random.Random(seed).random
        self._coming: list[tuple[float, int, int, Events]] = []
        self._lost: dict[int, Events] = {}
        self._last = [0.0] * len(names)  # when the latest batch of each arrives: they keep their order
        self._be_up(list(range(len(names))))

    def place(self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = ()) -> Placement | None:
        """None if no replica is left to try."""
        evaluation = self.evaluate(turn, session, now, tried)
        return None if evaluation is None else self.router.commit(evaluation, now)

    def evaluate(self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = ()) -> Evaluation | None:
        """None if no replica is left to try."""
        self._catch_up(now)
        up, targets = self._up, self._targets
        if tried:
            up = [index for index in up if index not in tried]
            targets = Targets([self.candidates[index] for index in up])
        if not up:
            return None
        self.truth.among, self.truth.output = up, turn.output
        root = turn.hashes[0] if turn.hashes else 0
        return self.router.evaluate(
            Demand(turn.tokens, self._size, root, session, turn.max_tokens, now, turn.hashes, self._draw()),
            targets,
            now,
        )

    def first(self, placement: Placement, now: float) -> None:
        self.router.first_token(placement, now, now - placement.at)

    def complete(self, placement: Placement, seconds: float, output: int, cached: int) -> None:
        """All of the reply is out, `seconds` after its first token; the engine reports how much was `cached`."""
        self.router.finish(placement, cached, seconds / (output - 1) if output > LEAST_OUTPUT else None, output)

    def abandon(self, placement: Placement, computed: bool = True) -> None:
        self.router.abandon(placement, computed)

    def session_finished(self, session: str) -> None:
        """Its client says that it is over, for a policy that wants to know (`session_finished`)."""
        if (tell := getattr(self.router.policy, "session_finished", None)) is not None:
            tell(session)

    # --- replicas

    def lost(self, index: int) -> None:
        """A replica is gone: every connection to it broke."""
        self._be_up([one for one in self._up if one != index])
        self.holders.clear(index)
        self._coming = [batch for batch in self._coming if batch[2] != index]
        heapq.heapify(self._coming)
        self._lost.pop(index, None)
        self.router.lost(self.candidates[index].replica)

    def back(self, index: int) -> None:
        self._be_up(sorted((*self._up, index)))

    def _be_up(self, up: list[int]) -> None:
        self._up, self._targets = up, Targets([self.candidates[index] for index in up])

    # --- their events

    def told(self, index: int, when: float, events: Events) -> None:
        """A step of this replica's, which ends at `when`, has these events."""
        wire = self._wire
        if wire.loss and self._random() < wire.loss:
            if not wire.unseen:
                self._lost.setdefault(index, []).extend(events)
            return
        due = max(when + wire.delay, self._last[index])
        if index in self._lost:
            events = self._lost.pop(index) + events
            due += wire.delay  # there and back
        self._last[index] = due
        heapq.heappush(self._coming, (due, next(self._order), index, events))

    def _catch_up(self, now: float) -> None:
        """Put into the map what has arrived: nobody looks at it between two requests."""
        coming, holders, tiers = self._coming, self.holders, self._wire.tiers
        while coming and coming[0][0] <= now:
            _, _, index, events = heapq.heappop(coming)
            for event in events:
                if type(event) is Stored:
                    if event.tier == "gpu":
                        holders.store(index, event.keys)
                    elif tiers:
                        holders.store_lower(index, event.keys, event.tier)
                elif type(event) is Removed:
                    if event.tier == "gpu":
                        holders.remove(index, event.keys)
                    elif tiers:
                        holders.remove_lower(index, event.keys, event.tier)
