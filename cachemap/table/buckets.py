"""A hash table of integer words in numpy arrays, the base of the block index and of the alias tables.

Open addressing in buckets of eight words, so looking up many keys is one gather of rows and one comparison. A word has
a tag (the key that is looked up) in its high bits and a payload in the low `payload_bits`. A place is an index into the
array of words; the word 0 marks an empty place.

Each tag has two buckets, chosen by secrets of this process. Tags derive from keys that engines report, and an engine
that knew the choice could send keys that all fall into the same two buckets.

A word goes to its first bucket while fewer than `EASY` of that bucket's places are taken, then to the emptier of its
first and second bucket. Only if both are full does it spill into the buckets that follow the second: at the load factor
`FILL` 1 word in 500 does, so a lookup takes two rounds even in a full table (linear probing took up to 35 rounds and 3
times the time). For each bucket, `passed` counts the words that have it as their first bucket but lie elsewhere, and
`spilled` the words that went past it while spilling. A lookup goes on to further buckets only where these counts are
above 0, and removals lower them again. There are no tombstones, so churn never degrades the table.

Growth is incremental: `widen` allocates a second table, each call of `go_on` moves some words there, and the second
table replaces the first once it has all. Until then lookups use the first table, which stays complete, and changes go
to both. Moving 50 M words at once would take 5 s.

At a load factor of 82 % a 64-bit word takes (8 + 5 / 8) / 0.82 = 10.5 bytes.
"""

from __future__ import annotations

import secrets

import numpy as np

from cachemap.table.memory import zeros

FILL = 0.82  # the load factor at which the table grows: above it too many words spill, below it memory is wasted
# The load factor that the table may reach while it grows; 1 word in 70 spills then. The nearer PACKED is to FILL, the
# longer the steps of growth: at 4 M blocks a call with 512 blocks took at most 2.6 to 3.7 ms. With FILL at 0.85 and
# PACKED at 0.91 it took 3.5 to 6.3 ms, and a block took 0.7 bytes less.
PACKED = 0.92
# Places of a bucket's 8 that are filled before words go to the emptier of their two buckets. A lower number sends more
# words to their second bucket, a higher number fills buckets unevenly.
EASY = 4
STEP = 1 << 12  # the least number of places that a step of growth handles: 0.3 ms
# The places of the old table that are moved at a time. With all intermediate arrays this fits the CPU caches; eight
# times as many take a third longer.
POURED = 1 << 12
LAID = 8  # how many places of a new table are zeroed in the time in which one word is moved

U64 = np.uint64
MIX = U64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads an engine's key over its tag; the same in all gateways
# A tag is multiplied by these secrets to find its first and second bucket. With an odd secret and an odd number of
# buckets, the product's upper half puts two given tags in the same of n buckets with a probability of about 2 / n at
# most.
FIRST, SECOND = (U64(secrets.randbits(64) | 1) for _ in range(2))
UPPER = U64(32)
ONE = np.uint8(1)  # 1 in the type of the array `load`: with an int, ufunc.at takes five times as long


