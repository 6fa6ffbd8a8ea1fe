"""One ledger for all workers: counters in shared memory, which each adds up before it chooses.

Of each worker there is a page that it alone writes: how many connections it has closed, a row of five counters for
each replica's slot, and which rows it changed last, so that its siblings read those and no others. A page is five
numbers of 8 bytes a slot; each is whole, and a row that is read half changed is a millionth of a second out of date.
A worker writes what it counts, not what changed: a row that is written late, or once more, is as right as any.
A worker that dies leaves a page that the control process clears.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

from policies import Ledger, Load, Reservation
from policies.ledger import NOTHING

COUNTS = len(NOTHING)
SLOTS = 4096  # replicas that are counted together; memory is used when it is written
RECENT = 256  # changed rows a page remembers
CHANGES, CLOSED, LOG = 0, 1, 8  # where in a page: changes so far, connections closed, the rows changed last
ROWS = LOG + RECENT
PAGE = ROWS + SLOTS * COUNTS
EMPTY = array("q", NOTHING)
_ROW = Struct(f"{COUNTS}q")
_FIRST, _BYTES = 8 * ROWS, 8 * COUNTS
_unpack, _pack = _ROW.unpack_from, _ROW.pack_into  # word by word took three times as long


class Page:
    """One worker's, as one process sees it. `changes` is how many the worker has written, or its sibling has read."""

    __slots__ = ("_bytes", "changes", "words")

    def __init__(self, memory: memoryview):
        self._bytes = memory
        self.words = memory.cast("q")
        self.changes = self.words[CHANGES]

    def row(self, slot: int) -> tuple[int, ...]:
        return _unpack(self._bytes, _FIRST + slot * _BYTES)

    def write(self, slot: int, load: Load, others: tuple[int, ...]) -> None:
        """What the worker has there: all but what others have."""
        requests, prefilling, prefill_tokens, decoding, context_tokens = others
        _pack(
            self._bytes, _FIRST + slot * _BYTES, load.requests - requests, load.prefilling - prefilling,
            load.prefill_tokens - prefill_tokens, load.decoding - decoding, load.context_tokens - context_tokens,
        )  # fmt: skip
        words, changes = self.words, self.changes
        words[LOG + changes % RECENT] = slot
        words[CHANGES] = self.changes = changes + 1

    def changed(self, changes: int) -> Iterable[int]:
        """The rows that were changed since this was asked last, now that there are so many changes."""
        words, since, self.changes = self.words, self.changes, changes
        if changes - since > RECENT // 2:
            return range(SLOTS)
        first, last = LOG + since % RECENT, LOG + changes % RECENT
        return words[first:last] if first <= last else [*words[first:ROWS], *words[LOG:last]]


class Board:
    """All workers' pages. `memory` holds `size(workers)` bytes."""

    def __init__(self, memory: memoryview, workers: int):
        self._bytes = memory.cast("B")
        self._pages = [self.page(worker) for worker in range(workers)]
        self.workers = workers

    @staticmethod
    def size(workers: int) -> int:
        return 8 * PAGE * workers

    def page(self, worker: int) -> Page:
        return Page(self._bytes[8 * PAGE * worker : 8 * PAGE * (worker + 1)])

    def sum(self, slot: int) -> tuple[int, ...]:
        return added(self._pages, slot)

    def clear(self, worker: int) -> None:
        """The worker is gone, and all it had; perhaps half-way through a row, or before it told which."""
        page = self._pages[worker]
        words = page.words
        for slot in range(SLOTS):
            if any(page.row(slot)):
                at = ROWS + slot * COUNTS
                words[at : at + COUNTS] = EMPTY
        words[CLOSED] = 0
        words[CHANGES] += RECENT  # all are to be read again

    def closed(self, worker: int) -> int:
        return self._pages[worker].words[CLOSED]

    def close(self, worker: int) -> None:
        self._pages[worker].words[CLOSED] += 1


def added(pages: Sequence[Page], slot: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*[page.row(slot) for page in pages])))


class WorkerLedger(Ledger):
    """What this worker counts stands on its page; what its siblings count is `others` once it has caught up."""

    def __init__(self, board: Board, worker: int):
        super().__init__()
        self._page = board.page(worker)
        self._siblings = [board.page(one) for one in range(board.workers) if one != worker]
        # What siblings have in a row. Of one there is nothing to add up: 1,000 instructions less.
        self._theirs = self._siblings[0].row if len(self._siblings) == 1 else lambda slot: added(self._siblings, slot)
        self._slots: dict[str, int] = {}
        self._replicas: dict[int, str] = {}
        self._untold: set[str] = set()
        self.lose_sight()

    def place(self, replica: str, slot: int) -> Load:
        """`add`, for a replica that is counted with the others."""
        load = self.add(replica)
        if slot < SLOTS:
            self._slots[replica], self._replicas[slot] = slot, replica
            self.others(replica, self._theirs(slot))
        return load

    def remove(self, replica: str) -> None:
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._replicas.pop(slot, None)
            self._page.write(slot, Load(), NOTHING)
        super().remove(replica)

    def catch_up(self, now: float | None = None) -> None:
        """Read what the siblings changed, as of `now`: who reads before each choice sees their first tokens soon enough."""
        touched: set[int] = set()
        for page in self._siblings:
            changes = page.words[CHANGES]
            if changes != page.changes:
                touched.update(page.changed(changes))
        for slot in touched:
            replica = self._replicas.get(slot)
            if replica is not None:
                self.others(replica, self._theirs(slot), now)

    def lose_sight(self) -> None:
        """`others` are told by somebody else for now: read all when that ends."""
        for page in self._siblings:
            page.changes = -SLOTS

    def tell(self) -> None:
        """What the siblings were not told at once, and may have been since."""
        while self._untold:
            self._write(self._untold.pop())

    def _write(self, replica: str) -> None:
        slot = self._slots.get(replica)
        if slot is not None:
            self._page.write(slot, self._loads[replica], self._others.get(replica, NOTHING))

    def reserve(self, replica: str, uncached: int, tokens: int, counted: bool = False, now: float | None = None) -> Reservation:
        taken = Ledger.reserve(self, replica, uncached, tokens, counted, now)  # super() takes 1,000 instructions, `_write` 5,000
        self._write(replica)
        return taken

    def first_byte(self, reservation: Reservation, now: float | None = None) -> None:
        """Told at once if it came at `now`. That of an answer in one piece is its last, too, as a rule: `release` tells of both, or `tell`."""
        Ledger.first_byte(self, reservation, now)
        if now is None:
            self._untold.add(reservation.replica)
        else:
            self._write(reservation.replica)

    def release(self, reservation: Reservation) -> None:
        Ledger.release(self, reservation)
        self._write(reservation.replica)


class ControlLedger(Ledger):
    """What all workers have, as the control process sees it; nothing is reserved here."""

    def __init__(self, board: Board):
        super().__init__()
        self._board = board
        self._slots: dict[str, int] = {}

    def place(self, replica: str, slot: int) -> Load:
        if slot < SLOTS:
            self._slots[replica] = slot
        return self.add(replica)

    def remove(self, replica: str) -> None:
        """What still runs on it settles with the workers."""
        self._slots.pop(replica, None)
        self._loads.pop(replica, None)

    def own(self, replica: str) -> tuple[int, ...]:
        slot, load = self._slots.get(replica), self._loads.get(replica)
        if slot is None or load is None:
            return NOTHING
        counts = self._board.sum(slot)
        load.requests, load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens = counts
        return counts
