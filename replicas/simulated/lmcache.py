"""LMCache's server behind the simulated engine: the other way to keep what the engine's cache has no room for.

Follows LMCache 0.5.6 with `LMCacheMPConnector` (`lmcache/integration/vllm`): chunks of 256 tokens in host memory, those
used last, of each prompt its first ones. A prompt is looked up in whole chunks from its beginning, whatever the engine
holds itself, and what the engine lacks of that is fetched; of a prompt that is found to its end the last token is
computed, and not counted as found. The server tells of every chunk by its tokens and a key of its own, and of every one
that goes.
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
        """Return what follows the first `start` blocks of a prompt of `blocks` full ones, of all that is found."""
        chunks = self.passes_on(keys[:blocks]) // self.chunk
        if chunks * self.chunk <= start:
            return Run(start, range(0))
        return Run(chunks * self.chunk, range(start // self.chunk, chunks))

    def reset(self) -> None:
        """Its server is not asked to: LMCache's connectors have no such call."""


def told(event: Stored | Removed, chunk: int, block_size: int, ids: Sequence[int] | None) -> list[dict]:
    """What it publishes of chunks that came, one event each, or that went. `chunk`: blocks of one."""
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
    """Its name for a chunk, which is none of the engine's."""
    return (key * _ODD + 1) % (1 << 64)