class Buckets:
    """A hash table of integer words in numpy arrays.

    Each word joins a nonzero tag (the key to look up) in its high bits and a payload in its low `payload_bits` bits.
    `words`: the array of all words, 0 where a place is empty. Methods take and return arrays, one element for each tag.
    Many of them return places, which are indices into `words`. No method moves a stored word to another place.
    """

    __slots__ = (
        "_buckets", "_laid", "_pace", "_payload_bits", "_poured", "_spills", "count", "load",
        "passed", "rows", "spilled", "wider", "words",
    )  # fmt: skip

    def __init__(self, capacity: int, payload_bits: int = 0, dtype: type = U64):
        buckets = buckets_for(capacity)
        self._buckets = U64(buckets)
        self._payload_bits = dtype(payload_bits)
        self._spills = 0
        self.words = zeros(buckets * 8, dtype)
        self.rows = self.words.reshape(buckets, 8)
        self.load = zeros(buckets, np.uint8)
        self.passed = zeros(buckets, np.int16)
        self.spilled = zeros(buckets, np.int16)
        self.count = 0
        self.wider: Buckets | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.words, self.load, self.passed, self.spilled

    @property
    def nbytes(self) -> int:
        own = sum(array.nbytes for array in self.arrays)
        return own + (self.wider.nbytes if self.wider is not None else 0)

    @property
    def room(self) -> int:
        """The number of words that can still be added before the table is too full for quick look-ups."""
        return int(len(self.words) * (FILL if self.wider is None else PACKED)) - self.count

    # ---- growth ----

    def widen(self, capacity: int) -> None:
        """Begin to move all words to a new table, larger or smaller, that has room for `capacity` words."""
        self.wider = self._like(capacity)
        self._laid = self._poured = 0
        spare = max(int(len(self.words) * PACKED) - self.count, 1)
        self._pace = 1 + (len(self.words) + len(self.wider.words) // LAID) * 9 // (8 * spare)

    def _like(self, capacity: int) -> Buckets:
        return Buckets(capacity, int(self._payload_bits))

    def go_on(self, more: int) -> Buckets:
        """Do the next step of growth, and return the table to use from now on.

        That is this table, or the new one once it has all words. `more`: how many words the caller adds between two
        steps. Each step is long enough that growth ends before this table is full. If this table has no room for `more`
        words, all remaining steps are done at once.
        """
        wider = self.wider
        if wider is None:
            return self
        if self.room < more:
            more = 2 * len(self.words) + len(wider.words)
        work = max(STEP, more * self._pace)
        size = len(wider.words)
        if self._laid < size:
            # Zero the new table's memory in order. Moving words would touch its pages at random, at 100 us for a new
            # page.
            end = min(self._laid + work * LAID, size)
            for array in wider.arrays:
                array[self._laid * len(array) // size : end * len(array) // size] = 0
            work -= (end - self._laid) // LAID
            self._laid = end
        while work > 0 and self._poured < len(self.words):
            piece = self.words[self._poured : self._poured + min(work, POURED)]
            words = piece[piece.nonzero()]
            wider.add(self._tags(words), words)
            self._poured += len(piece)
            work -= len(piece)
        return wider if self._poured == len(self.words) else self

    def grown(self) -> Buckets:
        """Do all remaining steps of growth at once, and return the new table."""
        table = self.go_on(self.room + 1)
        assert table.wider is None
        return table

    # ---- looking up ----

    def find(self, tags: np.ndarray) -> np.ndarray:
        """Return the place (index into the array `words`) of each tag, -1 for a tag that the table does not have."""
        first = self._first(tags)
        hits = self._hits(first, tags)
        if len(hits) == len(tags):
            return _places(first, hits)
        rows = hits >> 3
        places = np.full(len(tags), -1, np.int64)
        further = self.passed.take(first) > 0
        if len(rows):
            places[rows] = _places(first.take(rows), hits)
            further[rows] = False
        pending = further.nonzero()[0]
        if not len(pending):
            return places
        tags = tags.take(pending)
        second = self._second(tags)
        hits = self._hits(second, tags)
        if len(hits):
            rows = hits >> 3
            places[pending.take(rows)] = _places(second.take(rows), hits)
        if self._spills:
            lost = (places.take(pending) < 0).nonzero()[0]
            places[pending.take(lost)] = self._find_spilled(tags.take(lost), second.take(lost))
        return places

    def _find_spilled(self, tags: np.ndarray, buckets: np.ndarray) -> np.ndarray:
        """Return the place of each tag among the buckets after its second one, -1 where the tag is absent.

        `buckets`: each tag's second bucket. All tags are searched for together, one bucket further in each round: in a
        full table there are many, and 512 of them one after the other took 3 ms.
        """
        places = np.full(len(tags), -1, np.int64)
        rows = np.arange(len(tags))
        while True:
            on = (self.spilled.take(buckets) > 0).nonzero()[0]
            if not len(on):
                return places
            rows, buckets = rows.take(on), (buckets.take(on) + 1) % len(self.rows)
            hits = self._hits(buckets, tags.take(rows))
            found = hits >> 3
            places[rows.take(found)] = _places(buckets.take(found), hits)
            rows, buckets = np.delete(rows, found), np.delete(buckets, found)

    def payloads(self, places: np.ndarray) -> np.ndarray:
        """Return the payloads (low bits) of the words at these places (indices into the array `words`), as int64."""
        carried: np.ndarray = self.words.take(places) & ones(self._payload_bits)
        return carried.astype(np.int64)

    def _tags(self, words: np.ndarray) -> np.ndarray:
        tags: np.ndarray = words >> self._payload_bits
        return tags

    def _first(self, tags: np.ndarray) -> np.ndarray:
        return ((tags * FIRST >> UPPER) % self._buckets).view(np.int64)

    def _second(self, tags: np.ndarray) -> np.ndarray:
        return ((tags * SECOND >> UPPER) % self._buckets).view(np.int64)

    def _hits(self, buckets: np.ndarray, tags: np.ndarray) -> np.ndarray:
        """Return which tags lie in the given buckets and where: 8 * i + column if tags[i] is in buckets[i].

        A bucket has 8 columns, and at most one of them has the tag. Tags that are not in their bucket are left out.
        """
        lines = self.rows.take(buckets, 0)
        if self._payload_bits:
            lines >>= self._payload_bits
        hits: np.ndarray = (lines == tags[:, None]).ravel().nonzero()[0]
        return hits

    # ---- changing ----

    def add(self, tags: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Insert words whose tags the table does not have yet, and return their places in the array `self.words`.

        `words`: the words to insert, each a tag with its payload. `tags`: the tag in each of them. Of several words
        with the same tag one is inserted, and the place of that word is returned for all of them. Raises ValueError if
        the table has fewer free places than there are words.
        """
        if self.count + len(words) > len(self.words):
            raise ValueError("more words than there is room for")
        first = self._first(tags)
        places = self._race(words, tags, first)
        lost = (places < 0).nonzero()[0]
        while len(lost):
            places[lost] = self._race(words[lost], tags[lost], first[lost])
            lost = lost[places[lost] < 0]
        if self.wider is not None:
            both = (places < self._poured) & (self.words.take(places) == words)
            if both.any():
                self.wider.add(tags[both], words[both])
        return places

    def _race(self, words: np.ndarray, tags: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Put words into the first free place of their buckets, at most one word into each bucket.

        All words that want the same place write their index there, and the word whose index is read back gets the
        place. Returns each word's place, or -1 for a word that lost to another one. A word that lost to a word with the
        same tag gets that word's place. `first`: each tag's first bucket.
        """
        at, spilled = self._emptier(tags, first)
        wanted = at << 3
        wanted += (self.rows.take(at, 0) == 0).argmax(1)
        numbers = np.arange(len(words), dtype=self.words.dtype)
        self.words[wanted] = numbers
        winner = self.words.take(wanted)
        won = winner == numbers
        places = wanted
        if not won.all():
            twins = tags.take(winner.astype(np.int64)) == tags
            places = np.where(twins, wanted, -1)
            winners = won.nonzero()[0]
            words, tags, first = words.take(winners), tags.take(winners), first.take(winners)
            at, wanted = at.take(winners), wanted.take(winners)
        self.words[wanted] = words
        self.load[at] += ONE  # each bucket occurs once: all words for a bucket competed for the same place
        self.count += len(at)
        self._count_passed(tags, first, at, 1, spilled)
        return places

    def put(self, places: np.ndarray, words: np.ndarray) -> None:
        """Overwrite the words at `places` with words that have the same tags and other payloads."""
        self.words[places] = words
        if self.wider is not None:
            both = places < self._poured
            self.wider.put(self.wider.find(self._tags(words[both])), words[both])

    def drop(self, places: np.ndarray) -> None:
        """Remove the words at these places, which must be distinct and not empty."""
        tags = self._tags(self.words[places])
        if self.wider is not None:
            self.wider.drop(self.wider.find(tags[places < self._poured]))
        buckets = places >> 3
        self._count_passed(tags, self._first(tags), buckets, -1, self._spills > 0)
        self.words[places] = 0
        np.subtract.at(self.load, buckets, ONE)
        self.count -= len(places)

    def _emptier(self, tags: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the bucket into which each tag should go at present, and whether any tag goes beyond its two buckets.

        `first`: each tag's first bucket. Which bucket is best depends on how many words each one has now.
        """
        load = self.load.take(first)
        crowded = (load >= EASY).nonzero()[0]
        if not len(crowded):
            return first, False
        second = self._second(tags.take(crowded))
        load = load.take(crowded)
        second_load = self.load.take(second)
        at = first.copy()
        at[crowded] = np.where(second_load < load, second, first.take(crowded))
        full = (np.minimum(load, second_load) == 8).nonzero()[0]
        if not len(full):
            return at, False
        ends, walking = second.take(full), np.arange(len(full))
        while len(walking):
            walking = walking[self.load.take(ends.take(walking)) == 8]
            ends[walking] = (ends.take(walking) + 1) % len(self.rows)
        at[crowded.take(full)] = ends
        return at, True

    def _count_passed(self, tags: np.ndarray, first: np.ndarray, ends: np.ndarray, step: int, spilled: bool) -> None:
        """Add `step` to the counters of each bucket that a look-up of these tags passes before it finds them.

        The counters, `passed` and `spilled`, tell look-ups whether to go on to further buckets. `first`: the tags'
        first buckets. `ends`: the buckets in which the tags lie. `step`: 1 after an insertion, -1 for a removal.
        `spilled`: some tags may lie beyond their second bucket.
        """
        away = (first != ends).nonzero()[0]
        if not len(away):
            return
        np.add.at(self.passed, first.take(away), np.int16(step))
        if not spilled:
            return
        buckets, ends = self._second(tags.take(away)), ends.take(away)
        self._spills += step * int(np.count_nonzero(buckets != ends))
        while len(walking := (buckets != ends).nonzero()[0]):
            buckets, ends = buckets.take(walking), ends.take(walking)
            np.add.at(self.spilled, buckets, np.int16(step))
            buckets = (buckets + 1) % len(self.rows)


def distinct(places: np.ndarray) -> np.ndarray:
    """Return the places sorted and without duplicates.

    For a few hundred places this takes a third of np.unique's time; if they are sorted and distinct already, 3 us.
    """
    if (places[1:] > places[:-1]).all():
        return places
    ordered = np.sort(places)
    keep = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


def ones(bits: np.unsignedinteger) -> np.unsignedinteger:
    """Return an integer whose low `bits` bits are 1, of the same type as `bits`."""
    return type(bits)((1 << int(bits)) - 1)


def _places(buckets: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Return the places (indices into `words`) at which tags were found.

    `buckets`: the bucket of each tag; `hits`: the tags' positions from `_hits`, in the same order.
    """
    places = buckets << 3
    places += hits & 7
    return places


def buckets_for(capacity: int) -> int:
    """Return how many buckets a table for `capacity` words needs at the load factor `FILL`: an odd number."""
    return int(capacity / (8 * FILL)) + 1 | 1
