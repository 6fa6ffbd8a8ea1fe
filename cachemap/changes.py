"""Changes to the KV cache blocks that a replica is known to hold, in a form that other gateways' maps can apply.

A block is named by its hash and by its tag (the engine's own key of the block, mixed and shortened). A change has no
text, no tokens and nothing specific to one process, so gateways send changes to each other unaltered.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

TIERS = ("gpu", "cpu", "disk", "remote")
_GROUP = re.compile(r"group (\d{1,5}), last (\d{1,9})")
_CHUNKS = re.compile(r"(cpu|disk|remote) in (own )?chunks of (\d{1,5})")

# Flags in a cache group's index, which gateways exchange in 16 bits:
STATES = 1 << 14  # the group is of Mamba layers
PARTS = 1 << 15  # the group is for prompts' last, partial blocks, where blocks of full attention are larger than ours


class CacheGroup(NamedTuple):
    """A KV cache group other than the first full-attention one, of an engine whose layers are not all alike.

    Such an engine keeps separate blocks for the same tokens in each group of layers, and evicts the blocks of each
    group independently. The blocks of the first full-attention group are in tier "gpu".

    `last`: how many blocks at the end of a hit must be in this group's cache (all blocks if the hit is shorter). For a
    sliding window these are the blocks that the window reaches back over. For Mamba layers `last` is 1, as the state
    after the last block covers everything before it. For a further group of full attention it is EVERY, which is more
    than any prompt has.
    """

    # The engine's index of the group, with STATES or PARTS; it hides tuple.index, which is never called.
    index: int  # type: ignore[assignment]
    last: int

    @classmethod
    def of_states(cls, index: int) -> "CacheGroup":
        """Return a cache group of Mamba layers, which keep a state of a whole prefix, not keys and values of tokens.

        `index`: the engine's index of the group. The result's index has the flag STATES, which marks Mamba layers.
        """
        return cls(index | STATES, 1)

    @classmethod
    def of_parts(cls, index: int, whole: int) -> "CacheGroup":
        """Return a cache group for the partial blocks at the ends of prompts; the engine has no such group of its own.

        It is used where one block of the engine's full-attention group is larger than the map's blocks. A prompt may
        end inside such a large block, and a later hit may end at the same place if the replica holds all large blocks
        before it. `index`: the engine's index of the full-attention group. `whole`: how many of the map's blocks make
        up one large block.
        """
        return cls(index | PARTS, whole)

    @property
    def told_as(self) -> int:
        """The engine's own index of the group: `index` without the flags STATES and PARTS."""
        return self.index & ~(STATES | PARTS)

    @property
    def has_states(self) -> bool:
        return bool(self.index & STATES)

    @property
    def has_parts(self) -> bool:
        return bool(self.index & PARTS)

    @property
    def tier(self) -> str:
        return f"group {self.index}, last {self.last}"

    @staticmethod
    def of(tier: str) -> "CacheGroup | None":
        """Return the cache group whose tier name (`CacheGroup.tier`) this is, or None for any other tier name."""
        found = _GROUP.fullmatch(tier)
        return CacheGroup(int(found[1]), int(found[2])) if found else None


class ChunkTier(NamedTuple):
    """A tier slower than the GPU that finds a prompt's blocks only in whole chunks of several blocks.

    Chunks are counted from the prompt's beginning; blocks after a prompt's last whole chunk are not found, even if a
    longer prompt's chunk contains them.

    `base`: the kind of memory. `blocks`: blocks in a chunk.
    `own`: the tier is the engine's own. Its lookup starts with the chunk in which the GPU hit ends, and fetches no less
    than one chunk of tokens. The map keeps only the last block of each chunk. If `own` is False, the tier is a store
    below the engine (such as LMCache), whose lookup starts at the prompt's beginning, whatever the engine holds.
    """

    base: str  # one of TIERS, but not "gpu"
    blocks: int
    own: bool = False

    @property
    def tier(self) -> str:
        return f"{self.base} in {'own ' if self.own else ''}chunks of {self.blocks}"

    @staticmethod
    def of(tier: str) -> "ChunkTier | None":
        """Return the ChunkTier whose tier name (`ChunkTier.tier`) this is, or None for a tier without chunks."""
        found = _CHUNKS.fullmatch(tier)
        return ChunkTier(found[1], int(found[3]), bool(found[2])) if found and int(found[3]) else None


