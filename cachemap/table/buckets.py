"""Buckets: a hash table of words in numpy, the ground the map stands on.

Open addressing in buckets of eight words, so a lookup of many keys is one gather of lines and
one comparison. A word is a tag in the high bits (what is looked up) and a payload in the low
`payload_bits`; the word 0 marks an empty place.

Which buckets are a tag's first and second is secret to this process. Tags are made of the keys that engines tell, and
an engine that knew the choice could tell keys which all go to the same two buckets.

A tag goes to its first bucket while that is less than `EASY` full, then to the emptier of
its first and second, and only if both are full it spills to the buckets after the second. At
the table's fill that is 1 word in 500, so a lookup is two rounds even when the table is full
(plain linear probing needed up to 35 rounds and 3 times the time). `passed` counts for
each bucket the words that have it for their first and live elsewhere, `spilled` those that
went past it after that: a lookup goes on only where they say so, and removal lowers them
again. There are no tombstones, so churn never degrades the table.

It grows in steps: `widen` begins a second table, into which each `go_on` pours some of the words, and which
takes this one's place once it has them all. Until then this one stays complete and is what is looked up, while what
comes and goes meanwhile is told to both. Moving 50 M words at once would take 5 s.

Filled to 82 %: (8 + 5 / 8) / 0.82 = 10.5 bytes a word of 64 bits.
"""

from __future__ import annotations

import secrets

import numpy as np

from cachemap.table.memory import zeros

FILL = 0.82  # fuller, words spill; emptier, memory is wasted
PACKED = 0.92  # how full it may become while a wider one is made: 1 word in 70 spills. The nearer
# to FILL, the longer the steps of growth: at 4 M blocks a call of 512 took at most 2.6 to 3.7 ms, with .85 and .91 3.5
# to 6.3, and 0.7 bytes less a block
EASY = 4  # of 8; lower sends more words to their second bucket, higher fills buckets unevenly
STEP = 1 << 12  # places of both tables that a step of growth handles at least: 0.3 ms
# places of the old one at a time: fits the caches with all that is made of it, eight times as many take a third longer
POURED = 1 << 12
LAID = 8  # places of a new table whose memory is laid out in the time one word is poured

U64 = np.uint64
MIX = U64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads an engine's key over its tag, alike in all gateways
# A tag is multiplied with these for its first and second bucket. With an odd secret and an odd number of buckets, the
# product's upper half leads two given tags to the same one of n buckets with a probability of about 2 / n at most.
FIRST, SECOND = (U64(secrets.randbits(64) | 1) for _ in range(2))
UPPER = U64(32)
ONE = np.uint8(1)  # of the array's own type: ufunc.at takes five times as long with an int


class Buckets:
    """A set of tags, each with a payload; callers speak in places (indices into `words`).

    Tags must be nonzero. Operations take and give arrays, and none of them moves a word.
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
        """How many more words fit before the table is too full to be quick."""
        return int(len(self.words) * (FILL if self.wider is None else PACKED)) - self.count

    # ---- growth ----

    def widen(self, capacity: int) -> None:
        """Begin to grow, or to shrink, to this capacity."""
        self.wider = self._like(capacity)
        self._laid = self._poured = 0
        spare = max(int(len(self.words) * PACKED) - self.count, 1)
        self._pace = 1 + (len(self.words) + len(self.wider.words) // LAID) * 9 // (8 * spare)

    def _like(self, capacity: int) -> Buckets:
        return Buckets(capacity, int(self._payload_bits))

    def go_on(self, more: int) -> Buckets:
        """The next step of growth, long enough to end it before words that come `more` at a time have filled
        this table. Gives the table to use from now on."""
        wider = self.wider
        if wider is None:
            return self
        work = max(STEP, more * self._pace)
        size = len(wider.words)
        if self._laid < size:
            # touched here in order, since pouring touches all of it at random: pages come with 100 us of zeroing
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
        """The rest of growth at once."""
        table = self.go_on(2 * len(self.words) + (len(self.wider.words) if self.wider is not None else 0))
        assert table.wider is None
        return table

    # ---- looking up ----

    def find(self, tags: np.ndarray) -> np.ndarray:
        """The place of each tag, -1 where absent."""
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
        """The place of each tag behind its second bucket, -1 where absent. All at once, as where a table is full each
        second tag is looked for here: one after the other 512 took 3 ms."""
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
        """What the words at these places carry, as int64."""
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
        """Where bucket i has tag i, as 8 i + column, at most one for each i."""
        lines = self.rows.take(buckets, 0)
        if self._payload_bits:
            lines >>= self._payload_bits
        hits: np.ndarray = (lines == tags[:, None]).ravel().nonzero()[0]
        return hits

    # ---- changing ----

    def add(self, tags: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Put in words whose tags are absent; gives their places. Of words with the same
        tag one goes in and all have its place."""
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
        """Words go for the first free place of their bucket: each writes its number there
        and the one that can be read has it. Its twins have it too, the others -1."""
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
        self.load[at] += ONE  # each once: all who want a bucket want the same place in it
        self.count += len(at)
        self._count_passed(tags, first, at, 1, spilled)
        return places

    def put(self, places: np.ndarray, words: np.ndarray) -> None:
        """Words of the same tags in place of those that are there."""
        self.words[places] = words
        if self.wider is not None:
            both = places < self._poured
            self.wider.put(self.wider.find(self._tags(words[both])), words[both])

    def drop(self, places: np.ndarray) -> None:
        """Take out the words at these places (distinct, none empty)."""
        tags = self._tags(self.words[places])
        if self.wider is not None:
            self.wider.drop(self.wider.find(tags[places < self._poured]))
        buckets = places >> 3
        self._count_passed(tags, self._first(tags), buckets, -1, self._spills > 0)
        self.words[places] = 0
        np.subtract.at(self.load, buckets, ONE)
        self.count -= len(places)

    def _emptier(self, tags: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, bool]:
        """The bucket each tag should go to, as the loads are now, and whether some spill."""
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
        """Add `step` at every bucket each tag goes past on the way to the one it ends in; `spilled`: some may be past
        their second."""
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
    """Sorted and each once; for a few hundred a third of what np.unique takes, and 3 us where they are so already."""
    if (places[1:] > places[:-1]).all():
        return places
    ordered = np.sort(places)
    keep = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


def ones(bits: np.unsignedinteger) -> np.unsignedinteger:
    return type(bits)((1 << int(bits)) - 1)


def _places(buckets: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Places from buckets and what `_hits` found in them, one each."""
    places = buckets << 3
    places += hits & 7
    return places


def buckets_for(capacity: int) -> int:
    """How many buckets hold `capacity` words at the table's fill; an odd number (see `FIRST`)."""
    return int(capacity / (8 * FILL)) + 1 | 1
