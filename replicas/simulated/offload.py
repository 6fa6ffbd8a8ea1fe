"""Tiers behind the simulated engine's cache: host memory, and a disk behind that.

Follows vLLM's offloading connector (0.28 to 0.32) with its CPU and tiering specs. What a step fills is copied down at
once, in chunks of one or more blocks, to every tier. Each tier keeps what was used last. A prompt finds the run of
chunks that follows its blocks on the GPU, each in whichever tier has it; what comes from the disk is copied to host
memory on its way. A copy counts as there from the step on that filled its blocks: vLLM's takes some steps, in which the
GPU still has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby, islice
from typing import NamedTuple

from .blocks import Key
from .profile import Profile
from .steps import EngineRequest, Removed, Stored

Events = list[Stored | Removed]


class Run(NamedTuple):
    """Blocks that a prompt finds behind those on the GPU: until block `end`; `chunks` by number, with their tiers."""

    end: int
    chunks: list[tuple[int, str]]


class Offload:
    counts_last = True  # a prompt that is found to its end counts as found with its last token, which is computed

    def __init__(self, profile: Profile) -> None:
        self.chunk = profile.chunk_blocks
        room = {"cpu": profile.cpu_blocks // self.chunk, "disk": profile.disk_blocks // self.chunk}
        self._room = {tier: chunks for tier, chunks in room.items() if chunks}
        self._held: dict[str, OrderedDict[Key, list[Key]]] = {tier: OrderedDict() for tier in self._room}
        size = profile.block_size * self.chunk * profile.kv_bytes_per_token / profile.speedup
        cpu = size / (profile.cpu_gb_per_s * 1e9)
        self._seconds = {"cpu": cpu, "disk": cpu + size / (profile.disk_gb_per_s * 1e9)}
        self._loading: dict[Key, int] = {}
        self._free_at = 0.0  # when the link has brought all that was asked of it

    def __len__(self) -> int:
        """Chunks in all tiers."""
        return sum(map(len, self._held.values()))

    def find(self, keys: Sequence[Key], start: int, blocks: int) -> Run:
        """The run behind the first `start` blocks of a prompt of `blocks` full ones."""
        size, chunks = self.chunk, []
        for number in range(start // size, min(blocks, len(keys)) // size):
            last = keys[number * size + size - 1]
            tier = next((tier for tier, held in self._held.items() if last in held), None)
            if tier is None:
                break
            chunks.append((number, tier))
        end = (start // size + len(chunks)) * size
        return Run(end, chunks) if end - start >= size else Run(start, [])  # less than a chunk is not worth a transfer

    def passes_on(self, keys: Sequence[Key]) -> int:
        """Leading blocks of a prompt that another engine may fetch: those in host memory, in whole chunks."""
        held, size, count = self._held["cpu"], self.chunk, 0
        while (count + 1) * size <= len(keys) and keys[(count + 1) * size - 1] in held:
            count += 1
        return count * size

    def take_in(self, request: EngineRequest, keys: Sequence[Key], start: int, end: int, events: Events) -> None:
        """Another engine has passed on these blocks: they are in host memory now, as if they had been stored there."""
        self._put("cpu", request, keys, list(range(start // self.chunk, end // self.chunk)), events)

    def reset(self) -> None:
        """Host memory is emptied, and nobody is told; disks keep what they have."""
        self._held["cpu"].clear()

    def is_loading(self, keys: Sequence[Key], run: Run) -> bool:
        """Whether another request is fetching some of it: vLLM lets the second wait for the first."""
        size = self.chunk
        return bool(self._loading) and any(keys[number * size + size - 1] in self._loading for number, _ in run.chunks)

    def load(self, request: EngineRequest, keys: Sequence[Key], run: Run, now: float, events: Events) -> float:
        """Begin to fetch; when it will be there."""
        size = self.chunk
        for number, _ in run.chunks:
            last = keys[number * size + size - 1]
            self._loading[last] = self._loading.get(last, 0) + 1
        for tier, group in groupby(run.chunks, key=lambda chunk: chunk[1]):
            numbers = [number for number, _ in group]
            if tier != "cpu":
                self._put("cpu", request, keys, numbers, events)
        self._touch(keys, [number for number, _ in run.chunks])
        self._free_at = max(now, self._free_at) + sum([self._seconds[tier] for _, tier in run.chunks])
        return self._free_at

    def loaded(self, keys: Sequence[Key], run: Run) -> None:
        """It is there, or nobody wants it any more."""
        for number, _ in run.chunks:
            last = keys[(number + 1) * self.chunk - 1]
            self._loading[last] -= 1
            if not self._loading[last]:
                del self._loading[last]

    def store(self, request: EngineRequest, keys: Sequence[Key], start: int, end: int, events: Events) -> None:
        """Chunks `start` to `end` of a sequence are computed: copies go to every tier that has none."""
        numbers = list(range(start, end))
        self._touch(keys, numbers)
        for tier in self._held:
            self._put(tier, request, keys, numbers, events)

    def _touch(self, keys: Sequence[Key], numbers: Sequence[int]) -> None:
        """The first chunk of a prompt was used last, so that its tail goes first."""
        size = self.chunk
        for held in self._held.values():
            for number in reversed(numbers):
                if (last := keys[number * size + size - 1]) in held:
                    held.move_to_end(last)

    def _put(
        self, tier: str, request: EngineRequest, keys: Sequence[Key], numbers: Sequence[int], events: Events
    ) -> None:
        held, size = self._held.get(tier), self.chunk
        if held is None:
            return
        of = {number: keys[number * size : (number + 1) * size] for number in numbers}
        new = [number for number in numbers if of[number][-1] not in held]
        keep = {of[number][-1] for number in numbers} | self._loading.keys()
        short = len(held) + len(new) - self._room[tier]
        oldest = list(islice((last for last in held if last not in keep), max(0, short)))
        if len(oldest) < short:
            return  # vLLM: "cannot store chunks"
        if oldest:
            events.append(Removed([key for last in oldest for key in held.pop(last)], tier))
        for number in reversed(new):
            held[of[number][-1]] = list(of[number])
        for _, run in groupby(new, key=_Consecutive()):
            numbers = list(run)
            start, end = numbers[0] * size, (numbers[-1] + 1) * size
            events.append(Stored(request, start, list(keys[start:end]), keys[start - 1] if start else None, tier))


class _Consecutive:
    """A key for `groupby`: the same for numbers that follow one another."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, number: int) -> int:
        self._count += 1
        return number - self._count
