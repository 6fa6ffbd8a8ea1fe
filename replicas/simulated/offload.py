"""Host memory behind the simulated engine's cache.

`Offload` follows vLLM's offloading connector (0.28 to 0.32) with its CPU spec. Blocks that a step fills are copied at
once, in chunks of one or more blocks; the least recently used chunks are evicted. A look-up of a prompt finds the
chunks that directly follow the prompt's blocks on the GPU. Here a copy exists from the step that filled its blocks;
vLLM's copy takes some steps more, in which the GPU still has the blocks.

`LMCache` follows LMCache's server, as of 0.5.6 with `LMCacheMPConnector` (`lmcache/integration/vllm`): chunks of 256
tokens, of which those at a prompt's end are evicted first. A prompt is looked up in whole chunks from its beginning,
whatever the engine holds itself, and chunks that the engine lacks are fetched. If a prompt is found to its end, its
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
    """A run of blocks of a prompt that host memory has, directly after the blocks on the GPU."""

    end: int  # the number, in the prompt, of the block after the last of them
    chunks: range  # the numbers of the chunks to fetch, counted from the prompt's beginning


class Offload:
    """The chunks of KV blocks in host memory, as vLLM's offloading connector keeps them.

    A chunk is known by the key of its last block. The least recently used chunks are evicted first.
    """

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
        """Return the run of blocks that host memory has after the first `start` blocks of a prompt.

        `keys`: the keys of the prompt's blocks. `blocks`: how many full blocks the prompt has. The run is empty if it
        is shorter than a chunk, which is not worth a transfer.
        """
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
        """Store the blocks `start` to `end` of a prompt, which another engine has passed on."""
        self._put(request, keys, range(start // self.chunk, end // self.chunk), events)

    def reset(self) -> None:
        """Empty host memory, without an event."""
        self._held.clear()

    def is_loading(self, keys: Sequence[Key], run: Run) -> bool:
        """Return whether another request is fetching some chunks of this run; vLLM then lets the later request wait."""
        return bool(self._loading) and any(self._last(keys, number) in self._loading for number in run.chunks)

    def load(self, request: EngineRequest, keys: Sequence[Key], run: Run, now: float, events: Events) -> float:
        """Begin to fetch a run of blocks from host memory at `now` (seconds); return the time when the fetch ends."""
        self._loading.update(self._last(keys, number) for number in run.chunks)
        self._touch(keys, run.chunks)
        self._free_at = max(now, self._free_at) + len(run.chunks) * self._seconds
        return self._free_at

    def loaded(self, keys: Sequence[Key], run: Run) -> None:
        """Note that the fetch of a run is complete or no longer wanted."""
        self._loading -= Counter(self._last(keys, number) for number in run.chunks)

    def store(self, request: EngineRequest, keys: Sequence[Key], start: int, end: int, events: Events) -> None:
        """Copy the chunks `start` to `end` of a request, which are computed, to host memory unless it has them."""
        self._touch(keys, range(start, end))
        self._put(request, keys, range(start, end), events)

    def _touch(self, keys: Sequence[Key], numbers: range) -> None:
        """Mark a prompt's chunks as used now, the first one as used last.

        So the chunks at a prompt's end are evicted before those at its beginning. `numbers`: of the chunks.
        """
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
    """The chunks of KV blocks in host memory, as LMCache's server keeps them."""

    counts_last = False

    def find(self, keys: Sequence[Key], start: int, blocks: int) -> Run:
        """Return the run of chunks that host memory has and the GPU lacks, looked up from the prompt's beginning.

        `keys`: the keys of the prompt's blocks. `start`: how many leading blocks are on the GPU. `blocks`: how many
        full blocks the prompt has.
        """
        chunks = self.passes_on(keys[:blocks]) // self.chunk
        if chunks * self.chunk <= start:
            return Run(start, range(0))
        return Run(chunks * self.chunk, range(start // self.chunk, chunks))

    def reset(self) -> None:
        """Do nothing, as LMCache's connectors do not support a reset."""
