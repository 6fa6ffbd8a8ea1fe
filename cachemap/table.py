"""Buckets: a hash table of 64-bit words in numpy, the ground the block map stands on.

Open addressing in buckets of eight words, one cache line each, so a lookup of many keys is
one gather of lines and one comparison. A word is a tag in the high bits (what is looked
up) and, if wanted, a payload in the low `payload_bits`; the word 0 marks an empty place.

A tag goes to its first bucket while that is less than `EASY` full, then to the emptier of
its first and second, and only if both are full it spills to the buckets after the second. At
the table's fill that is 1 word in 500, so a lookup is two rounds even when the table is full
(plain linear probing needed up to 35 rounds and 3 times the time). `passed` counts for
each bucket the words that have it for their first and live elsewhere, `spilled` those that
went past it after that: a lookup goes on only where they say so, and removal lowers them
again. There are no tombstones, so churn never degrades the table.

Filled to 85 %: (8 + 5 / 8) / 0.85 = 10.1 bytes a word.
"""

import numpy as np

from cachemap.memory import PRIVATE, Memory

FILL = 0.85  # fuller, words spill; emptier, memory is wasted
EASY = 4  # of 8; lower sends more words to their second bucket, higher fills buckets unevenly
CHUNK = 1 << 15  # words moved at a time: fits the L2 cache

U64 = np.uint64
MIX = U64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads a tag for its second bucket
MIX_SHIFT = U64(23)
ONE = np.uint8(1)  # of the array's own type: ufunc.at takes five times as long with an int


