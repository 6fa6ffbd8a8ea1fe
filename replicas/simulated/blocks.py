"""The simulated engine's KV blocks: reference counts, a free queue in LRU order, and the prefix cache.

Follows vLLM v1's block pool. A block is an index. Every block nobody uses stands in the free
queue, cached or not, and the head of the queue is taken (and forgotten by the cache) first. Two
blocks may hold the same key: a prompt that ends on a block's edge computes its last block again, and
vLLM keeps both copies, reports each as stored and each as removed.
"""
from collections import OrderedDict
from collections.abc import Hashable, Sequence

Key = Hashable


class BlockPool:
    """`num_blocks` as vLLM counts them: block 0 is its null block and is never handed out."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is vLLM's null block), not {num_blocks}")
        self.usable = num_blocks - 1
        self._uses = [0] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        self._cached: dict[Key, int] = {}
        self._copies: dict[Key, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def free(self) -> int:
        """Blocks that nobody uses, whether or not they still hold something cached."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use by requests, 0 to 1: vLLM's `kv_cache_usage_perc`."""
        return 1.0 - len(self._free) / self.usable

    @property
    def cached(self) -> int:
        """Distinct keys that would be hits now."""
        return len(self._cached)

    def find(self, keys: Sequence[Key], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of `keys`, at most `limit` of them."""
        cached, found = self._cached, []
        for key in keys[:limit]:
            block = cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: list[int]) -> int:
        """How many of `blocks` stand in the free queue (using them takes room there)."""
        uses = self._uses
        return sum(1 for block in blocks if not uses[block])

    def use(self, blocks: list[int]) -> None:
        uses, free = self._uses, self._free
        for block in blocks:
            if not uses[block]:
                del free[block]
            uses[block] += 1

    def take(self, count: int, removed: list[Key]) -> list[int]:
        """`count` blocks from the head of the free queue; keys they held are appended to `removed`."""
        uses, key_of, cached, copies, pop = self._uses, self._key_of, self._cached, self._copies, self._free.popitem
        taken = [pop(False)[0] for _ in range(count)]
        for block in taken:
            uses[block] = 1
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                removed.append(key)
                if key in copies:
                    self._forget_copy(key, block)
                else:
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
        """The blocks are full: from now on they are hits for `keys`."""
        cached, key_of = self._cached, self._key_of
        for block, key in zip(blocks, keys):
            key_of[block] = key
            if cached.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a request's blocks, last first, so that its tail is evicted before its head.

        Blocks that hold nothing cached go to the head of the queue: losing them costs nothing."""
        uses, key_of, free = self._uses, self._key_of, self._free
        for block in reversed(blocks):
            left = uses[block] - 1
            uses[block] = left
            if not left:
                free[block] = None
                if key_of[block] is None:
                    free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget everything cached; refused (False) while a request holds blocks, as vLLM does."""
        if len(self._free) != self.usable:
            return False
        self._cached.clear()
        self._copies.clear()
        self._key_of = [None] * len(self._key_of)
        return True
