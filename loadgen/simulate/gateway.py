"""One gateway of a simulated fleet: its map, its policy, its learned costs, and the load it knows of.

Requests are placed by the Router that the gateway has, whole or in two legs. Each gateway gets the engines' events on
its own connections, so each may miss others. What a lost batch held comes with the next one (its number shows the gap,
and the gateway asks for a replay), or never, if losses go unseen. The gateway's rule for healing a map that is wrong is
not here.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from policies import (
    Candidate,
    CostGroup,
    Demand,
    Evaluation,
    Ledger,
    Pairing,
    Placement,
    Policy,
    Router,
    Targets,
    two_legs,
)
from policies.legs import LegRule
from policies.outputs import LEAST_OUTPUT
from replicas.simulated.engine import Cleared, Removed, Stored
from replicas.simulated.pools import sides, takes_whole
from replicas.simulated.profile import Profile

from .holders import Holders
from .turns import Turn

if TYPE_CHECKING:
    from bench.rules.prefill_queue import PrefillQueue
    from bench.rules.truth import Truth

Events = list[Stored | Removed | Cleared]


@dataclass(slots=True)
class Legs:
    """A request in two legs. `moved`: prompt tokens whose cache the decoder was taken to lack."""

    first: Placement
    second: Placement
    moved: int
    kept_at: float | None = None  # when its prompt was computed; None: it is being computed
    sent_at: float = 0.0  # when the second leg was sent


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
        truth: Truth | None,
        seed: int,
        roles: Sequence[str],
        leg_rule: LegRule,
        queue: PrefillQueue | None = None,
        pulls: bool = False,
    ) -> None:
        self.holders = Holders([profile.num_blocks for profile in profiles], wire.delay is not None)
        self.router = Router(policy, self.holders, ledger, CostGroup(), leg_rule)
        self._queue, self._pulls = queue, pulls
        self._roles, self._contexts = roles, [profile.context_length for profile in profiles]
        self.candidates = [self.router.add(name, index) for index, name in enumerate(names)]
        self.truth, self._size = truth, profiles[0].block_size
        self._wire, self._random, self._order = wire, random.Random(f"events {seed}").random, count()
        # of its own: which events get lost must not decide which replica is chosen
        self._draw = random.Random(seed).random
        self._coming: list[tuple[float, int, int, Events]] = []
        self._lost: dict[int, Events] = {}
        self._last = [0.0] * len(names)  # when the latest batch of each arrives: they keep their order
        self._be_up(list(range(len(names))))

    def place(
        self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = (), stays_whole: bool = False
    ) -> Placement | Legs | None:
        """None if no replica is left to try."""
        evaluation = self.evaluate(turn, session, now, tried)
        return None if evaluation is None else self.commit(evaluation, turn, now, tried, stays_whole)

    def evaluate(self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = ()) -> Evaluation | None:
        """None if no replica is left to try."""
        self._catch_up(now)
        taking, targets = self._taking, self._targets
        if tried:
            taking = takes_whole(self._roles, [index for index in self._up if index not in tried])
            targets = Targets([self.candidates[index] for index in taking])
        if not taking:
            return None
        if self.truth is not None:
            self.truth.among, self.truth.output = taking, turn.output
        root = turn.hashes[0] if turn.hashes else 0
        demand = Demand(turn.tokens, self._size, root, session, turn.max_tokens, now, turn.hashes, self._draw())
        return self.router.evaluate(demand, targets, now, peers=self._peers)

    def commit(
        self, evaluation: Evaluation, turn: Turn, now: float, tried: tuple[int, ...] = (), stays_whole: bool = False
    ) -> Placement | Legs:
        """Place it as evaluated, or in two legs if they are better."""
        chosen = evaluation.legs
        if not evaluation.settled and not stays_whole:
            chosen = two_legs.choose_among(
                self.router, two_legs.ways(self.router, evaluation, self.pairings(turn, tried), now)
            )
        if chosen is not None:
            first, second, move = two_legs.commit(self.router, evaluation, chosen, now)
            return Legs(first, second, move.tokens)
        return self.router.commit(evaluation, now)

    def pairings(self, turn: Turn, tried: tuple[int, ...] = ()) -> list[Pairing]:
        """Who may have legs of it."""
        if not self.prefillers or (self._queue is not None and self._queue.is_full):
            return []
        return [(self._able(self.prefillers, turn, tried), self._able(self._decoders, turn, tried))]

    def _able(self, side: Sequence[int], turn: Turn, tried: tuple[int, ...]) -> list[Candidate]:
        """Those of a side that were not tried and have room for a prompt and its answer."""
        needed = turn.tokens + (turn.max_tokens or 1)
        return [self.candidates[one] for one in side if one not in tried and self._contexts[one] >= needed]

    def computed_by(self, legs: Legs, index: int, now: float) -> None:
        """Another prefiller than the one that was counted on is free first."""
        candidate = self.candidates[index]
        if legs.first.candidate is not candidate:
            self._catch_up(now)
            legs.first = two_legs.move_prefill(self.router, legs.first, candidate.replica, now)

    def handed_over(self, legs: Legs, now: float, cached: int) -> None:
        """The prompt is computed, and kept for the decoder; the engine had found `cached` tokens of it."""
        legs.kept_at = now
        self.first(legs.first, now)
        self.router.finish(legs.first, cached)

    def next_decoder(self, legs: Legs, turn: Turn, now: float, tried: tuple[int, ...]) -> bool:
        """Have another one write the answer; False: nobody is left."""
        able = [one for one in self._able(self._decoders, turn, tried) if one is not legs.first.candidate]
        candidate = two_legs.weigh_decoder(self.router, legs.first.demand, able, now)
        if candidate is None:
            return False
        legs.moved = two_legs.begin_transfer(
            self.router, legs.first.candidate, candidate, legs.first.demand, now
        ).tokens
        legs.second = two_legs.commit_decoder(self.router, legs.first.demand, candidate, now)
        return True

    def transferred(self, legs: Legs, now: float) -> None:
        """The second leg has its first token."""
        pair = legs.first.candidate.replica, legs.second.candidate.replica
        moving = two_legs.moving_seconds(legs.second, now - legs.sent_at)
        self.router.transfers.observe(*pair, legs.moved, moving, now)

    def transfer_failed(self, legs: Legs, now: float) -> None:
        self.router.transfers.failed(legs.first.candidate.replica, legs.second.candidate.replica, now)

    def first(self, placement: Placement, now: float) -> None:
        self.router.first_token(placement, now, now - placement.at)

    def came(self, placement: Placement, tokens: int) -> None:
        self.router.came(placement, tokens)

    def pulled(self, placement: Placement, cached: int, now: float) -> None:
        self.router.pulled(placement, cached, now)

    def complete(
        self, placement: Placement, seconds: float, output: int, cached: int | None, capped: bool = False
    ) -> None:
        """All of the reply is out, `seconds` after its first token; the engine reports how much was `cached`. None:
        nothing was predicted of that. Of one that was `capped` no length is learned."""
        per_token = seconds / (output - 1) if output > LEAST_OUTPUT else None
        self.router.finish(placement, cached, per_token, None if capped else output)

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
        self._up, self._taking = up, takes_whole(self._roles, up)
        self._targets = Targets([self.candidates[index] for index in self._taking])
        self._peers = [self.candidates[index] for index in up] if self._pulls else []
        self.prefillers, self._decoders = sides(self._roles, up)

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
