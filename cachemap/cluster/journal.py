"""What a writer has to tell the others: changes not sent yet, and how much of the tail is sent since the snapshot.

No sockets, no clock. A snapshot is due when the deltas after the last one have grown to `TAIL` bytes a block: with 13
bytes a block in the snapshot itself this holds all that Redis keeps of a replica under 16. Deltas of the last `KEEP`
bytes a block stay, so that a slow reader need not load the snapshot.
"""

from __future__ import annotations

import random
from collections import deque

from cachemap.changes import Change
from cachemap.cluster.codec import FIRST, Position, encode_change, encode_delta

TAIL, KEEP = 2.6, 0.3
LEAST_TAIL = 1 << 14  # bytes; less is not worth a snapshot
ENTRY = 40  # bytes of a delta besides its changes: its head, and what the stream needs for it
MOST_PENDING = 1 << 20  # bytes; when more waits, the server being away, a snapshot is the shorter way
LONGEST_DELTA = MOST_PENDING + 64


class Journal:
    """Of one replica, while this gateway writes. `n` numbers the last delta that is known to be in Redis."""

    def __init__(self, n: int, whole: bool):
        self.n = n
        self.term = random.getrandbits(32)
        self.whole = whole  # a snapshot has to come before any delta: nothing in Redis is known to follow from
        self._pending: list[bytes] = []
        self._bytes = 0
        self._flags = FIRST
        self._tail: deque[tuple[int, int]] = deque()  # number and size of the deltas that are there
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
        """What is in Redis is not what was last written there, or too much waits: only a snapshot helps."""
        self.whole = True
        self._pending, self._bytes = [], 0

    def seal(self, position: Position) -> bytes | None:
        """The next delta, None if nothing changed. `sent` or `start_over` must follow."""
        if self.whole or not self._pending:
            return None
        delta = encode_delta(self.term, self._flags, position, self._pending)
        self._pending, self._bytes = [], 0
        return delta

    def sent(self, size: int) -> None:
        self._flags = 0
        self.n += 1
        self._tail.append((self.n, size + ENTRY))
        self.tail_bytes += size + ENTRY

    def due(self, blocks: int) -> bool:
        """Whether a snapshot has to be written, `blocks` being held."""
        return self.whole or self.tail_bytes > max(TAIL * blocks, LEAST_TAIL)

    def first_to_keep(self, blocks: int) -> int:
        """The oldest delta that stays beside a snapshot just made."""
        size, first = 0, self.n + 1
        for number, bytes_ in reversed(self._tail):
            size += bytes_
            if size > max(KEEP * blocks, LEAST_TAIL // 8):
                break
            first = number
        return first

    def trimmed(self, first: int) -> None:
        while self._tail and self._tail[0][0] < first:
            self.tail_bytes -= self._tail.popleft()[1]

    def anew(self, n: int) -> None:
        """The snapshot is in place, numbered n, and begins this writer's deltas."""
        self.n, self._flags = n, 0
        self._tail.clear()
        self.tail_bytes = 0
