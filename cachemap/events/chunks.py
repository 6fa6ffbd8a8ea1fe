"""Chunks: what a store below the engine keeps in pieces of one or more of the map's blocks.

LMCache does, 256 tokens to a chunk unless it is told otherwise. Its server tells of each chunk that comes to its host
memory, by tokens and the chunk before it, and of each that goes (`lmcache/v1/multiprocess/modules/kv_events.py` of
0.5.6). It looks a prompt up in whole chunks from the prompt's beginning, whatever the engine holds itself, and stops at
the first one that it has not: so a chunk is found while it and all before it are held. Only what is found goes to the
map, into a tier of its own (`ChunkTier`). The map's rule (blocks of slower tiers right behind those on the GPU, of such
a tier up to the prompt's last whole chunk) then gives what LMCache delivers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

Key = int | bytes
U64 = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
# Of one replica's tier, in chunks that are held or gone: 16 million tokens, about 40 MB. What is told of more is
# ignored, as is what the map's budget has no room for.
MOST_BLOCKS = 1 << 20
CHUNK_BYTES = 520  # of a chunk, its key and its places in dicts, beside 8 for each of its blocks


class Chunk:
    """`hashes`: of its blocks, chained from the prompt's beginning; `parent`: of the block before them, or 0."""

    __slots__ = ("key", "hashes", "parent", "before", "behind", "held", "found")

    def __init__(self, key: Key, hashes: Sequence[int], parent: int, before: Chunk | None):
        self.key, self.hashes, self.parent, self.before = key, array("Q", hashes), parent, before
        self.behind: dict[Key, Chunk] = {}
        self.held = self.found = False

    def block_keys(self) -> list[Key]:
        return block_keys(self.key, len(self.hashes))


def block_keys(key: Key, blocks: int) -> list[Key]:
    """The keys that a chunk's blocks go by in the map. The last one is the chunk's own, so that the map says what a
    chunk behind it continues, to a gateway too that has only the map from another one."""
    base = int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key
    return [*((base + number * ODD) & U64 for number in range(1, blocks)), key]


class Chunks:
    """Those of one replica in one tier. Each is counted in the map's budget, by `hold` (`CacheMap.hold`).

    `blind`: a chunk was told of that was held already, so nobody told that it had gone in between. LMCache's server
    tells of a chunk once until it goes; its connectors do not, where they tell of what they stored themselves, and
    those never say what is evicted (`CacheEngine.get_kv_events`; `_build_store_kv_events` where the server has no log).
    What such a source has is not known, and nothing that it tells is kept, until it tells of something that went.
    """

    def __init__(self, blocks: int, hold: Callable[[int], bool]) -> None:
        self._hold, self._bytes = hold, CHUNK_BYTES + 8 * blocks
        self._by_key: dict[Key, Chunk] = {}
        self.blocks = blocks  # of a chunk
        self.blind = False

    def __len__(self) -> int:
        """Chunks that are known, with those that are gone and have others behind them."""
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def end(self, key: Key) -> int:
        """The hash of a chunk's last block, 0 if it is not known."""
        chunk = self._by_key.get(key)
        return chunk.hashes[-1] if chunk is not None else 0

    def store(self, key: Key, before: Key | None, parent: int, hashes: Sequence[int]) -> Iterator[Chunk] | None:
        """A chunk is held now, behind the one called `before`; gives those that are found with it, each behind the one
        it follows. `parent`: the hash of the block before `hashes`, or 0. A chunk whose predecessor is not known here
        is taken to be found. None: there is no room for it. All that is given must be taken before the next call."""
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
        """These are gone; gives the chunks that are found no longer, which are those behind them as well, and None for
        each chunk that is forgotten. All must be taken before the next call."""
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
        """All that a lookup finds, each behind the one it follows."""
        for chunk in self._by_key.values():
            if chunk.found and (chunk.before is None or not chunk.before.found):
                yield from _with_those_behind(chunk)

    def clear(self) -> None:
        """Nothing is held."""
        self._hold(-self._bytes * len(self._by_key))
        self._by_key = {}

    def _forget(self, chunk: Chunk | None) -> Iterator[None]:
        """A chunk that is gone is kept while others stand behind it: they are found again when it is stored again."""
        while chunk is not None and not chunk.held and not chunk.behind:
            del self._by_key[chunk.key]
            self._hold(-self._bytes)
            if chunk.before is not None:
                del chunk.before.behind[chunk.key]
            chunk = chunk.before
            yield None


def _find(chunk: Chunk) -> Iterator[Chunk]:
    """It and all held ones behind it, which are found from now on."""
    todo = [chunk]
    while todo:
        one = todo.pop()
        one.found = True
        yield one
        todo += [behind for behind in one.behind.values() if behind.held]


def _with_those_behind(chunk: Chunk) -> Iterator[Chunk]:
    """It and all found ones behind it."""
    todo = [chunk]
    while todo:
        one = todo.pop()
        todo += [behind for behind in one.behind.values() if behind.found]
        yield one


def chains(chunks: Sequence[Chunk]) -> tuple[list[int], list[Key], list[tuple[int, int]]]:
    """Hashes, keys and heads of chains of these chunks' blocks, as the map takes them."""
    hashes: list[int] = []
    keys: list[Key] = []
    heads: list[tuple[int, int]] = []
    for chunk in chunks:
        heads.append((len(hashes), chunk.parent))
        hashes += chunk.hashes
        keys += chunk.block_keys()
    return hashes, keys, heads
