"""A fleet on a virtual clock: one policy, one cache map, one ledger and N simulated engines.

The policy, the map, the ledger and the learned costs are the ones the gateway uses; the engines
are the ones behind `hitherto replica`. Time is a heap of events, so a minute of fleet takes as
long as its engine steps cost to compute, and the same seed gives the same result.

Per request: match -> choose -> reserve -> engine, then first token -> ledger and TTFT learned,
end -> release and the conversation's next turn after its think time. An engine's block events
reach the map `event_delay` seconds after the step that made them.
"""
from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Callable, Sequence

from cachemap import CacheMap
from policies import Candidate, CostGroup, Demand, Ledger, Reservation, make
from replicas.simulated.engine import Engine, EngineRequest, Removed, Stored
from replicas.simulated.profile import FrontEnd, Profile

_SCRAPE_SECONDS = 1.0     # the gateway's own interval


@dataclass(slots=True)
class Turn:
    """One request: chained hashes of its prompt's full blocks, and of prompt and reply together."""
    hashes: list[int]
    tokens: int            # of the prompt
    output: int            # tokens of the reply
    all_hashes: list[int]
    think: float = 0.0     # seconds between the reply before and this request

Conversation = Sequence[Turn]      # sent one after the other, each after the reply before it


@dataclass(slots=True)
class Record:
    """What became of one request; times in seconds of the virtual clock."""
    replica: int
    sent: float
    turn: Turn
    predicted: int                 # cached tokens the map promised
    expected_ttft: float           # by the chosen replica's costs
    cached: int = 0                # cached tokens the engine found
    first: float = 0.0
    end: float = 0.0

    @property
    def tokens(self) -> int:
        return self.turn.tokens

    @property
    def output(self) -> int:
        return self.turn.output


@dataclass(slots=True)
class _Live:
    """A request in an engine."""
    record: Record
    reservation: Reservation
    on_end: Callable[[], None] | None


@dataclass
class Result:
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0           # virtual time until the last request ended


def ideal_hit_rate(records: Sequence[Record], block_size: int = 16) -> float:
    """Share of prompt tokens one infinite cache would have had, seeing these requests as sent.

    A request's blocks count from the moment it is sent, its reply's from the moment it ends.
    """
    sent = [(r.sent, 0, n) for n, r in enumerate(records)] + [(r.end, 1, n) for n, r in enumerate(records)]
    seen: set[int] = set()
    hit = total = 0
    for _, ended, number in sorted(sent):
        turn = records[number].turn
        if ended:
            seen.update(turn.all_hashes)
            continue
        held = next((n for n, h in enumerate(turn.hashes) if h not in seen), len(turn.hashes))
        hit += min(held, (turn.tokens - 1) // block_size) * block_size
        total += turn.tokens
        seen.update(turn.hashes)
    return hit / total if total else 0.0


class Fleet:
    """One simulated run. `profiles`: one per replica; `event_delay`: seconds from step to map (None: never)."""

    def __init__(self, profiles: Sequence[Profile], policy: str, seed: int = 0, event_delay: float | None = 0.005,
                 block_size: int = 16, map_bytes: int = 1 << 28) -> None:
        self.engines = [Engine(profile) for profile in profiles]
        self._fronts = [FrontEnd(profile) for profile in profiles]
        self.policy = make(policy, seed)
        self.block_size = block_size
        self.map = CacheMap(map_bytes)
        self.ledger, self.group = Ledger(), CostGroup()
        names = [f"r{index}" for index in range(len(profiles))]
        self.slots = [self.map.attach(name, profile.num_blocks, True) for name, profile in zip(names, profiles)]
        self.candidates = [Candidate(name, 0, self.ledger.add(name), self.group.add(name)) for name in names]
        self.event_delay = event_delay
        self.now = 0.0
        self._scrape_at = 0.0
        self._stepping = [False] * len(profiles)
        self._live: dict[int, _Live] = {}
        self._heap: list[tuple[float, int, Callable, tuple]] = []
        self._order = count()
        self._ids = count(1)
        self.result = Result()

    def at(self, when: float, action: Callable, *args) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action, args))

    def run(self, until: float = float("inf")) -> Result:
        """Let happen what is scheduled and what follows from it, up to `until` seconds."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action, args = heapq.heappop(self._heap)
            action(*args)
        self.result.seconds = self.now
        return self.result

    def send(self, turn: Turn, session: str | None = None, on_end: Callable[[], None] | None = None) -> Record:
        """Route one request now; `on_end` is called when its last token is out."""
        if self.now >= self._scrape_at:
            self._scrape()
        held = self.map.match(turn.hashes, self.now).held
        most = (turn.tokens - 1) // self.block_size      # the last prompt token is never a hit
        for candidate, slot in zip(self.candidates, self.slots):
            candidate.overlap = min(held[slot], most) * self.block_size
        root = turn.hashes[0] if turn.hashes else 0
        demand = Demand(turn.tokens, self.block_size, root, session, turn.output)
        index = self.policy.choose(demand, self.candidates).index
        chosen = self.candidates[index]
        uncached = turn.tokens - chosen.overlap
        expected = chosen.costs.ttft_seconds(chosen.load, uncached, chosen.overlap)
        reservation = self.ledger.reserve(chosen.replica, uncached, turn.tokens)
        self.map.expect(self.slots[index], turn.hashes, self.now)
        record = Record(index, self.now, turn, chosen.overlap, expected)
        self.result.records.append(record)
        request = next(self._ids)
        self._live[request] = _Live(record, reservation, on_end)
        asked = EngineRequest(request, turn.hashes, turn.tokens, turn.output, turn.all_hashes.__getitem__)
        reaches = self._fronts[index].reaches_engine(self.now, turn.tokens)
        if reaches > self.now:
            self.at(reaches, self._arrived, index, asked)
        else:
            self._arrived(index, asked)
        return record

    def _arrived(self, index: int, asked: EngineRequest) -> None:
        self.engines[index].add(asked)
        if not self._stepping[index]:
            self._step(index)

    def _scrape(self) -> None:
        """What a gateway reads off /metrics, as old as it would be."""
        self._scrape_at = self.now + _SCRAPE_SECONDS
        for candidate, engine in zip(self.candidates, self.engines):
            candidate.load.scraped(engine.waiting, engine.kv_usage)

    def _step(self, index: int) -> None:
        step = self.engines[index].step()
        self._stepping[index] = step is not None
        if step is not None:
            self.at(self.now + step.seconds, self._stepped, index, step)

    def _stepped(self, index: int, step) -> None:
        for output in step.outputs:
            live = self._live[output.id]
            if output.first:
                self._first(live, output)
            if output.finished:
                self._end(output.id, live)
        if step.events and self.event_delay is not None:
            self.at(self.now + self.event_delay, self._events, index, step.events)
        self._step(index)

    def _first(self, live: _Live, output) -> None:
        record, reservation = live.record, live.reservation
        record.first, record.cached = self.now, output.cached_tokens
        self.ledger.first_byte(reservation)
        self.candidates[record.replica].costs.observe_ttft(
            self.now - record.sent, record.tokens - record.cached, record.cached, reservation.before)

    def _end(self, request: int, live: _Live) -> None:
        record, load = live.record, live.reservation.load
        record.end = self.now
        if record.output > 1:
            self.candidates[record.replica].costs.observe_itl(
                (record.end - record.first) / (record.output - 1), load.decoding, load.context_tokens)
        self.ledger.release(live.reservation)
        del self._live[request]
        if live.on_end is not None:
            live.on_end()

    def _events(self, index: int, events: list) -> None:
        """One step's events to the map, in order; stores that follow each other in one call."""
        slot, keys, heads = self.slots[index], [], []
        for event in events:
            if type(event) is Stored:
                heads.append((len(keys), event.parent or 0))
                keys += event.keys
            elif type(event) is Removed:
                self._store(slot, keys, heads)
                keys, heads = [], []
                self.map.remove(slot, event.keys)
        self._store(slot, keys, heads)

    def _store(self, slot: int, keys: list[int], heads: list[tuple[int, int]]) -> None:
        if keys:
            self.map.store(slot, keys, keys, heads=heads)


