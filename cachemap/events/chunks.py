"""Chunks: the pieces of one or more blocks in which a store below the engine keeps its cache.

LMCache is such a store, by default with 256 tokens a chunk. Its server reports each chunk that enters its host memory,
with the chunk's tokens and the chunk before it, and each chunk that leaves
(`lmcache/v1/multiprocess/modules/kv_events.py` of 0.5.6). It looks a prompt up in whole chunks from the prompt's
beginning, whatever the engine holds itself, and stops at the first chunk that it lacks. So a chunk is called found
while the store holds it and all chunks before it. Only found chunks go to the map, into a tier of their own
(`ChunkTier`). The map counts blocks of slower tiers that directly follow those on the GPU, in a chunk tier up to the
prompt's last whole chunk; this is what LMCache delivers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from cachemap.table.block_table import key_bits

Key = int | bytes
U64 = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
# The limit for one tier of one replica, in blocks of known chunks: 16 million tokens, about 40 MB. Events about more
# are ignored, as are those that the map's budget has no room for.
MOST_BLOCKS = 1 << 20
CHUNK_BYTES = 520  # a chunk, its key and its dict entries, without the 8 bytes for each of its blocks


class Chunk:
    """A chunk: one or more blocks that a store below the engine, such as LMCache, keeps and finds together.

    `hashes`: the hashes of its blocks. `parent`: the hash of the block before them, 0 at a prompt's start.
    `before`: the chunk before this one; `behind`: the chunks that follow this one, by key.
    `held`: the store has the chunk. `found`: the store has this chunk and all chunks before it, so a look-up finds it.
    """

    __slots__ = ("key", "hashes", "parent", "before", "behind", "held", "found")

    def __init__(self, key: Key, hashes: Sequence[int], parent: int, before: Chunk | None):
        self.key, self.hashes, self.parent, self.before = key, array("Q", hashes), parent, before
        self.behind: dict[Key, Chunk] = {}
        self.held = self.found = False


def block_keys(key: Key, blocks: int) -> list[Key]:
    """Return the keys under which the map stores a chunk's blocks; the last block has the chunk's own key.

    The chunk's key therefore leads to the block before the next chunk, even in a gateway that has only a copy of
    another gateway's map. `blocks`: how many blocks the chunk has.
    """
    return [*((key_bits(key) + number * ODD) & U64 for number in range(1, blocks)), key]


class Chunks:
    """The chunks of one replica in one slower memory tier.

    `blocks`: blocks in a chunk. `hold`: a function that reserves bytes of the map's memory budget (`CacheMap.hold`).
    `blind`: whether the source of the events reports no removals. It is set when a chunk is reported that is held
    already.
    LMCache's server reports a chunk only once until it is removed. LMCache's connectors can report what they stored
    themselves; they may report a chunk again, and they never report evictions (`CacheEngine.get_kv_events`;
    `_build_store_kv_events` where the server has no log). What the store of a blind source holds is unknown, so nothing
    that it reports is kept until it reports a removal.
    """

    def __init__(self, blocks: int, hold: Callable[[int], bool]) -> None:
        self._hold, self._bytes = hold, CHUNK_BYTES + 8 * blocks
        self._by_key: dict[Key, Chunk] = {}
        self.blocks = blocks  # in a chunk
        self.blind = False

    def __len__(self) -> int:
        """Return the number of known chunks, including removed ones that other chunks follow."""
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def end(self, key: Key) -> int:
        """Return the hash of the last block of the chunk with this key, 0 if the chunk is unknown."""
        chunk = self._by_key.get(key)
        return chunk.hashes[-1] if chunk is not None else 0

    def store(self, key: Key, before: Key | None, parent: int, hashes: Sequence[int]) -> Iterator[Chunk] | None:
        """Record that the store has a chunk; return the chunks that a look-up now finds, or None if memory is short.

        `key`: the chunk's key. `before`: the key of the chunk before it. `parent`: the hash of the block before it, 0
        at a prompt's start. `hashes`: the hashes of its blocks.
        In the result, a chunk comes after the one that it follows. If the chunk before the stored one is unknown,
        look-ups are assumed to find the stored one. If the store has the chunk already, `blind` is set. The caller must
        exhaust the iterator before the next call.
        """
        chunk = self._by_key.get(key)
        if chunk is None:
            if not self._hold(self._bytes):
                return None
            above = self._by_key.get(before) if before is not None else None
            chunk = self._by_key[key] = Chunk(key, hashes, parent, above)
            if above is not None:
                above.behind[key] = chunk
        elif chunk.held:
            self.blind = True
            return iter(())
        chunk.held = True
        return _find(chunk) if chunk.before is None or chunk.before.found else iter(())

    def remove(self, keys: Iterable[Key]) -> Iterator[Chunk | None]:
        """Record that the store dropped these chunks; yield each chunk that a look-up no longer finds.

        These include the chunks that follow a removed one. In addition, None is yielded for each chunk that is
        forgotten here, so that the caller can count the work. The caller must exhaust the iterator before the next
        call.
        """
        for key in keys:
            chunk = self._by_key.get(key)
            if chunk is not None and chunk.held:
                chunk.held = False
                if chunk.found:
                    for one in _with_those_behind(chunk):
                        one.found = False
                        yield one
                yield from self._forget(chunk)

    def found(self) -> Iterator[Chunk]:
        """Yield all chunks that a look-up finds, as no chunk before them is missing, each after the one it follows."""
        for chunk in self._by_key.values():
            if chunk.found and (chunk.before is None or not chunk.before.found):
                yield from _with_those_behind(chunk)

    def clear(self) -> None:
        """Forget all chunks, and return their bytes to the map's memory budget."""
        self._hold(-self._bytes * len(self._by_key))
        self._by_key = {}

    def _forget(self, chunk: Chunk | None) -> Iterator[None]:
        """Forget a removed chunk, and the removed chunks before it that no chunk follows any more; yield None for each.

        A removed chunk that other chunks follow is kept, so that those are found again when it is stored again.
        """
        while chunk is not None and not chunk.held and not chunk.behind:
            del self._by_key[chunk.key]
            self._hold(-self._bytes)
            if chunk.before is not None:
                del chunk.before.behind[chunk.key]
            chunk = chunk.before
            yield None


def _find(chunk: Chunk) -> Iterator[Chunk]:
    """Mark this chunk, and the chunks that follow it without a gap, as found by look-ups; yield them."""
    todo = [chunk]
    while todo:
        one = todo.pop()
        one.found = True
        yield one
        todo += [behind for behind in one.behind.values() if behind.held]


def _with_those_behind(chunk: Chunk) -> Iterator[Chunk]:
    """Yield this chunk and all found chunks that follow it."""
    todo = [chunk]
    while todo:
        one = todo.pop()
        todo += [behind for behind in one.behind.values() if behind.found]
        yield one


def chains(chunks: Iterable[Chunk]) -> tuple[list[int], list[Key], list[tuple[int, int]]]:
    """Return the hashes, engine keys and `heads` with which `CacheMap.store` stores these chunks' blocks."""
    hashes: list[int] = []
    keys: list[Key] = []
    heads: list[tuple[int, int]] = []
    for chunk in chunks:
        heads.append((len(hashes), chunk.parent))
        hashes += chunk.hashes
        keys += block_keys(chunk.key, len(chunk.hashes))
    return hashes, keys, heads
