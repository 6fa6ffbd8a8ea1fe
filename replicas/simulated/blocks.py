"""The simulated engine's KV blocks: reference counts, a free queue in LRU order, and the prefix cache.

This follows vLLM v1's block pool. A block is an index. Every block that no request uses is in the free queue, whether
it is cached (holds the KV of a key, so that it can be a hit) or not. The block at the queue's head is taken first; then
it is no longer cached. Two blocks may hold the same key: a prompt that ends on a block's edge computes its last block
again, and vLLM keeps both copies, and reports each of them as stored and as removed.

The queue has three parts, taken in this order: blocks that were released with nothing cached in them, last released
first; blocks that were never used, of which only the number is kept, since a simulated fleet has millions; all other
blocks, longest unused first.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

Key = Hashable


class BlockPool:
    """A pool of `num_blocks` KV cache blocks. As in vLLM, block 0 is the null block, which no request gets."""

    def __init__(self, num_blocks: int):
        self.usable = num_blocks - 1
        self._num_blocks = num_blocks
        self._uses, self._key_of = [0], [None]  # of the blocks used so far; the first is the null block
        self._cached: dict[Key, int] = {}
        self._copies: dict[Key, list[int]] = {}
        self._blank: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks that no request uses, cached or not."""
        return len(self._free) + len(self._blank) + self._num_blocks - len(self._uses)

    @property
    def usage(self) -> float:
        """The share of the blocks in use by requests, 0 to 1: vLLM's `kv_cache_usage_perc`."""
        return 1.0 - self.free / self.usable

    @property
    def keys(self) -> list[Key]:
        """The keys of all cached blocks."""
        return list(self._cached)

    def find(self, keys: Sequence[Key], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of `keys`, at most `limit` of them."""
        # stops at the first None; a loop would take twice as long, and a simulated fleet looks up 200 keys a request
        return list(iter(map(self._cached.get, keys[:limit]).__next__, None))

    def block(self, key: Key) -> int | None:
        """Return the block that is cached for this key, or None."""
        return self._cached.get(key)

    def idle(self, blocks: list[int]) -> int:
        """Return how many of `blocks` no request uses; `use(blocks)` would take these from the free queue."""
        uses = self._uses
        return sum(1 for block in blocks if not uses[block])

    def use(self, blocks: list[int]) -> None:
        """Add a request as a user of each of `blocks`; blocks that no request used before leave the free queue."""
        uses, free = self._uses, self._free
        for block in blocks:
            if not uses[block]:
                del free[block]
            uses[block] += 1

    def take(self, count: int, removed: list[Key]) -> list[int]:
        """Take `count` blocks from the head of the free queue; add the keys of blocks that are evicted to `removed`."""
        blank = self._blank
        taken = blank[: -count - 1 : -1]
        del blank[len(blank) - len(taken) :]
        for block in taken:
            self._uses[block] = 1
        if new := min(count - len(taken), self._num_blocks - len(self._uses)):
            start = len(self._uses)
            self._uses += [1] * new
            self._key_of += [None] * new
            taken += range(start, start + new)
        if len(taken) < count:
            taken += self._take_oldest(count - len(taken), removed)
        return taken

    def _take_oldest(self, count: int, removed: list[Key]) -> list[int]:
        uses, key_of, cached, copies, pop = self._uses, self._key_of, self._cached, self._copies, self._free.popitem
        taken = [pop(False)[0] for _ in range(count)]
        keys = [key for block in taken if (key := key_of[block]) is not None]
        removed += keys
        for block in taken:
            uses[block] = 1
        if copies.keys().isdisjoint(keys):
            for block in taken:
                key_of[block] = None
            deque(map(cached.__delitem__, keys), maxlen=0)
            return taken
        for block in taken:
            key, key_of[block] = key_of[block], None
            if key in copies:
                self._forget_copy(key, block)
            elif key is not None:
                del cached[key]
        return taken

    def _forget_copy(self, key: Key, block: int) -> None:
        copies = self._copies[key]
        if self._cached[key] == block:
            self._cached[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def store(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """Cache full blocks, each under its key, so that later lookups of the key find it."""
        cached, key_of = self._cached, self._key_of
        for block, key in zip(blocks, keys):
            key_of[block] = key
        if cached.keys().isdisjoint(keys):
            cached.update(zip(keys, blocks))
            return
        for block, key in zip(blocks, keys):
            if cached.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks, last first, so that its last blocks are evicted before its first ones.

        Blocks that are not cached go to the head of the free queue: losing them costs nothing.
        """
        uses, key_of, free = self._uses, self._key_of, self._free
        for block in reversed(blocks):
            left = uses[block] - 1
            uses[block] = left
            if not left:
                if key_of[block] is None:
                    self._blank.append(block)
                else:
                    free[block] = None

    def clear(self) -> bool:
        """Empty the prefix cache and return True. As in vLLM, do nothing and return False while requests use blocks."""
        if self.free != self.usable:
            return False
        self._cached.clear()
        self._copies.clear()
        self._key_of = [None] * len(self._key_of)
        return True
