"""The simulated engine in real time: a loop that makes steps, sleeps as long as each takes, and hands out results."""

import contextlib
import heapq
import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from . import keys
from .alarm import Alarm
from .engine import Engine, EngineRequest, Output
from .faults import Faults
from .metrics import Metrics
from .profile import FrontEnd, RequestTime
from .publisher import Publisher
from .replies import Replies
from .requests import Asked

LAG = 1.0  # s; an engine that is further behind, as after the machine slept, does not make up for the lost time


@dataclass(slots=True, eq=False)
class Generation:
    """One output sequence of a request. Its tokens are known before it runs, as `plan` decides all of them.

    `tell(generation, output)` is called whenever the engine has computed tokens of the sequence.
    """

    id: str
    prompt: list[int] | array
    asked: Asked
    arrived: float = field(default_factory=time.monotonic)
    adapter: str | None = None
    weights: str | None = None  # what of the adapter goes into block keys: name and path
    ids: list[int] = field(default_factory=list)  # all output tokens
    pieces: list[str] = field(default_factory=list)  # the text of each
    reason: str | None = None  # why it ends: "stop" or "length"
    stop: str | None = None  # the stop string that ends it
    sent: int = 0  # output tokens handed out
    cached: int = 0  # prompt tokens found cached
    received: int = 0  # prompt tokens that another engine has computed
    cached_there: int | None = None  # how many of these the other engine found cached; reported as `cached`
    begun: float = 0.0  # time of the first token
    last: float = 0.0  # time of the last token
    tell: Callable[["Generation", Output], None] = lambda generation, output: None
    request: EngineRequest | None = None
    all_ids: array | None = None  # the prompt's and all of the output's

    def __post_init__(self):
        self.prompt = array("I", self.prompt)

    def plan(self, replies: Replies, eos: int | None, room: int) -> None:
        """Decide all output tokens, and why the output ends: the reply is over, or a limit is reached.

        `eos`: the id of the token that ends a turn. `room`: how many tokens fit into the context after the prompt.
        """
        start, natural = replies.begin(self.prompt)
        limit = min(self.asked.max_tokens or room, room)
        natural = max(natural, self.asked.min_tokens, eos is None)
        ends = not self.asked.ignore_eos and natural + (eos is not None) <= limit
        count = natural if ends else limit
        self.ids, self.pieces = replies.walk(start, count)
        self.reason = "stop" if ends else "length"
        if ends and eos is not None:
            self.ids.append(eos)
            self.pieces.append("")
        if self.asked.stop:
            self._stop_at(self.asked.stop)
        self.all_ids = self.prompt + array("I", self.ids)

    def _stop_at(self, stop: list[str]) -> None:
        text = "".join(self.pieces)
        found = [(at, -len(word), word) for word in stop if word and (at := text.find(word)) >= 0]
        if not found:
            return
        at, _, word = min(found)
        end, kept = at + len(word), 0
        for count, piece in enumerate(self.pieces, 1):  # noqa: B007  used after the loop
            kept += len(piece)
            if kept >= end:  # the token that completes the stop string is generated, but its text is not shown
                break
        self.ids, pieces, room = self.ids[:count], self.pieces[:count], at
        for n, piece in enumerate(pieces):
            pieces[n], room = piece[:room], max(0, room - len(piece))
        self.pieces, self.reason, self.stop = pieces, "stop", word


class Runner:
    """The loop that runs one engine in real time."""

    def __init__(self, engine: Engine, metrics: Metrics, publisher: Publisher | None, seed: int):
        self.engine, self.metrics, self.publisher = engine, metrics, publisher
        self.faults = Faults()
        if publisher is not None:
            publisher.faults = self.faults
        self.started = int(time.time())
        self._root = keys.root(seed)
        self._adapters: dict[str, int] = {}  # adapters' numbers in events
        self._live: dict[str, Generation] = {}
        self._front = FrontEnd(engine.profile) if engine.profile.request != RequestTime() else None
        self._coming: list[tuple[float, int, Generation]] = []  # heap: on the way to the scheduler
        self._order = itertools.count()
        self._alarm: Alarm | None = None

    def submit(self, generation: Generation) -> None:
        """Send a generation to the scheduler, after the delay of the profile's front end.

        The time since the request arrived at this server is part of the delay.
        """
        size, asked = self.engine.profile.block_size, generation.asked
        blocks = keys.chain(generation.prompt, size, self._root, generation.weights, asked.salt)
        known = list(blocks)

        def output_key(index: int) -> int:
            block, parent = generation.all_ids[index * size : (index + 1) * size], known[-1] if known else self._root
            known.extend(keys.chain(block, size, parent, generation.weights, asked.salt if not index else None))
            return known[index]

        tokens, limit = len(generation.prompt), len(generation.ids)
        generation.request = request = EngineRequest(generation.id, blocks, tokens, limit, output_key, owner=generation)
        request.stop_tokens = limit if generation.reason == "stop" else None
        request.reads_cache, request.priority = asked.reads_cache, asked.priority
        request.received = generation.received
        due, busy = time.monotonic(), self.engine.running > 0
        if self._front is not None:
            due = self._front.reaches_engine(generation.arrived, tokens, asked.text, busy)
        heapq.heappush(self._coming, (due, next(self._order), generation))
        self._live[generation.id] = generation
        if self._alarm is not None:
            self._alarm.wake()

    def abort(self, generation: Generation) -> None:
        """Drop a generation whose client has left, or wants no more; do nothing if it has ended already."""
        if self._live.pop(generation.id, None) is not None:
            self.engine.abort(generation.id)
            self.metrics.ended["abort"] += 1

    @property
    def live(self) -> int:
        return len(self._live)

    def _tokens_of(self, generation: Generation) -> tuple:
        name = generation.adapter
        number = None if name is None else self._adapters.setdefault(name, len(self._adapters) + 1)
        return generation.all_ids, name, number, generation.asked.salt

    async def run(self) -> None:
        """Run until cancelled; a step's events are published at its end, before its tokens are sent, as in vLLM."""
        ends = 0.0
        with contextlib.closing(Alarm()) as alarm:
            self._alarm = alarm
            while True:
                begun = self._admit()
                step = self.engine.step()
                if step is None:
                    await alarm.until(self._coming[0][0] if self._coming else None, disturbed=True)
                    ends = 0.0
                    continue
                now = time.monotonic()
                ends = max(ends or begun, now - LAG) + step.seconds * self.faults.slow
                await alarm.until(ends)
                if step.events and self.publisher is not None:
                    self.publisher.publish(step.events, self._tokens_of)
                self._hand_out(step.outputs)

    def _admit(self) -> float:
        """Give the engine the generations that have reached the scheduler by now.

        Returns the time at which the first of them reached it, or the present time if there is none.
        """
        now = first = time.monotonic()
        while self._coming and self._coming[0][0] <= now:
            due, _, generation = heapq.heappop(self._coming)
            first = min(first, due)
            if generation.id in self._live:  # else its client has left
                self.engine.add(generation.request)
        return first

    def _hand_out(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            generation = self._live.get(output.id)
            if generation is None:
                continue
            if output.first:
                there = generation.cached_there
                generation.cached = output.cached_tokens if there is None else there
                generation.begun = now
                self.metrics.first.observe(now - generation.arrived)
            else:
                self.metrics.between.observe(now - generation.last)
            generation.last = now
            if output.finished:
                del self._live[output.id]
                self.metrics.ended[output.finished] += 1
            generation.tell(generation, output)
