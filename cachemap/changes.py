"""Changes to what a replica is known to hold, in terms that mean the same in every map.

Blocks are named by their hash and by a tag derived from the engine's key: no text, no tokens, nothing specific to one
process. So a change can be sent to other gateways as it is.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

TIERS = ("gpu", "cpu", "disk", "remote")
_GROUP = re.compile(r"group (\d{1,5}), last (\d{1,9})")
_CHUNKS = re.compile(r"(cpu|disk|remote) in (own )?chunks of (\d{1,5})")

# Flags in a group's index, which gateways exchange in 16 bits:
STATES = 1 << 14  # the group is of Mamba layers
PARTS = 1 << 15  # the group has prompts' ends within blocks of full attention


class CacheGroup(NamedTuple):
    """A further KV cache group of an engine whose layers are not all alike.

    Besides full attention's blocks, which are in tier "gpu", such an engine holds other blocks for the same tokens, and
    drops them one by one. `last`: how many of a hit's last blocks must be held in this group (all, if the hit has
    fewer). With a sliding window these are the blocks that the window reaches back over; for Mamba layers it is 1, as
    the state after the last block says all; for a further group of full attention it is EVERY. `tier` is the group's
    name in changes.
    """

    # The engine's index, with STATES or PARTS; it hides tuple.index, which is never called.
    index: int  # type: ignore[assignment]
    last: int

    @classmethod
    def of_states(cls, index: int) -> "CacheGroup":
        """Return a group of Mamba layers; its index is kept apart from those of other kinds."""
        return cls(index | STATES, 1)

    @classmethod
    def of_parts(cls, index: int, whole: int) -> "CacheGroup":
        """Return the group of prompts' ends within blocks of full attention.

        `whole` is the number of hashed blocks in one block of full attention. A hit may end at such an end if all
        blocks before the one it lies in are held.
        """
        return cls(index | PARTS, whole)

    @property
    def told_as(self) -> int:
        """The index that the engine gives the group."""
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
        """Return the group that a change's tier names; None for any other tier."""
        found = _GROUP.fullmatch(tier)
        return CacheGroup(int(found[1]), int(found[2])) if found else None


class ChunkTier(NamedTuple):
    """A slower tier that finds a prompt's blocks in whole chunks of `blocks`, counted from the prompt's beginning.

    Blocks after a prompt's last whole chunk are not found, even if a longer prompt's chunk contains them. `tier` is the
    tier's name in changes.

    A store below the engine finds chunks from a prompt's beginning on, whatever the engine holds. The engine's `own`
    tier starts with the chunk in which its GPU hit ends, and fetches no less than one chunk of tokens; of its chunks
    the map keeps only the last block, which stands for the whole.
    """

    base: str  # one of TIERS, but not "gpu"
    blocks: int
    own: bool = False

    @property
    def tier(self) -> str:
        return f"{self.base} in {'own ' if self.own else ''}chunks of {self.blocks}"

    @staticmethod
    def of(tier: str) -> "ChunkTier | None":
        """Return the chunk tier that a change's tier names; None for any other tier."""
        found = _CHUNKS.fullmatch(tier)
        return ChunkTier(found[1], int(found[3]), bool(found[2])) if found and int(found[3]) else None


def outlives(tier: str) -> bool:
    """Return whether blocks in this tier stay when an engine drops everything that it holds itself.

    vLLM's reset of its prefix cache leaves LMCache's chunks, and what is on disk or on other machines. Some resets
    (sleep, pause, `reset_external`) empty its own host memory and others do not, with the same event: the memory counts
    as emptied.
    """
    chunks = ChunkTier.of(tier)
    base, own = (tier, True) if chunks is None else (chunks.base, chunks.own)
    return not own or base in ("disk", "remote")


EVERY = 10**9 - 1  # blocks, more than any prompt has


class Store(NamedTuple):
    """Blocks that the replica now holds; `heads` as in `CacheMap.store`.

    Without blocks it announces a cache group, so that the group is known before its first block.
    """

    tier: str  # one of TIERS, or the `tier` of a CacheGroup or ChunkTier
    hashes: np.ndarray
    tags: np.ndarray
    heads: list[tuple[int, int]]


class Remove(NamedTuple):
    """Blocks of which the replica dropped one copy each."""

    tier: str
    tags: np.ndarray


class Clear(NamedTuple):
    """The loss of all blocks; without `below`, those in tiers that outlive the engine's own cache stay."""

    below: bool = True


class Observe(NamedTuple):
    """The switch between following the replica's events and modelling its cache; it starts from nothing."""

    observed: bool


Change = Store | Remove | Clear | Observe


class Contents(NamedTuple):
    """All that a replica holds: hashes and tags by tier, least recently used first, and the copies beyond the first."""

    observed: bool
    held: dict[str, tuple[np.ndarray, np.ndarray]]
    copies: dict[tuple[str, int], int]


def merged(changes: Iterable[Change], most: int = 1024) -> Iterator[Change]:
    """Yield equivalent changes, merged to about `most` blocks each.

    Applying 400 small changes takes as long as 20,000 blocks in one. Removals come first, then stores. A block that is
    stored twice, dropped twice, or dropped after it was stored starts new changes, as does another tier.
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