def play(fleet: Fleet, conversations: Sequence[Conversation], starts: Sequence[float]) -> Result:
    """Each conversation begins at its start; a turn follows the reply before it by its think time."""
    def begin(number: int, turn: int) -> None:
        turns = conversations[number]
        following = turn + 1

        def ended() -> None:
            if following < len(turns):
                fleet.at(fleet.now + turns[following].think, begin, number, following)
        fleet.send(turns[turn], f"session-{number}", ended)

    for number, start in enumerate(starts):
        fleet.at(start, begin, number, 0)
    return fleet.run()


class _Pool:
    """Open conversations, `users` at a time; one that ends makes room for the next of the work."""

    def __init__(self, conversations: Sequence[Conversation], users: int) -> None:
        self._new = deque(enumerate(conversations))
        self.ready: list[tuple[int, Conversation, int]] = []    # (number, turns, next turn)
        for _ in range(users):
            self.open()

    @property
    def left(self) -> int:
        """Conversations not opened yet."""
        return len(self._new)

    def open(self) -> None:
        if self._new:
            self.ready.append((*self._new.popleft(), 0))

    def send(self, fleet: Fleet, index: int, then: Callable[[], None] = lambda: None) -> None:
        """Send the turn at `index` of `ready`; `then` is called when its reply is complete."""
        number, turns, turn = self.ready[index]
        self.ready[index] = self.ready[-1]
        self.ready.pop()

        def ended() -> None:
            if turn + 1 < len(turns):
                self.ready.append((number, turns, turn + 1))
            else:
                self.open()
            then()
        fleet.send(turns[turn], f"session-{number}", ended)


def pace(fleet: Fleet, conversations: Sequence[Conversation], rate: float, users: int, seed: int) -> Result:
    """Send requests as a Poisson process of `rate` a second, whatever becomes of those before.

    Each is the next turn of one of `users` open conversations, drawn at random among those whose last
    reply is complete; if none is, a further conversation is opened.
    """
    pool, rng = _Pool(conversations, users), random.Random(seed)
    left = sum(map(len, conversations))

    def arrive() -> None:
        nonlocal left
        if not pool.ready:
            pool.open()
        if pool.ready:
            left -= 1
            pool.send(fleet, int(rng.random() * len(pool.ready)))
        if left:
            fleet.at(fleet.now + rng.expovariate(rate), arrive)

    fleet.at(0.0, arrive)
    return fleet.run()


def backlog(fleet: Fleet, conversations: Sequence[Conversation], users: int) -> float:
    """Requests a second at full stretch: `users` conversations always open, none of them ever thinking.

    Counted from the first quarter of the work on, until there is no further conversation to open.
    """
    pool = _Pool(conversations, users)
    records, total = fleet.result.records, sum(map(len, conversations))
    begun: tuple[int, float] | None = None
    rate = 0.0

    def sent() -> None:
        nonlocal begun, rate
        while pool.ready and pool.left:
            pool.send(fleet, len(pool.ready) - 1, sent)
        if begun is None and len(records) > total / 4:
            begun = len(records), fleet.now
        elif begun and fleet.now > begun[1]:
            rate = (len(records) - begun[0]) / (fleet.now - begun[1])

    fleet.at(0.0, sent)
    fleet.run()
    return rate
