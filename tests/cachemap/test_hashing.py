"""Block hashes: a chain of xxh3, in which there is no 0."""

import random

import pytest
from xxhash import xxh3_64_intdigest

from cachemap import hash_blocks, hashing


def chained(tokens, width, seed, digest=xxh3_64_intdigest):
    hashes = []
    for start in range(0, len(tokens) - width + 1, width):
        seed = digest(tokens[start : start + width], seed) or 1
        hashes.append(seed)
    return hashes


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_each_hash_is_the_seed_of_the_next(size, seed):
    for count in (0, 1, 2, 3, 55, 2000):
        tokens = random.Random(count).randbytes(4 * size * count + 3)
        assert hash_blocks(tokens, size, seed) == chained(tokens, 4 * size, seed)


def test_one_stands_in_for_zero_and_the_chain_goes_on_from_it(monkeypatch):
    def digest(block, seed):
        return 0 if block[0] % 3 == 0 else xxh3_64_intdigest(block, seed)

    monkeypatch.setattr(hashing, "xxh3_64_intdigest", digest)
    tokens = random.Random(1).randbytes(64 * 40)
    made = hash_blocks(tokens, 16, 5)
    assert made == chained(tokens, 64, 5, digest)
    assert 0 not in made and made.count(1) > 1
