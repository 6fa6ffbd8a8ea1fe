"""Who holds which prefix: block hashing, the block table, KV event intake."""

from cachemap.events.intake import EventIntake
from cachemap.hashing import chain_seed, hash_blocks
from cachemap.map import CacheMap, Match

__all__ = ["CacheMap", "EventIntake", "Match", "chain_seed", "hash_blocks"]
