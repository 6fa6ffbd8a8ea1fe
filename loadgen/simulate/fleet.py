"""A fleet on a virtual clock: gateways with one policy and the simulated engines behind them.

Policies, learned costs and the ledger (the load reserved on each replica) are the real gateway's code, and the map
(which replica holds which KV blocks) answers as the real one does. The engines are those of `hitherto replica`. Time is
a heap of scheduled calls: simulating a minute takes as long as its engine steps take to compute, and the same seed
gives the same result.

A request is matched against the map, placed on a replica, reserved in the ledger and sent to the engine. Its first
token updates the ledger and the learned TTFT; its end releases the reservation and starts the think time before the
conversation's next turn. Where replicas have roles, a request may have two legs, as in the proxy. In the first, a
prefiller computes the prompt and one token, and keeps the KV cache until a lease ends. In the second, a decoder fetches
the blocks that it lacks and writes the answer, including the first token that the client sees.

A replica that is lost loses its cache and breaks the streams that it has begun. Requests that it had not begun to
answer are sent to other replicas at once, because the gateway notices the broken connections.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from policies import AdmissionDecision, Ledger, Placement, QueuedRequest
from replicas.simulated.engine import EngineRequest, Output
from replicas.simulated.profile import Profile

from .gate import Gate
from .gateway import Gateway, Legs
from .links import Links
from .replica import Replica
from .rules import make, make_legs, truth_of
from .setting import Setting
from .turns import Record, Result, Turn

RETRIES = 2  # further replicas to try; the gateway's default
_SCRAPE_SECONDS = 1.0  # between readings of the engines' metrics, as in the real gateway
_SWEEP_SECONDS = 0.25  # between updates of the gateways on the progress of streams, likewise


@dataclass(slots=True)
class Live:
    """A request that has not ended: its record, its gateway and where it is."""

    record: Record
    gateway: Gateway
    session: str | None  # id of its conversation
    on_end: Callable[[], None] | None  # called when it has ended or failed
    placement: Placement | None = None  # of the whole request, or of its current leg
    legs: Legs | None = None  # its prefill and decode legs; None: it is not split
    stays_whole: bool = False  # never split into legs again, because that failed
    gate: Gate | None = None  # admission of its gateway, if there is one
    id: int = 0  # at the engine; each further attempt has a new one
    queued: QueuedRequest | None = None  # the admission's object for it, if there is admission
    capped: bool = False  # its answer was shortened by admission
    steps: int = 0  # steps that its engine had ended when the answer's tokens were last reported to the gateway

    @property
    def turn(self) -> Turn:
        return self.record.turn

    def cap(self, tokens: int) -> None:
        """Limit the answer to `tokens` tokens."""
        turn, self.capped = self.turn, True
        self.record.turn = replace(turn, output=min(turn.output, tokens), max_tokens=tokens)


class Fleet:
    """A simulated fleet and its virtual clock: `send` and `at` schedule what happens, `run` makes it happen.

    `keep`: whether `result` keeps the record of each request, with its block hashes. All other arguments are fields of
    `Setting`; `more` has those that are not named here.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        policy: str,
        seed: int = 0,
        event_delay: float | None = 0.005,
        *,
        keep: bool = True,
        **more: Any,
    ) -> None:
        self.now = 0.0
        setting = Setting(policy, profiles, seed, event_delay=event_delay, **more)
        self.replicas = [Replica(profile, setting.timed) for profile in profiles]
        self.links = Links(setting.network)
        self.names = [f"r{index}" for index in range(len(profiles))]
        truth, ledger = truth_of(self.replicas, lambda: self.now), Ledger()
        rule, self._queue = make_legs(setting.legs)
        self.gateways: list[Gateway] = []
        for number in range(setting.gateways):
            chooses, known = make(policy, seed + number, truth), ledger if setting.shared_ledger else Ledger()
            made = Gateway(setting, self.names, chooses, known, truth, seed + number, rule, self._queue)
            self.gateways.append(made)
        admission = setting.admitting
        self.gates = [
            Gate(one, admission(one), self._sent, self._refused, self.at) for one in self.gateways if admission
        ]
        self._tells = event_delay is not None
        self._random = random.Random(seed).random
        self._scrape_at = self._sweep_at = 0.0
        self._live: list[dict[int, Live]] = [{} for _ in profiles]  # by replica, by id: requests that were sent to it
        self._heap: list[tuple[float, int, Callable, tuple]] = []  # scheduled calls: (time, order, function, arguments)
        self._order, self._ids = count(), count(1)
        self._keep = keep
        self.result = Result()

    # --- time

    def at(self, when: float, action: Callable, *args) -> None:
        """Schedule the call `action(*args)` at virtual time `when` (seconds)."""
        heapq.heappush(self._heap, (when, next(self._order), action, args))

    def run(self, until: float = float("inf")) -> Result:
        """Make the scheduled calls up to `until` (virtual seconds), in order of time, and return the result so far."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, action, args = pop(heap)
            action(*args)
        self.result.seconds = self.now
        return self.result

    # --- a request

    def send(self, turn: Turn, session: str | None = None, on_end: Callable[[], None] | None = None) -> Record:
        """Route one request now and return its record, which is filled in as the request proceeds.

        `session`: id of its conversation, for policies that use sessions; `on_end`: called when it has ended or failed.
        """
        if self.now >= self._scrape_at:
            self._scrape()
        if self.now >= self._sweep_at:
            self._sweep()
        gateways = self.gateways
        number = int(self._random() * len(gateways)) if len(gateways) > 1 else 0
        record = Record(turn, self.now)
        if self._keep:
            self.result.records.append(record)
        live = Live(record, gateways[number], session, on_end, id=next(self._ids))
        if self.gates:
            live.gate = self.gates[number]
            live.queued = live.gate.ask(live, self.now)
        else:
            self._dispatch(live)
        return record

    def _refused(self, live: Live, verdict: AdmissionDecision) -> None:
        live.record.retry_after = verdict.retry_after
        self.at(self.now, self._ended, live, "http_429", verdict.reason)

    def _drain(self) -> None:
        """Let the admission of every gateway send requests from its queues, because capacity may have become free."""
        for gate in self.gates:
            gate.drain(self.now)

    def session_finished(self, session: str) -> None:
        """Notify all gateways that the client ended this session."""
        for gateway in self.gateways:
            gateway.session_finished(session)

    def _dispatch(self, live: Live) -> None:
        self._sent(live, live.gateway.place(live.turn, live.session, self.now, live.record.tried, live.stays_whole))

    def _again(self, live: Live, stays_whole: bool = False) -> None:
        """Route a request again under a new id.

        `stays_whole`: one replica computes prompt and answer from now on.
        """
        live.id, live.stays_whole = next(self._ids), live.stays_whole or stays_whole
        self._dispatch(live)

    def _sent(self, live: Live, placed: Placement | Legs | None) -> None:
        """Send a request to where it was placed, or let its prefill leg wait in the shared prefill queue.

        `placed` is None if no replica could take the request, which then ends with an error.
        """
        record = live.record
        if placed is None:
            answered = ("http_502", "no replica is left to try"), ("http_503", "no replica is ready")
            self.at(self.now, self._ended, live, *answered[not record.tried])
            return
        legs = live.legs = placed if isinstance(placed, Legs) else None
        if legs is not None and self._queue is not None:
            live.placement = legs.first
            self._queue.add(live)
            self._take_next()
            return
        self._begin(live, placed)

    def _take_next(self) -> None:
        """Send prefill legs that wait in the shared prefill queue to the prefillers that are free."""
        for index, live in self._queue.ready(self.gateways[0].prefillers):
            live.gateway.computed_by(live.legs, index, self.now)
            self._begin(live, live.legs)

    def _prefiller_free(self, index: int) -> None:
        if self._queue is not None:
            self._queue.freed(index)
            self._take_next()

    def _begin(self, live: Live, placed: Placement | Legs) -> None:
        """Send the whole request, or its prefill leg, to the chosen replica, and note the choice in the record."""
        record, turn, request = live.record, live.turn, live.id
        legs = live.legs
        placement = live.placement = placed if legs is None else legs.first
        index = record.replica = placement.candidate.slot
        record.predicted, record.expected_ttft = placement.predicted, placement.ttft
        record.prefilled_by = -1
        self._live[index][request] = live
        asked = _asked(request, turn)
        if legs is not None:
            asked.max_tokens, asked.keeps = 1, True
        follows = self._arrived if placement.pull is None else self._pull
        self._when_read(index, turn, follows, index, self.replicas[index].incarnation, asked)

    def _when_read(self, index: int, turn: Turn, action: Callable, *args) -> None:
        """Call `action(*args)` once the API server of replica `index` has read the request: now or at a later time."""
        replica = self.replicas[index]
        reaches = replica.front.reaches_engine(self.now, turn.tokens, turn.text, replica.engine.running > 0)
        if reaches > self.now:
            self.at(reaches, action, *args)
        else:
            action(*args)

    def _arrived(self, index: int, incarnation: int, asked: EngineRequest) -> None:
        """Queue a request at the engine of replica `index`, unless the replica was lost after the request was sent.

        `incarnation`: the replica's `Replica.incarnation` when the request was sent; another value now means that it
        was lost. A request that is too long for the engine ends with an error. If it is a prefill leg, it is routed
        again in one piece instead, so that the client gets the error for its whole request.
        """
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return  # the replica was lost in the meantime, and the request was sent elsewhere
        planned = replica.turn
        try:
            begins = replica.add(asked, self.now)
        except ValueError as error:  # too long for the engine, which would answer 400; that is not retried
            live = self._live[index].pop(asked.id)
            self._abandon(live, computed=False)
            if asked.keeps:
                self._prefiller_free(index)
                self.at(self.now, self._again, live, True)  # whole, so that the client gets the refusal of its request
            else:
                self.at(self.now, self._ended, live, "http_400", str(error))
            self.at(self.now, self._drain)  # its capacity is free for queued requests
            begins = False  # no step begins now; a running engine is woken at its step's end, as after any arrival
        self._began(index, replica, begins, planned)

    def _pull(self, index: int, incarnation: int, asked: EngineRequest) -> None:
        """Fetch KV blocks that replica `index` lacks from another replica's host memory, then queue the request.

        The request's placement names the other replica. If the other replica has no blocks to add, the request is
        queued at once. `incarnation`: `Replica.incarnation` of replica `index` when the request was sent; another value
        now means that replica `index` was lost, and nothing is done.
        """
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
        """Add the KV blocks that were fetched from another replica to replica `index`, and queue the request.

        The blocks are not added if the other replica was lost during the transfer. `incarnation`: `Replica.incarnation`
        of replica `index` when the request was sent; `left`: the other replica's index and its `incarnation` when the
        transfer began, and the range of the blocks; `began`: whether there was a transfer.
        """
        source, holder, start, end = left
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return
        if began and self.replicas[source].incarnation == holder:
            replica.engine.take_in(asked, start, end)
        self._arrived(index, incarnation, asked)

    def _abandon(self, live: Live, computed: bool = True) -> None:
        """Release the reservation of a request that its replica will not answer, and of a decode leg not yet begun.

        `computed`: whether the engine may have computed the prompt, so that its blocks are in the cache.
        """
        legs = live.legs
        live.gateway.router.abandon(live.placement, computed)
        if legs is not None and legs.kept_at is None:
            live.gateway.router.abandon(legs.second, computed=False)

    def _ended(self, live: Live, error: str | None, detail: str = "") -> None:
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

    def _began(self, index: int, replica: Replica, begins: bool, planned: int) -> None:
        """Start the engine's next step, or reschedule its wake-up if the time of the wake-up has changed.

        `begins`: whether the next step begins now; `planned`: the value of `Replica.turn`, which counts changes of the
        wake-up, before the call that may have changed it.
        """
        if begins:
            self._go_on(index, replica)
        elif replica.turn != planned:
            self._plan(index, replica)

    def _plan(self, index: int, replica: Replica) -> None:
        if replica.wakes is not None:
            self.at(replica.wakes, self._wake, index, replica, replica.turn)

    def _wake(self, index: int, replica: Replica, turn: int) -> None:
        """End the engine's planned steps, handle their outputs and begin the next step.

        `turn`: the value of `Replica.turn` when this wake-up was scheduled. If it has changed since, the wake-up is
        void and nothing is done.
        """
        if turn != replica.turn:
            return  # this wake-up is void: a request arrived in the meantime, or the replica was lost
        step = replica.wake()
        if step is not None:
            for output in step.outputs:
                self._output(index, output)
            if step.outputs and self.gates:
                self._drain()
        self._go_on(index, replica)

    def _output(self, index: int, output: Output) -> None:
        """Handle one output of a step: the end of a prefill leg, a first token, or the end of a request."""
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
            live.gateway.router.first_token(live.placement, self.now, self.now - live.placement.at)
            if live.gate is not None:
                live.gate.first(live.queued, self.now)
            if legs is None:
                record.cached = output.cached_tokens
            else:
                live.gateway.transferred(legs, self.now)
        if output.finished:
            del self._live[index][output.id]
            cached = record.cached if legs is None else None
            if live.placement.pull is not None:
                live.gateway.router.pulled(live.placement, record.cached, self.now)
            live.gateway.complete(live.placement, self.now - record.first, record.output, cached, live.capped)
            if live.gate is not None:
                live.gate.complete(live.queued, record.first, self.now, record.output)
            record.gaps = self.replicas[index].gaps(record.first, self.now)
            self._ended(live, None)

    # --- the second leg

    def _second_leg(self, request: int, live: Live, legs: Legs) -> None:
        """Send the decode leg to the reserved decoder, or to another decoder if the reserved one was lost.

        `request`: id of the request at the prefiller. If no decoder is left, the request is routed again in one piece.
        """
        gateway, record = live.gateway, live.record
        prefiller = self.replicas[legs.first.candidate.slot].incarnation
        if not self.replicas[legs.second.candidate.slot].up:
            gateway.router.abandon(legs.second, computed=False)
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

    def _fetch(self, request: int, live: Live, legs: Legs, prefiller: int, decoder: int) -> None:
        """Begin the transfer of the KV blocks that the decoder lacks, and schedule what follows it.

        `prefiller`, `decoder`: `Replica.incarnation` of the two when the leg was sent; another value now means that the
        replica was lost.
        """
        first, second, turn = legs.first.candidate.slot, legs.second.candidate.slot, live.record.turn
        engine = self.replicas[second].engine
        if self.replicas[second].incarnation != decoder:
            self._keep_until_the_lease_ends(request, legs, prefiller)
            return  # the decoder was lost, and the request was sent elsewhere
        there = None
        if self.replicas[first].incarnation == prefiller:
            profile = engine.profile
            tokens = turn.tokens - engine.cached(turn.hashes, turn.tokens) * profile.block_size
            there = self.links.begin(first, second, tokens, profile.kv_bytes_per_token, self.now, legs.kept_at)
        ends = max(self.now, legs.kept_at + self.links.network.lease) if there is None else there
        self.at(ends, self._fetched, request, live, legs, prefiller, decoder, there is not None)

    def _fetched(self, request: int, live: Live, legs: Legs, prefiller: int, decoder: int, began: bool) -> None:
        """Queue the request at the decoder after its transfer, or route it again if the transfer failed.

        `began`: False if the lease had ended or the prefiller was lost before the transfer could begin. `prefiller`,
        `decoder`: `Replica.incarnation` of the two when the leg was sent.
        """
        first, second, turn = legs.first.candidate.slot, legs.second.candidate.slot, live.record.turn
        if self.replicas[second].incarnation != decoder:
            self._keep_until_the_lease_ends(request, legs, prefiller)
            return
        there = began and self.replicas[first].incarnation == prefiller
        self._let_go(request, first, prefiller)
        if there:
            asked = _asked(request, turn)
            asked.received = turn.tokens
            self._arrived(second, decoder, asked)
        else:
            self._transfer_failed(request, live, legs)

    def _keep_until_the_lease_ends(self, request: int, legs: Legs, prefiller: int) -> None:
        """Let the prefiller free the prompt's KV cache when the lease ends, as no decoder will fetch it."""
        until = legs.kept_at + self.links.network.lease
        self.at(max(self.now, until), self._let_go, request, legs.first.candidate.slot, prefiller)

    def _let_go(self, request: int, index: int, incarnation: int) -> None:
        """Free the KV cache that prefiller `index` keeps for this request, unless the prefiller has been lost."""
        replica = self.replicas[index]
        if replica.incarnation != incarnation:
            return
        planned = replica.turn
        self._began(index, replica, replica.let_go(request, self.now), planned)

    def _transfer_failed(self, request: int, live: Live, legs: Legs) -> None:
        """Route a request again in one piece, as the transfer of its KV cache failed; an engine would answer 500.

        The gateway avoids this pair of replicas for a while.
        """
        del self._live[legs.second.candidate.slot][request]
        pair = legs.first.candidate.replica, legs.second.candidate.replica
        live.gateway.router.transfers.failed(*pair, self.now)
        live.gateway.router.abandon(legs.second, computed=False)
        live.legs = None
        self._again(live, stays_whole=True)

    def _scrape(self) -> None:
        """Update the gateways' load figures from each engine's metrics, as a scrape of /metrics would."""
        self._scrape_at = self.now + _SCRAPE_SECONDS
        ledgers = {id(gateway.router.ledger): gateway.router.ledger for gateway in self.gateways}.values()
        for name, replica in zip(self.names, self.replicas):
            for ledger in ledgers:
                ledger.scraped(name, replica.engine.waiting, replica.engine.kv_usage)
            for gateway in self.gateways:
                gateway.router.learn_max_num_seqs(name, replica.engine.running)

    def _sweep(self) -> None:
        """Report to the gateways how many tokens each of their streams has got since the last report."""
        self._sweep_at = self.now + _SWEEP_SECONDS
        for replica, lives in zip(self.replicas, self._live):
            steps = replica.steps(self.now)
            for live in lives.values():
                if live.record.first:
                    live.gateway.router.came(live.placement, steps - live.steps)
                    live.steps = steps

    # --- replicas come and go

    def lose(self, index: int) -> None:
        """Make a replica die now, and retry or end its requests; do nothing if it is down already.

        `restore` brings the replica back.
        """
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
        """Bring a lost replica back with an empty cache; do nothing if it is up."""
        replica = self.replicas[index]
        if not replica.up:
            replica.start()
            for gateway in self.gateways:
                gateway.back(index)
            self._prefiller_free(index)
            self._drain()


def _asked(request: int, turn: Turn) -> EngineRequest:
    return EngineRequest(request, turn.hashes, turn.tokens, turn.output, turn.all_hashes.__getitem__)
