"""Changes to a replica's blocks that wait to be handed to the map, gathered for each tier.

A call to the map takes about 40 us and each of its blocks 0.3 us. An engine's step evicts and fills blocks of several
prompts in turn, and copies them to host memory one by one, so the changes of all its events are handed over together.
"""

from collections.abc import Sequence

from cachemap.map import CacheMap

Key = int | bytes
MOST_PENDING = 2048  # blocks to store, and keys to remove, that are gathered for one tier before they go to the map


class Pending:
    """The waiting changes to the blocks of one tier: a memory tier or a cache group (layers with blocks of their own).

    Stores and removals wait together, since their order matters only for one key. Hand all over before you remove a
    key that waits to be stored, or store one that waits to be removed (`removes`).

    `stored`: our hash of each block that waits to be stored, by the engine's key.
    """

    __slots__ = ("_gone", "_heads", "_removed", "_tail", "_twice", "stored")

    def __init__(self) -> None:
        self.stored: dict[Key, int] = {}
        self._heads: list[tuple[int, int]] = []  # where chains begin among `stored`, as for `CacheMap.store`
        self._tail = 0  # the hash of the block stored last
        self._twice: list[tuple[Key, int, int]] = []  # blocks reported once more: key, hash and parent of each
        self._removed: list[Key] = []
        self._gone: set[Key] = set()  # the same, for look-ups

    @property
    def is_full(self) -> bool:
        """Whether so many blocks wait that they should be handed over."""
        return len(self.stored) + len(self._twice) > MOST_PENDING or len(self._removed) > MOST_PENDING

    def removes(self, keys: Sequence[Key]) -> bool:
        """Return whether any of these engine keys waits to be removed."""
        return bool(self._gone) and not self._gone.isdisjoint(keys)

    def stores(self, keys: Sequence[Key]) -> bool:
        """Return whether any of these engine keys waits to be stored."""
        return bool(self.stored) and not self.stored.keys().isdisjoint(keys)

    def store_chain(self, keys: Sequence[Key], hashes: list[int], parent: int) -> None:
        """Add a chain of consecutive blocks; a block that waits already gets one more copy.

        `keys`, `hashes`: the engine's key and our hash of each block. `parent`: the hash of the block before the first
        one, 0 at a prompt's start.
        """
        if self.stored.keys().isdisjoint(keys):
            self._begin(parent)
            self.stored.update(zip(keys, hashes))
            self._tail = hashes[-1]
            return
        for key, block, above in zip(keys, hashes, (parent, *hashes), strict=False):
            self._store(key, block, above)

    def store(self, key: Key, block: int) -> None:
        """Add one block, whose place in a prompt does not matter. `block`: our hash of it."""
        self._store(key, block, self._tail)

    def _store(self, key: Key, block: int, parent: int) -> None:
        if key in self.stored:
            self._twice.append((key, self.stored[key], parent))
        else:
            self._begin(parent)
            self.stored[key] = self._tail = block

    def _begin(self, parent: int) -> None:
        if parent != self._tail or not self.stored:
            self._heads.append((len(self.stored), parent))

    def remove(self, keys: Sequence[Key]) -> None:
        """Add the removal of one copy of each block with these engine keys."""
        self._removed += keys
        self._gone.update(keys)

    def hand_over(self, cache_map: CacheMap, slot: int, tier: str) -> int:
        """Make all waiting changes in the map; return how many blocks the replica no longer holds.

        `slot`: the replica's index in the map. `tier`: the name under which the map keeps these blocks.
        """
        gone = 0
        if self._removed:
            gone = cache_map.remove(slot, self._removed, tier)
            self._removed, self._gone = [], set()
        if self.stored:
            cache_map.store(slot, list(self.stored.values()), list(self.stored), tier, self._heads)
            if self._twice:
                heads = [(at, parent) for at, (_, _, parent) in enumerate(self._twice)]
                keys = [key for key, _, _ in self._twice]
                cache_map.store(slot, [block for _, block, _ in self._twice], keys, tier, heads)
            self.stored, self._heads, self._tail, self._twice = {}, [], 0, []
        return gone
