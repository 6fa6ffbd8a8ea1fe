"""A fleet on a virtual clock: gateways with one policy, and N simulated engines behind them.

Policies, ledger and learned costs are the ones the gateway uses, the map answers as the gateway's does; the engines are
the ones behind `hitherto replica`. Time is a heap of events, so a minute of fleet takes as long as its engine steps
cost to compute, and the same seed gives the same result.

Per request: match -> choose -> reserve -> engine, then first token -> ledger and TTFT learned, end -> release and the
conversation's next turn after its think time. Where replicas have roles a request may have two legs, as in the proxy:
one replica computes the prompt and a token, keeps the cache for as long as a lease, and another fetches what it lacks
and writes the answer, with the first token that the client sees. A replica that is lost takes its cache with it and
cuts the streams it has begun; what it had not answered is sent elsewhere, as the gateway does, which notices at once
since every connection breaks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from policies import Admission, Ledger, Placement, Ticket, Verdict
from replicas.simulated.engine import EngineRequest, Output
from replicas.simulated.profile import Profile

from .gate import Gate
from .gateway import Gateway, Legs, Wire
from .links import Links, Network
from .replica import Replica
from .rules import make, make_legs, truth_of
from .turns import Record, Result, Turn

RETRIES = 2  # further replicas that are tried; the gateway's default
_SCRAPE_SECONDS = 1.0  # the gateway's own intervals
_SWEEP_SECONDS = 0.25


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    record: Record
    gateway: Gateway
    session: str | None
    on_end: Callable[[], None] | None
    placement: Placement | None = None  # of the leg that is under way
    legs: Legs | None = None
    stays_whole: bool = False  # a transfer failed
    gate: Gate | None = None  # of its gateway
    id: int = 0
    ticket: Ticket | None = None  # where it was asked whether it may go
    capped: bool = False  # by its gate
    steps: int = 0  # that its engine had taken when its gateway last looked at its answer

    @property
    def turn(self) -> Turn:
        return self.record.turn

    def cap(self, tokens: int) -> None:
        """Its answer is to have no more tokens than these."""
        turn, self.capped = self.turn, True
        self.record.turn = replace(turn, output=min(turn.output, tokens), max_tokens=tokens)


class Fleet:
    """One simulated run. `profiles`: one per replica, all of the same block size; `policy`: a name that `rules.make`
    knows; `roles`: one per replica (None: nobody has one); `legs`: a name that `rules.make_legs` knows; `timed`: keep
    the times between tokens; `keep`: keep the records of requests that ended, with their hashes; `admission`: makes
    what says for a gateway when its requests are sent; `pulls`: replicas fetch prompts from one another's host
    memory."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        policy: str,
        seed: int = 0,
        event_delay: float | None = 0.005,
        *,
        event_loss: float = 0.0,
        losses_unseen: bool = False,
        tiers_known: bool = True,
        gateways: int = 1,
        shared_ledger: bool = True,
        roles: Sequence[str] | None = None,
        legs: str = "seconds",
        network: Network | None = None,
        timed: bool = False,
        keep: bool = True,
        admission: Callable[[Gateway], Admission] | None = None,
        pulls: bool = False,
    ) -> None:
        self.now = 0.0
        self.replicas = [Replica(profile, timed) for profile in profiles]
        self.links = Links(network or Network())
        self.names = [f"r{index}" for index in range(len(profiles))]
        ledger = Ledger()
        truth = truth_of(self.replicas, lambda: self.now)
        wire = Wire(event_delay, event_loss, losses_unseen, tiers_known)
        rule, self._queue = make_legs(legs)
        self.gateways = [
            Gateway(
                self.names,
                profiles,
                make(policy, seed + number, truth),
                ledger if shared_ledger else Ledger(),
                wire,
                truth,
                seed + number,
                roles or ["both"] * len(profiles),
                rule,
                self._queue,
                pulls,
            )
            for number in range(gateways)
        ]
        self.gates = [
            Gate(one, admission(one), self._sent, self._refused, self.at) for one in self.gateways if admission
        ]
        self._tells = event_delay is not None
        self._random = random.Random(seed).random
        self._scrape_at = self._sweep_at = 0.0
        self._live: list[dict[int, _Live]] = [{} for _ in profiles]  # by replica
        self._heap: list[tuple[float, int, Callable, tuple]] = []
        self._order, self._ids = count(), count(1)
        self._keep = keep
        self.result = Result()

    # --- time

    def at(self, when: float, action: Callable, *args) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action, args))

    def run(self, until: float = float("inf")) -> Result:
        """Let happen what is scheduled and what follows from it, up to `until` seconds."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, action, args = pop(heap)
            action(*args)
        self.result.seconds = self.now
        return self.result

    # --- a request

    def send(self, turn: Turn, session: str | None = None, on_end: Callable[[], None] | None = None) -> Record:
        """Route one request now; `on_end` is called when its last token is out, or when it has failed."""
        if self.now >= self._scrape_at:
            self._scrape()
        if self.now >= self._sweep_at:
            self._sweep()
        gateways = self.gateways
        number = int(self._random() * len(gateways)) if len(gateways) > 1 else 0
        record = Record(turn, self.now)
        if self._keep:
            self.result.records.append(record)
        live = _Live(record, gateways[number], session, on_end, id=next(self._ids))
        if self.gates:
            live.gate = self.gates[number]
            live.ticket = live.gate.ask(live, self.now)
        else:
            self._dispatch(live)
        return record

    def _refused(self, live: _Live, verdict: Verdict) -> None:
        live.record.retry_after = verdict.retry_after
        self.at(self.now, self._ended, live, "http_429", verdict.reason)

    def _drain(self) -> None:
        """There may be room again."""
        for gate in self.gates:
            gate.drain(self.now)

    def session_finished(self, session: str) -> None:
        """A client will not ask in this session again, and tells all gateways so."""
        for gateway in self.gateways:
            gateway.session_finished(session)

    def _dispatch(self, live: _Live) -> None:
        self._sent(live, live.gateway.place(live.turn, live.session, self.now, live.record.tried, live.stays_whole))

    def _again(self, live: _Live, stays_whole: bool = False) -> None:
        """Send it once more, with an id that no engine knows."""
        live.id, live.stays_whole = next(self._ids), live.stays_whole or stays_whole
        self._dispatch(live)

    def _sent(self, live: _Live, placed: Placement | Legs | None) -> None:
        record = live.record
        if placed is None:
            answered = (
                ("http_502", "no replica is left to try") if record.tried else ("http_503", "no replica is ready")
            )
            self.at(self.now, self._ended, live, *answered)
            return
        legs = live.legs = placed if isinstance(placed, Legs) else None
        if legs is not None and self._queue is not None:
            live.placement = legs.first
            self._queue.add(live)
            self._take_next()
            return
        self._begin(live, placed)

    def _take_next(self) -> None:
        """Have prefillers that are free compute for those who wait in the queue."""
        for index, live in self._queue.ready(self.gateways[0].prefillers):
            live.gateway.computed_by(live.legs, index, self.now)
            self._begin(live, live.legs)

    def _prefiller_free(self, index: int) -> None:
        if self._queue is not None:
            self._queue.freed(index)
            self._take_next()

    def _begin(self, live: _Live, placed: Placement | Legs) -> None:
        """Send it, or its first leg."""
        record, turn, request = live.record, live.turn, live.id
        legs = live.legs
        placement = live.placement = placed if legs is None else legs.first
        index = record.replica = placement.candidate.slot
        record.predicted, record.expected_ttft = placement.predicted, placement.ttft
        record.prefilled_by = -1
        self._live[index][request] = live
        asked = EngineRequest(request, turn.hashes, turn.tokens, turn.output, turn.all_hashes.__getitem__)
        if legs is not None:
            asked.max_tokens, asked.keeps = 1, True
        follows = self._arrived if placement.pull is None else self._pull
        self._when_read(index, turn, follows, index, self.replicas[index].incarnation, asked)

    def _when_read(self, index: int, turn: Turn, action: Callable, *args) -> None:
        """Go on once the engine's front end has read the request."""
        replica = self.replicas[index]
        reaches = replica.front.reaches_engine(self.now, turn.tokens, turn.text, replica.engine.running > 0)
        if reaches > self.now:
            self.at(reaches, action, *args)
        else:
            action(*args)

    def _arrived(self, index: int, incarnation: int, asked: EngineRequest) -> None:
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return  # it was lost on the way there, and sent elsewhere
        planned = replica.turn
        try:
            begins = replica.add(asked, self.now)
        except ValueError as error:  # too long for it: as the engine's answer of 400, which is not tried again
            live = self._live[index].pop(asked.id)
            self._abandon(live, computed=False)
            if asked.keeps:
                self._prefiller_free(index)
                self.at(self.now, self._again, live, True)  # the refusal is to be of the client's own request
            else:
                self.at(self.now, self._ended, live, "http_400", str(error))
            self.at(self.now, self._drain)  # those that wait may have its room
            begins = False  # the others there are woken at the end of the step under way, as after any arrival
        if begins:
            self._go_on(index, replica)
        elif replica.turn != planned:
            self._plan(index, replica)

    def _pull(self, index: int, incarnation: int, asked: EngineRequest) -> None:
        """What the request finds nowhere here comes from the memory of the replica that it names, if it is there."""
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return
        source = self.names.index(self._live[index][asked.id].placement.pull.source)
        holder, size = self.replicas[source], replica.profile.block_size
        start = replica.engine.found(asked.blocks, asked.prompt_tokens)
        end = holder.engine.passes_on(asked.blocks) if holder.up else 0
        if end <= start:
            self._arrived(index, incarnation, asked)
            return
        tokens, each = (end - start) * size, replica.profile.kv_bytes_per_token
        there = self.links.begin(source, index, tokens, each, self.now, self.now)
        left = (source, holder.incarnation, start, end)
        self.at(self.now if there is None else there, self._pulled, index, incarnation, asked, left, there is not None)

    def _pulled(
        self, index: int, incarnation: int, asked: EngineRequest, left: tuple[int, int, int, int], began: bool
    ) -> None:
        """The blocks are there, or the replica that had them is gone."""
        source, holder, start, end = left
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return
        if began and self.replicas[source].incarnation == holder:
            replica.engine.take_in(asked, start, end)
        self._arrived(index, incarnation, asked)

    def _abandon(self, live: _Live, computed: bool = True) -> None:
        """Its leg under way comes to nothing, and so does the one that was to follow."""
        legs = live.legs
        live.gateway.abandon(live.placement, computed)
        if legs is not None and legs.kept_at is None:
            live.gateway.abandon(legs.second, computed=False)

    def _ended(self, live: _Live, error: str | None, detail: str = "") -> None:
        record = live.record
        record.end, record.error, record.detail = self.now, error, detail
        if live.on_end is not None:
            live.on_end()

    # --- engines

    def _go_on(self, index: int, replica: Replica) -> None:
        step = replica.go_on(self.now)
        if step is not None and step.events and self._tells:
            ends = self.now + step.seconds
            for gateway in self.gateways:
                gateway.told(index, ends, step.events)
        self._plan(index, replica)

    def _plan(self, index: int, replica: Replica) -> None:
        if replica.wakes is not None:
            self.at(replica.wakes, self._wake, index, replica, replica.turn)

    def _wake(self, index: int, replica: Replica, turn: int) -> None:
        if turn != replica.turn:
            return  # a request came in between, or the replica was lost
        step = replica.wake()
        if step is not None:
            for output in step.outputs:
                self._output(index, output)
            if step.outputs and self.gates:
                self._drain()
        self._go_on(index, replica)

    def _output(self, index: int, output: Output) -> None:
        live = self._live[index][output.id]
        record, legs = live.record, live.legs
        if legs is not None and legs.kept_at is None:
            del self._live[index][output.id]
            record.cached, record.prefilled_by = output.cached_tokens, index
            live.gateway.handed_over(legs, self.now, output.cached_tokens)
            self._second_leg(output.id, live, legs)
            self._prefiller_free(index)
            return
        if output.first:
            record.first, live.steps = self.now, self.replicas[index].steps(self.now)
            live.gateway.first(live.placement, self.now)
            if live.gate is not None:
                live.gate.first(live.ticket, self.now)
            if legs is None:
                record.cached = output.cached_tokens
            else:
                live.gateway.transferred(legs, self.now)
        if output.finished:
            del self._live[index][output.id]
            cached = record.cached if legs is None else None
            if live.placement.pull is not None:
                live.gateway.pulled(live.placement, record.cached, self.now)
            live.gateway.complete(live.placement, self.now - record.first, record.output, cached, live.capped)
            if live.gate is not None:
                live.gate.complete(live.ticket, record.first, self.now, record.output)
            record.gaps = self.replicas[index].gaps(record.first, self.now)
            self._ended(live, None)

    # --- the second leg

    def _second_leg(self, request: int, live: _Live, legs: Legs) -> None:
        """Send it where it is reserved, or to another decoder if that one is gone."""
        gateway, record = live.gateway, live.record
        prefiller = self.replicas[legs.first.candidate.slot].incarnation
        if not self.replicas[legs.second.candidate.slot].up:
            gateway.abandon(legs.second, computed=False)
            if not gateway.next_decoder(legs, record.turn, self.now, record.tried):
                self._keep_until_the_lease_ends(request, legs, prefiller)
                live.legs = None
                self._again(live, stays_whole=True)
                return
        live.placement, legs.sent_at = legs.second, self.now
        index = record.replica = legs.second.candidate.slot
        self._live[index][request] = live
        self._when_read(
            index, record.turn, self._fetch, request, live, legs, prefiller, self.replicas[index].incarnation
        )

    def _fetch(self, request: int, live: _Live, legs: Legs, prefiller: int, decoder: int) -> None:
        """The decoder begins to read what it lacks."""
        first, second, turn = legs.first.candidate.slot, legs.second.candidate.slot, live.record.turn
        engine = self.replicas[second].engine
        if self.replicas[second].incarnation != decoder:
            self._keep_until_the_lease_ends(request, legs, prefiller)
            return  # it was lost, and the request has been sent elsewhere
        there = None
        if self.replicas[first].incarnation == prefiller:
            profile = engine.profile
            tokens = turn.tokens - engine.cached(turn.hashes, turn.tokens) * profile.block_size
            there = self.links.begin(first, second, tokens, profile.kv_bytes_per_token, self.now, legs.kept_at)
        ends = max(self.now, legs.kept_at + self.links.network.lease) if there is None else there
        self.at(ends, self._fetched, request, live, legs, prefiller, decoder, there is not None)

    def _fetched(self, request: int, live: _Live, legs: Legs, prefiller: int, decoder: int, began: bool) -> None:
        """The transfer is over, or it never `began`."""
        first, second, turn = legs.first.candidate.slot, legs.second.candidate.slot, live.record.turn
        if self.replicas[second].incarnation != decoder:
            self._keep_until_the_lease_ends(request, legs, prefiller)
            return
        there = began and self.replicas[first].incarnation == prefiller
        self._let_go(request, first, prefiller)
        if there:
            asked = EngineRequest(request, turn.hashes, turn.tokens, turn.output, turn.all_hashes.__getitem__)
            asked.received = turn.tokens
            self._arrived(second, decoder, asked)
        else:
            self._transfer_failed(request, live, legs)

    def _keep_until_the_lease_ends(self, request: int, legs: Legs, prefiller: int) -> None:
        """Nobody is going to read what the prefiller keeps."""
        until = legs.kept_at + self.links.network.lease
        self.at(max(self.now, until), self._let_go, request, legs.first.candidate.slot, prefiller)

    def _let_go(self, request: int, index: int, incarnation: int) -> None:
        """What a prefiller kept is read, or its lease is over."""
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return
        planned = replica.turn
        if replica.let_go(request, self.now):
            self._go_on(index, replica)
        elif replica.turn != planned:
            self._plan(index, replica)

    def _transfer_failed(self, request: int, live: _Live, legs: Legs) -> None:
        """As an engine's 500: the request is sent whole, and the pair left out for a while."""
        del self._live[legs.second.candidate.slot][request]
        live.gateway.transfer_failed(legs, self.now)
        live.gateway.abandon(legs.second, computed=False)
        live.legs = None
        self._again(live, stays_whole=True)

    def _scrape(self) -> None:
        """What gateways read off /metrics, as old as it would be."""
        self._scrape_at = self.now + _SCRAPE_SECONDS
        ledgers = {id(gateway.router.ledger): gateway.router.ledger for gateway in self.gateways}.values()
        for name, replica in zip(self.names, self.replicas):
            for ledger in ledgers:
                ledger.scraped(name, replica.engine.waiting, replica.engine.kv_usage)
            for gateway in self.gateways:
                gateway.router.count_seats(name, replica.engine.running)

    def _sweep(self) -> None:
        """Gateways look at how far the streams have come."""
        self._sweep_at = self.now + _SWEEP_SECONDS
        for replica, lives in zip(self.replicas, self._live):
            steps = replica.steps(self.now)
            for live in lives.values():
                if live.record.first:
                    live.gateway.came(live.placement, steps - live.steps)
                    live.steps = steps

    # --- replicas come and go

    def lose(self, index: int) -> None:
        """A replica dies now; `restore` brings it back. Nothing happens if it is gone already."""
        replica = self.replicas[index]
        if not replica.up:
            return
        replica.stop()
        for gateway in self.gateways:
            gateway.lost(index)
        if self._queue is not None:
            self._queue.freed(index)
            for live in [] if self.gateways[0].prefillers else self._queue.leave():
                self._abandon(live, computed=False)
                self._again(live, stays_whole=True)
        lives, self._live[index] = self._live[index], {}
        for live in lives.values():
            self._abandon(live)
            record = live.record
            record.tried += (index,)
            if record.first:
                self._ended(live, "stream_error", f"the answer broke off: {self.names[index]} was lost")
            elif len(record.tried) > RETRIES:
                self._ended(live, "http_502", f"no replica answered after {len(record.tried)} attempts")
            else:
                self._again(live)
        self._drain()

    def restore(self, index: int) -> None:
        """It is back, with an empty cache."""
        replica = self.replicas[index]
        if not replica.up:
            replica.start()
            for gateway in self.gateways:
                gateway.back(index)
            self._prefiller_free(index)
            self._drain()
