"""Host memory behind the simulated engine's cache.

Follows vLLM's offloading connector (0.28 to 0.32) with its CPU spec. Blocks that a step fills are copied at once, in
chunks of one or more blocks; the least recently used chunks are evicted. A prompt finds the run of chunks that follows
its blocks on the GPU. A copy exists from the step that filled its blocks; vLLM's takes some steps more, in which the
GPU still has them.

`LMCache` is LMCache's server instead, as of 0.5.6 with `LMCacheMPConnector` (`lmcache/integration/vllm`): chunks of 256
tokens, of which the end of a prompt is evicted first. A prompt is looked up in whole chunks from its beginning,
whatever the engine holds itself, and chunks that the engine lacks are fetched; if a prompt is found to its end, the
last token is computed, and not counted as found.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from .blocks import Key
from .profile import Profile
from .steps import EngineRequest, Removed, Stored

TIER = "cpu"
LMCACHE_TOKENS = 256  # in a chunk of LMCache's, by default
Events = list[Stored | Removed]


class Run(NamedTuple):
    """The blocks that a prompt finds after those on the GPU: up to block `end`; `chunks` are numbers of chunks."""

    end: int
    chunks: range


class Offload:
    """The chunks in host memory by the key of their last block, least recently used first."""

    counts_last = True  # a prompt found to its end counts as found completely, though its last token is computed

    def __init__(self, profile: Profile) -> None:
        self.chunk = profile.chunk_blocks
        self._room = profile.cpu_blocks // self.chunk
        self._held: OrderedDict[Key, list[Key]] = OrderedDict()
        size = profile.block_size * self.chunk * profile.kv_bytes_per_token / profile.speedup
        self._seconds = size / (profile.cpu_gb_per_s * 1e9)  # per chunk
        self._loading: Counter[Key] = Counter()
        self._free_at = 0.0  # when the link has completed all fetches

    def _last(self, keys: Sequence[Key], number: int) -> Key:
        return keys[(number + 1) * self.chunk - 1]

    def find(self, keys: Sequence[Key], start: int, blocks: int) -> Run:
        """Return the run after the first `start` blocks of a prompt of `blocks` full ones."""
        first, most = start // self.chunk, min(blocks, len(keys)) // self.chunk
        end = first
        while end < most and self._last(keys, end) in self._held:
            end += 1
        if end * self.chunk - start < self.chunk:  # less than a chunk is not worth a transfer
            return Run(start, range(0))
        return Run(end * self.chunk, range(first, end))

    def passes_on(self, keys: Sequence[Key]) -> int:
        """Return how many leading blocks of a prompt another engine may fetch, in whole chunks."""
        return Offload.find(self, keys, 0, len(keys)).end

    def take_in(self, request: EngineRequest, keys: Sequence[Key], start: int, end: int, events: Events) -> None:
        """Hold blocks that another engine has passed on, as if they had been stored here."""
        self._put(request, keys, range(start // self.chunk, end // self.chunk), events)

    def reset(self) -> None:
        """Empty it, without an event."""
        self._held.clear()

    def is_loading(self, keys: Sequence[Key], run: Run) -> bool:
        """Return whether another request is fetching some of these chunks: vLLM lets the second wait for the first."""
        return bool(self._loading) and any(self._last(keys, number) in self._loading for number in run.chunks)

    def load(self, request: EngineRequest, keys: Sequence[Key], run: Run, now: float, events: Events) -> float:
        """Begin to fetch a run; return when it will be complete."""
        self._loading.update(self._last(keys, number) for number in run.chunks)
        self._touch(keys, run.chunks)
        self._free_at = max(now, self._free_at) + len(run.chunks) * self._seconds
        return self._free_at

    def loaded(self, keys: Sequence[Key], run: Run) -> None:
        """End a fetch that is complete or no longer wanted."""
        self._loading -= Counter(self._last(keys, number) for number in run.chunks)

    def store(self, request: EngineRequest, keys: Sequence[Key], start: int, end: int, events: Events) -> None:
        """Copy chunks `start` to `end` of a sequence, which are computed, unless they are here."""
        self._touch(keys, range(start, end))
        self._put(request, keys, range(start, end), events)

    def _touch(self, keys: Sequence[Key], numbers: range) -> None:
        """Note a use; the first chunk of a prompt counts as used last, so that its tail is evicted first."""
        for number in reversed(numbers):
            if (last := self._last(keys, number)) in self._held:
                self._held.move_to_end(last)

    def _put(self, request: EngineRequest, keys: Sequence[Key], numbers: range, events: Events) -> None:
        held, size = self._held, self.chunk
        new = [number for number in numbers if self._last(keys, number) not in held]
        keep = {self._last(keys, number) for number in numbers} | self._loading.keys()
        short = len(held) + len(new) - self._room
        oldest = list(islice((last for last in held if last not in keep), max(0, short)))
        if len(oldest) < short:
            return  # vLLM: "cannot store chunks"
        if oldest:
            events.append(Removed([key for last in oldest for key in held.pop(last)], TIER))
        for number in reversed(new):
            held[self._last(keys, number)] = list(keys[number * size : (number + 1) * size])
        while new:
            run = [number for place, number in enumerate(new) if number == new[0] + place]
            new = new[len(run) :]
            start = run[0] * size
            stored = list(keys[start : start + len(run) * size])
            events.append(Stored(request, start, stored, keys[start - 1] if start else None, TIER))


class LMCache(Offload):
    counts_last = False

    def find(self, keys: Sequence[Key], start: int, blocks: int) -> Run:
        """Return the chunks to fetch after the first `start` blocks of a prompt of `blocks` full ones."""
        chunks = self.passes_on(keys[:blocks]) // self.chunk
        if chunks * self.chunk <= start:
            return Run(start, range(0))
        return Run(chunks * self.chunk, range(start // self.chunk, chunks))

    def reset(self) -> None:
        """Do nothing: LMCache's connectors have no such call."""
