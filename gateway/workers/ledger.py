"""One ledger for all workers: counters in shared memory, which each adds up before it chooses.

Of each worker there is a page that it alone writes: how many connections it has closed, a row of five counters for
each replica's slot, and which rows it changed last, so that its siblings read those and no others. A page is five
numbers of 8 bytes a slot; each is whole, and a row that is read half changed is a millionth of a second out of date.
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
_unpack, _pack = _ROW.unpack_from, _ROW.pack_into


class Board:
    """All workers' pages. `memory` holds `size(workers)` bytes."""

    def __init__(self, memory: memoryview, workers: int):
        self._bytes = memory.cast("B")
        self.words = self._bytes.cast("q")
        self.workers = workers

    @staticmethod
    def size(workers: int) -> int:
        return 8 * PAGE * workers

    def row(self, worker: int, slot: int) -> tuple[int, ...]:
        return _unpack(self._bytes, 8 * (worker * PAGE + ROWS + slot * COUNTS))

    def sum(self, slot: int, workers: Sequence[int]) -> tuple[int, ...]:
        if len(workers) == 1:
            return self.row(workers[0], slot)
        return tuple(map(sum, zip(*[self.row(worker, slot) for worker in workers])))

    def add(self, worker: int, slot: int, change: tuple[int, ...]) -> None:
        """What a worker does to a row of its own. As a whole: word by word took several times as long, three times a request."""
        words, page = self.words, worker * PAGE  # CHANGES is a page's first word
        at = 8 * (page + ROWS + slot * COUNTS)
        requests, prefilling, prefill_tokens, decoding, context_tokens = _unpack(self._bytes, at)
        more, begun, uncached, streams, context = change
        _pack(self._bytes, at, requests + more, prefilling + begun, prefill_tokens + uncached, decoding + streams, context_tokens + context)
        changes = words[page]
        words[page + LOG + changes % RECENT] = slot
        words[page] = changes + 1

    def changed(self, worker: int, since: int) -> tuple[int, Iterable[int]]:
        """How many changes there were, and the rows changed since there were so many."""
        words, page = self.words, worker * PAGE
        changes = words[page]
        if changes == since:
            return changes, ()
        if changes - since > RECENT // 2:
            return changes, range(SLOTS)
        first, last, log = since % RECENT, changes % RECENT, page + LOG
        if first < last:
            return changes, set(words[log + first : log + last])
        return changes, {*words[log + first : log + RECENT], *words[log : log + last]}

    def clear(self, worker: int) -> None:
        """The worker is gone, and all it had; perhaps half-way through a row, or before it told which."""
        words, page = self.words, worker * PAGE
        for slot in range(SLOTS):
            if any(self.row(worker, slot)):
                at = page + ROWS + slot * COUNTS
                words[at : at + COUNTS] = EMPTY
        words[page + CLOSED] = 0
        words[page] += RECENT  # all are to be read again

    def closed(self, worker: int) -> int:
        return self.words[worker * PAGE + CLOSED]

    def close(self, worker: int) -> None:
        self.words[worker * PAGE + CLOSED] += 1


class WorkerLedger(Ledger):
    """What this worker counts stands on its page; what its siblings count is `others` once it has caught up."""

    def __init__(self, board: Board, worker: int):
        super().__init__()
        self._board, self._worker = board, worker
        self._siblings = [one for one in range(board.workers) if one != worker]
        self._seen = dict.fromkeys(self._siblings, -SLOTS)
        self._slots: dict[str, int] = {}
        self._replicas: dict[int, str] = {}

    def place(self, replica: str, slot: int) -> Load:
        """`add`, for a replica that is counted with the others."""
        load = self.add(replica)
        if slot < SLOTS:
            self._slots[replica], self._replicas[slot] = slot, replica
            self.others(replica, self._board.sum(slot, self._siblings))
        return load

    def remove(self, replica: str) -> None:
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._replicas.pop(slot, None)
            self._board.add(self._worker, slot, tuple(-count for count in self._board.row(self._worker, slot)))
        super().remove(replica)

    def others(self, replica: str, counts: tuple[int, ...], now: float | None = None) -> None:
        """As it is, said at length: a fifth of the time, three times a request."""
        load = self._loads.get(replica)
        if load is not None:
            before = self._others.get(replica, NOTHING)
            if counts == before:
                return
            stepped = counts[1] < before[1] or not load.prefilling
            load.requests += counts[0] - before[0]
            load.prefilling += counts[1] - before[1]
            load.prefill_tokens += counts[2] - before[2]
            load.decoding += counts[3] - before[3]
            load.context_tokens += counts[4] - before[4]
            if stepped:
                load.since, load.begun, load.begun_tokens = now, load.prefilling, load.prefill_tokens
            self._others[replica] = counts
            self.changes.tell(replica)

    def catch_up(self, now: float | None = None) -> None:
        """Read what the siblings changed, as of `now`: who reads before each choice sees their first tokens soon enough."""
        touched: set[int] = set()
        for sibling, seen in self._seen.items():
            changes, slots = self._board.changed(sibling, seen)
            if slots:
                self._seen[sibling] = changes
                touched.update(slots)
        for slot in touched:
            replica = self._replicas.get(slot)
            if replica is not None:
                self.others(replica, self._board.sum(slot, self._siblings), now)

    def lose_sight(self) -> None:
        """`others` are told by somebody else for now: read all when that ends."""
        self._seen = dict.fromkeys(self._siblings, -SLOTS)

    def reserve(self, replica: str, uncached: int, tokens: int, counted: bool = False, now: float | None = None) -> Reservation:
        taken = super().reserve(replica, uncached, tokens, counted, now)
        slot = self._slots.get(replica)
        if slot is not None:
            self._board.add(self._worker, slot, (1, 1, uncached, 0, 0))
        return taken

    def first_byte(self, reservation: Reservation, now: float | None = None) -> None:
        if reservation.stage == "prefill":
            super().first_byte(reservation, now)
            slot = self._slots.get(reservation.replica)
            if slot is not None and self._loads[reservation.replica] is reservation.load:
                self._board.add(self._worker, slot, (0, -1, -reservation.uncached, 1, reservation.tokens))

    def release(self, reservation: Reservation) -> None:
        stage = reservation.stage
        if stage != "done":
            super().release(reservation)
            slot = self._slots.get(reservation.replica)
            # a replica that was removed meanwhile, and perhaps added again, has nothing of this
            if slot is not None and self._loads[reservation.replica] is reservation.load:
                change = (-1, -1, -reservation.uncached, 0, 0) if stage == "prefill" else (-1, 0, 0, -1, -reservation.tokens)
                self._board.add(self._worker, slot, change)


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
        counts = self._board.sum(slot, range(self._board.workers))
        load.requests, load.prefilling, load.prefill_tokens, load.decoding, load.context_tokens = counts
        return counts
