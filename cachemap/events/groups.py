"""GroupEvents: what is stored in an engine's further cache groups and dropped from them, on its way to the map.

Engines name a block by the same key in all groups, and tell its tokens with that of full attention. The events of one
step's blocks come group by group, that of full attention among them, so what comes before it waits for it.
"""

from collections.abc import Callable

from cachemap.changes import EVERY, CacheGroup
from cachemap.events.records import FULL_ATTENTION, MAMBA, SLIDING_WINDOW, Removed, Stored
from cachemap.map import CacheMap

Key = int | bytes


class GroupEvents:
    """Those of one replica. `hash_of` gives our hash of the block that full attention has under a key, or 0.

    Counts, in blocks: `removed`; `orphans`, which full attention does not have."""

    def __init__(self, cache_map: CacheMap, slot: int, block_size: int, hash_of: Callable[[Key], int]):
        self._map, self._slot, self._block_size, self._hash_of = cache_map, slot, block_size, hash_of
        self._known: dict[int, CacheGroup] = {}  # by the engine's index
        self.waiting: list[Stored] = []  # for what their keys stand for
        self._storing: dict[str, dict[Key, int]] = {}  # by tier, key -> hash
        self._removing: dict[str, list[Key]] = {}
        self.removed = 0
        self.orphans = 0

    def knows(self, index: int) -> bool:
        """Whether the replica has such a group beside that of full attention."""
        if index not in self._known:  # maybe another gateway was told of it
            self._known = {group.index: group for group in self._map.groups(self._slot).values()}
        return index in self._known

    def trouble(self, event: Stored) -> str | None:
        """Why nothing can be known of an engine with this group; None if all is well."""
        if event.block_size != self._block_size:
            return (
                f"blocks of one of the engine's cache groups have {event.block_size} tokens, "
                f"prompts are hashed in blocks of {self._block_size}"
            )
        if event.kind not in (FULL_ATTENTION, SLIDING_WINDOW, MAMBA) or (
            event.kind == SLIDING_WINDOW and not event.window
        ):
            return f"the engine has a cache group of a kind that is not understood: {event.kind}"
        return None

    def store(self, event: Stored) -> None:
        """It comes to the map with `follow`, `remove` or `flush`."""
        if not self.knows(event.group):
            last = EVERY if event.kind == FULL_ATTENTION else self._blocks(event.window or 1)
            self._known[event.group] = CacheGroup(event.group, last)
        self._map.add_group(self._slot, self._known[event.group])
        self.waiting.append(event)

    def _blocks(self, window: int) -> int:
        """Blocks that the tokens before the next one in its window lie in."""
        return max(1, -(-(window - 1) // self._block_size))

    def follow(self) -> None:
        """What waits for full attention's blocks has them now."""
        for event in self.waiting:
            tier = self._known[event.group].tier
            storing = self._storing.setdefault(tier, {})
            if self._removing.get(tier) or not storing.keys().isdisjoint(event.keys):
                self._hand_over(tier)
                storing = self._storing[tier]
            for key in event.keys:
                if block := self._hash_of(key):
                    storing[key] = block
                else:
                    self.orphans += 1
        self.waiting.clear()

    def remove(self, event: Removed) -> None:
        self.follow()
        tier = self._known[event.group].tier
        if self._storing.get(tier):
            self._hand_over(tier)
        self._removing.setdefault(tier, []).extend(event.keys)

    def flush(self) -> None:
        """Hand over what is pending, but for what waits."""
        for tier in {*self._storing, *self._removing}:
            self._hand_over(tier)

    def _hand_over(self, tier: str) -> None:
        """One of the two is empty: what was dropped before it was stored, or after it, has been handed over."""
        if removing := self._removing.pop(tier, None):
            self.removed += self._map.remove(self._slot, removing, tier)
        storing, self._storing[tier] = self._storing.get(tier), {}
        if storing:
            self._map.store(self._slot, list(storing.values()), list(storing), tier)

    def forget(self) -> None:
        """Nothing pending counts, and which groups there are is to be told anew."""
        self._known, self.waiting, self._storing, self._removing = {}, [], {}, {}
