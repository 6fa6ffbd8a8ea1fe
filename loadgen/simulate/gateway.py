"""One gateway of a simulated fleet: its map, its policy, its learned costs, and the load it knows of.

What it does with a request is what `gateway.dispatch` does: match, choose, reserve, expect; the first token moves the
reservation and teaches the costs, the end releases it and teaches them again. Each gateway gets the engines' events on its
own connections, so each may miss others. What a lost batch held comes with the next one (its number shows the gap, and the
gateway asks for a replay), or never, if losses go unseen. The gateway's rule for healing a map that is wrong is not here.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from loadgen.simulate.field import Asked
from policies import Candidate, CostGroup, Ledger, Policy, Reservation
from replicas.simulated.engine import Cleared, Removed, Stored
from replicas.simulated.profile import Profile

from .holders import Holders
from .truth import Truth
from .turns import Turn

_LEAST_OUTPUT = 8         # tokens; costs learn from streams that are longer than this
Events = list[Stored | Removed | Cleared]


@dataclass(frozen=True, slots=True)
class Wire:
    """How an engine's events reach a gateway. `delay`: seconds from the end of their step; None: engines send none, and
    caches are modelled. `loss`: share of batches that get lost; `unseen`: without a gap in their numbers."""
    delay: float | None = 0.005
    loss: float = 0.0
    unseen: bool = False


@dataclass(slots=True)
class Sent:
    """A gateway's choice for one request."""
    index: int
    asked: Asked
    reservation: Reservation
    overlap: int
    expected: float        # seconds to the first token, by the costs
    at: float


class Gateway:
    def __init__(self, names: Sequence[str], profiles: Sequence[Profile], policy: Policy, ledger: Ledger, wire: Wire, truth: Truth,
                 seed: int) -> None:
        self.policy, self.ledger, self.group, self.truth = policy, ledger, CostGroup(), truth
        self.holders = Holders([profile.num_blocks for profile in profiles], wire.delay is not None)
        self.candidates = [Candidate(name, 0, ledger.add(name), self.group.add(name)) for name in names]
        self.up = list(range(len(names)))
        self._size = profiles[0].block_size
        self._hooks = {name: getattr(policy, name, None) for name in ("placed", "first", "ended", "gone")}
        self._wire, self._random, self._order = wire, random.Random(f"events {seed}").random, count()
        self._draw = random.Random(seed).random    # of its own: which events get lost must not decide which replica is chosen
        self._coming: list[tuple[float, int, int, Events]] = []
        self._lost: dict[int, Events] = {}
        self._last = [0.0] * len(names)      # when the latest batch of each arrives: they keep their order

    def choose(self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...]) -> Sent | None:
        """Choose and reserve; None if no replica is left to try."""
        self._catch_up(now)
        up = [index for index in self.up if index not in tried] if tried else self.up
        if not up:
            return None
        held, confirmed = self.holders.match(turn.hashes, now)
        size, most = self._size, (turn.tokens - 1) // self._size      # the last prompt token is never a hit
        candidates = [self.candidates[index] for index in up]
        for candidate, index in zip(candidates, up):
            blocks = held[index]
            candidate.overlap = (blocks if blocks < most else most) * size      # `min` would be most of what this costs
        asked = Asked(turn.tokens, size, turn.hashes[0] if turn.hashes else 0, session, turn.output, now, turn.hashes, self._draw())
        self.truth.among = up
        choice = self.policy.choose(asked, candidates)
        if hear := self._hooks["placed"]:
            hear(asked, candidates, choice)
        chosen, index = candidates[choice.index], up[choice.index]
        uncached = turn.tokens - chosen.overlap
        expected = chosen.costs.ttft_seconds(chosen.load, uncached, chosen.overlap, now)
        reservation = self.ledger.reserve(chosen.replica, uncached, turn.tokens, now=now)
        self.holders.expect(index, turn.hashes, confirmed[index], now)
        return Sent(index, asked, reservation, chosen.overlap, expected, now)

    def first(self, sent: Sent, now: float) -> None:
        taken = sent.reservation
        self.ledger.first_byte(taken, now)
        if hear := self._hooks["first"]:
            hear(taken.replica, sent.asked)
        self.candidates[sent.index].costs.observe_ttft(now - sent.at, taken.uncached, sent.overlap, taken.before, taken.at)

    def complete(self, sent: Sent, seconds: float, output: int, cached: int) -> None:
        """All of the reply is out, `seconds` after its first token; the engine reports how much was `cached`."""
        taken = sent.reservation
        self.holders.learn(sent.index, sent.overlap // self._size, cached // self._size)
        if output > _LEAST_OUTPUT:
            load = taken.load
            self.candidates[sent.index].costs.observe_itl(seconds / (output - 1), load.decoding, load.context_tokens)
        self.release(sent)

    def release(self, sent: Sent) -> None:
        self.ledger.release(sent.reservation)
        if hear := self._hooks["ended"]:
            hear(sent.reservation.replica, sent.asked)

    # --- replicas

    def lost(self, index: int) -> None:
        """A replica is gone: every connection to it broke."""
        self.up.remove(index)
        self.holders.clear(index)
        self._coming = [batch for batch in self._coming if batch[2] != index]
        heapq.heapify(self._coming)
        self._lost.pop(index, None)
        if hear := self._hooks["gone"]:
            hear(self.candidates[index].replica)

    def back(self, index: int) -> None:
        self.up = sorted((*self.up, index))

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
            due += wire.delay      # there and back
        self._last[index] = due
        heapq.heappush(self._coming, (due, next(self._order), index, events))

    def _catch_up(self, now: float) -> None:
        """Put into the map what has arrived: nobody looks at it between two requests."""
        coming, holders = self._coming, self.holders
        while coming and coming[0][0] <= now:
            _, _, index, events = heapq.heappop(coming)
            for event in events:
                if type(event) is Stored:
                    holders.store(index, event.keys)
                elif type(event) is Removed:
                    holders.remove(index, event.keys)
