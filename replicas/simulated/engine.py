"""A step-level model of vLLM v1's scheduler and prefix cache: pure, no clock, no I/O.

`Engine.step()` does what one scheduler step does and says how long the profile thinks it took. The
server sleeps that long; a simulation adds it to its virtual clock. Followed here, rule by rule:

- Running requests come first, in the order they were admitted, one token each; a prompt that did
  not fit in the step's token budget goes on; then waiting requests, first come first served, until
  the budget, `max_num_seqs` or the blocks run out. Only the last request admitted can have part of its
  prompt still to do, since it took what was left of the budget.
- A waiting request is admitted only if its whole prompt fits in free blocks (vLLM's
  `scheduler_reserve_full_isl`, on by default), and starts behind the longest cached prefix. The
  token after that is always computed, so at most (tokens - 1) // block_size blocks are hits.
- A block is a hit from the moment the step that fills it is scheduled: a later request of the same
  step can already use it.
- No block left for a running request: the last one admitted gives up its blocks, returns to the head
  of the waiting queue, and nothing else is admitted in that step.
- The key/value of a request's last output token is never computed.

Requests that only decode cost nothing in most steps: a request is looked at when it needs a block,
fills one or ends, so a step's cost does not grow with the batch unless `every_token` is asked for. Steps in which
nobody is looked at need not be taken one by one: `ahead` says when they end, `leap` takes them at once.

Held against Dynamo 1.6.1's offline replay (8 engines, round robin, the Mooncake conversation trace, profile
gpu-8b), this model gives hit rate and TTFT mean / p99 in ms of .050 and 362 / 2285 where that has .050 and
359 / 2199 (16,384 blocks), at twice the speed .049 and 1368 / 18317 for .051 and 1376 / 18387; with 65,536
blocks .082 and 317 / 2079 for .082 and 321 / 2049, and .083 and 348 / 2181 for .082 and 347 / 2148.
"""
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from .blocks import BlockPool, Key
from .profile import Profile


@dataclass(slots=True)
class EngineRequest:
    """`blocks`: chained keys of the prompt's full blocks (any hashable; equal keys mean equal prefixes).

    `output_blocks(i)` gives the key of block `i` of the whole sequence, prompt included, once output has
    filled it; without it, blocks filled by output are never hits and raise no events. `stop_tokens`:
    after how many tokens the model ends by itself (None: never); the output is cut at `max_tokens` and at the
    engine's context length."""
    id: str
    blocks: list[Key]
    prompt_tokens: int
    max_tokens: int
    output_blocks: Callable[[int], Key] | None = None
    stop_tokens: int | None = None
    owner: object = None  # the caller's own; the engine never looks at it


class Output(NamedTuple):
    """Tokens a request got in a step. `tokens`: new since this request's last Output."""
    id: str
    tokens: int
    first: bool
    finished: str | None  # "stop", "length", or None: goes on
    cached_tokens: int


class Stored(NamedTuple):
    """Blocks `start`, `start + 1`, ... of a request's sequence were filled; `parent` is the key before them."""
    request: EngineRequest
    start: int
    keys: list[Key]
    parent: Key | None


class Removed(NamedTuple):
    keys: list[Key]


class Cleared(NamedTuple):
    """The whole prefix cache was reset (before this step)."""


@dataclass(slots=True)
class Step:
    """`seconds` long. `events` in the order the cache changed: apply them in this order."""
    seconds: float
    outputs: list[Output] = field(default_factory=list)
    events: list[Stored | Removed | Cleared] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0

    @property
    def stored(self) -> list[Stored]:
        return [event for event in self.events if type(event) is Stored]

    @property
    def removed(self) -> list[Key]:
        return [key for event in self.events if type(event) is Removed for key in event.keys]


