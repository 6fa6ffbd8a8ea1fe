"""A prompt with the beginning of its answer behind it, as a replica gets it that is to go on with that answer."""

from __future__ import annotations

from array import array
from dataclasses import replace

from cachemap import hash_blocks
from cachemap.hashing import named_ahead

from .prompt import Prompt


def longer(prompt: Prompt, ids: bytes, limit: int | None) -> Prompt:
    """`ids` (uint32 LE): of all of it; `limit`: tokens that the rest of the answer may have."""
    hashes = array("Q", hash_blocks(ids, prompt.block_size, prompt.seed))
    if prompt.looks_ahead:
        hashes = named_ahead(hashes, ids, prompt.block_size, prompt.looks_ahead)
    return replace(
        prompt,
        tokens=len(ids) // 4,
        token_ids=b"",
        hashes=hashes,
        max_tokens=limit,
        kind="",
        rendered_chars=0,
        also=None,
    )


def repeated(prompt: Prompt) -> Prompt:
    """The same prompt once more, as text."""
    return replace(prompt, token_ids=b"", kind="", also=None)
