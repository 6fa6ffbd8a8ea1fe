"""Chains of blocks that a replica is assumed to hold because prompts were routed to it, not because it reported them.

A chain is a prompt's blocks in order. Prompts have hundreds of blocks and share their beginnings, so a radix tree keeps
runs of blocks in arrays: a prompt costs a few steps instead of one for each block, and a block takes 9 bytes. Two uses:
`EngineModel` here models the whole cache of an engine without events; the module `routed` predicts the blocks of
engines with events until the events arrive.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

BYTES_PER_BLOCK = 90  # what the byte budget counts for a block
SEGMENT_BLOCKS = 5  # a segment of EngineModel counts as so many blocks (450 bytes), besides 9 bytes for each block


class Segment:
    """A node of the radix tree: consecutive blocks of a chain that were last used together.

    A chain is a prompt's blocks in order. `blocks`: the blocks' hashes. `start`: how many blocks of the chain come
    before this segment. `parent`: the segment with the blocks just before; the root is its own parent. `children`: how
    many segments continue this one.
    """

    __slots__ = ("blocks", "children", "parent", "stamps", "start")

    stamps: dict[int, tuple[float, int]]  # by slot (replica's index): a `routed.Stamp`; only used in that module

    def __init__(self, parent: Segment | None, start: int, blocks: array[int]):
        self.parent = self if parent is None else parent
        self.start = start
        self.blocks = blocks
        self.children = 0


class Tree:
    """A radix tree of segments, each found by the hash of its first block.

    A block's hash stands for the whole prefix up to the block, so comparing the last hash of a segment tells whether a
    prompt has all blocks of the segment.
    """

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
        """Find the longest beginning of this chain of blocks that is in the tree.

        Returns the segment (tree node) with its last block, and its length in blocks.
        """
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
        """Cut a segment (tree node) in two, after the first `end` blocks of its chain; return the part before the cut.

        `rest`: the segment to cut, which becomes the part after the cut.
        """
        size = end - rest.start
        segment = Segment(rest.parent, rest.start, rest.blocks[:size])
        segment.children = 1
        rest.parent, rest.start, rest.blocks = segment, end, rest.blocks[size:]
        self._heads[segment.blocks[0]] = segment
        self._heads[rest.blocks[0]] = rest
        return segment

    def _branch(self, segment: Segment, start: int, new: array[int]) -> Segment:
        """Add new blocks to the tree as a segment that follows the given one, and return the new segment.

        `new`: the blocks' hashes. `start`: how many blocks of the chain come before the new ones.
        """
        self._count += len(new)
        segment.children += 1
        child = self._heads[new[0]] = Segment(segment, start, new)
        return child


class EngineModel(Tree):
    """A model of one engine's cache, which evicts the least recently used chains, last blocks first.

    The engine reports its capacity in blocks. `limit`, how many of them hold prompts, is learned from the cached tokens
    that the engine reports with its answers: `limit` shrinks when the engine had fewer than predicted and grows when it
    had more, between a quarter and all of the capacity.

    Segments are kept in order of their last use. Using a chain moves its segments to the end of the order, deepest
    first, so a parent is always more recent than its children and the least recent segment is a leaf.
    """

    __slots__ = ("_found", "_order", "capacity", "limit", "most")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.limit = capacity
        self.most = 1 << 30  # what the byte budget allows
        self.clear()

    def clear(self) -> None:
        self._empty()
        self._order: OrderedDict[Segment, None] = OrderedDict()  # least recently used first
        self._found: tuple[Sequence[int], Segment, int] = ((), self._root, 0)  # the last call of `reach` and its result

    def resize(self, capacity: int) -> None:
        """Set the capacity in blocks; the limit starts again from the whole capacity."""
        if capacity != self.capacity:
            self.capacity = self.limit = capacity
            self._found = ((), self._root, 0)
            self._shed()

    def add(self, hashes: Sequence[int]) -> None:
        """Record that the engine computed or used the blocks of this chain (a prompt) just now.

        The least recently used blocks are evicted if the modelled cache is full.
        """
        order, root = self._order, self._root
        asked, segment, held = self._found  # usually for this chain, which was looked up to choose the replica
        if asked is not hashes:
            segment, held = self._longest(hashes)
        self._found = ((), root, 0)
        if 0 < held - segment.start < len(segment.blocks):
            segment = self._split(segment, held)
        if held < len(hashes):
            new = hashes[held:] if type(hashes) is array else array("Q", hashes[held:])
            if segment is not root and not segment.children:  # a leaf can be extended in place
                self._count += len(new)
                segment.blocks += new
            else:
                segment = self._branch(segment, held, new)
                order[segment] = None
        touch = order.move_to_end
        while segment is not root:
            touch(segment)
            segment = segment.parent
        if self._count > self.limit or self._count + SEGMENT_BLOCKS * len(order) > self.most:
            self._shed()

    def take_back(self, hashes: Sequence[int], held: int) -> None:
        """Remove a chain's blocks after its first `held` blocks, as the engine never computed them.

        Blocks that are followed by another chain's blocks stay.
        """
        segment, end = self._longest(hashes)
        while end > held and not segment.children and end == segment.start + len(segment.blocks):
            self._drop(segment, end - held)
            end, segment = segment.start, segment.parent

    def reach(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of this chain (a prompt) the engine should still have in its cache."""
        segment, held = self._longest(hashes)
        self._found = hashes, segment, held
        return held

    def learn(self, predicted: int, reported: int) -> None:
        """Correct `limit`, the modelled cache size in blocks, by 2 % after the engine's report on one prompt.

        `predicted`, `reported`: how many of the prompt's blocks this model predicted, and the engine reported, as
        cached. The limit shrinks if fewer were reported than predicted, and grows if more were.
        """
        if reported < predicted:
            self.limit = max(self.limit - self.limit // 50, -(-self.capacity // 4))
        elif reported > predicted:
            self.limit = min(self.limit + self.limit // 50 + 1, self.capacity)

    def _split(self, rest: Segment, end: int) -> Segment:
        """Cut a segment (tree node) in two, after the first `end` blocks of its chain; return the part before the cut.

        The part after the cut keeps its place in the order of last use; the part before becomes the most recent.
        """
        segment = super()._split(rest, end)
        self._order[segment] = None
        return segment

    def _shed(self) -> None:
        """Drop blocks until both limits hold, from the ends of the least recently used segments.

        The limits are `limit`, in blocks, and the byte budget `most`, which also counts the segments themselves.
        """
        count, order = self._count, self._order
        excess = max(count - self.limit, count + SEGMENT_BLOCKS * len(order) - self.most)
        while excess > 0 and order:
            excess -= self._drop(next(iter(order)), excess)

    def _drop(self, segment: Segment, count: int) -> int:
        """Remove up to `count` blocks from the end of a segment without children; return how many were removed."""
        blocks = segment.blocks
        size = len(blocks)
        if count < size:
            del blocks[size - count :]
            self._count -= count
            return count
        self._count -= size
        self._heads.pop(blocks[0], None)  # the entry may be gone if two hashes collided
        del self._order[segment]
        segment.parent.children -= 1
        return size


def _shared(blocks: array[int], hashes: Sequence[int], start: int, size: int) -> int:
    """Return how many leading hashes of `blocks` equal those in `hashes` from index `start` on, by bisection.

    Only the first `size` hashes are compared. Of these the first pair must be equal and the last pair different.
    """
    low, high = 1, size - 1
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == hashes[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
