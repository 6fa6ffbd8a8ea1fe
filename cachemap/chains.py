"""Chains a replica is thought to hold because we sent them there, not because it said so.

Both classes keep whole chains of block hashes in a dict, and in both a block is kept at
least as long as those behind it. So how far a prompt is held is found by bisection: seven
look-ups for 110 blocks. About 110 bytes a block, the price of being quick on entries that
come by the prompt and go within seconds (`Routed`) or that exist only for engines without
events (`EngineModel`).
"""

from collections import deque

BYTES_PER_BLOCK = 110  # dict entry 50 (at mid fill), hash 32, chain 8 and slack


class Routed:
    """What was routed to a replica and is predicted to be there until events confirm it."""

    __slots__ = ("_seconds", "_turn", "most", "new", "old")

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.new: dict[int, float] = {}
        self.old: dict[int, float] = {}
        self._turn = 0.0
        self.most = 1 << 30

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    def add(self, hashes: list[int], now: float) -> None:
        """Predicted from now on. Expired entries leave by the generation, not one by one."""
        if now >= self._turn or len(self.new) > self.most:
            self.old = self.new if now < self._turn + self._seconds else {}
            self.new = {}
            self._turn = now + self._seconds
        self.new.update(dict.fromkeys(hashes, now + self._seconds))

    def reach(self, hashes: list[int], start: int, now: float) -> int:
        """How far the chain is held, `start` blocks being held for other reasons."""
        end = len(hashes)
        if start == end:
            return end
        new, old = self.new.get, self.old.get
        block = hashes[start]
        if new(block, now) <= now and old(block, now) <= now:
            return start
        block = hashes[-1]
        if new(block, now) > now or old(block, now) > now:
            return end
        low, high = start + 1, end - 1
        while low < high:
            middle = (low + high) // 2
            block = hashes[middle]
            if new(block, now) > now or old(block, now) > now:
                low = middle + 1
            else:
                high = middle
        return low

    def discard(self, hashes: list[int]) -> None:
        """The replica said that it dropped these."""
        for entries in (self.new, self.old):
            if entries:
                for block in hashes:
                    entries.pop(block, None)

    def clear(self) -> None:
        self.new, self.old = {}, {}


class EngineModel:
    """A guess at an engine's own cache: least recently used chains go first, tails first.

    The engine says how many blocks it has; how many of them hold prompts is learned from
    the cached tokens it reports: `limit` shrinks when it had less than we thought and grows
    when it had more, between a quarter and all of its blocks.
    """

    __slots__ = ("_blocks", "_chained", "_chains", "_clock", "capacity", "limit", "most")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.limit = capacity
        self.most = capacity  # what the byte budget allows
        self.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        self._blocks: dict[int, int] = {}  # block -> stamp of its last use
        self._chains: deque[tuple[int, list[int]]] = deque()
        self._chained = 0
        self._clock = 0

    def add(self, hashes: list[int]) -> None:
        """The replica computed, or used, this chain just now."""
        self._clock += 1
        self._blocks.update(dict.fromkeys(hashes, self._clock))
        self._chains.append((self._clock, hashes))
        self._chained += len(hashes)
        limit = min(self.limit, self.most)
        while len(self._blocks) > limit:
            self._drop_oldest(len(self._blocks) - limit)
        if self._chained > 4 * limit:
            self._compact()

    def reach(self, hashes: list[int]) -> int:
        """How many leading blocks of this chain the engine should still have."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        if hashes[-1] in blocks:
            return len(hashes)
        low, high = 1, len(hashes) - 1
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def learn(self, predicted: int, reported: int) -> None:
        """Correct the limit by 2 % when the engine had less, or more, than predicted."""
        if reported < predicted:
            self.limit = max(self.limit - self.limit // 50, -(-self.capacity // 4))
        elif reported > predicted:
            self.limit = min(self.limit + self.limit // 50 + 1, self.capacity)

    def _drop_oldest(self, count: int) -> None:
        """Drop up to `count` blocks from the tail of the chain longest unused."""
        stamp, chain = self._chains.popleft()
        self._chained -= len(chain)
        blocks = self._blocks
        live = [block for block in chain if blocks.get(block) == stamp]  # the rest was used again since
        for block in live[-count:]:
            del blocks[block]
        if len(live) > count:
            self._chains.appendleft((stamp, live[:-count]))
            self._chained += len(live) - count

    def _compact(self) -> None:
        """Forget the parts of chains that a later chain has used again."""
        chains = deque()
        for stamp, chain in self._chains:
            live = [block for block in chain if self._blocks.get(block) == stamp]
            if live:
                chains.append((stamp, live))
        self._chains = chains
        self._chained = sum(len(chain) for _, chain in chains)