def outlives(tier: str) -> bool:
    """Return whether blocks in this memory tier stay when an engine clears its own cache.

    vLLM's reset of its prefix cache leaves LMCache's chunks, and blocks on disk or on other machines. Some resets
    (sleep, pause, `reset_external`) also empty vLLM's own host memory and others do not. The event is the same for all
    of them, so host memory is taken to be emptied.
    """
    chunks = ChunkTier.of(tier)
    base, own = (tier, True) if chunks is None else (chunks.base, chunks.own)
    return not own or base in ("disk", "remote")


EVERY = 10**9 - 1  # blocks, more than any prompt has


class Store(NamedTuple):
    """A change that adds blocks to those that a replica holds, as one or more chains of consecutive blocks.

    A Store without blocks announces a cache group, so that the group is known before its first block.
    """

    tier: str  # one of TIERS, or the `tier` of a CacheGroup or ChunkTier
    hashes: np.ndarray
    tags: np.ndarray
    heads: list[tuple[int, int]]  # for each chain: the index of its first block, the hash of the block before it or 0


class Remove(NamedTuple):
    """A change that removes one copy of each of these blocks from a replica."""

    tier: str
    tags: np.ndarray


class Clear(NamedTuple):
    """A change that removes all blocks of a replica from the map.

    If `below` is False, its blocks in those slower tiers stay that keep them when the engine's own cache is emptied.
    """

    below: bool = True  # also those in slower tiers that outlive the engine's own cache (`outlives`)


class Observe(NamedTuple):
    """A change that sets whether a replica's blocks come from its events or from a model of its cache.

    `observed`: True for its events. If this is not the present source, the map forgets all blocks of the replica.
    """

    observed: bool


Change = Store | Remove | Clear | Observe


class Contents(NamedTuple):
    """All blocks that one replica holds according to its events."""

    observed: bool  # the replica's events are followed
    held: dict[str, tuple[np.ndarray, np.ndarray]]  # by tier: hashes and tags of the blocks, least recently used first
    copies: dict[tuple[str, int], int]  # by tier and tag: how many copies of a block there are beyond the first


def merged(changes: Iterable[Change], most: int = 1024) -> Iterator[Change]:
    """Yield fewer, larger changes with the same effect as `changes`, each of about `most` blocks.

    Applying 400 small changes takes as long as applying one change of 20,000 blocks. Consecutive changes are merged
    into one removal followed by one store. A new merge begins where that order would matter: at a block that would be
    stored twice, removed twice, or removed after it was stored. It also begins at a change of another tier.
    """
    dropped: list[Remove] = []
    stored: list[Store] = []
    tags_dropped: set[int] = set()
    tags_stored: set[int] = set()

    def together() -> Iterator[Change]:
        if dropped:
            yield Remove(dropped[0].tier, np.concatenate([one.tags for one in dropped]))
        if stored:
            heads, at = [], 0
            for one in stored:
                heads += [(at + index, parent) for index, parent in one.heads]
                at += len(one.hashes)
            yield Store(
                stored[0].tier,
                np.concatenate([one.hashes for one in stored]),
                np.concatenate([one.tags for one in stored]),
                heads,
            )
        for pending in (dropped, stored, tags_dropped, tags_stored):
            pending.clear()

    for change in changes:
        tags: set[int] = set()
        same_tier = False
        if isinstance(change, Store | Remove) and (tags := set(change.tags.tolist())):
            ahead: list[Store | Remove] = [*dropped[:1], *stored[:1]]
            same_tier = all(one.tier == change.tier for one in ahead)
        known = tags_stored if isinstance(change, Store) else tags_stored | tags_dropped
        if not same_tier or not known.isdisjoint(tags) or len(tags_stored) > most:
            yield from together()
        if isinstance(change, Store):
            stored.append(change)
            tags_stored |= tags
        elif isinstance(change, Remove):
            dropped.append(change)
            tags_dropped |= tags
        else:
            yield change
    yield from together()
