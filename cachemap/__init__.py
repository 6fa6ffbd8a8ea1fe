"""The cache map: which replica holds which prefix. Block hashing, block tables and KV event intake."""

from cachemap.events.intake import EventIntake
from cachemap.hashing import GuessedBlocks, Span, chain_seed, hash_blocks, hash_with_media
from cachemap.map import CacheMap, Match

__all__ = ["CacheMap", "EventIntake", "GuessedBlocks", "Match", "Span", "chain_seed", "hash_blocks", "hash_with_media"]
