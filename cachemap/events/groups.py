"""The events of an engine's cache groups other than the main one (full attention), on their way to the map.

A cache group is a set of like layers with blocks of their own. An engine names a block by the same key in all groups,
and sends the block's tokens only with the event of full attention. The events of one engine step come group by group.
An event that comes before the one of full attention waits here for that one.

Blocks of full attention can be larger than the blocks at whose ends Mamba's states are kept. Then the tokens in Mamba's
own event show which prefix a state belongs to. A prompt can also end within a block of full attention. The engine's key
of that end is equal to the key of Mamba's state there, so Mamba's event shows which prefix it stands for.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import repeat

from cachemap.changes import EVERY, STATES, CacheGroup
from cachemap.events.pending import Key, Pending
from cachemap.events.records import FULL_ATTENTION, MAMBA, SLIDING_WINDOW, Removed, Stored
from cachemap.hashing import TOKEN_BYTES
from cachemap.map import CacheMap

# The most groups of one replica, and the highest index of a group. An engine may have as many groups as layers.
MOST_GROUPS, MOST_INDEX = 64, STATES - 1
# MOST_PIECE blocks are handled in one step of 5 ms: a million blocks of one event at once held up all clients for 4.7
# s. A call to the map takes as long as FLUSH blocks.
MOST_PIECE, FLUSH = 1024, 32
HASHED = 32  # how many blocks are hashed from their tokens in the time that the map takes for one block
MOST_STEP = 1 << 19  # the most bytes of tokens in Mamba's event of a step for a prompt's end to be looked for in it


class GroupEvents:
    """The events of one replica's cache groups (layers with blocks of their own) besides the main one, full attention.

    `slot`: the replica's index in the map. `told`: a function that returns, for each engine key, our hash of the block,
    or 0 if the key is unknown. `hashes_of`: a function that returns our hashes of the last blocks of an event
    (`EventApplier._hashes_of`). `removed`: how many blocks were removed from the map. `orphans`: how many blocks were
    left out because full attention does not have them.
    """

    def __init__(self, cache_map: CacheMap, slot: int, block_size: int, told: Callable[[Sequence[Key]], list[int]],
                 hashes_of: Callable[[Stored, int, int, int], Generator[None, None, list[int]]]):  # fmt: skip
        self._map, self._slot, self._block_size = cache_map, slot, block_size
        self._told, self._hashes_of = told, hashes_of
        self._parts: CacheGroup | None = None
        # By the key of a waiting prompt's end (its last, partial block): Mamba's event of the same engine step.
        # `_alone` has the keys of the ends whose Mamba event has not come yet.
        self._beside: dict[Key, Stored] = {}
        self._alone: list[Key] = []
        self._state: Stored | None = None  # the last event of Mamba
        # An event of Mamba, and our hashes of its blocks by their tokens; 0 for tokens that several blocks have.
        self._ends: tuple[Stored | None, dict[bytes, int]] = None, {}
        self._known: dict[int, CacheGroup] = {}  # the replica's groups by the engine's index of each
        self.waiting: list[Stored] = []  # events for whose keys no hashes are known yet
        self.waiting_work = 0  # the work to apply the waiting events, in blocks
        self._pending: dict[str, Pending] = {}  # by tier
        self.removed = 0
        self.orphans = 0

    def knows(self, index: int) -> bool:
        """Return whether the replica is known to have a cache group with this index, other than the full-attention one.

        A cache group is a set of like layers with blocks of their own. `index`: the engine's index of the group.
        """
        if index not in self._known:  # another gateway may have learned it
            groups = self._map.groups(self._slot).values()
            self._known |= {group.told_as: group for group in groups if not group.has_parts}
        return index in self._known

    def trouble(self, event: Stored) -> str | None:
        """Return why this event's cache group makes all events of the engine unusable, or None if it does not.

        A cache group is a set of like layers with blocks of their own.
        """
        sizes = sorted((event.block_size, self._block_size))
        parts = event.kind == MAMBA and sizes[0] > 0 and sizes[1] % sizes[0] == 0
        if event.block_size != self._block_size and not parts:
            return (
                f"blocks of one of the engine's cache groups have {event.block_size} tokens, "
                f"prompts are hashed in blocks of {self._block_size}"
            )
        if event.kind not in (FULL_ATTENTION, SLIDING_WINDOW, MAMBA) or (
            event.kind == SLIDING_WINDOW and not event.window
        ):
            return f"the engine has a cache group of a kind that is not understood: {event.kind[:100]}"
        known = self.knows(event.group)
        if event.group > MOST_INDEX or (not known and len(self._known) >= MOST_GROUPS):
            return f"the engine has more than {MOST_GROUPS} cache groups, or one of number {event.group}"
        return None

    def store_part(self, event: Stored) -> None:
        """Queue an event about a prompt's last, partial block, for an engine with larger blocks than the map's.

        `following` finds the block's hash later, in the event of Mamba layers that the same engine step sends.
        """
        self._wait(event)
        if self._state is not None and self._state.group < event.group:
            self._beside[event.keys[0]] = self._state
        else:
            self._alone += event.keys

    def store(self, event: Stored) -> None:
        """Queue an event of a cache group (like layers with blocks of their own), and note the group.

        The event waits until `following` finds its blocks' hashes. An event of Mamba layers is also kept, because it
        shows the hashes of prompts' last, partial blocks of the same engine step.
        """
        if not self.knows(event.group):
            if event.kind == MAMBA:
                self._known[event.group] = CacheGroup.of_states(event.group)
            else:
                # how many blocks hold the tokens that a sliding window reaches back over
                window = max(1, -(-((event.window or 1) - 1) // self._block_size))
                last = EVERY if event.kind == FULL_ATTENTION else min(EVERY, window)
                self._known[event.group] = CacheGroup(event.group, last)
        self._map.add_group(self._slot, self._known[event.group])
        self._wait(event)
        if event.kind == MAMBA:
            self._state = event
            self._beside.update(dict.fromkeys(self._alone, event))
            self._alone.clear()

    def _wait(self, event: Stored) -> None:
        self.waiting.append(event)
        self.waiting_work += self._work(event)

    def _work(self, event: Stored) -> int:
        """Return how long it takes to find the hashes of an event's blocks.

        The unit is the time that the map takes for one block.
        """
        return FLUSH // 2 + len(event.keys) + len(event.tokens) // (self._block_size * TOKEN_BYTES * HASHED)

    # --- blocks of full attention with several hashed blocks each

    @property
    def whole(self) -> int:
        """How many of the map's blocks make up one block of full attention; 0 if both have the same size."""
        return self._parts.last if self._parts is not None else 0

    def look_up(self) -> None:
        """Take over from the map what another gateway may have learned: how large a block of full attention is."""
        if self._parts is None:
            self._parts = next((group for group in self._map.groups(self._slot).values() if group.has_parts), None)

    def learn_whole(self, index: int, blocks: int) -> None:
        """Note that one block of full attention is as large as `blocks` of the map's blocks.

        Also adds to the map the cache group for prompts' last, partial blocks. `index`: the engine's index of the
        full-attention group.
        """
        if blocks != self.whole:
            self._parts = CacheGroup.of_parts(index, blocks)
        if self._parts is not None:
            self._map.add_group(self._slot, self._parts)

    def remove_parts(self, keys: Sequence[Key]) -> None:
        """Queue the removal of prompts' last, partial blocks with these engine keys.

        Iterate `following` to its end before, so that no earlier event about these blocks still waits.
        """
        if self._parts is not None:
            self._remove(self._parts.tier, keys)

    # ---

    def _tier(self, event: Stored) -> str:
        parts = self._parts
        return parts.tier if parts is not None and event.group == parts.told_as else self._known[event.group].tier

    def _hashes_under(self, keys: Sequence[Key]) -> list[int]:
        """Return our hash of the block with each engine key, 0 for an unknown key.

        The keys that are not pending here are looked up in one call, as a call for each takes 10 to 100 us.
        """
        pending = [one.stored for one in self._pending.values() if one.stored]
        found = [next((stored[key] for stored in pending if key in stored), 0) for key in keys]
        missing = [at for at, block in enumerate(found) if not block]
        for at, block in zip(missing, self._told([keys[at] for at in missing]), strict=True):
            found[at] = block
        return found

    def _named(self, event: Stored) -> Generator[None, None, list[tuple[Key, int]]]:
        """Pair each engine key of an event with the map's hash of its block, 0 if unknown; yield between steps."""
        known: list[tuple[Key, int]] = []
        for start in range(0, len(event.keys), MOST_PIECE):
            if start:
                yield
            keys = event.keys[start : start + MOST_PIECE]
            known += zip(keys, self._hashes_under(keys), strict=True)
        if not event.tokens or all(block for _, block in known):
            return known
        above = 0 if event.parent is None else self._hashes_under([event.parent])[0]
        if event.parent is not None and not above:
            if event.kind == FULL_ATTENTION:
                known = list(zip(event.keys, repeat((yield from self._beside_states(event))), strict=False))
            return known
        whole = event.block_size // self._block_size
        hashes = (yield from self._hashes_of(event, above, len(known), whole)) if whole else []
        return list(zip(event.keys, hashes, strict=True)) if len(hashes) == len(known) else known

    def _beside_states(self, part: Stored) -> Generator[None, None, int]:
        """Return our hash of a prompt's last, partial block, 0 if unknown; yield between steps of the work.

        `part`: the event about that block. Its tokens are looked for in Mamba's event of the same engine step.
        """
        states = self._beside.get(part.keys[0])
        if states is None:
            return 0
        if self._ends[0] is not states:
            self._ends = states, (yield from self._ends_in(states))
        return self._ends[1].get(part.tokens, 0)

    def _ends_in(self, states: Stored) -> Generator[None, None, dict[bytes, int]]:
        """Return our hashes of the blocks in a Mamba event, by each block's tokens; yield between steps of the work.

        The hash is 0 for tokens that several of the blocks have.
        """
        above = 0 if states.parent is None else self._hashes_under([states.parent])[0]
        if (states.parent is not None and not above) or len(states.tokens) > MOST_STEP:
            return {}
        width, found = self._block_size * TOKEN_BYTES, {}
        hashes = yield from self._hashes_of(states, above, len(states.tokens) // width, 1)
        for at, block in enumerate(hashes):
            tokens = states.tokens[at * width : (at + 1) * width]
            found[tokens] = 0 if tokens in found else block
        return found

    def follow_soon(self) -> None:
        """Find the hashes for all waiting events now if that is little work, and otherwise leave it to later steps."""
        if self.waiting_work <= MOST_PIECE:
            for _ in self.following():
                pass

    def following(self) -> Iterator[None]:
        """Find the hashes for the blocks of all waiting events, and queue the blocks for the map.

        Call this when the blocks of full attention are known. The hash of a prompt's last, partial block is found
        through Mamba's event. Yields between steps of some milliseconds; the map may be read then.
        """
        work = 0
        for event in sorted(self.waiting, key=lambda one: one.kind == FULL_ATTENTION):
            tier = self._tier(event)
            pending = self._pending.setdefault(tier, Pending())
            work += self._work(event)
            if pending.removes(event.keys) or pending.stores(event.keys) or work > MOST_PIECE:
                self._hand_over(tier)
                work += FLUSH
            if work > MOST_PIECE:
                work = 0
                yield
            # Where blocks of full attention are larger than the map's, a key may stand for a block that no event
            # reports.
            is_told = not self.whole and event.block_size >= self._block_size
            for number, (key, block) in enumerate((yield from self._named(event)), 1):
                if block:
                    if key not in pending.stored:  # an event that names a block twice means one copy
                        pending.store(key, block)
                elif is_told:
                    self.orphans += 1
                if not number % MOST_PIECE:
                    self._hand_over(tier)
                    yield
        self.waiting.clear()
        self.waiting_work = 0
        self._ends = None, {}
        self._beside.clear()
        self._alone.clear()

    def remove(self, event: Removed) -> None:
        """Queue the removal of an event's blocks from its cache group.

        Iterate `following` to its end before, so that no earlier event about these blocks still waits.
        """
        self._remove(self._known[event.group].tier, event.keys)

    def _remove(self, tier: str, keys: Sequence[Key]) -> None:
        pending = self._pending.setdefault(tier, Pending())
        if pending.stores(keys):
            self._hand_over(tier)
        pending.remove(keys)
        if pending.is_full:
            self._hand_over(tier)

    def flush(self) -> None:
        """Hand all pending changes to the map, except events that still wait for their blocks' hashes."""
        for tier in self._pending:
            self._hand_over(tier)

    def _hand_over(self, tier: str) -> None:
        self.removed += self._pending[tier].hand_over(self._map, self._slot, tier)

    def forget(self) -> None:
        """Drop all pending changes and waiting events, and all that is known of the engine's cache groups."""
        self._known, self.waiting, self._pending, self._parts = {}, [], {}, None
        self.waiting_work = 0
        self._beside, self._alone, self._state = {}, [], None
