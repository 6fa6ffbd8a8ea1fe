"""What can change in what a replica is known to hold, in words that mean the same in every map.

Blocks are named by their own hash and by a tag, the fingerprint of the engine's key: no text, no
tokens, nothing of one process. So a change can be sent to other gateways as it is.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

TIERS = ("gpu", "cpu", "disk", "remote")
_GROUP = re.compile(r"group (\d{1,5}), last (\d{1,9})")
_CHUNKS = re.compile(r"(cpu|disk|remote) in (own )?chunks of (\d{1,5})")

# In a group's index, which gateways tell each other in 16 bits:
STATES = 1 << 14  # it is of Mamba layers
PARTS = 1 << 15  # it has ends of prompts within blocks of full attention


class CacheGroup(NamedTuple):
    """A further KV cache group of an engine whose layers are not all alike: beside the blocks of full attention, which
    are those of tier "gpu", it holds others for the same tokens, and drops them one by one.

    `last`: of a hit's blocks so many, the last ones, must be held in this group (all, where the hit has fewer). For
    layers with a sliding window it is what the window reaches back over, for Mamba layers 1, as the state after the
    last block says all; EVERY for one more group of full attention. `tier` is how changes name the group.
    """

    # of the engine, with STATES or PARTS; hides tuple.index, which nobody calls
    index: int  # type: ignore[assignment]
    last: int

    @classmethod
    def of_states(cls, index: int) -> "CacheGroup":
        """One of Mamba layers. Its index here is told apart from those of other kinds."""
        return cls(index | STATES, 1)

    @classmethod
    def of_parts(cls, index: int, whole: int) -> "CacheGroup":
        """The ends of prompts within blocks of full attention, each of which has so many (`whole`) of the blocks that
        prompts are hashed in. A hit may end at one if all before its block is held."""
        return cls(index | PARTS, whole)

    @property
    def told_as(self) -> int:
        """The engine's index."""
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
        """The group that a change is of; None: it is of a tier."""
        found = _GROUP.fullmatch(tier)
        return CacheGroup(int(found[1]), int(found[2])) if found else None


class ChunkTier(NamedTuple):
    """A slower tier in which a prompt's blocks are found by whole chunks of `blocks`, counted from its beginning: what
    is behind a prompt's last whole chunk is not found, though a longer prompt's chunk has it. `tier` is how changes
    name it.

    A store below the engine finds chunks from a prompt's beginning on, whatever the engine holds. The engine's `own`
    tier begins with the chunk in which what it holds in the first tier ends, and fetches no less than a chunk of
    tokens; of its chunks only the last block is kept in the map, which stands for all of them.
    """

    base: str  # of TIERS, but for the first
    blocks: int
    own: bool = False

    @property
    def tier(self) -> str:
        return f"{self.base} in {'own ' if self.own else ''}chunks of {self.blocks}"

    @staticmethod
    def of(tier: str) -> "ChunkTier | None":
        """None: it is none in chunks."""
        found = _CHUNKS.fullmatch(tier)
        return ChunkTier(found[1], int(found[3]), bool(found[2])) if found and int(found[3]) else None


def outlives(tier: str) -> bool:
    """Whether what lies there stays when an engine drops all that it has itself.

    vLLM's reset of its prefix cache leaves LMCache's chunks and what is on disk or on other machines. Its own host
    memory is emptied with some resets (sleep, pause, `reset_external`) and not with others, and its event is the same
    for both: taken as emptied.
    """
    chunks = ChunkTier.of(tier)
    base, own = (tier, True) if chunks is None else (chunks.base, chunks.own)
    return not own or base in ("disk", "remote")


EVERY = 10**9 - 1  # blocks, more than any prompt has


class Store(NamedTuple):
    """It now has these blocks; `heads` as in CacheMap.store. Of a cache group that has none yet it may be empty: the
    replica has such a group."""

    tier: str  # of TIERS, or a CacheGroup's or ChunkTier's
    hashes: np.ndarray
    tags: np.ndarray
    heads: list[tuple[int, int]]


class Remove(NamedTuple):
    """It dropped, of each of these, one copy."""

    tier: str
    tags: np.ndarray


class Clear(NamedTuple):
    """It holds nothing; without `below`, nothing but what is in tiers that outlive the engine's own cache."""

    below: bool = True


class Observe(NamedTuple):
    """Its events are followed from now on, or its cache is modelled; it starts from nothing."""

    observed: bool


Change = Store | Remove | Clear | Observe


class Contents(NamedTuple):
    """All of it at once: hashes and tags by tier, those longest unused first, and copies beyond the first."""

    observed: bool
    held: dict[str, tuple[np.ndarray, np.ndarray]]
    copies: dict[tuple[str, int], int]


def merged(changes: Iterable[Change], most: int = 1024) -> Iterator[Change]:
    """The same in fewer changes, of about `most` blocks: applying 400 small ones takes as long as 20,000 blocks at
    once.

    What is dropped goes first, then what is stored; so far as no block is stored twice, dropped twice, or dropped after
    it was stored, which makes a new start.
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
