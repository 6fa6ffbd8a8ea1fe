"""The application of one replica's KV cache events to the map, without sockets or clocks.

The engine names blocks by keys of its own, which are opaque here. Blocks are hashed again from their tokens and the
hash of the block before, so that a block gets the same hash from an event as from a prompt, whatever the engine hashes
with. The changes to one tier reach the map together (`Pending`).
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import numpy as np

from cachemap.changes import ChunkTier
from cachemap.events.chunks import MOST_BLOCKS, Chunk, Chunks, block_keys, chains
from cachemap.events.groups import FLUSH, HASHED, MOST_PIECE, GroupEvents
from cachemap.events.pages import Pages
from cachemap.events.pending import MOST_PENDING, Pending
from cachemap.events.records import (
    FULL_ATTENTION,
    MAMBA,
    MOST_AHEAD,
    UNTOLD,
    Agreed,
    Blocks,
    Cleared,
    Removed,
    Stored,
)
from cachemap.hashing import TOKEN_BYTES, chain_seed, covering, hash_blocks, looking_ahead
from cachemap.map import CacheMap

# The most blocks of the map in a chunk of a slower tier, or in one block of an engine: 65,536 tokens at 16 a block. 256
# tokens are usual.
MOST_CHUNK = 4096
SEARCHED = 16  # how many pages are visited one by one in the time that the map takes for one block
LEAST_BLOCK = 64  # bytes of tokens that count as one block when work is estimated: 16 tokens
MOST_STATES = 1 << 16  # the most blocks of one Mamba event: those of a million tokens, at 16 a block


class EventApplier:
    """Applies the events of one replica in order. Call `flush` before you read the map.

    An engine may have several cache groups (groups of like layers with blocks of their own). Prompts are looked up in
    the first group of full attention, called the main group here; `GroupEvents` handles the other groups.

    Arguments besides those with which prompts are hashed (`model`, `block_size`):
    `slot`: the replica's index in the map;
    `looks_ahead`: how many tokens after a block the block's name in prompts also covers;
    `told`: the engine's block format as earlier events showed it.

    Attributes (`orphans` and `ignored` count pages where the engine's pages are smaller than blocks):
    `blocks_stored`: how many blocks were stored in the main group;
    `blocks_removed`: how many blocks were removed;
    `orphans`: how many blocks were left out because their tokens or the block before them are unknown, so that they
    have no hash;
    `ignored`: how many blocks were left out for another reason: a slower tier keeps them for another cache group, or in
    chunks that do not consist of the map's blocks; they are parts of a block; or their format is not the engine's known
    one;
    `fault`: why nothing of this replica can be used, None while all is well.
    """

    def __init__(
        self, cache_map: CacheMap, slot: int, model: str, block_size: int, looks_ahead: int = 0, told: Blocks = UNTOLD
    ):
        self._map = cache_map
        self._slot = slot
        self._model = model
        self._block_size = block_size
        self._pending: dict[str, Pending] = {}  # by tier, the changes of the main group and of slower tiers
        # Our hash of blocks, by the engine's key: of the pending ones, and of known ones to which events refer.
        self._hash_of: dict[int | bytes, int] = {}
        self._work = 0  # blocks handled since the last step ended, besides those that `in_pieces` counts
        self._main: int | None = None  # the cache group in which prompts are looked up; None until an event shows it
        self._groups = GroupEvents(cache_map, slot, block_size, self._hashes_under, self._hashes_of)
        self.pages: Pages | None = None  # the engine's pages, if these are smaller than the map's blocks
        self._steps: Iterator[None] = iter(())  # the remaining work on the last event; iterating does it
        self._chunks: dict[str, Chunks] = {}  # the chunks of stores below the engine, by tier
        self._own_chunk = 1  # blocks in a chunk of the engine's own slower tiers, as far as events showed
        self.blocks_stored = 0
        self._removed = 0
        self._orphans = 0
        self.ignored = 0
        self.fault: str | None = None
        self._looks_ahead = looks_ahead
        self._has_wide = False  # a pending block of the engine is as large as several blocks of the map
        self.believe(told._replace(ahead=told.ahead or looks_ahead))
        self._root: tuple[bytes, list[object] | None] | None = None  # the first block of the last prompt that began
        self._salted = False

    @property
    def stored_as(self) -> Blocks:
        """The engine's block format, as shown by events that were applied here or that another gateway read."""
        return Blocks(self._size.known, self._ahead.known, self._states.known)

    def believe(self, told: Blocks) -> None:
        """Adopt the block format that another gateway read from events, until later events agree on another format.

        A format in which a block's name covers more than 16 tokens after the block (MOST_AHEAD) counts as unknown.
        """
        if told.ahead > MOST_AHEAD:
            told = UNTOLD
        self._size = Agreed(told.size, told.size > 0)
        self._ahead = Agreed(told.ahead, told.size > 0)
        self._states = Agreed(told.states, told.states > 0)

    @property
    def blocks_removed(self) -> int:
        return self._removed + self._groups.removed

    @property
    def orphans(self) -> int:
        return self._orphans + self._groups.orphans + (self.pages.orphans if self.pages is not None else 0)

    def reach(self, held: int, hashes: Sequence[int], seed: int, tokens: memoryview) -> int:
        """Return how many of a prompt's leading tokens the replica holds, in whole blocks of the engine.

        These are the map's blocks, or pages if the engine's blocks are smaller. `held`: how many leading blocks the map
        finds. `hashes`, `seed`: the hashes of the prompt's blocks and the seed of the first one. `tokens`: the prompt's
        token ids (uint32), without those that can never be a hit.
        """
        return self.pages.reach(held, hashes, seed, tokens) if self.pages is not None else held * self._block_size

    def apply(self, events: list[Stored | Removed | Cleared]) -> None:
        """Apply events in order; the more events in a call, the less each of them costs."""
        for _ in self._applying(events):
            pass

    def applying(self, events: list[Stored | Removed | Cleared]) -> Iterator[None]:
        """Apply events in order and hand all changes to the map, in steps of some milliseconds.

        Iterate to the end; between steps the map may be read.
        """
        for number, piece in enumerate(in_pieces(events)):
            if number:
                yield
            yield from self._applying(piece)
        yield from self.flushing()

    def _applying(self, events: list[Stored | Removed | Cleared]) -> Iterator[None]:
        self._look_up(events)
        self._groups.look_up()
        self._work = 0
        before: Stored | Removed | Cleared | None = None
        for event in joined(events):
            before, last = event, before
            if isinstance(event, Stored):
                self._store(event)
                yield from self._steps
            elif isinstance(event, Removed):
                if event.tier == "gpu" and (
                    self._groups.whole or (event.group != self._main and self._groups.knows(event.group))
                ):
                    self._work += self._groups.waiting_work
                    yield from self._groups.following()
                step = max(1, MOST_PIECE // self._blocks_under_key(event.tier))
                for start in range(0, len(event.keys), step):
                    if start:
                        yield
                    yield from self._remove(event._replace(keys=event.keys[start : start + step]))
                    yield from self._steps
            elif not isinstance(last, Cleared):
                self._flush()
                self._forget_own()
                self._map.clear(self._slot, below=False)  # tiers that outlive the engine's own cache stay
            if self.pages is not None:
                self._work += self.pages.searched // SEARCHED
                self.pages.searched %= SEARCHED
            if self._work > MOST_PIECE:
                self._work = 0
                yield

    def _blocks_under_key(self, tier: str) -> int:
        """Return the most blocks of the map that the removal of one engine key can concern in this memory tier."""
        if tier == "gpu":
            return self._groups.whole or 1
        tiers = self._map.chunk_tiers(self._slot)
        return max([one.blocks for one in tiers if one.base == tier and not one.own], default=1)

    def flush(self) -> None:
        """Hand all changes that are still pending here to the map."""
        for _ in self.flushing():
            pass

    def flushing(self) -> Iterator[None]:
        """Hand all pending changes to the map in steps of some milliseconds.

        Iterate to the end; between steps the map may be read. Sets `fault` if the events cannot be used.
        """
        if self._groups.waiting and self._main is None and not self._map.held(self._slot):
            self.fault = "none of the engine's layers has full attention"  # only its blocks show which tokens keys mean
        if self._has_wide and not self.stored_as.parts:  # only an engine with smaller Mamba blocks may have such blocks
            self._set_size_fault(self._size.known)
        self._has_wide = False
        yield from self._groups.following()
        self._flush()
        self._groups.flush()

    def _flush(self) -> None:
        """Hand the pending changes of the main cache group (full attention) and of slower tiers to the map."""
        for tier, pending in self._pending.items():
            self._work += FLUSH
            self._removed += pending.hand_over(self._map, self._slot, tier)
        self._pending.clear()

    def _to_store(self, tier: str, keys: Sequence[int | bytes]) -> Pending:
        """Return the pending changes of a tier, to which blocks with these engine keys can be added."""
        pending = self._pending.get(tier)
        if pending is not None and (pending.is_full or pending.removes(keys)):
            self._flush()
            pending = None
        if pending is None:
            pending = self._pending[tier] = Pending()
        return pending

    @property
    def blind(self) -> list[str]:
        """The names of the slower tiers whose store, such as LMCache, reports added chunks but no removed ones."""
        return [tier for tier, chunks in self._chunks.items() if chunks.blind]

    def forget(self) -> None:
        """Forget all blocks of the replica, here and in the map, and all changes that were not handed to the map yet.

        The counts and the engine's block format stay. So does the knowledge which slower tiers have a store that
        reports the chunks that it adds but not those that it removes (`blind`), as their chunks cannot be followed.
        """
        self._forget_own()
        self.let_go()
        self._map.clear(self._slot)

    def let_go(self) -> None:
        """Drop what is known of pages (blocks smaller than the map's) and chunks (several blocks in a slower tier).

        Without further events this would become outdated. The map is unchanged.
        """
        self._drop_pages()
        for chunks in self._chunks.values():
            chunks.clear()
        self._chunks = {tier: chunks for tier, chunks in self._chunks.items() if chunks.blind}
        self._own_chunk = 1

    def _drop_pages(self) -> None:
        if self.pages is not None:
            self._orphans += self.pages.orphans
            self.pages = None

    def _forget_own(self) -> None:
        self._pending, self._hash_of = {}, {}
        self.fault = self._main = None
        self._drop_pages()
        self._groups.forget()

    def _look_up(self, events: list[Stored | Removed | Cleared]) -> None:
        """Look up the hashes of the blocks in the map to which these events refer, and keep them in `_hash_of`.

        These are the blocks before those that were stored, and those that were copied to a slower tier. One call looks
        up all of them, as a call for each takes 12 to 40 us. A block that an earlier event of the piece removes stays
        known by its key, which means the same tokens. A key that is not known yet is looked up again when its event is
        applied: cache groups and chunks reach the map meanwhile.
        """
        self._hash_of = {key: block for one in self._pending.values() for key, block in one.stored.items()}
        wanted: list[int | bytes] = []
        for event in events:
            if isinstance(event, Stored):
                if event.parent is not None and event.tokens and event.block_size >= self._block_size:
                    wanted.append(event.parent)
                if event.tier != "gpu" and not event.below:
                    wanted += event.keys
        keys = [key for key in dict.fromkeys(wanted) if key not in self._hash_of]
        if keys:
            found = zip(keys, self._map.resolve(self._slot, keys), strict=True)
            self._hash_of.update([(key, block) for key, block in found if block])

    def _store(self, event: Stored) -> None:
        if event.block_size > MOST_CHUNK * self._block_size:
            self.ignored += len(event.keys)
            return
        if event.group != self._main and not self._is_main(event):
            self._store_in_group(event)
            return
        if event.below or (event.tokens and event.tier != "gpu" and event.block_size != self._block_size):
            self._store_chunks(event)
            return
        if event.tokens and event.tier == "gpu":
            if not self._is_as_known(event):
                self.ignored += len(event.keys) * max(1, event.block_size // self._block_size)
                return
            whole, parts = divmod(event.block_size, self._block_size)
            if whole > 1 and not parts:
                self._has_wide = True
                self._groups.learn_whole(event.group, whole)
                cut = self._cut(event)
                if cut is None:
                    self.ignored += len(event.keys) * whole
                    return
                event = cut
            elif self._groups.whole:
                self._groups.store_part(event)
                return
        if event.tokens and event.block_size != self._block_size:
            if event.block_size > 0 and self._block_size % event.block_size == 0:
                if self._size.known == self._block_size:
                    self.ignored += len(event.keys)  # parts of a block, or a size not used for prompts yet
                    self._drop_pages()
                    return
                self._store_pages(event)
                return
            self._set_size_fault(event.block_size)
            return
        if event.together > MOST_CHUNK:
            self.ignored += len(event.keys)
            return
        blocks = 1 if event.tier == "gpu" else self._blocks_of(event)
        tier = ChunkTier(event.tier, blocks, own=True).tier if blocks > 1 else event.tier
        pending = self._to_store(tier, event.keys)
        # A block in a slower tier is usually a copy of a known one, and its extra keys may have been sent with the
        # first copy only.
        if event.together > 1 or (event.tokens and (event.tier == "gpu" or not all(self._hashes_under(event.keys)))):
            self._store_chain(event, pending)
        else:
            self._store_known(event, blocks, pending)
        if not event.more:
            self._groups.follow_soon()

    def _set_size_fault(self, size: int) -> None:
        self.fault = f"the engine's blocks have {size} tokens, prompts are hashed in blocks of {self._block_size}"

    def _is_as_known(self, event: Stored) -> bool:
        """Return whether an event's blocks have the format known for full attention, or are parts of such blocks.

        The format is the block size and how many tokens after a block its name also covers. Another format replaces the
        known one once several events in a row have shown it. Sets `fault` if the names of prompts' blocks cover another
        number of tokens after the block than the engine's.
        """
        if event.looks_ahead > MOST_AHEAD:
            return False
        size, known, has_states = event.block_size, self._size.known, self._states.known > 0
        part = has_states and 0 < size < known and known % size == 0
        page = 0 < size < self._block_size and self._block_size % size == 0
        alike = part or self._learn(self._size, size, not has_states) or page
        if not self._learn(self._ahead, event.looks_ahead):
            return False
        if event.looks_ahead != self._looks_ahead:
            self.fault = (
                f"{event.looks_ahead} tokens behind a block are part of its name at the engine, "
                f"{self._looks_ahead} in prompts"
            )
            return False
        return alike

    def _learn(self, number: Agreed, told: int, ends_other: bool = True) -> bool:
        before = number.known
        agrees = number.take(told, ends_other)
        if before and number.known != before:
            self.fault = None  # it may be resolved now; if not, the next events set it again
        return agrees

    def _blocks_of(self, event: Stored) -> int:
        """Return how many blocks each chunk has in an event about the engine's own slower memory tier.

        The engine finds only whole chunks in such a tier. Some events report a chunk only by the key of its last block,
        which is all that the map needs. Until an event with tokens shows how many blocks a chunk has, such a chunk
        counts as one block.
        """
        known = event.together if event.tokens else max(self._own_chunk, self._map.own_chunk(self._slot))
        self._own_chunk = max(self._own_chunk, known)
        return event.together if event.tokens else known

    def _store_chain(self, event: Stored, pending: Pending) -> None:
        """Queue an event's consecutive blocks for the map; count blocks whose hash cannot be computed in `orphans`.

        Where a slower tier of the engine keeps several blocks as one chunk, only the last block of each chunk is
        queued.
        """
        ends = slice(event.together - 1, None, event.together)
        keys, parent = event.keys[ends], 0 if event.parent is None else self._hashes_under([event.parent])[0]
        hashes = self._hashes_under(keys) if event.together > 1 else [0]
        if not all(hashes):
            if event.parent is not None and not parent:
                self._orphans += len(event.keys)
                return
            hashes = self._hashes(event, parent)[ends]
        self._store_hashes(pending, keys, hashes, parent)
        self.blocks_stored += len(event.keys) - len(hashes)

    def _is_main(self, event: Stored) -> bool:
        """Return whether an event is the first one known to be of the main group (full attention).

        Returns False once the main group is known. If the event is of that group and about GPU memory, its group is the
        main group from now on.
        """
        if self._main is not None or event.kind != FULL_ATTENTION or self._groups.knows(event.group):
            return False
        if event.tier == "gpu":  # stores below the engine may not report the group
            self._main = event.group
        return True

    def _store_in_group(self, event: Stored) -> None:
        if event.tier != "gpu" or (event.tokens and len(event.keys) > MOST_STATES):
            self.ignored += len(event.keys)
        elif trouble := self._groups.trouble(event):
            self.fault = trouble
        else:
            if event.kind == MAMBA:
                self._learn(self._states, event.block_size)
                if event.looks_ahead != self._looks_ahead:  # names from its tokens would match no prompt's blocks
                    event = event._replace(tokens=b"", lookahead=b"")
                if self._main is not None and event.group > self._main:
                    event = self._salt(event)
            self._groups.store(event)

    def _salt(self, event: Stored) -> Stored:
        """Return a Mamba event with the tenant's cache salt added to its extra keys.

        The engine sends the salt only with the event of full attention's first block. If salts are in use and that
        event has not been seen, the result has no tokens, so that no tenant is predicted to find another's blocks.
        """
        if event.parent is not None or not event.tokens:
            return event
        if self._root is not None and event.tokens.startswith(self._root[0]):
            return event._replace(extra=[self._root[1]])
        return event._replace(tokens=b"") if self._salted else event

    def _cut(self, event: Stored) -> Stored | None:
        """Return the event with its large blocks cut into blocks of the size in which prompts are hashed.

        Returns None if it is unknown to which of the smaller blocks the event's extra keys (such as images) belong.
        """
        extra, size = event.extra, self._block_size
        if extra and any(extra):
            besides = [_besides(keys, event.adapter) for keys in extra]
            if any(besides[1:]) or (besides[0] and event.parent is not None) or _has_media(besides[0]):
                return None
            extra = [extra[0]]
        whole = event.block_size // size
        keys = [one for key in event.keys for one in block_keys(key, whole)]
        if event.parent is None:
            self._root = event.tokens[: event.block_size * TOKEN_BYTES], extra[0] if extra else None
            self._salted |= bool(extra and _besides(extra[0], event.adapter))
        return self._in_blocks(event._replace(extra=extra), keys)

    def _in_blocks(self, event: Stored, keys: Sequence[int | bytes]) -> Stored:
        """Return an event's tokens as an event of smaller blocks, of the size in which prompts are hashed.

        `keys`: the keys of the smaller blocks. Only the extra keys of the first block are kept.
        """
        ahead, size, count = event.looks_ahead, self._block_size, len(keys)
        lookahead = b""
        if ahead:
            ids = np.frombuffer(event.tokens + event.lookahead[-ahead * TOKEN_BYTES :], np.uint32)
            lookahead = ids[np.arange(1, count + 1)[:, None] * size + np.arange(ahead)].tobytes()
        extra = [event.extra[0], *[None] * (count - 1)] if event.extra and event.extra[0] else None
        return event._replace(keys=keys, block_size=size, extra=extra, lookahead=lookahead)

    def _hashes_of(self, event: Stored, parent: int, count: int, whole: int) -> Generator[None, None, list[int]]:
        """Return our hashes of the last `count` blocks in an event of a cache group, or of all if there are fewer.

        `parent`: the hash of the block before the event's first one, 0 at a prompt's start. `whole`: how many blocks of
        the map one of the event's blocks has. Returns an empty list if the event has no tokens. Yields between steps of
        some milliseconds.
        """
        if event.kind == MAMBA and event.group < (self._main or 0):  # the event came before full attention's
            event = self._salt(event)
        size, width, ahead = self._block_size, self._block_size * TOKEN_BYTES, event.looks_ahead
        blocks, piece = len(event.tokens) // width, MOST_PIECE * HASHED
        ids = np.frombuffer(event.tokens + event.lookahead[-ahead * TOKEN_BYTES :], np.uint32)
        seed = looking_ahead([parent], ids[:ahead].reshape(1, -1))[0] if ahead and parent else parent
        hashes: list[int] = []
        for start in range(0, blocks, piece):
            if start:
                yield
            end = min(start + piece, blocks)
            extra = event.extra if not start else None
            some = event._replace(tokens=event.tokens[start * width : end * width], lookahead=b"", extra=extra)
            own = self._hashes(self._in_blocks(some, range(end - start)), seed)
            seed = own[-1]
            hashes += own[(-start - 1) % whole :: whole]
            del hashes[:-count]
        if ahead:
            ends = (blocks // whole - np.arange(len(hashes))[::-1]) * (whole * size)
            hashes = looking_ahead(hashes, ids[ends[:, None] + np.arange(ahead)])
        return hashes

    def _store_pages(self, event: Stored) -> None:
        """Begin to store an event of an engine whose blocks, here called pages, are smaller than the map's blocks.

        The remaining work is left in the iterator `_steps`. It stores the map's blocks of which the engine now has all
        pages.
        """
        if self.pages is None:
            self.pages = Pages(self._model, self._block_size, event.block_size, bool(event.ahead))
        if self.pages.pairs != bool(event.ahead):
            self.fault = "some of the engine's pages have pairs of tokens, and others have tokens"
            return
        if self.pages.page_size != event.block_size:
            self.fault = f"the engine's pages have {event.block_size} tokens, and had {self.pages.page_size} before"
            return
        self._steps = self._storing_pages(self.pages, event)

    def _storing_pages(self, pages: Pages, event: Stored) -> Iterator[None]:
        try:
            whole = yield from pages.store(event)
        except OverflowError as error:
            self.fault = f"{error}: start it with larger pages"
            return
        for chain in whole:
            self._store_hashes(self._to_store("gpu", chain.keys), chain.keys, chain.hashes, chain.parent)
            if self._pending["gpu"].is_full:
                self._flush()
                yield

    def _store_chunks(self, event: Stored) -> None:
        """Begin to store an event of a store below the engine (such as LMCache), which keeps chunks of blocks.

        The remaining work is left in the iterator `_steps`. An event that cannot be used is counted in `ignored`.
        """
        blocks, parts = divmod(event.block_size, self._block_size)
        chunks = self._chunks.get(event.tier)
        if chunks is None and 0 < blocks <= MOST_CHUNK and not parts:
            chunks = self._chunks[event.tier] = Chunks(blocks, self._map.hold)
        if (
            chunks is None
            or parts
            or chunks.blocks != blocks
            or chunks.blind
            or (len(chunks) + len(event.keys)) * blocks > MOST_BLOCKS
        ):
            self.ignored += len(event.keys) * max(1, blocks)
            return
        self._flush()
        self._steps = self._storing_chunks(event, chunks)

    def _storing_chunks(self, event: Stored, chunks: Chunks) -> Iterator[None]:
        yield from self._mapping(chunks, self._found_with(event, chunks), event.tier, are_found=True)
        if chunks.blind:
            yield from self._mapping(chunks, chunks.found(), event.tier, are_found=False)
            chunks.clear()
            self.ignored += len(event.keys) * chunks.blocks

    def _found_with(self, event: Stored, chunks: Chunks) -> Iterator[Chunk]:
        """Add an event's chunks to `chunks`; yield each chunk that a look-up now finds and did not find before."""
        before, width = event.parent, event.block_size * TOKEN_BYTES
        for number, key in enumerate(event.keys):
            parent = 0 if before is None else chunks.end(before) or self._hashes_under([before])[0]
            if before is not None and not parent:
                self._orphans += (len(event.keys) - number) * chunks.blocks
                return
            seed = parent or chain_seed(self._model, self._block_size, event.adapter)
            hashes = hash_blocks(event.tokens[number * width : (number + 1) * width], self._block_size, seed)
            found = chunks.store(key, before, parent, hashes)
            if found is None:
                self.ignored += (len(event.keys) - number) * chunks.blocks
                return
            yield from found
            before = key

    def _mapping(self, chunks: Chunks, changed: Iterator[Chunk | None], tier: str, are_found: bool) -> Iterator[None]:
        """Store or remove the blocks of changed chunks in the map, in steps of some milliseconds.

        One event may change any number of chunks: all that follow the one it names. `changed`: the chunks; None stands
        for work without a change. `tier`: the kind of memory. `are_found`: a look-up finds the chunks from now on, so
        the map stores them; otherwise it no longer finds them, and the map removes them.
        """
        tier = ChunkTier(tier, chunks.blocks).tier
        step = max(1, MOST_PIECE // chunks.blocks)
        while piece := list(islice(changed, step)):
            hashes, keys, heads = chains(filter(None, piece))
            self._work += FLUSH
            if not are_found:
                self._removed += self._map.remove(self._slot, keys, tier)
            elif hashes:
                self._map.store(self._slot, hashes, keys, tier, heads)
                self.blocks_stored += len(hashes)
            if len(piece) == step:
                yield

    def _store_hashes(self, pending: Pending, keys: Sequence[int | bytes], hashes: list[int], parent: int) -> None:
        """Queue a chain of consecutive blocks for the map.

        `keys`, `hashes`: the engine's key and our hash of each block. `parent`: the hash of the block before the first
        one, 0 at a prompt's start.
        """
        self.blocks_stored += len(hashes)
        pending.store_chain(keys, hashes, parent)
        self._hash_of.update(zip(keys, hashes))

    def _store_known(self, event: Stored, blocks: int, pending: Pending) -> None:
        """Queue blocks for the map that an event reports only by key, as when they are copied to a slower tier.

        Unknown keys are counted in `orphans`. `blocks`: how many blocks each key stands for.
        """
        for key, block in zip(event.keys, self._hashes_under(event.keys), strict=True):
            if block:
                pending.store(key, block)
                self.blocks_stored += blocks
            else:
                self._orphans += blocks

    def _remove(self, event: Removed) -> Iterator[None]:
        if event.group != self._main and self._groups.knows(event.group):
            if event.tier == "gpu":
                self._groups.remove(event)
            else:
                self.ignored += len(event.keys)
            return
        keys: Sequence[int | bytes] = event.keys
        if event.tier == "gpu" and (whole := self._groups.whole):
            self._groups.remove_parts(keys)
            keys = [one for key in keys for one in block_keys(key, whole)]
        if self.pages is not None and event.tier == "gpu":
            keys = yield from self.pages.remove(keys)
        if event.tier != "gpu" and (self._chunks or self._own_chunk > 1 or self._map.chunk_tiers(self._slot)):
            keys = self._remove_chunks(event)
        pending = self._pending.get(event.tier)
        if pending is not None and pending.stores(keys):
            self._flush()
        for start in range(MOST_PENDING, len(keys), MOST_PENDING):  # one removed page may end any number of blocks
            self._removed += self._map.remove(self._slot, keys[start : start + MOST_PENDING], event.tier)
            yield
        pending = self._pending.setdefault(event.tier, Pending())
        pending.remove(keys[:MOST_PENDING])
        if pending.is_full:
            self._flush()

    def _remove_chunks(self, event: Removed) -> list[int | bytes]:
        """Remove the chunks (blocks found only together) with an event's keys; return keys that may be single blocks'.

        The event is about a slower memory tier. The removal of chunks of a store below the engine, such as LMCache, is
        left to the iterator `_steps`.
        """
        self._flush()
        self._work += FLUSH
        unknown = list(event.keys)
        blind = (chunks := self._chunks.get(event.tier)) is not None and chunks.blind
        if blind and not any(self._map.resolve(self._slot, unknown)):  # known keys would be the engine's own blocks
            del self._chunks[event.tier]  # the store does report removals, so its chunks are kept from now on
        if (chunks := self._chunks.get(event.tier)) is not None:
            self._steps = self._mapping(chunks, chunks.remove(event.keys), event.tier, are_found=False)
            unknown = [key for key in unknown if key not in chunks]
        for tier in self._map.chunk_tiers(self._slot):  # the engine's own chunks, and chunks that only the map has
            if tier.base == event.tier:
                keys = unknown if tier.own else [one for key in unknown for one in block_keys(key, tier.blocks)]
                self._removed += self._map.remove(self._slot, keys, tier.tier) * (tier.blocks if tier.own else 1)
        return unknown

    def _hashes_under(self, keys: Sequence[int | bytes]) -> list[int]:
        """Return our hash of the block with each engine key, 0 for an unknown key.

        Pass many keys at once, as a call for each takes 10 to 40 us.
        """
        found = [self._hash_of.get(key, 0) for key in keys]
        missing = [at for at, block in enumerate(found) if not block]
        if missing:
            resolved = self._map.resolve(self._slot, [keys[at] for at in missing])
            for at, block in zip(missing, resolved, strict=True):
                found[at] = block
        return found

    def _hashes(self, event: Stored, parent: int) -> list[int]:
        tokens, adapter = event.tokens, event.adapter
        if event.lookahead:  # the parent block's name covers the first of this event's tokens
            first = np.frombuffer(tokens[: event.looks_ahead * TOKEN_BYTES], np.uint32)
            above = looking_ahead([parent], first.reshape(1, -1))[0] if parent else 0
            hashes = self._hashes(event._replace(lookahead=b""), above)
            return looking_ahead(hashes, np.frombuffer(event.lookahead, np.uint32).reshape(len(hashes), -1))
        if not event.extra or not any(event.extra):
            seed = parent or chain_seed(self._model, self._block_size, adapter)
            return hash_blocks(tokens, self._block_size, seed)
        extra = [_besides(keys, adapter) for keys in event.extra]
        salt = None
        if not parent and len(salts := [key for key in extra[0] if isinstance(key, str)]) == 1:
            # Only a prompt's first block covers the tenant's salt; a media item's key is a pair.
            salt, extra[0] = salts[0], [key for key in extra[0] if not isinstance(key, str)]
        seed = parent or chain_seed(self._model, self._block_size, adapter, salt)
        if any(extra):
            return self._hashes_apart(tokens, extra, seed)
        return hash_blocks(tokens, self._block_size, seed)

    def _hashes_apart(self, tokens: bytes, extra: list[list[object]], seed: int) -> list[int]:
        """Return the hashes of consecutive blocks, some of which also cover extra keys such as images.

        They equal those of `hash_with_media`. `tokens`: the token ids of all blocks together, uint32; `extra`: the
        extra keys of each block; `seed`: the seed of the first block.
        """
        width = len(tokens) // len(extra)
        hashes: list[int] = []
        for i, keys in enumerate(extra):
            if keys:
                seed = covering(keys, seed)
            hashes += hash_blocks(tokens[i * width : (i + 1) * width], self._block_size, seed)
            seed = hashes[-1]
        return hashes


def joined(events: list[Stored | Removed | Cleared]) -> Iterator[Stored | Removed | Cleared]:
    """Yield the events in order, with consecutive removals from one tier and cache group as one event.

    vLLM sends an event for each removed block.
    """
    removed: Removed | None = None
    keys: list[int | bytes] = []
    for event in events:
        if removed is not None:
            if isinstance(event, Removed) and event.tier == removed.tier and event.group == removed.group:
                keys += event.keys
                continue
            yield removed._replace(keys=keys)
        removed = None
        if isinstance(event, Removed):
            removed, keys = event, [*event.keys]
        else:
            yield event
    if removed is not None:
        yield removed._replace(keys=keys)


def in_pieces(events: list[Stored | Removed | Cleared]) -> Iterator[list[Stored | Removed | Cleared]]:
    """Yield the events in pieces, of which each takes a few milliseconds to apply; few events stay one piece."""
    if len(events) <= MOST_PIECE and len(events) + sum(map(_blocks, events)) <= MOST_PIECE:
        yield events
        return
    piece: list[Stored | Removed | Cleared] = []
    room = MOST_PIECE
    for event in events:
        # A Mamba event has tokens of more blocks than it has keys: `GroupEvents.following` works in steps itself.
        is_whole = isinstance(event, Cleared) or (isinstance(event, Stored) and event.kind == MAMBA and event.tokens)
        for part in (event,) if is_whole else _parts(event):
            piece.append(part)
            room -= 1 + _blocks(part)
            if room <= 0:
                yield piece
                piece, room = [], MOST_PIECE
    yield piece


def _blocks(event: Stored | Removed | Cleared) -> int:
    """Return how many blocks an event reports, estimated from its tokens if it has fewer keys than blocks."""
    if isinstance(event, Stored):
        return max(len(event.keys), len(event.tokens) // LEAST_BLOCK)
    return len(event.keys) if isinstance(event, Removed) else 0


def _parts(event: Stored | Removed | Cleared) -> Iterator[Stored | Removed]:
    """Yield an event as several smaller ones with the same effect.

    The blocks of one chunk (several blocks that a slower tier keeps together) stay in one event.
    """
    assert not isinstance(event, Cleared)
    count = len(event.keys)
    if isinstance(event, Removed):
        for start in range(0, count, MOST_PIECE):
            yield event._replace(keys=event.keys[start : start + MOST_PIECE])
        return
    wide = max(1, _blocks(event) // max(count, 1))
    step = max(1, MOST_PIECE // (event.together * wide)) * event.together
    if count <= step:
        yield event
        return
    width, behind = len(event.tokens) // count, len(event.lookahead) // count
    for start in range(0, count, step):
        end = start + step
        yield event._replace(
            keys=event.keys[start:end],
            parent=event.keys[start - 1] if start else event.parent,
            tokens=event.tokens[start * width : end * width],
            extra=event.extra and event.extra[start:end],
            ahead=event.ahead[start * width : end * width],
            lookahead=event.lookahead[start * behind : end * behind],
            more=event.more or end < count,
        )


def _has_media(keys: list[object]) -> bool:
    """Return whether a block's extra keys have more than a tenant's cache salt; a salt is a string, media are not."""
    return len(keys) > 1 or any(not isinstance(key, str) for key in keys)


def _besides(keys: list[object] | None, adapter: str | None) -> list[object]:
    """Return a block's extra keys without the adapter's name, which the seed of a prompt's first block covers already.

    vLLM puts the adapter's name first, then media, then the cache salt. Only a first key is taken for the name, as a
    tenant's salt may equal the adapter's name.
    """
    if not keys:
        return []
    return list(keys[1:] if adapter and keys[0] == adapter else keys)
