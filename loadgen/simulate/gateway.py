"""A gateway of a simulated fleet: its map of cached KV blocks, policy, learned costs, and the load it knows of.

The real gateway's Router places requests, each whole or in two legs (prefill on one replica, decode on another). Each
gateway gets the engines' KV events over its own connections, so gateways may lose different batches of events. The
events of a lost batch arrive with the next batch, because the gap in the batches' numbers makes the gateway request a
replay. The real gateway's repair of a wrong map is not simulated.
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

from .holders import Holders
from .setting import Setting
from .turns import Turn

if TYPE_CHECKING:
    from bench.rules.prefill_queue import PrefillQueue
    from bench.rules.truth import Truth

Events = list[Stored | Removed | Cleared]


@dataclass(slots=True)
class Legs:
    """The two legs of a request: one replica computes its prompt (prefill), another writes the answer (decode)."""

    first: Placement  # of the prefill leg
    second: Placement  # of the decode leg
    moved: int  # prompt tokens whose KV cache the decoder was assumed to lack when it was chosen
    kept_at: float | None = None  # when the prefiller had computed the prompt; None: not yet
    sent_at: float = 0.0  # when the decode leg was sent


class Gateway:
    """A simulated gateway with the real gateway's Router; methods name replicas by their index in the fleet."""

    def __init__(
        self,
        setting: Setting,
        names: Sequence[str],
        policy: Policy,
        ledger: Ledger,
        truth: Truth | None,
        seed: int,
        leg_rule: LegRule,
        queue: PrefillQueue | None = None,
    ) -> None:
        self._setting, profiles = setting, setting.profiles
        self.holders = Holders([profile.num_blocks for profile in profiles], setting.event_delay is not None)
        self._changes = {Stored: self.holders.store, Removed: self.holders.remove}
        self.router = Router(policy, self.holders, ledger, CostGroup(), leg_rule)
        self._queue = queue
        self._roles = setting.roles or ["both"] * len(profiles)
        self._contexts = [profile.context_length for profile in profiles]
        self.candidates = [self.router.add(name, index) for index, name in enumerate(names)]
        self.truth, self._size = truth, profiles[0].block_size
        self._random, self._order = random.Random(f"events {seed}").random, count()
        # a generator of its own, so that lost events do not change the draws for the choice of replicas
        self._draw = random.Random(seed).random
        self._coming: list[tuple[float, int, int, Events]] = []  # a heap of (arrival, order, replica, KV events)
        self._lost: dict[int, Events] = {}  # by replica: KV events of lost batches, which are to be replayed
        self._last = [0.0] * len(names)  # when each replica's latest batch arrives: batches keep their order
        self._be_up(list(range(len(names))))

    def place(
        self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = (), stays_whole: bool = False
    ) -> Placement | Legs | None:
        """Choose a replica for a request, or two for its prefill and decode legs, and reserve the load there.

        `tried`: replicas that were lost with this request; `stays_whole`: do not split it into legs. Returns None if no
        replica is left to try.
        """
        evaluation = self.evaluate(turn, session, now, tried)
        return None if evaluation is None else self.commit(evaluation, turn, now, tried, stays_whole)

    def evaluate(self, turn: Turn, session: str | None, now: float, tried: tuple[int, ...] = ()) -> Evaluation | None:
        """Return the policy's choice of a replica for a request, without reserving it; None if none is left to try.

        `tried`: replicas that were lost with this request.
        """
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
        """Reserve the evaluated choice, or two legs if the leg rule prefers them, and return what was reserved.

        `tried`: replicas that were lost with this request; `stays_whole`: do not split it into legs.
        """
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
        """Return the candidates for the two legs of a request, as a list with one pair (prefillers, decoders).

        `tried`: replicas that were lost with this request. Returns [] if there are no prefillers now, or if the shared
        prefill queue is full.
        """
        if not self.prefillers or (self._queue is not None and self._queue.is_full):
            return []
        return [(self._able(self.prefillers, turn, tried), self._able(self._decoders, turn, tried))]

    def _able(self, side: Sequence[int], turn: Turn, tried: tuple[int, ...]) -> list[Candidate]:
        """Return those of `side` (prefillers or decoders) that were not tried and whose context fits the request.

        Prompt and answer must fit; the answer is taken to have `max_tokens`, or one token if the client sent none.
        """
        needed = turn.tokens + (turn.max_tokens or 1)
        return [self.candidates[one] for one in side if one not in tried and self._contexts[one] >= needed]

    def computed_by(self, legs: Legs, index: int, now: float) -> None:
        """Move the prefill leg's reservation to prefiller `index`, which became free before the reserved prefiller."""
        candidate = self.candidates[index]
        if legs.first.candidate is not candidate:
            self._catch_up(now)
            legs.first = two_legs.move_prefill(self.router, legs.first, candidate.replica, now)

    def handed_over(self, legs: Legs, now: float, cached: int) -> None:
        """Complete the prefill leg: the prefiller has computed the prompt and keeps its KV cache for the decoder.

        `cached`: prompt tokens that the prefiller had in its cache before.
        """
        legs.kept_at = now
        self.router.first_token(legs.first, now, now - legs.first.at)
        self.router.finish(legs.first, cached)

    def next_decoder(self, legs: Legs, turn: Turn, now: float, tried: tuple[int, ...]) -> bool:
        """Choose and reserve another decoder for the decode leg, whose reserved decoder was lost.

        `tried`: replicas that were lost with this request. Returns False if no decoder is left.
        """
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
        """Learn how long the transfer between the two replicas took, from the decode leg's first token at `now`."""
        pair = legs.first.candidate.replica, legs.second.candidate.replica
        moving = two_legs.moving_seconds(legs.second, now - legs.sent_at)
        self.router.transfers.observe(*pair, legs.moved, moving, now)

    def complete(
        self, placement: Placement, seconds: float, output: int, cached: int | None, capped: bool = False
    ) -> None:
        """Release the reservation of a request whose reply ended, and let the Router learn from it.

        `seconds`: from the first token to the last; `output`: tokens of the reply; `cached`: prompt tokens that the
        engine had cached, or None for a request in two legs. `capped`: admission has shortened the reply, so its length
        is not learned.
        """
        per_token = seconds / (output - 1) if output > LEAST_OUTPUT else None
        self.router.finish(placement, cached, per_token, None if capped else output)

    def session_finished(self, session: str) -> None:
        """Notify the policy, if it has a method `session_finished`, that the client ended this session."""
        if (tell := getattr(self.router.policy, "session_finished", None)) is not None:
            tell(session)

    # --- replicas

    def lost(self, index: int) -> None:
        """Remove a replica that was lost: its blocks in the map, its events on the way and its load."""
        self._be_up([one for one in self._up if one != index])
        self.holders.clear(index)
        self._coming = [batch for batch in self._coming if batch[2] != index]
        heapq.heapify(self._coming)
        self._lost.pop(index, None)
        self.router.lost(self.candidates[index].replica)

    def back(self, index: int) -> None:
        """Make a replica that has come back available to requests again."""
        self._be_up(sorted((*self._up, index)))

    def _be_up(self, up: list[int]) -> None:
        self._up, self._taking = up, takes_whole(self._roles, up)
        self._targets = Targets([self.candidates[index] for index in self._taking])
        self._peers = [self.candidates[index] for index in up] if self._setting.pulls else []
        self.prefillers, self._decoders = sides(self._roles, up)

    # --- their events

    def told(self, index: int, when: float, events: Events) -> None:
        """Queue the KV events of a step of replica `index`; the map gets them `event_delay` seconds after the step.

        `when`: when the step ends. A random share of the batches is lost; the events of a lost batch come with the
        replica's next batch.
        """
        setting = self._setting
        if setting.event_loss and self._random() < setting.event_loss:
            self._lost.setdefault(index, []).extend(events)
            return
        due = max(when + setting.event_delay, self._last[index])
        if index in self._lost:
            events = self._lost.pop(index) + events
            due += setting.event_delay  # round trip of the replay request
        self._last[index] = due
        heapq.heappush(self._coming, (due, next(self._order), index, events))

    def _catch_up(self, now: float) -> None:
        """Apply the KV events that have arrived by now to the map of cached blocks."""
        coming = self._coming
        while coming and coming[0][0] <= now:
            _, _, index, events = heapq.heappop(coming)
            for event in events:
                if change := self._changes.get(type(event)):
                    change(index, event.keys, event.tier)
