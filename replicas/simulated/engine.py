"""A model of vLLM v1's scheduler and prefix cache, step by step, without a clock or I/O.

`Engine.step()` does one scheduler step and returns how long it takes by the profile. The server sleeps so long; a
simulation adds the time to its virtual clock. A step follows these rules:

- Running requests come first, in the order they were admitted, one token each; a prompt that did not fit in the step's
  token budget continues; then waiting requests, first come first served, until the budget, `max_num_seqs` or the
  blocks run out. Only the last request admitted can have part of its prompt still to do, since it took what was left
  of the budget.
- A waiting request is admitted only if its whole prompt fits in free blocks (vLLM's `scheduler_reserve_full_isl`, on by
  default), and starts after the longest cached prefix. The prompt's last token is always computed, so at most
  (tokens - 1) // block_size blocks are hits.
- With `scheduling_policy` priority, waiting requests are ordered by priority, the lowest number first, then by arrival,
  and the running request that is last in that order is preempted.
- A block is a hit from the moment when the step that fills it is scheduled: a later request of the same step can
  already use it.
- If no block is left for a running request, the last one admitted is preempted: it gives up its blocks and returns to
  the head of the waiting queue, and nothing else is admitted in that step.
- The key/value of a request's last output token is never computed.
- With further cache groups (`groups`) each block of tokens takes one block in every group, a hit has to be a hit in all
  of them, and blocks that a window has passed are released before new ones are taken.
- With host memory behind the cache (`offload`), a waiting request's blocks that follow its cached prefix are fetched
  from host memory, as far as it has them, while other requests run; they count as cached. A request whose prompt is
  fetched to the end computes only the last token.

In most steps the simulation does nothing for a decoding request: the request needs work only when it needs a block,
fills one or ends. So a step's cost does not grow with the batch unless `every_token` is set. Steps without such work
need not be taken one by one: `ahead` returns when they end, `leap` takes them at once.

Compared with Dynamo 1.6.1's offline replay (8 engines, round robin, the Mooncake conversation trace, profile gpu-8b),
by hit rate and TTFT mean / p99 in ms:
                                    this model            Dynamo
    16,384 blocks                   .050  362 /  2285     .050  359 /  2199
    16,384 blocks, twice the speed  .049 1368 / 18317     .051 1376 / 18387
    65,536 blocks                   .082  317 /  2079     .082  321 /  2049
    65,536 blocks, twice the speed  .083  348 /  2181     .082  347 /  2148
"""

from collections import deque
from collections.abc import Hashable

from .batch import Batch, Sequence
from .blocks import BlockPool, Key
from .groups import Groups
from .offload import LMCache, Offload, Run
from .profile import Profile, StepDurations
from .steps import Cleared, Counters, EngineRequest, Output, Removed, Step, Stored

__all__ = ["Cleared", "Counters", "Engine", "EngineRequest", "Output", "Removed", "Step", "Stored"]


