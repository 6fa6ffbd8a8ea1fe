"""The changes that the leading gateway has not written to Redis yet, and the size of the deltas that it wrote.

A delta is the changes to a replica's blocks that are written at one time. A snapshot is all blocks that the replica
holds, and replaces the deltas before it. A snapshot is due when the deltas after the last snapshot reach `TAIL` bytes
for each block of the replica: with 13 bytes a block in the snapshot itself, Redis keeps less than 16 bytes a block. The
newest deltas, `KEEP` bytes a block, stay beside a new snapshot, so that a gateway that reads slowly need not load the
snapshot. No sockets and no clock are used here.
"""

from __future__ import annotations

import random
from collections import deque

from cachemap.changes import Change
from cachemap.cluster.codec import FIRST, MOST_PENDING, Position, encode_change, encode_delta

TAIL, KEEP = 2.6, 0.3
LEAST_TAIL = 1 << 14  # a snapshot is not due while the deltas have fewer bytes, however few blocks there are
ENTRY = 40  # bytes of a delta besides its changes: its head and the Redis stream's overhead


class Journal:
    """The changes to one replica's blocks that wait to be written to Redis, while this gateway leads the replica.

    `n`: the number of the last delta known to be in Redis.
    `term`: a random number in all deltas of this journal, by which two gateways that write at once are noticed.
    `whole`: a snapshot must be written before any delta, as the data in Redis cannot be continued.
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
        """Drop the waiting changes and require a snapshot as the next write.

        Called when Redis may lack the data that was written last, or when too many changes wait.
        """
        self.whole = True
        self._pending, self._bytes = [], 0

    def seal(self, position: Position) -> bytes | None:
        """Return the waiting changes, encoded as the next delta, and empty the journal; None if no changes wait.

        `position`: the last of the engine's event batches that the changes include. After the write call `sent` or, if
        it failed, `start_over`.
        """
        if self.whole or not self._pending:
            return None
        delta = encode_delta(self.term, self._flags, position, self._pending)
        self._pending, self._bytes = [], 0
        return delta

    def sent(self, size: int) -> None:
        """Note that the delta (set of changes) that `seal` returned last, with `size` bytes, is now in Redis."""
        self._flags = 0
        self.n += 1
        self._tail.append((self.n, size + ENTRY))
        self.tail_bytes += size + ENTRY

    def due(self, blocks: int) -> bool:
        """Return whether a snapshot of all blocks must be written to Redis now, as there are too many deltas.

        `blocks`: how many blocks the replica holds.
        """
        return self.whole or self.tail_bytes > max(TAIL * blocks, LEAST_TAIL)

    def first_to_keep(self, blocks: int) -> int:
        """Return the number of the oldest delta (set of changes) that Redis should keep in addition to a new snapshot.

        `blocks`: how many blocks the snapshot has.
        """
        size, first = 0, self.n + 1
        for number, bytes_ in reversed(self._tail):
            size += bytes_
            if size > max(KEEP * blocks, LEAST_TAIL // 8):
                break
            first = number
        return first

    def trimmed(self, first: int) -> None:
        """Note that the deltas (sets of changes) before number `first` were removed from Redis."""
        while self._tail and self._tail[0][0] < first:
            self.tail_bytes -= self._tail.popleft()[1]

    def anew(self, n: int) -> None:
        """Note that a snapshot was written to Redis that replaces all deltas; the next delta has the number `n` + 1."""
        self.n, self._flags = n, 0
        self._tail.clear()
        self.tail_bytes = 0
