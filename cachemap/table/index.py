"""The index of a block table, a hash table from a block's hash to the block's number."""

from __future__ import annotations

import numpy as np

from cachemap.table.buckets import FIRST, SECOND, U64, Buckets, ones

FIRST_FACTOR, SECOND_FACTOR, BITS = int(FIRST), int(SECOND), (1 << 64) - 1


class Index(Buckets):
    """A map from block hashes to block numbers in words of 32 bits: 5.6 bytes a block.

    The tags of `Buckets` are block hashes here. A word has the block's number (never 0) and, in the remaining bits, the
    top bits of the hash; the whole hash is read from the array `hashes` at the block's number.
    """

    __slots__ = ("_mark_shift", "_number_bits", "hashes")

    def __init__(self, capacity: int, number_bits: int, hashes: np.ndarray):
        super().__init__(capacity, number_bits, np.uint32)
        self.hashes = hashes
        self._number_bits = number_bits
        self._mark_shift = 32 + number_bits  # shifts out all but the top bits of a hash, which fit above the number

    def _like(self, capacity: int) -> Index:
        return Index(capacity, self._number_bits, self.hashes)

    def numbers(self, tags: np.ndarray) -> np.ndarray:
        """Return the number of the block with each of these hashes, 0 where the block is unknown."""
        places = self.find(tags)
        numbers = self.payloads(places)
        numbers[places < 0] = 0
        return numbers

    def at(self, tag: int) -> int:
        """Return the number of the block with this hash (`tag`), 0 if the block is unknown.

        This works with plain ints and takes 1 us, or 2 us if the second bucket is searched too. `numbers`, which works
        with arrays, takes 10 us for one block.
        """
        buckets = len(self.rows)
        first = ((tag * FIRST_FACTOR & BITS) >> 32) % buckets
        number = self._in(first, tag)
        if number or not self.passed[first]:
            return number
        second = ((tag * SECOND_FACTOR & BITS) >> 32) % buckets
        number = self._in(second, tag)
        if number or not self.spilled[second]:
            return number
        place = self._find_spilled(np.array([tag], U64), np.array([second]))
        return int(self.payloads(place)[0]) if place[0] >= 0 else 0

    def _in(self, bucket: int, tag: int) -> int:
        base = tag >> self._mark_shift << self._number_bits
        most = 1 << self._number_bits
        word: int
        for word in self.words[bucket * 8 : bucket * 8 + 8].tolist():
            if 0 < word - base < most and self.hashes.item(word - base) == tag:
                return word - base
        return 0

    def insert(self, tags: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Insert blocks that the index does not have, and return their numbers.

        `tags`: the blocks' hashes, which the array `hashes` must have already. If a hash occurs twice, one of its two
        numbers is inserted and returned for both.
        """
        words = ((tags >> U64(self._mark_shift)) << U64(self._number_bits) | numbers.view(U64)).astype(np.uint32)
        return self.payloads(self.add(tags, words))

    def remove(self, numbers: np.ndarray) -> None:
        """Remove the blocks with these numbers: distinct, all known, and with their hashes still in `hashes`."""
        self.drop(self.find(self.hashes.take(numbers)))

    def _tags(self, words: np.ndarray) -> np.ndarray:
        tags: np.ndarray = self.hashes.take(words & ones(self._payload_bits))
        return tags

    def _hits(self, buckets: np.ndarray, tags: np.ndarray) -> np.ndarray:
        lines = self.rows.take(buckets, 0)
        marks = (tags >> U64(self._mark_shift)).astype(np.uint32)
        hits: np.ndarray = (lines >> self._payload_bits == marks[:, None]).ravel().nonzero()[0]
        numbers = lines.ravel().take(hits) & ones(self._payload_bits)
        real = self.hashes.take(numbers) == tags.take(hits >> 3)
        return hits if real.all() else hits[real]
