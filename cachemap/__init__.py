"""The cache map: which replica (engine) has the KV cache of which prompt prefixes.

Block hashing, block tables, and the intake of the KV cache events that engines publish.
"""

from cachemap.events.intake import EventIntake
from cachemap.hashing import GuessedBlocks, Span, chain_seed, hash_blocks, hash_with_media
from cachemap.map import CacheMap, Match

__all__ = ["CacheMap", "EventIntake", "GuessedBlocks", "Match", "Span", "chain_seed", "hash_blocks", "hash_with_media"]