class Engine:
    """One simulated engine: vLLM's scheduler and prefix cache. Each call of `step` simulates one scheduler step.

    `every_token`: report each token of each request, as a server streams them; otherwise an `Output` comes only with a
    request's first token and at its end.
    """

    def __init__(self, profile: Profile, every_token: bool = False):
        self.profile = profile
        self.counters = Counters()
        self._every_token = every_token
        self._size = profile.block_size
        self.pool = BlockPool(profile.num_blocks)
        self._offload = (LMCache if profile.lmcache else Offload)(profile) if profile.cpu_blocks else None
        self._groups = Groups(profile, self.pool) if profile.windows else None
        self._width = 1 + len(profile.windows)  # blocks of the pool per block of tokens: one for each cache group
        self._fetching: list[Sequence] = []
        self._elapsed = 0.0  # seconds of the steps that were taken one by one; fetches are timed by it
        self._all: dict[Hashable, Sequence] = {}
        self._kept: dict[Hashable, Sequence] = {}  # ended, with blocks that another engine is to fetch
        self._waiting: deque[Sequence] = deque()
        self._partial: Sequence | None = None  # the request whose prompt is partly done; admitted last
        self.batch = Batch(self._size)  # requests whose prompt is done
        self._admitted = self._arrivals = 0
        self._by_priority = profile.scheduling_policy == "priority"
        self._pending: list[Stored | Removed | Cleared] = []  # events to be reported with the next step
        self._settled = False  # the next step schedules decoding requests only
        self.durations = StepDurations(profile)  # may be replaced, to simulate an engine that turns slow

    @property
    def running(self) -> int:
        return len(self.batch.sequences) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._fetching)

    @property
    def kv_usage(self) -> float:
        return self.pool.usage

    def cached(self, request_blocks: list[Key], prompt_tokens: int) -> int:
        """Return how many leading blocks of a prompt would be hits in the engine's cache now.

        `request_blocks`: the keys of the prompt's full blocks. `prompt_tokens`: the prompt's length; its last token is
        always computed.
        """
        hits = len(self.pool.find(request_blocks, (prompt_tokens - 1) // self._size))
        if self.profile.drops_block:
            hits = max(0, hits - 1)
        return self._groups.longest(request_blocks, hits) if self._groups else hits

    def found(self, request_blocks: list[Key], prompt_tokens: int) -> int:
        """Return how many leading blocks of a prompt are cached: first those on the GPU, then those in host memory.

        `request_blocks`: the keys of the prompt's full blocks.
        """
        start = self.cached(request_blocks, prompt_tokens)
        return self._offload.find(request_blocks, start, prompt_tokens // self._size).end if self._offload else start

    def passes_on(self, request_blocks: list[Key]) -> int:
        """Return how many leading blocks of a prompt host memory has, so that another engine may fetch them.

        `request_blocks`: the keys of the prompt's full blocks.
        """
        return self._offload.passes_on(request_blocks) if self._offload else 0

    def take_in(self, request: EngineRequest, start: int, end: int) -> None:
        """Put blocks that another engine has passed on into host memory; call this before `add`.

        The blocks are those of `request` from number `start` up to but not including `end`.
        """
        if self._offload is not None:
            self._offload.take_in(request, request.blocks, start, end, self._pending)
            self._settled = False

    @property
    def to_prefill(self) -> list[Sequence]:
        """The requests whose prompts are not computed completely: the one in progress first, then the waiting ones."""
        return [*([self._partial] if self._partial is not None else []), *self._waiting]

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError if the request could never run, or if its id is in use."""
        room = self.profile.context_length - request.prompt_tokens
        if room < 1:
            what = f"a prompt of {request.prompt_tokens} tokens and one of output"
            raise ValueError(f"{what} exceed {self.profile.context_length}")
        if request.id in self._all:
            raise ValueError(f"request id {request.id!r} is in use")
        if len(request.blocks) != request.prompt_tokens // self._size:
            blocks = f"{len(request.blocks)} keys' blocks"
            raise ValueError(f"{request.prompt_tokens} prompt tokens fill fewer or more than {blocks}")
        limit, reason = min(request.max_tokens, room), "length"
        if request.stop_tokens is not None and request.stop_tokens <= limit:
            limit, reason = max(1, request.stop_tokens), "stop"
        self._settled = False
        self._arrivals += 1
        self._all[request.id] = sequence = Sequence(request, limit, reason, self._arrivals)
        if self._by_priority:
            self._queue(sequence)
        else:
            self._waiting.append(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Insert a request into the waiting queue by priority and arrival."""
        waiting, rank = self._waiting, _rank(sequence)
        place = next((place for place, one in enumerate(waiting) if _rank(one) > rank), len(waiting))
        waiting.insert(place, sequence)

    def abort(self, id: Hashable) -> bool:
        """Drop a request and free its blocks; return False if the engine does not have it (any more)."""
        if (sequence := self._all.pop(id, None)) is None:
            return False
        self._settled = False
        if sequence is self._partial:
            self._partial = None
        elif id in self.batch.sequences:
            self.batch.leave(sequence, self.batch.now)
        elif sequence in self._fetching:
            self._fetching.remove(sequence)
            self._offload.loaded(sequence.keys, sequence.run)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        return True

    def let_go(self, id: Hashable) -> bool:
        """Free the blocks that an ended request keeps for another engine; return False if it keeps none."""
        if (sequence := self._kept.pop(id, None)) is not None:
            self._settled = False
            self._release(sequence)
        return sequence is not None

    def reset_prefix_cache(self, external: bool = False) -> bool:
        """Empty the prefix cache and return True; return False and do nothing while requests use blocks.

        The next step reports the event, as in vLLM. Host memory keeps its blocks; with `external` it is emptied too,
        without an event.
        """
        if not self.pool.clear():
            return False
        if external and self._offload is not None:
            self._offload.reset()
        self._pending, self._settled = [Cleared(), *(one for one in self._pending if type(one) is not Cleared)], False
        return True

    def step(self) -> Step | None:
        """Do one scheduler step and return its results; None if there is nothing to do until `add` or `let_go`."""
        if not self._all:
            return None
        batch = self.batch
        batch.now += 1
        self.counters.steps += 1
        step, self._pending = Step(0.0, events=self._pending), []
        due = self._grow(step)
        decoding = step.decode_tokens = len(batch.sequences)
        ended: list[Sequence] = []  # requests whose prompt is complete after this step
        self._settled, pairs = True, 0.0
        if self._fetching:
            self._end_fetches(step)
        if self._waiting or self._partial is not None:
            pairs = self._prefill(step, self.profile.max_num_batched_tokens - decoding, ended)
        if self._kept and not (decoding or step.prefill_tokens or self._fetching or step.events):
            return None  # all requests wait for blocks that are kept
        step.seconds = self.durations.seconds(step.prefill_tokens, pairs, decoding, batch.context)
        self.durations.taken(1)
        if self._fetching:
            self._settled = False
            if not (decoding or step.prefill_tokens):
                step.seconds = max(step.seconds, min(one.ready for one in self._fetching) - self._elapsed)
        self._elapsed += step.seconds
        batch.context += decoding
        self.counters.generated_tokens += decoding + len(ended)
        self._report(step, due, ended)
        return step

    def ahead(self, now: float) -> list[float]:
        """Return the times at which the next steps end, up to the first step that has to do more than decode.

        In these steps no block is started or filled and no request ends, so no waiting request can start. The list is
        empty if the next step has to do more. `now`: the time (seconds) at which the next step begins.
        """
        batch, durations = self.batch, self.durations
        if not self._settled or not batch.sequences or self._every_token:
            return []
        ends, decoding, context = [], len(batch.sequences), batch.context
        for step in range(batch.quiet_steps()):
            if not step or durations.differ:
                seconds = durations.seconds(0, 0.0, decoding, context + step * decoding, step)
            now += seconds
            ends.append(now)
        return ends

    def leap(self, steps: int) -> None:
        """Take `steps` steps at once. They have to be among those whose ends `ahead` returned."""
        self.batch.leap(steps)
        self.durations.taken(steps)
        self.counters.steps += steps
        self.counters.generated_tokens += steps * len(self.batch.sequences)

    # ---- decoding requests

    def _grow(self, step: Step) -> list[Sequence]:
        """Do the work for decoding requests that start a block, fill a block or end in this step.

        A request that starts a block takes one, and a block that is filled is cached. Returns these requests, without
        those that were preempted.
        """
        now, alive = self.batch.now, []
        for sequence in self.batch.due():
            if sequence.due != now:  # it was preempted by an earlier one, or is listed twice
                continue
            position = sequence.tokens + now - sequence.base - 2  # of the token whose key/value is computed now
            if position % self._size == 0 and self._groups:
                self._groups.pass_by(sequence, position)
            if position % self._size == 0 and not self._room_for_one(sequence, step):
                continue
            if (position + 1) % self._size == 0:
                self._fill(sequence, position // self._size, position + 1, step)
            sequence.due = -1
            alive.append(sequence)
        if step.preempted and self._by_priority:  # a preempted request may have been handled before
            alive = [one for one in alive if one.request.id in self.batch.sequences]
        return alive

    def _room_for_one(self, sequence: Sequence, step: Step) -> bool:
        """Take one more block for a request, by preemption if needed; return False if it was preempted itself."""
        while self.pool.free < self._width:
            if self._by_priority:
                partial = [self._partial] if self._partial is not None else []
                victim = max((*self.batch.sequences.values(), *partial), key=_rank)
            else:
                victim = self._partial or next(reversed(self.batch.sequences.values()))
            self._preempt(victim, step)
            if victim is sequence:
                return False
        self._extend(sequence, 1, step)
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Preempt a request: it gives up its blocks and this step's token, and returns to the waiting queue."""
        if sequence is self._partial:
            self._partial = None
        else:
            self.batch.leave(sequence, self.batch.now - 1)
        self._release(sequence)
        sequence.held, sequence.computed = [], 0
        sequence.run, sequence.stored, sequence.offered = None, 0, 0
        if self._by_priority:
            self._queue(sequence)
        else:
            self._waiting.appendleft(sequence)
        self.counters.preemptions += 1
        step.preempted += 1

    # ---- prompts

    def _prefill(self, step: Step, budget: int, ended: list[Sequence]) -> float:
        """Continue the prompt that is partly computed, then admit waiting requests, within `budget` tokens.

        Requests whose prompts are complete after this step are added to `ended`. Returns the number of pairs of tokens
        between which attention is computed, for `StepTime.seconds`.
        """
        pairs = 0.0
        sequence = self._partial
        if sequence is not None and budget > 0:
            new = min(sequence.tokens - sequence.computed, budget)
            if self._groups:
                self._groups.pass_by(sequence, sequence.computed)
            if (self._blocks(sequence.computed + new) - len(sequence.held)) * self._width > self.pool.free:
                self._preempt(sequence, step)  # it was admitted last, so it is the one to preempt
            else:
                self._partial = None
                pairs += self._compute(sequence, new, step, ended)
                budget -= new
        self._settled = False
        if step.preempted:
            return pairs
        waiting, most = self._waiting, self.profile.max_num_seqs
        behind: list[Sequence] = []  # requests that wait until another one has fetched the same chunks
        while waiting and budget > 0 and self.running + len(ended) < most:
            sequence = waiting[0]
            hits = sequence.held or self._hits(sequence)
            taken = self._promised(sequence) if sequence.held else self.pool.idle(hits) + self._promised()
            if self._groups:
                taken += self._groups.idle(sequence.keys, len(hits))
            if (self._blocks(sequence.tokens) - len(hits)) * self._width + taken > self.pool.free:
                break
            waiting.popleft()
            if self._offload is not None and not sequence.held and sequence.request.reads_cache:
                run = self._offload.find(sequence.keys, len(hits), sequence.tokens // self._size)
                if self._offload.is_loading(sequence.keys, run):
                    behind.append(sequence)
                    continue
                if run.chunks:
                    self._fetch(sequence, hits, run, step)
                    continue
            if sequence.run is None:
                received = sequence.request.received if sequence.cached < 0 else 0  # 0 after a preemption
                self._admit(sequence, hits, len(hits) * self._size)
                if received:
                    self._receive(sequence, received, step)
            new = min(sequence.tokens - sequence.computed, budget)
            pairs += self._compute(sequence, new, step, ended)
            budget -= new
        waiting.extendleft(reversed(behind))
        self._settled = self._partial is None and (budget > 0 or not waiting) and not behind
        return pairs

    def _fetch(self, sequence: Sequence, hits: list[int], run: Run, step: Step) -> None:
        """Admit a request, and begin to fetch blocks of its prompt from host memory.

        `hits`: ids of the blocks that are cached on the GPU. `run`: the blocks that host memory has after these.
        """
        computed = min(run.end * self._size, sequence.tokens - 1)
        self._admit(sequence, hits, computed, run.end * self._size if self._offload.counts_last else computed)
        sequence.run, sequence.stored = run, len(hits)
        sequence.held = hits + self._take(run.end - len(hits), step)
        sequence.ready = self._offload.load(sequence.request, sequence.keys, run, self._elapsed, step.events)
        self._fetching.append(sequence)

    def _promised(self, asked: Sequence | None = None) -> int:
        """Return how many more blocks are needed by requests that have blocks from host memory.

        These requests are fetching blocks, or have fetched some and wait for the rest of their prompt to be computed.
        `asked`: a request that is not counted.
        """
        if self._offload is None:
            return 0
        those = [*self._fetching, *[one for one in self._waiting if one.held]]
        return sum([self._blocks(one.tokens) - len(one.held) for one in those if one is not asked])

    def _end_fetches(self, step: Step) -> None:
        """Cache the blocks of completed fetches on the GPU, and put their requests at the head of the waiting queue."""
        there = [one for one in self._fetching if one.ready <= self._elapsed]
        self._fetching = [one for one in self._fetching if one.ready > self._elapsed]
        for sequence in there:
            run, start, keys = sequence.run, sequence.stored, sequence.keys
            self._offload.loaded(keys, run)
            self.pool.store(sequence.held[start : run.end], keys[start : run.end])
            parent = keys[start - 1] if start else None
            step.events.append(Stored(sequence.request, start, keys[start : run.end], parent))
            sequence.stored = run.end
        self._waiting.extendleft(reversed(there))

    def _hits(self, sequence: Sequence) -> list[int]:
        if not sequence.request.reads_cache:
            return []
        hits = self.pool.find(sequence.keys, (sequence.tokens - 1) // self._size)
        if self.profile.drops_block:
            del hits[-1:]
        if self._groups:
            longest = self._groups.longest(sequence.keys, len(hits))
            sequence.junction = len(hits) if len(hits) > longest else 0
            del hits[longest:]
        return hits

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _admit(self, sequence: Sequence, hits: list[int], computed: int, found: int = 0) -> None:
        """Admit a request, which takes the cached blocks of its prefix.

        `hits`: ids of these blocks. `computed`: how many of its tokens need not be computed. `found`: how many tokens
        are reported as found, in the cache or in host memory; 0: as many as `computed`.
        """
        self.pool.use(hits)
        sequence.held = hits
        if self._groups:
            self._groups.admit(sequence)
        sequence.computed = computed
        self._admitted += 1
        sequence.order = self._admitted
        if sequence.cached < 0:  # vLLM counts a preempted request's second lookup separately
            sequence.cached = found or computed
            counters, local = self.counters, len(hits) * self._size
            counters.prompt_tokens += sequence.tokens
            if sequence.request.reads_cache:  # only lookups are counted
                counters.prefix_queries += sequence.tokens
                counters.prefix_hits += local
                if self._offload is not None:
                    counters.external_queries += sequence.tokens - local
                    counters.external_hits += sequence.cached - local

    def _receive(self, sequence: Sequence, received: int, step: Step) -> None:
        """Cache the blocks of the first `received` prompt tokens, which another engine has computed.

        The prompt's last token is computed here even if it was received.
        """
        before, after = sequence.computed, min(received, sequence.request.prompt_tokens - 1)
        if after > before:
            self._extend(sequence, self._blocks(after) - len(sequence.held), step)
            sequence.computed = after
            self._fill(sequence, before // self._size, after, step)

    def _compute(self, sequence: Sequence, new: int, step: Step, ended: list[Sequence]) -> float:
        """Compute `new` tokens of a request's prompt (after a preemption: of its prompt and output).

        If the prompt is complete then, the request is added to `ended`. Returns the number of pairs of tokens between
        which attention is computed.
        """
        before = sequence.computed
        sequence.computed = after = before + new
        need = self._blocks(after) - len(sequence.held)
        if need > 0:
            self._extend(sequence, need, step)
        self._fill(sequence, max(before // self._size, sequence.stored), after, step)
        step.prefill_tokens += new
        if after == sequence.tokens:
            ended.append(sequence)
        else:
            self._partial = sequence
        return new * (before + new / 2)

    # ---- prompts and decoding requests

    def _extend(self, sequence: Sequence, count: int, step: Step) -> None:
        """Take `count` more blocks for a request, in each cache group."""
        if self._groups:
            removed: list[Key] = []
            self._groups.take(sequence, count, removed)
            if removed:
                step.events.append(Removed(removed))
        sequence.held += self._take(count, step)

    def _release(self, sequence: Sequence) -> None:
        if self._groups:
            self._groups.release(sequence)
        self.pool.release(sequence.held)

    def _take(self, count: int, step: Step) -> list[int]:
        removed: list[Key] = []
        taken = self.pool.take(count, removed)
        if removed:
            step.events.append(Removed(removed))
        return taken

    def _fill(self, sequence: Sequence, start: int, tokens: int, step: Step) -> None:
        """Cache those blocks of a request that are full once its first `tokens` tokens are computed.

        `start`: the number of the first block that is not cached yet. Chunks that are complete are copied to host
        memory, too.
        """
        end, keys, output_blocks = tokens // self._size, sequence.keys, sequence.request.output_blocks
        if output_blocks is None:
            end = min(end, len(keys))
        else:
            while len(keys) < end:
                keys.append(output_blocks(len(keys)))
        if start < end:
            new = keys[start:end]
            if self._groups:
                step.events += self._groups.fill(sequence, start, end)
            self.pool.store(sequence.held[start:end], new)
            step.events.append(Stored(sequence.request, start, new, keys[start - 1] if start else None))
        if self._offload is not None:
            chunks = min(tokens // self._size, len(keys)) // self._offload.chunk
            if chunks > sequence.offered:
                self._offload.store(sequence.request, keys, sequence.offered, chunks, step.events)
                sequence.offered = chunks

    def _report(self, step: Step, due: list[Sequence], ended: list[Sequence]) -> None:
        """Add the step's outputs. Requests that end leave the batch; those whose prompts are complete join it.

        `due`: decoding requests that needed work in this step. `ended`: requests whose prompts this step completed.
        """
        batch, outputs = self.batch, step.outputs
        now = batch.now
        if self._every_token:
            for sequence in batch.sequences.values():
                if sequence.finish != now:
                    sequence.reported += 1
                    outputs.append(Output(sequence.request.id, 1, False, None, sequence.cached))
        for sequence in due:
            if sequence.finish == now:
                batch.leave(sequence, now)
                self._finish(sequence, step)
            else:
                batch.plan(sequence)
        for sequence in ended:
            sequence.tokens += 1
            sequence.generated += 1
            if sequence.generated == sequence.limit:
                self._finish(sequence, step)
                continue
            batch.join(sequence)
            first = sequence.generated == 1
            if first or self._every_token:
                sequence.reported += 1
                outputs.append(Output(sequence.request.id, 1, first, None, sequence.cached))

    def _finish(self, sequence: Sequence, step: Step) -> None:
        self._settled = self._settled and not self._waiting  # a waiting request may need what it frees
        if sequence.request.keeps:
            self._kept[sequence.request.id] = sequence
        else:
            self._release(sequence)
        del self._all[sequence.request.id]
        new, first = sequence.generated - sequence.reported, sequence.generated == 1
        step.outputs.append(Output(sequence.request.id, new, first, sequence.reason, sequence.cached))


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a request under priority scheduling: priority, then arrival; the lowest goes first."""
    return sequence.request.priority, sequence.arrival