@dataclass(slots=True)
class Counters:
    """Totals since the start, as vLLM's metrics of these names count them (tokens unless said)."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class _Sequence:
    """A request inside the engine. While it decodes, its length follows from the number of the step."""
    __slots__ = ("request", "keys", "held", "tokens", "computed", "generated", "limit", "reason", "reported",
                 "cached", "order", "base", "due", "finish", "wanted")

    def __init__(self, request: EngineRequest, limit: int, reason: str):
        self.request = request
        self.keys = list(request.blocks)  # grows as output fills blocks
        self.held: list[int] = []         # block ids
        self.tokens = request.prompt_tokens  # prompt and output; while decoding: as of step `base`
        self.computed = 0                 # of these, with key/value computed; unused while decoding
        self.generated = 0                # output; while decoding: as of step `base`
        self.limit, self.reason = limit, reason
        self.reported = 0                 # output tokens already told
        self.cached = -1                  # hits at first admission; -1: never admitted
        self.order = 0
        self.base = 0                     # the step that ended its prefill
        self.due = -1                     # the next step that must look at it
        self.finish = -1                  # the step that yields its last token
        self.wanted = -1                  # prompt tokens to compute, as of when `outlook` first looked


class Engine:
    """`every_token`: report each token of each request (a server streams them); otherwise a request is
    reported with its first token and when it ends."""

    def __init__(self, profile: Profile, every_token: bool = False):
        self.profile = profile
        self.counters = Counters()
        self._every_token = every_token
        self._size = profile.block_size
        self._pool = BlockPool(profile.num_blocks)
        self._all: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._decoding: dict[str, _Sequence] = {}  # in order of admission
        self._partial: _Sequence | None = None     # its prompt is partly done; admitted last
        self._due: dict[int, list[_Sequence]] = {}
        self._context = 0                          # tokens of all decoding requests, before the next step
        self._admitted = 0
        self._now = 0                              # number of the step
        self._cleared = False
        self._settled = False                      # the next step schedules nobody but those who decode
        self._chance = Random(0)                   # of how long steps take, where the profile has a spread
        self._drawn: deque[float] = deque()        # by `ahead`, for steps not taken yet

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        return self._pool.usage

    @property
    def cached_blocks(self) -> int:
        return self._pool.cached

    def cached(self, request_blocks: list[Key], prompt_tokens: int) -> int:
        """How many blocks of such a prompt would be hits now."""
        return len(self._pool.find(request_blocks, (prompt_tokens - 1) // self._size))

    def outlook(self) -> tuple[int, int, int, int]:
        """What a new request finds: prompt tokens to compute before its own, blocks they will take beyond those that are
        free (negative: what is left), requests that decode, and their context in tokens."""
        tokens, blocks = 0, -self._pool.free
        if (begun := self._partial) is not None:
            tokens += begun.tokens - begun.computed
            blocks += self._blocks(begun.tokens) - len(begun.held)
        for sequence in self._waiting:
            if sequence.wanted < 0:      # looked up once: it is what the cache had when somebody first asked
                sequence.wanted = sequence.tokens - self.cached(sequence.keys, sequence.tokens) * self._size
            tokens += sequence.wanted
            blocks += self._blocks(sequence.wanted)
        return tokens, blocks, len(self._decoding), self._context

    def steps_until_free(self, blocks: int) -> int:
        """In how many steps so many blocks come free by requests that end, if nobody else takes them."""
        steps = 0
        for sequence in sorted(self._decoding.values(), key=lambda s: s.finish):
            if blocks <= 0:
                break
            blocks -= len(sequence.held)
            steps = sequence.finish - self._now
        return steps

    def add(self, request: EngineRequest) -> None:
        """Queue a request. ValueError if it could never run or its id is in use."""
        room = self.profile.context_length - request.prompt_tokens
        if room < 1:
            raise ValueError(f"the prompt has {request.prompt_tokens} tokens; this engine holds "
                             f"{self.profile.context_length} with at least one token of output")
        if request.id in self._all:
            raise ValueError(f"request id {request.id!r} is in use")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one token of output")
        if len(request.blocks) != request.prompt_tokens // self._size:
            raise ValueError(f"{request.prompt_tokens} prompt tokens fill {request.prompt_tokens // self._size} blocks "
                             f"of {self._size}, but {len(request.blocks)} keys were given")
        limit, reason = min(request.max_tokens, room), "length"
        if request.stop_tokens is not None and request.stop_tokens <= limit:
            limit, reason = max(1, request.stop_tokens), "stop"
        sequence = _Sequence(request, limit, reason)
        self._settled = False
        self._all[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, id: str) -> bool:
        """Drop a request and free its blocks; False if it is not here (it may have ended)."""
        sequence = self._all.pop(id, None)
        if sequence is None:
            return False
        self._settled = False
        if sequence is self._partial:
            self._partial = None
        elif id in self._decoding:
            self._leave(sequence, self._now)
        else:
            self._waiting.remove(sequence)
        self._pool.release(sequence.held)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while requests hold blocks. Told with the next step, as vLLM does."""
        if not self._pool.clear():
            return False
        self._cleared, self._settled = True, False
        return True

    def step(self) -> Step | None:
        """Schedule and do one step; None when there is nothing to do."""
        if not self._all:
            return None
        self._now += 1
        self.counters.steps += 1
        step = Step(0.0)
        if self._cleared:
            step.events.append(Cleared())
            self._cleared = False
        due = self._grow(step)
        decoding = step.decode_tokens = len(self._decoding)
        ended: list[_Sequence] = []  # whose prompt is complete after this step
        self._settled, pairs = True, 0.0
        if self._waiting or self._partial is not None:
            pairs = self._prefill(step, self.profile.max_num_batched_tokens - decoding, ended)
        step.seconds = self._seconds(step.prefill_tokens, pairs, decoding, self._context, self._pool.usage)
        self._drawn and self._drawn.popleft()
        self._context += decoding
        self.counters.generated_tokens += decoding + len(ended)
        self._report(step, due, ended)
        return step

    def _seconds(self, tokens: int, pairs: float, sequences: int, context: int, usage: float, step: int = 0) -> float:
        """How long the step takes that is the `step`-th from now."""
        time, drawn = self.profile.step, self._drawn
        seconds = time.seconds(tokens, pairs, sequences, context, usage) / self.profile.speedup
        if time.spread:
            while len(drawn) <= step:
                drawn.append(math.exp(self._chance.gauss(0, time.spread)))
            seconds *= drawn[step]
        return seconds

    def ahead(self, now: float) -> list[float]:
        """The next step begins at `now`: when it and those after it end, as long as they change nothing but the length
        of what decodes. No block is begun or filled in them, nobody starts, ends or waits for what they could give."""
        if not self._settled or not self._decoding or self._every_token:
            return []
        count = min(self._due) - self._now - 1
        ends, decoding, context, usage = [], len(self._decoding), self._context, self._pool.usage
        alike = not self.profile.step.spread and not self.profile.step.decode_context_token
        for step in range(count):
            if not step or not alike:
                seconds = self._seconds(0, 0.0, decoding, context + step * decoding, usage, step)
            now += seconds
            ends.append(now)
        return ends

    def leap(self, steps: int) -> None:
        """Take so many of the steps that `ahead` told of."""
        decoded = steps * len(self._decoding)
        self._now += steps
        self._context += decoded
        self.counters.steps += steps
        self.counters.generated_tokens += decoded
        for _ in range(min(steps, len(self._drawn))):
            self._drawn.popleft()

    # ---- decoding requests

    def _grow(self, step: Step) -> list[_Sequence]:
        """Blocks for the requests whose next token starts or fills one. Returns those looked at and still running."""
        now = self._now
        due = [s for s in self._due.pop(now, ()) if s.due == now]
        if len(due) > 1:
            due.sort(key=lambda s: s.order)
        alive = []
        for sequence in due:
            if sequence.due != now:  # given up for one before it, or listed twice
                continue
            position = sequence.tokens + now - sequence.base - 2  # of the token whose key/value is computed now
            if position % self._size == 0 and not self._room_for_one(sequence, step):
                continue
            if (position + 1) % self._size == 0:
                self._fill(sequence, position // self._size, position + 1, step)
            sequence.due = -1
            alive.append(sequence)
        return alive

    def _room_for_one(self, sequence: _Sequence, step: Step) -> bool:
        """One more block, from the last admitted if need be; False if that is the request itself."""
        while not self._pool.free:
            victim = self._partial or next(reversed(self._decoding.values()))
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.held += self._take(1, step)
        return True

    def _preempt(self, sequence: _Sequence, step: Step) -> None:
        """Back to the head of the waiting queue; it loses the token that this step would have given it."""
        if sequence is self._partial:
            self._partial = None
        else:
            self._leave(sequence, self._now - 1)
        self._pool.release(sequence.held)
        sequence.held, sequence.computed = [], 0
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1
        step.preempted += 1

    def _join(self, sequence: _Sequence) -> None:
        """Its prompt is done and its next token known: from the next step on it decodes."""
        sequence.base = self._now
        sequence.finish = self._now + sequence.limit - sequence.generated
        self._decoding[sequence.request.id] = sequence
        self._context += sequence.tokens
        self._plan(sequence)

    def _leave(self, sequence: _Sequence, last: int) -> None:
        """Out of the decoding batch; `last` is the last step that gave it a token."""
        del self._decoding[sequence.request.id]
        sequence.tokens += last - sequence.base
        sequence.generated += last - sequence.base
        self._context -= sequence.tokens
        sequence.due = sequence.finish = -1

    def _plan(self, sequence: _Sequence) -> None:
        """Note the next step in which a decoding request starts a block, fills one or ends."""
        size = self._size
        offset = (sequence.tokens + self._now - sequence.base - 1) % size  # within its block, of the next token
        if offset == 0:
            wait = 1
        elif sequence.request.output_blocks is not None:
            wait = size - offset
        else:
            wait = size - offset + 1
        sequence.due = due = min(self._now + wait, sequence.finish)
        self._due.setdefault(due, []).append(sequence)

    # ---- prompts

    def _prefill(self, step: Step, budget: int, ended: list[_Sequence]) -> float:
        """Go on with the prompt begun, then admit. Returns the pairs of tokens attended (see StepTime)."""
        pairs = 0.0
        sequence = self._partial
        if sequence is not None and budget > 0:
            new = min(sequence.tokens - sequence.computed, budget)
            if self._blocks(sequence.computed + new) - len(sequence.held) > self._pool.free:
                self._preempt(sequence, step)  # it was admitted last, so it is the one to give way
            else:
                self._partial = None
                pairs += self._compute(sequence, new, step, ended)
                budget -= new
        self._settled = False
        if step.preempted:
            return pairs
        waiting, most = self._waiting, self.profile.max_num_seqs
        while waiting and budget > 0 and self.running + len(ended) < most:
            sequence = waiting[0]
            hits = self._pool.find(sequence.keys, (sequence.tokens - 1) // self._size)
            if self._blocks(sequence.tokens) - len(hits) + self._pool.idle(hits) > self._pool.free:
                break
            waiting.popleft()
            self._admit(sequence, hits)
            new = min(sequence.tokens - sequence.computed, budget)
            pairs += self._compute(sequence, new, step, ended)
            budget -= new
        self._settled = self._partial is None and (budget > 0 or not waiting)
        return pairs

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _admit(self, sequence: _Sequence, hits: list[int]) -> None:
        self._pool.use(hits)
        sequence.held = hits
        sequence.computed = len(hits) * self._size
        self._admitted += 1
        sequence.order = self._admitted
        if sequence.cached < 0:  # vLLM counts a preempted request's second look apart
            sequence.cached = sequence.computed
            self.counters.prompt_tokens += sequence.tokens
            self.counters.prefix_queries += sequence.tokens
            self.counters.prefix_hits += sequence.computed

    def _compute(self, sequence: _Sequence, new: int, step: Step, ended: list[_Sequence]) -> float:
        """Compute `new` tokens of its prompt (after a preemption: of prompt and output)."""
        before = sequence.computed
        sequence.computed = after = before + new
        need = self._blocks(after) - len(sequence.held)
        if need > 0:
            sequence.held += self._take(need, step)
        self._fill(sequence, before // self._size, after, step)
        step.prefill_tokens += new
        if after == sequence.tokens:
            ended.append(sequence)
        else:
            self._partial = sequence
        return new * (before + new / 2)

    # ---- both

    def _take(self, count: int, step: Step) -> list[int]:
        removed: list[Key] = []
        taken = self._pool.take(count, removed)
        if removed:
            step.events.append(Removed(removed))
        return taken

    def _fill(self, sequence: _Sequence, start: int, tokens: int, step: Step) -> None:
        """Blocks from `start` that `tokens` computed tokens fill become hits."""
        end, keys, output_blocks = tokens // self._size, sequence.keys, sequence.request.output_blocks
        if output_blocks is None:
            end = min(end, len(keys))
        else:
            while len(keys) < end:
                keys.append(output_blocks(len(keys)))
        if start < end:
            new = keys[start:end]
            self._pool.store(sequence.held[start:end], new)
            step.events.append(Stored(sequence.request, start, new, keys[start - 1] if start else None))

    def _report(self, step: Step, due: list[_Sequence], ended: list[_Sequence]) -> None:
        """The step's outputs; what ended leaves, what finished its prompt starts to decode."""
        now, outputs = self._now, step.outputs
        if self._every_token:
            for sequence in self._decoding.values():
                if sequence.finish != now:
                    sequence.reported += 1
                    outputs.append(Output(sequence.request.id, 1, False, None, sequence.cached))
        for sequence in due:
            if sequence.finish == now:
                self._leave(sequence, now)
                self._finish(sequence, step)
            else:
                self._plan(sequence)
        for sequence in ended:
            sequence.tokens += 1
            sequence.generated += 1
            if sequence.generated == sequence.limit:
                self._finish(sequence, step)
                continue
            self._join(sequence)
            first = sequence.generated == 1
            if first or self._every_token:
                sequence.reported += 1
                outputs.append(Output(sequence.request.id, 1, first, None, sequence.cached))

    def _finish(self, sequence: _Sequence, step: Step) -> None:
        self._settled = self._settled and not self._waiting  # what it leaves may be what someone waits for
        self._pool.release(sequence.held)
        del self._all[sequence.request.id]
        step.outputs.append(Output(sequence.request.id, sequence.generated - sequence.reported,
                                   sequence.generated == 1, sequence.reason, sequence.cached))