class Buckets:
    """A set of tags, each with a payload; callers speak in places (indices into `words`).

    Tags must be nonzero. Operations take and give arrays; none of them grows the table: see
    `room` and `pour`.
    """

    __slots__ = (
        "_buckets", "_payload_bits", "_spills", "count", "load", "passed", "rows", "spilled",
        "words",
    )  # fmt: skip

    def __init__(self, capacity: int, payload_bits: int = 0, memory: Memory = PRIVATE):
        buckets = buckets_for(capacity)
        self._buckets = U64(buckets)
        self._payload_bits = U64(payload_bits)
        self._spills = 0
        self.words = memory.zeros(buckets * 8, U64)
        self.rows = self.words.reshape(buckets, 8)
        self.load = np.zeros(buckets, np.uint8)
        self.passed = memory.zeros(buckets, np.int16)
        self.spilled = memory.zeros(buckets, np.int16)
        self.count = 0

    @classmethod
    def over(cls, words: np.ndarray, passed: np.ndarray, spilled: np.ndarray) -> "Buckets":
        """Another process's table without payload, to be looked things up in."""
        self = cls.__new__(cls)
        self.words, self.rows, self.passed, self.spilled = words, words.reshape(-1, 8), passed, spilled
        self._buckets, self._payload_bits = U64(len(self.rows)), U64(0)
        self._spills = 1  # not known here: look
        return self

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.words, self.load, self.passed, self.spilled))

    @property
    def room(self) -> int:
        """How many more words fit before the table is too full to be quick."""
        return int(len(self.words) * FILL) - self.count

    def at(self, tag: int) -> int:
        """The place of one tag, -1 if absent, in a table without payload. Plain ints: 0.6 us
        where `find` takes 5, 1.2 us if it has to look into the second bucket."""
        start = tag % len(self.rows) * 8
        line = self.words[start : start + 8].tolist()
        if tag in line:
            return start + line.index(tag)
        if not self.passed[start >> 3]:
            return -1
        start = (tag * int(MIX) % (1 << 64) >> int(MIX_SHIFT)) % len(self.rows) * 8
        line = self.words[start : start + 8].tolist()
        if tag in line:
            return start + line.index(tag)
        return self._find_spilled(U64(tag), start >> 3)

    def find(self, tags: np.ndarray) -> np.ndarray:
        """The place of each tag, -1 where absent."""
        first = self._first(tags)
        hits = self._hits(first, tags)
        if len(hits) == len(tags):
            return _places(first, hits)
        return self._find_elsewhere(tags, first, hits)

    def find_prefix(self, tags: np.ndarray) -> np.ndarray:
        """The places of the leading tags that are present, up to the first absent one."""
        first = self._first(tags)
        hits = self._hits(first, tags)
        if len(hits) == len(tags):
            return _places(first, hits)
        rows = hits >> 3
        lead = len(rows)  # tags that are in their first bucket, from the start on
        if lead and rows[-1] != lead - 1:
            lead = int((rows != np.arange(lead)).argmax())
        if not self.passed[first[lead]]:
            return _places(first[:lead], hits[:lead])
        return self._prefix_in_two(tags, first, hits)

    def _prefix_in_two(self, tags, first, hits) -> np.ndarray:
        """The prefix when some tags are not in their first bucket."""
        rows = hits >> 3
        missing = np.ones(len(tags), bool)
        missing[rows] = False
        pending = missing.nonzero()[0]
        rest = tags.take(pending)
        second = self._second(rest)
        more = self._hits(second, rest)
        found = more >> 3
        end = len(tags)
        if len(found) < len(pending):
            missing[pending.take(found)] = False
            end = int(missing.argmax())
            if self.spilled[second[pending.searchsorted(end)]]:
                places = self._find_elsewhere(tags, first, hits)
                absent = (places < 0).nonzero()[0]
                return places[: absent[0]] if len(absent) else places
        first[pending] = second
        first <<= 3
        first[rows] += hits & 7
        first[pending.take(found)] += more & 7
        return first[:end]

    def _find_elsewhere(self, tags, first, hits) -> np.ndarray:
        """The rest of `find` when the first buckets have only some of the tags."""
        rows = hits >> 3
        places = np.full(len(tags), -1, np.int64)
        places[rows] = _places(first.take(rows), hits)
        further = self.passed.take(first) > 0
        further[rows] = False
        pending = further.nonzero()[0]
        if not len(pending):
            return places
        tags = tags.take(pending)
        second = self._second(tags)
        hits = self._hits(second, tags)
        rows = hits >> 3
        places[pending.take(rows)] = _places(second.take(rows), hits)
        if self._spills:
            lost = ((places.take(pending) < 0) & (self.spilled.take(second) > 0)).nonzero()[0]
            for i in lost.tolist():
                places[pending[i]] = self._find_spilled(tags[i], int(second[i]))
        return places

    def _find_spilled(self, tag: np.uint64, bucket: int) -> int:
        while self.spilled[bucket]:
            bucket = (bucket + 1) % len(self.rows)
            hit = (self.rows[bucket] >> self._payload_bits == tag).nonzero()[0]
            if len(hit):
                return bucket * 8 + int(hit[0])
        return -1

    def add(self, words: np.ndarray) -> np.ndarray:
        """Put in words whose tags are absent; gives their places. Of words with the same
        tag one goes in and all have its place."""
        if self.count + len(words) > len(self.words):
            raise ValueError("more words than there is room for")
        tags = words >> self._payload_bits
        first = self._first(tags)
        places = self._race(words, tags, first)
        lost = (places < 0).nonzero()[0]
        while len(lost):
            places[lost] = self._race(words[lost], tags[lost], first[lost])
            lost = lost[places[lost] < 0]
        return places

    def _race(self, words, tags, first) -> np.ndarray:
        """Words go for the first free place of their bucket: each writes its number there
        and the one that can be read has it. Its twins have it too, the others -1."""
        at = self._emptier(tags, first)
        wanted = at << 3
        wanted += (self.rows.take(at, 0) == 0).argmax(1)
        numbers = np.arange(len(words), dtype=U64)
        self.words[wanted] = numbers
        winner = self.words.take(wanted)
        won = winner == numbers
        places = wanted
        if not won.all():
            twins = tags.take(winner.view(np.int64)) == tags
            places = np.where(twins, wanted, -1)
            winners = won.nonzero()[0]
            words, tags, first = words.take(winners), tags.take(winners), first.take(winners)
            at, wanted = at.take(winners), wanted.take(winners)
        self.words[wanted] = words
        self.load[at] += ONE  # each once: all who want a bucket want the same place in it
        self.count += len(at)
        self._count_passed(tags, first, at, 1)
        return places

    def drop(self, places: np.ndarray) -> None:
        """Take out the words at these places (distinct, none empty)."""
        tags = self.words[places] >> self._payload_bits
        buckets = places >> 3
        self._count_passed(tags, self._first(tags), buckets, -1)
        self.words[places] = 0
        np.subtract.at(self.load, buckets, ONE)
        self.count -= len(places)

    def pour(self, into: "Buckets"):
        """Add all words to another table. Yields (places here, places there) in pieces
        while doing so, so that what lies beside the table can be moved along."""
        for start in range(0, len(self.words), CHUNK):
            piece = self.words[start : start + CHUNK]
            filled = piece.nonzero()[0]
            yield filled + start, into.add(piece[filled])

    def _first(self, tags: np.ndarray) -> np.ndarray:
        return (tags % self._buckets).view(np.int64)

    def _second(self, tags: np.ndarray) -> np.ndarray:
        return (((tags * MIX) >> MIX_SHIFT) % self._buckets).view(np.int64)

    def _hits(self, buckets: np.ndarray, tags: np.ndarray) -> np.ndarray:
        """Where bucket i has tag i, as 8 i + column, at most one for each i."""
        lines = self.rows.take(buckets, 0)
        if self._payload_bits:
            lines >>= self._payload_bits
        return (lines == tags[:, None]).ravel().nonzero()[0]

    def _emptier(self, tags: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The bucket each tag should go to, as the loads are now."""
        load = self.load.take(first)
        crowded = (load >= EASY).nonzero()[0]
        if not len(crowded):
            return first
        second = self._second(tags.take(crowded))
        load = load.take(crowded)
        second_load = self.load.take(second)
        at = first.copy()
        at[crowded] = np.where(second_load < load, second, first.take(crowded))
        full = (np.minimum(load, second_load) == 8).nonzero()[0]
        for i in full.tolist():
            bucket = int(second[i])
            while self.load[bucket] == 8:
                bucket = (bucket + 1) % len(self.rows)
            at[crowded[i]] = bucket
        return at

    def _count_passed(self, tags, first, ends, step: int) -> None:
        """Add `step` at every bucket each tag goes past on the way to the one it ends in."""
        away = (first != ends).nonzero()[0]
        if not len(away):
            return
        np.add.at(self.passed, first.take(away), np.int16(step))
        second, ends = self._second(tags.take(away)), ends.take(away)
        for i in (second != ends).nonzero()[0].tolist():
            self._spills += step
            bucket = int(second[i])
            while bucket != ends[i]:
                self.spilled[bucket] += step
                bucket = (bucket + 1) % len(self.rows)


def distinct(places: np.ndarray) -> np.ndarray:
    """Sorted and each once; for a few hundred a third of what np.unique takes."""
    ordered = np.sort(places)
    keep = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


def _places(buckets: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Places from buckets and what `_hits` found in them, one each."""
    places = buckets << 3
    places += hits & 7
    return places


def buckets_for(capacity: int) -> int:
    """Buckets needed to hold `capacity` words at the table's fill."""
    return max(1, -(-int(capacity / FILL) // 8))
