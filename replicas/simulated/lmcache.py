"""LMCache's server behind the simulated engine: the other way to keep what does not fit in the engine's cache.

Follows LMCache 0.5.6 with `LMCacheMPConnector` (`lmcache/integration/vllm`): chunks of 256 tokens in host memory,
evicted by least recent use, the end of a prompt first. A prompt is looked up in whole chunks from its beginning,
whatever the engine holds itself, and chunks that the engine lacks are fetched; if a prompt is found to its end, the
last token is computed, and not counted as found. The server reports every chunk with its tokens and a key of its own,
and every removed chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Key
from .offload import Offload, Run
from .steps import Removed, Stored

CHUNK_TOKENS = 256
MEDIUM = "CPU"
_ODD = 0x9E3779B97F4A7C15


class LMCache(Offload):
    counts_last = False

    def find(self, keys: Sequence[Key], start: int, blocks: int) -> Run:
        """Return the chunks to fetch after the first `start` blocks of a prompt of `blocks` full ones."""
        chunks = self.passes_on(keys[:blocks]) // self.chunk
        if chunks * self.chunk <= start:
            return Run(start, range(0))
        return Run(chunks * self.chunk, range(start // self.chunk, chunks))

    def reset(self) -> None:
        """Do nothing: LMCache's connectors have no such call."""


def told(event: Stored | Removed, chunk: int, block_size: int, ids: Sequence[int] | None) -> list[dict]:
    """Return the published events: one for each chunk that was stored, or one for all that were removed.

    `chunk`: blocks of a chunk.
    """
    last = event.keys[chunk - 1 :: chunk]
    if type(event) is Removed:
        return [{"type": "BlockRemoved", "block_hashes": [_key(key) for key in last], "medium": MEDIUM}]
    parents, tokens = [event.parent, *last], chunk * block_size
    return [
        {
            "type": "BlockStored",
            "block_hashes": [_key(key)],
            "parent_block_hash": None if parents[number] is None else _key(parents[number]),
            "token_ids": list(ids[event.start * block_size + number * tokens :][:tokens]),
            "block_size": tokens,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        for number, key in enumerate(last)
    ]


def _key(key: Key) -> int:
    """Return LMCache's key of a chunk, which differs from the engine's."""
    return (key * _ODD + 1) % (1 << 64)
