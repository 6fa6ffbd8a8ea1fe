"""Chains a replica is thought to hold because we sent them there, not because it said so.

In both a block is kept at least as long as those behind it, so how far a prompt is held is
found by bisection. `Routed` has each block in a dict, quick on entries that come by the
prompt and go within seconds. `EngineModel`, for engines without events, has runs of blocks
in arrays: entries there are many, last, and go one by one.
"""

from array import array
from collections import OrderedDict

BYTES_PER_BLOCK = 90  # of Routed: 80 on average (hash 32, dict entry the rest), 90 when it just grew
SEGMENT_BLOCKS = 5  # a segment of EngineModel takes 450 bytes as blocks of this size; its blocks 9 each


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


class _Segment:
    """Consecutive blocks of a chain that were last used together, between two branchings.

    `start` is the place of the first one in its chain, `parent` has the blocks before it.
    """

    __slots__ = ("blocks", "children", "parent", "start")

    def __init__(self, parent: "_Segment | None", start: int, blocks: array):
        self.parent = parent
        self.start = start
        self.blocks = blocks
        self.children = 0


class EngineModel:
    """A guess at an engine's own cache: least recently used chains go first, tails first.

    The engine says how many blocks it has; how many of them hold prompts is learned from
    the cached tokens it reports: `limit` shrinks when it had less than we thought and grows
    when it had more, between a quarter and all of its blocks.

    A radix tree of segments. Using a chain re-orders its segments, deepest first, and writes
    the new blocks only: a parent is always more recent than its children, so the least
    recent segment is a leaf. Segments are found by their first blocks, and as equal hashes
    mean equal prefixes, one comparison tells whether a whole segment is shared.
    """

    __slots__ = ("_count", "_heads", "_order", "_root", "capacity", "limit", "most")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.limit = capacity
        self.most = 1 << 30  # what the byte budget allows
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        self._count = 0
        self._heads: dict[int, _Segment] = {}
        self._order: OrderedDict[_Segment, None] = OrderedDict()  # the least recent first
        self._root = _Segment(None, 0, array("Q"))

    def add(self, hashes: list[int]) -> None:
        """The replica computed, or used, this chain just now."""
        segment, held = self._longest(hashes)
        if 0 < held - segment.start < len(segment.blocks):
            segment = self._split(segment, held)
        if held < len(hashes):
            segment = self._append(segment, held, array("Q", hashes[held:]))
        touch, root = self._order.move_to_end, self._root
        while segment is not root:
            touch(segment)
            segment = segment.parent
        while (excess := self._count - self._room()) > 0:
            self._drop_oldest(excess)

    def reach(self, hashes: list[int]) -> int:
        """How many leading blocks of this chain the engine should still have."""
        return self._longest(hashes)[1]

    def learn(self, predicted: int, reported: int) -> None:
        """Correct the limit by 2 % when the engine had less, or more, than predicted."""
        if reported < predicted:
            self.limit = max(self.limit - self.limit // 50, -(-self.capacity // 4))
        elif reported > predicted:
            self.limit = min(self.limit + self.limit // 50 + 1, self.capacity)

    def _room(self) -> int:
        """Blocks that may be held; what segments cost comes out of the byte budget."""
        return min(self.limit, self.most - SEGMENT_BLOCKS * len(self._order))

    def _longest(self, hashes: list[int]) -> tuple[_Segment, int]:
        """How many leading blocks are held, and the segment that has the last of them."""
        find, end = self._heads.get, len(hashes)
        last, held = self._root, 0
        while held < end and (segment := find(hashes[held])) is not None:
            last, blocks = segment, segment.blocks
            size = len(blocks)
            if size > end - held:
                size = end - held
            if blocks[size - 1] != hashes[held + size - 1]:
                return last, held + _shared(blocks, hashes, held, size)
            held += size
        return last, held

    def _split(self, rest: _Segment, end: int) -> _Segment:
        """Cut a segment where its chain has `end` blocks, and give what is before the cut.

        What is behind it stays where it was in the order.
        """
        size = end - rest.start
        segment = _Segment(rest.parent, rest.start, rest.blocks[:size])
        segment.children = 1
        rest.parent, rest.start, rest.blocks = segment, end, rest.blocks[size:]
        self._heads[segment.blocks[0]] = segment
        self._heads[rest.blocks[0]] = rest
        self._order[segment] = None
        return segment

    def _append(self, segment: _Segment, start: int, new: array) -> _Segment:
        """Put new blocks behind a segment: into it if nothing else is there."""
        self._count += len(new)
        if segment is not self._root and not segment.children:
            segment.blocks += new
            return segment
        segment.children += 1
        child = self._heads[new[0]] = _Segment(segment, start, new)
        self._order[child] = None
        return child

    def _drop_oldest(self, count: int) -> None:
        """Drop up to `count` blocks from the tail of the segment longest unused."""
        segment = next(iter(self._order))
        blocks = segment.blocks
        if count < len(blocks):
            del blocks[-count:]
            self._count -= count
            return
        self._count -= len(blocks)
        self._heads.pop(blocks[0], None)  # gone if hashes collided
        del self._order[segment]
        segment.parent.children -= 1


def _shared(blocks: array, hashes: list[int], start: int, size: int) -> int:
    """How many of the first `size` blocks are in `hashes` from `start` on; by bisection.

    The first one is, the last one is not.
    """
    low, high = 1, size - 1
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == hashes[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
