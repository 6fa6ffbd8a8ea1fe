"""Chains a replica is thought to hold because we sent them there, not because it said so.

Prompts come by the hundred blocks and share their beginnings, so they are kept as runs of blocks in arrays, in a radix
tree: a prompt costs a few steps, not one for each block, and a block 9 bytes. `EngineModel`, for engines without
events, is a guess at one engine's own cache; `routed` has what is predicted of engines that do tell, until they have
told.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

BYTES_PER_BLOCK = 90  # what budgets count a block for
SEGMENT_BLOCKS = 5  # a segment of EngineModel takes 450 bytes as blocks of this size; its blocks 9 each


class Segment:
    """Consecutive blocks of a chain that were last used together, between two branchings.

    `start` is the place of the first one in its chain, `parent` has the blocks before it; a tree's root is its own
    parent.
    """

    __slots__ = ("blocks", "children", "parent", "stamps", "start")

    stamps: dict[int, tuple[float, int]]  # by slot; only `routed` has them

    def __init__(self, parent: Segment | None, start: int, blocks: array[int]):
        self.parent = self if parent is None else parent
        self.start = start
        self.blocks = blocks
        self.children = 0


class Tree:
    """Segments are found by their first blocks, and as equal hashes mean equal prefixes, one comparison tells whether
    a whole segment is shared."""

    __slots__ = ("_count", "_heads", "_root")

    def __init__(self) -> None:
        self._empty()

    def _empty(self) -> None:
        self._count = 0
        self._heads: dict[int, Segment] = {}
        self._root = Segment(None, 0, array("Q"))

    def __len__(self) -> int:
        return self._count

    def _longest(self, hashes: Sequence[int]) -> tuple[Segment, int]:
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

    def _split(self, rest: Segment, end: int) -> Segment:
        """Cut a segment where its chain has `end` blocks, and give what is before the cut."""
        size = end - rest.start
        segment = Segment(rest.parent, rest.start, rest.blocks[:size])
        segment.children = 1
        rest.parent, rest.start, rest.blocks = segment, end, rest.blocks[size:]
        self._heads[segment.blocks[0]] = segment
        self._heads[rest.blocks[0]] = rest
        return segment

    def _branch(self, segment: Segment, start: int, new: array[int]) -> Segment:
        """Put new blocks behind a segment, as one of their own."""
        self._count += len(new)
        segment.children += 1
        child = self._heads[new[0]] = Segment(segment, start, new)
        return child


class EngineModel(Tree):
    """A guess at an engine's own cache: least recently used chains go first, tails first.

    The engine says how many blocks it has; how many of them hold prompts is learned from
    the cached tokens it reports: `limit` shrinks when it had less than we thought and grows
    when it had more, between a quarter and all of its blocks.

    A radix tree of segments. Using a chain re-orders its segments, deepest first, and writes
    the new blocks only: a parent is always more recent than its children, so the least
    recent segment is a leaf.
    """

    __slots__ = ("_found", "_order", "capacity", "limit", "most")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.limit = capacity
        self.most = 1 << 30  # what the byte budget allows
        self.clear()

    def clear(self) -> None:
        self._empty()
        self._order: OrderedDict[Segment, None] = OrderedDict()  # the least recent first
        self._found: tuple[Sequence[int], Segment, int] = ((), self._root, 0)  # what `reach` was asked last, and found

    def resize(self, capacity: int) -> None:
        """The engine's cache has so many blocks; as before, all of them are taken to be of use until it shows
        otherwise."""
        if capacity != self.capacity:
            self.capacity = self.limit = capacity
            self._found = ((), self._root, 0)
            self._shed()

    def add(self, hashes: Sequence[int]) -> None:
        """The replica computed, or used, this chain just now."""
        order, root = self._order, self._root
        asked, segment, held = self._found  # as a rule of this chain, for the choice
        if asked is not hashes:
            segment, held = self._longest(hashes)
        self._found = ((), root, 0)
        if 0 < held - segment.start < len(segment.blocks):
            segment = self._split(segment, held)
        if held < len(hashes):
            new = hashes[held:] if type(hashes) is array else array("Q", hashes[held:])
            if segment is not root and not segment.children:  # nothing else is behind it
                self._count += len(new)
                segment.blocks += new
            else:
                segment = self._branch(segment, held, new)
                order[segment] = None
        touch = order.move_to_end
        while segment is not root:
            touch(segment)
            segment = segment.parent
        self._shed()

    def take_back(self, hashes: Sequence[int], held: int) -> None:
        """The blocks beyond `held` were not computed after all. Those that others build on stay."""
        segment, end = self._longest(hashes)
        while end > held and not segment.children and end == segment.start + len(segment.blocks):
            self._drop(segment, end - held)
            end, segment = segment.start, segment.parent

    def reach(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of this chain the engine should still have."""
        segment, held = self._longest(hashes)
        self._found = hashes, segment, held
        return held

    def learn(self, predicted: int, reported: int) -> None:
        """Correct the limit by 2 % when the engine had less, or more, than predicted."""
        if reported < predicted:
            self.limit = max(self.limit - self.limit // 50, -(-self.capacity // 4))
        elif reported > predicted:
            self.limit = min(self.limit + self.limit // 50 + 1, self.capacity)

    def _split(self, rest: Segment, end: int) -> Segment:
        """What is behind the cut stays where it was in the order."""
        segment = super()._split(rest, end)
        self._order[segment] = None
        return segment

    def _shed(self) -> None:
        """Drop what is too much, from the tails of the segments longest unused. What segments cost comes out of the
        byte budget."""
        count, order = self._count, self._order
        excess = max(count - self.limit, count + SEGMENT_BLOCKS * len(order) - self.most)
        while excess > 0 and order:
            excess -= self._drop(next(iter(order)), excess)

    def _drop(self, segment: Segment, count: int) -> int:
        """Drop up to `count` blocks from the tail of a segment that nothing is behind; gives how many."""
        blocks = segment.blocks
        size = len(blocks)
        if count < size:
            del blocks[size - count :]
            self._count -= count
            return count
        self._count -= size
        self._heads.pop(blocks[0], None)  # gone if hashes collided
        del self._order[segment]
        segment.parent.children -= 1
        return size


def _shared(blocks: array[int], hashes: Sequence[int], start: int, size: int) -> int:
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
