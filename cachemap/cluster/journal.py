"""The changes that the leading gateway has not written to Redis yet, and the size of what it wrote.

A delta is the changes written at one time; a snapshot is all that the replica holds, in place of the deltas before it.
A snapshot is due when the deltas after the last snapshot reach `TAIL` bytes for each block of the replica: with 13
bytes a block in the snapshot itself, Redis keeps less than 16 bytes a block. The last deltas, `KEEP` bytes a block,
stay beside a new snapshot, so that a slow reader need not load it. No sockets and no clock are used here.
"""

from __future__ import annotations

import random
from collections import deque

from cachemap.changes import Change
from cachemap.cluster.codec import FIRST, Position, encode_change, encode_delta

TAIL, KEEP = 2.6, 0.3
LEAST_TAIL = 1 << 14  # bytes of deltas that do not make a snapshot due yet, however few blocks there are
ENTRY = 40  # bytes of a delta besides its changes: its head and the stream's overhead
MOST_PENDING = 1 << 20  # bytes of changes; if more wait because the server is away, a snapshot is smaller


class Journal:
    """The journal of one replica while this gateway leads it.

    `n`: the number of the last delta known to be in Redis.
    `term`: a random number that marks all deltas of this journal, to notice two gateways that write at once.
    `whole`: a snapshot must be written before any delta, as nothing in Redis can be continued.
    """

    def __init__(self, n: int, whole: bool):
        self.n = n
        self.term = random.getrandbits(32)
        self.whole = whole
        self._pending: list[bytes] = []
        self._bytes = 0
        self._flags = FIRST
        self._tail: deque[tuple[int, int]] = deque()  # number and size of the deltas in Redis
        self.tail_bytes = 0

    def add(self, change: Change) -> None:
        if self.whole:
            return
        data = encode_change(change)
        self._pending.append(data)
        self._bytes += len(data)
        if self._bytes > MOST_PENDING:
            self.start_over()

    def start_over(self) -> None:
        """Drop pending changes, as a snapshot must be written next.

        The reason: Redis may lack what was last written, or too many changes wait.
        """
        self.whole = True
        self._pending, self._bytes = [], 0

    def seal(self, position: Position) -> bytes | None:
        """Return the pending changes as the next delta, None if there are none.

        `position`: the engine's last batch that the changes include. Call `sent` or `start_over` after the write.
        """
        if self.whole or not self._pending:
            return None
        delta = encode_delta(self.term, self._flags, position, self._pending)
        self._pending, self._bytes = [], 0
        return delta

    def sent(self, size: int) -> None:
        """Note that the delta from the last `seal`, with `size` bytes, is in Redis."""
        self._flags = 0
        self.n += 1
        self._tail.append((self.n, size + ENTRY))
        self.tail_bytes += size + ENTRY

    def due(self, blocks: int) -> bool:
        """Return whether a snapshot must be written, if the replica holds so many blocks."""
        return self.whole or self.tail_bytes > max(TAIL * blocks, LEAST_TAIL)

    def first_to_keep(self, blocks: int) -> int:
        """Return the number of the oldest delta to keep beside a new snapshot of so many blocks."""
        size, first = 0, self.n + 1
        for number, bytes_ in reversed(self._tail):
            size += bytes_
            if size > max(KEEP * blocks, LEAST_TAIL // 8):
                break
            first = number
        return first

    def trimmed(self, first: int) -> None:
        """Note that the deltas before number `first` are removed from Redis."""
        while self._tail and self._tail[0][0] < first:
            self.tail_bytes -= self._tail.popleft()[1]

    def anew(self, n: int) -> None:
        """Note that a snapshot was written that replaces all deltas; the next delta has the number after `n`."""
        self.n, self._flags = n, 0
        self._tail.clear()
        self.tail_bytes = 0
