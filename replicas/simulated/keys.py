"""Block keys of the simulated engine: opaque 64-bit numbers, as vLLM publishes them.

They are chained like vLLM's (made of the parent's key, the tokens, and extra keys). They are deliberately not the
gateway's own hashes, and differ between engines with different seeds: no client may rely on recomputing them.
"""

from array import array

import xxhash


def chain(
    ids: array, block_size: int, parent: int, adapter: str | None = None, salt: str | None = None, first: int = 0
) -> list[int]:
    """Return the keys of the full blocks of `ids` (unsigned 32 bit) from block `first` on.

    `parent`: the key of the block before them. An adapter's name is hashed into every block; a cache salt only into
    block 0, whose key the following blocks depend on.
    """
    data, width, keys = memoryview(ids).cast("B"), 4 * block_size, []
    lora = adapter.encode() if adapter else b""
    for start in range(first * width, len(data) - width + 1, width):
        extra = lora + b"\0" + salt.encode() if salt and not start else lora
        block = data[start : start + width]
        parent = xxhash.xxh3_64_intdigest(b"%b%b" % (block, extra) if extra else block, parent)
        keys.append(parent)
    return keys


def root(seed: int) -> int:
    """Return the key that stands for the parent of a prompt's first block; it depends on the engine's seed."""
    return xxhash.xxh3_64_intdigest(b"simulated engine", seed)


def extra_keys(adapter: str | None, salt: str | None, start: int, count: int) -> list[list[str] | None]:
    """Return vLLM's extra keys of `count` blocks from block `start` on: the adapter's name, and on block 0 a salt."""
    every = [adapter] if adapter else None
    keys: list[list[str] | None] = [every] * count
    if salt and start == 0 and count:
        keys[0] = [*(every or ()), salt]
    return keys
