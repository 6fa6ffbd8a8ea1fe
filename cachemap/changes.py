"""What can change in what a replica is known to hold, in words that mean the same in every map.

Blocks are named by their own hash and by a tag, the fingerprint of the engine's key: no text, no
tokens, nothing of one process. So a change can be sent to other gateways as it is.
"""

from typing import NamedTuple

import numpy as np

TIERS = ("gpu", "cpu", "disk", "remote")


class Store(NamedTuple):
    """It now has these blocks; `heads` as in CacheMap.store."""

    tier: str
    hashes: np.ndarray
    tags: np.ndarray
    heads: list[tuple[int, int]]


class Remove(NamedTuple):
    """It dropped, of each of these, one copy."""

    tier: str
    tags: np.ndarray


class Clear(NamedTuple):
    """It holds nothing."""


class Observe(NamedTuple):
    """Its events are followed from now on, or its cache is modelled; it starts from nothing."""

    observed: bool


Change = Store | Remove | Clear | Observe


class Contents(NamedTuple):
    """All of it at once: hashes and tags by tier, those longest unused first, and copies beyond the first."""

    observed: bool
    held: dict[str, tuple[np.ndarray, np.ndarray]]
    copies: dict[tuple[str, int], int]
