"""The changes that a writer has not sent yet, and the size of the deltas sent since its last snapshot.

No sockets, no clock. A snapshot is due when the deltas after the last one reach `TAIL` bytes a block: with 13 bytes a
block in the snapshot itself, Redis keeps less than 16 bytes a block. The last `KEEP` bytes a block of deltas stay, so
that a slow reader need not load the snapshot.
"""

from __future__ import annotations

import random
from collections import deque

from cachemap.changes import Change
from cachemap.cluster.codec import FIRST, Position, encode_change, encode_delta

TAIL, KEEP = 2.6, 0.3
LEAST_TAIL = 1 << 14  # bytes of deltas; fewer are not worth a snapshot
ENTRY = 40  # bytes of a delta besides its changes: its head and the stream's overhead
MOST_PENDING = 1 << 20  # bytes; if more waits because the server is away, a snapshot is smaller
LONGEST_DELTA = MOST_PENDING + 64


class Journal:
    """The journal of one replica while this gateway writes it. `n` is the last delta known to be in Redis."""

    def __init__(self, n: int, whole: bool):
        self.n = n
        self.term = random.getrandbits(32)
        self.whole = whole  # a snapshot must come before any delta, as nothing in Redis can be continued
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
        """Drop pending changes, and wait for a snapshot.

        Redis does not have what was last written there, or too much waits: only a snapshot helps.
        """
        self.whole = True
        self._pending, self._bytes = [], 0

    def seal(self, position: Position) -> bytes | None:
        """Return the next delta, None if nothing changed. `sent` or `start_over` must follow."""
        if self.whole or not self._pending:
            return None
        delta = encode_delta(self.term, self._flags, position, self._pending)
        self._pending, self._bytes = [], 0
        return delta

    def sent(self, size: int) -> None:
        """Note that the sealed delta, with `size` bytes, is in Redis."""
        self._flags = 0
        self.n += 1
        self._tail.append((self.n, size + ENTRY))
        self.tail_bytes += size + ENTRY

    def due(self, blocks: int) -> bool:
        """Return whether a snapshot must be written, with `blocks` blocks held."""
        return self.whole or self.tail_bytes > max(TAIL * blocks, LEAST_TAIL)

    def first_to_keep(self, blocks: int) -> int:
        """Return the number of the oldest delta to keep beside a new snapshot."""
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
        """Start with the deltas after snapshot `n`, which was written now."""
        self.n, self._flags = n, 0
        self._tail.clear()
        self.tail_bytes = 0
