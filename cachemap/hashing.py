"""Block hashing: the names under which the map knows blocks of tokens.

A block's name, or hash, is a 64-bit xxh3 of its token ids, seeded with the name of the block before it, so one number
stands for the whole prefix up to and including the block. The first block's seed is made of everything that blocks must
agree in besides tokens to be shared: the model, the block size, the LoRA adapter and the tenant's cache salt.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4  # token ids are unsigned 32-bit, little-endian


# The most characters of salt and adapter together whose seed is cached. Clients choose salts and the cache keeps 4,096
# seeds, so longer ones could fill the memory.
_LONG = 256


def chain_seed(model: str, block_size: int, adapter: str | None = None, cache_salt: str | None = None) -> int:
    """Return the u64 seed of a prompt's first block: two prompts share blocks only if all four arguments are equal.

    Each argument is hashed together with its length, so that no two combinations give the same bytes. None and "" mean
    the same, as they do to the engine.
    """
    short = len(adapter or "") + len(cache_salt or "") <= _LONG
    return (_seed if short else _seed.__wrapped__)(model, block_size, adapter, cache_salt)


@lru_cache(maxsize=4096)
def _seed(model: str, block_size: int, adapter: str | None, cache_salt: str | None) -> int:
    fields = (model, str(block_size), adapter or "", cache_salt or "")
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return xxh3_64_intdigest(b"".join(b"%d:%b" % (len(field), field) for field in encoded))


def hash_blocks(tokens: bytes | memoryview, block_size: int, seed: int) -> list[int]:
    """Return the hash (u64) of each full block of `tokens` (uint32 little-endian ids), in order.

    hash[i] = xxh3_64(bytes of block i, seed = hash[i-1]), where `seed` takes the place of hash[-1]. To continue a
    prefix that is hashed already, pass the hash of its last block as `seed`. Tokens after the last full block are
    ignored, as the engine caches full blocks only. A 16-token block takes about 75 ns.
    """
    width = block_size * TOKEN_BYTES
    if len(tokens) < width:
        return []
    # numpy cuts the bytes into blocks: slicing them one by one took 130 ns a block.
    blocks = np.frombuffer(tokens, _block(width), len(tokens) // width).tolist()
    # `map` reads its seeds from the list to which its results are appended, so each hash is the seed of the next one.
    # For 54 blocks this takes a tenth fewer instructions than a comprehension.
    hashes = [seed]
    hashes += map(xxh3_64_intdigest, blocks, hashes)
    del hashes[0]
    return hashes if all(hashes) else _without_zero(blocks, seed)


def covering(keys: Sequence[object], seed: int) -> int:
    """Return the seed for hashing a block whose name covers extra keys, such as images, besides its tokens.

    `keys`: the block's extra keys; a media item's key is [identity, offset from the block's start in tokens], as
    engines report it. `seed`: the hash of the block before this one.
    """
    return xxh3_64_intdigest(repr(keys).encode("utf-8", "surrogatepass"), seed)


def looking_ahead(hashes: Sequence[int], ahead: np.ndarray) -> list[int]:
    """Return for each block a 64-bit name that covers the block and the tokens that follow it in the prompt.

    `hashes`: the hash of each block, without the tokens after it; `ahead`: for each block a row with the ids of these
    tokens. A name is the XOR of the hash with a mix of the tokens, so calling this function on the names returns the
    hashes.
    """
    names = np.array(hashes, np.uint64)
    for place in range(ahead.shape[1]):
        mixed = ahead[:, place].astype(np.uint64) + np.uint64((place << 32) + 1)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        names ^= mixed
    told: list[int] = names.tolist()
    return told if all(told) else [name or 1 for name in told]


def named_ahead(hashes: Sequence[int], tokens: bytes | memoryview, block_size: int, ahead: int) -> array:  # type: ignore[type-arg]
    """Return for each block of a prompt a 64-bit name that covers the block and the `ahead` tokens after it.

    Blocks with fewer than `ahead` tokens after them get no name. `hashes`: the hash of each block, without the tokens
    after it; `tokens`: the whole prompt's token ids as uint32.
    """
    ids = np.frombuffer(tokens, np.uint32)
    count = max(0, min((len(ids) - ahead) // block_size, len(hashes)))
    rows = np.arange(1, count + 1)[:, None] * block_size + np.arange(ahead)
    return array("Q", looking_ahead(hashes[:count], ids[rows]))


class Span(NamedTuple):
    """The place of a media item (such as an image) in a prompt: `length` placeholder tokens from token `offset` on."""

    identity: str
    offset: int
    length: int


def hash_with_media(
    tokens: bytes | memoryview, block_size: int, seed: int, spans: Sequence[Span], ahead: int = 0
) -> list[int]:
    """Return block hashes like `hash_blocks`, but blocks with placeholders of a media item cover that item too.

    `spans`: the prompt's media items in order; a span may begin at the last token of the span before it. With `ahead`,
    a block also covers the items that have a placeholder among the `ahead` tokens after the block.
    """
    width = block_size * TOKEN_BYTES
    if len(tokens) < width:
        return []
    # A request of a kilobyte may have seven thousand such blocks, so the loop inlines `covering`: a call is 0.4 us.
    covered: dict[int, str] = {}  # by block, the items of the `keys` that `covering` would get, as text
    for identity, offset, length in spans:
        name = f"[{identity!r}, "
        for i in range(max(0, (offset - ahead) // block_size), -(-(offset + length) // block_size)):
            key = f"{name}{offset - i * block_size}]"
            covered[i] = f"{covered[i]}, {key}" if i in covered else key
    hashes, keys_of = [], covered.get
    for i, block in enumerate(np.frombuffer(tokens, _block(width), len(tokens) // width).tolist()):
        if (keys := keys_of(i)) is not None:
            seed = xxh3_64_intdigest(f"[{keys}]".encode("utf-8", "surrogatepass"), seed)
        seed = xxh3_64_intdigest(block, seed) or 1
        hashes.append(seed)
    return hashes


class GuessedBlocks(array):  # type: ignore[type-arg]
    """The names of a prompt's blocks, as array("Q"), for a prompt whose tokens the gateway knows only in part.

    Only the first `known` names are made of the tokens that the engine will use. The other names are made of the text
    and media of the rest of the prompt: equal names mean equal content, but no engine event reports these names.
    """

    known = 0

    @classmethod
    def of(cls, hashes: Sequence[int], known: int) -> "GuessedBlocks":
        """Return a prompt's block names (`hashes`) as GuessedBlocks.

        `known`: how many leading names are made of the tokens that the engine will use; the others are guesses.
        """
        guessed = cls("Q", hashes)
        guessed.known = known
        return guessed


def _without_zero(blocks: list[bytes], seed: int) -> list[int]:
    """Return the hashes of `hash_blocks` with 1 in place of 0, which marks an empty entry in the tables.

    One in 2**64 blocks has the hash 0.
    """
    return [seed := xxh3_64_intdigest(block, seed) or 1 for block in blocks]


@lru_cache(maxsize=16)
def _block(width: int) -> np.dtype:
    return np.dtype((np.void, width))
