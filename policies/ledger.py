"""The load of each replica, as the requests reserved there: sent to the replica and not ended.

A reservation is made in the same step as the choice of the replica. It changes from prefill to decode once, at the
first byte, grows with the answer, and ends once. Each of these steps is idempotent: of a retry, a cancellation, a crash
and the normal end, the first to come settles the reservation, and the others change nothing. Not thread safe: one event
loop owns a ledger.

An engine computes prompts in steps: all prompts that wait when a step ends are computed in the next one, and their
first tokens come at its end. A first token therefore shows that the step of the remaining prompts begins now, and that
prompts which arrive later are not in that step. The fields `since`, `begun` and `begun_tokens` of `Load` describe the
current step if callers pass the time. If they do not, or if an answer comes in one piece, the beginning of the step is
unknown until the next first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

# The time that stands for "unknown" is finite because formulas multiply it: 30,000 years from any clock's time.
FAR = 1e12
UNTIMED = -FAR  # `now` of callers without a clock: queued prompts then count as not begun


T = TypeVar("T")


@dataclass(slots=True)
class Load:
    """The present load of one replica.

    Scrapes of the engine's metrics set `waiting`, `kv_usage` and `capacity_tokens`; the ledger sets everything else.
    """

    requests: int = 0  # requests that were sent to it and have not ended
    prefilling: int = 0  # requests whose first byte has not come yet
    prefill_tokens: int = 0  # prompt tokens of the prefilling requests that are not cached and have to be computed
    decoding: int = 0  # requests whose first byte has come
    context_tokens: int = 0  # tokens of the decoding requests: their prompts, and their answers so far
    output_tokens: int = 0  # expected answer tokens still to come, of all requests
    waiting: int = 0  # requests in the engine's own waiting queue at the last scrape; 0 if not reported
    kv_usage: float = 0.0  # share of its KV blocks that running requests use, 0..1; 0 if not reported
    capacity_tokens: float = inf  # tokens that its KV cache can hold, by this ledger's counts; infinite: not known
    since: float = FAR  # when the current prefill step began, by the clock of `Demand.now`; FAR: unknown
    begun: int = 0  # how many of `prefilling` are in the current step (all if unknown); the others wait for the next
    begun_tokens: int = 0  # how many of `prefill_tokens` are in the current step
    recent: float = 0.0  # how often it was chosen lately, weighted; only its share of all replicas' sum has a meaning
    due: float = FAR  # when its next answer is expected, by the same clock (`Unanswered`); FAR: no answer is awaited

    def copy(self) -> Load:
        """Return a copy of this load; `dataclasses.replace` takes five times as long."""
        return Load(*_FIGURES(self))

    def scraped(self, waiting: int | None, kv_usage: float | None) -> None:
        """Set the engine's own figures from a scrape of its metrics.

        `waiting`: requests in the engine's queue; `kv_usage`: share of its KV blocks in use, 0..1 (None for either: not
        reported). The capacity is the ledger's token count divided by the share of KV blocks in use, so it allows for
        prompts that share blocks. Below half full the quotient is imprecise, and not needed.
        """
        self.waiting, self.kv_usage = waiting or 0, kv_usage or 0.0
        held = self.context_tokens + self.prefill_tokens
        if self.kv_usage < 0.5 or not held:
            self.capacity_tokens = inf
            return
        capacity = held / self.kv_usage
        self.capacity_tokens = capacity if self.capacity_tokens == inf else (self.capacity_tokens + capacity) / 2

    def timed(self, now: float | None) -> None:
        """Note that a prefill step with all waiting prompts began at `now`; None: at an unknown time."""
        self.since = FAR if now is None else now
        self.begun, self.begun_tokens = self.prefilling, self.prefill_tokens


_FIGURES = attrgetter(*Load.__slots__)
_COUNTS = Load.__slots__[:6]
NOTHING = (0,) * len(_COUNTS)
_VOID = 64  # void entries that the heap of `Unanswered` may have, however few requests wait
# Choices per replica over which `Load.recent` is averaged. With fewer it is noise; with more it counts conversations
# that are over, and sends simultaneous ones to the same replica.
_WINDOW = 4


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's share of a replica's load.

    `met`: the load before this request was added, as figures in the order of the fields of `Load`.
    `uncached`: how many prompt tokens the replica has to compute. `tokens`: all prompt tokens and, later, those of the
    answer so far.
    `at`: when the reservation was made. `output`: how many answer tokens are expected.
    `due`: when the first byte of the answer is expected, or FAR (never) if the gateway would not see that byte.
    """

    replica: str
    load: Load
    met: tuple[float, ...]
    uncached: int
    tokens: int
    at: float = UNTIMED
    output: int = 0
    due: float = FAR
    unanswered: Unanswered | None = None  # the replica's unanswered requests, if this one was ever among them
    number: int = 0  # its number among the unanswered requests; 0: it is not (or no longer) one of them
    stage: str = "prefill"  # then "decode", then "done"

    @property
    def before(self) -> Load:
        """The replica's load before this request was added (`met`), as a `Load`.

        It is built when it is asked for, since most requests end without needing it.
        """
        return Load(*self.met)  # type: ignore[arg-type]  # the figures are of two types


class Unanswered:
    """The requests on one replica that have no answer yet; they determine when its next answer is due (`Load.due`).

    Any answer shows that the replica is not stalled. So no answer is due before the time of the last one, nor before
    the gateway itself resumed after a stall. Requests older than the one answered last are no longer expected: the
    engine may have put them behind others, or lost them.
    """

    __slots__ = ("_load", "_heap", "_waiting", "_number", "_overtaken", "_answered_at")

    def __init__(self, load: Load) -> None:
        self._load = load
        # Entries of (due, number when added, reservation). Void entries (of requests that ended, were overtaken, or are
        # due at another time by now) are dropped when they come to the top, or when there are too many.
        self._heap: list[tuple[float, int, Reservation]] = []
        # How many requests wait; the number given last; the highest number of an answered request, which voids all
        # entries up to that number.
        self._waiting = self._number = self._overtaken = 0
        self._answered_at = UNTIMED

    def add(self, reservation: Reservation) -> None:
        if len(self._heap) > 2 * self._waiting + _VOID:  # keeps the heap bounded by the number of waiting requests
            self._heap = [entry for entry in self._heap if entry[2].number == entry[1] > self._overtaken]
            heapify(self._heap)
        self._number = number = self._number + 1
        self._waiting += 1
        reservation.unanswered, reservation.number = self, number
        heappush(self._heap, (due := reservation.due, number, reservation))
        if self._heap[0][2] is reservation:
            self._load.due = due if due > self._answered_at else self._answered_at

    def answered(self, reservation: Reservation, now: float) -> None:
        if number := reservation.number:
            reservation.number = 0
            self._waiting -= 1
            if number > self._overtaken:
                self._overtaken = number
        self._answered_at = now
        self._look()

    def held_up(self, now: float) -> None:
        """Note that the gateway was stalled until `now`, so that no answer counts as due before.

        Answers that came meanwhile may not have been seen yet.
        """
        self._answered_at = now
        self._look()

    def leave(self, reservation: Reservation) -> None:
        """Stop awaiting the first byte of a request, because it has ended or the gateway would not notice that byte."""
        if reservation.number:
            reservation.number = 0
            self._waiting -= 1
            self._look()

    def _look(self) -> None:
        heap, due = self._heap, FAR
        while heap:
            due, number, reservation = heap[0]
            if reservation.number == number > self._overtaken:
                break
            heappop(heap)
            due = FAR
        self._load.due = due if due > self._answered_at else self._answered_at


class Changes(Generic[T]):
    """A log of the latest changes, for readers that poll it.

    Each reader remembers the `count` up to which it has read the log, and passes it to `since`.
    """

    __slots__ = ("_latest", "count")

    def __init__(self) -> None:
        self._latest: deque[T] = deque(maxlen=4096)
        self.count = 0

    def tell(self, what: T) -> None:
        """Add an entry to the log: `what` has changed."""
        self._latest.append(what)
        self.count += 1

    def since(self, count: int) -> Iterable[T] | None:
        """Return the entries that were logged after the first `count` ones, the newest first.

        Returns None if the log, whose length is limited, no longer has all of them.
        """
        new = self.count - count
        return None if new > len(self._latest) else islice(reversed(self._latest), new)


class Ledger:
    """The load of all replicas: the requests of this gateway plus those of other gateways (`others`).

    `moved`: if set, called with the name of each replica on which this gateway's own part of the load changes.
    `changes`: the log of replicas whose `Load` changed in any way, kept once `follow` was called.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._others: dict[str, tuple[int, ...]] = {}
        self._leaving: list[tuple[str, Load]] = []  # replicas removed while requests were still on them
        self._unanswered: dict[str, Unanswered] = {}
        self._shared = False
        # The weight of the latest choice of a replica in `Load.recent`, and the factor by which it grows at each
        # choice.
        self._weight, self._growth = 1.0, 1.0
        self.moved: Callable[[str], None] | None = None
        self.changes: Changes[str] | None = None

    def follow(self) -> Changes[str]:
        """Return the log of the replicas whose load changes, which begins at the first call.

        The log costs three entries per request, so it is kept only if there are so many replicas that their loads are
        compared as arrays (`Roster`).
        """
        if self.changes is None:
            self.changes = Changes()
        return self.changes

    def _changed(self, replica: str, own: bool = True) -> None:
        """Log that a replica's load has changed; if this gateway's requests changed it (`own`), also call `moved`."""
        if self.changes is not None:
            self.changes.tell(replica)
        if own and self.moved is not None:
            self.moved(replica)

    def add(self, replica: str) -> Load:
        """Add a replica if it is new, and return its load, the same object until `remove`."""
        load = self._loads.get(replica)
        if load is None:
            load = self._loads[replica] = Load()
            self._unanswered[replica] = Unanswered(load)
        self._regrow()
        return load

    def remove(self, replica: str) -> None:
        """Remove a replica; requests that are still on it are taken off its old load as they end."""
        self.others(replica, NOTHING)
        self._others.pop(replica, None)
        self._unanswered.pop(replica, None)
        if (load := self._loads.pop(replica, None)) is not None:
            self._leaving.append((replica, load))
            self._regrow()
        self._leaving = [one for one in self._leaving if one[1].requests]

    def load(self, replica: str) -> Load:
        """Return the replica's load; raise KeyError if it is unknown."""
        return self._loads[replica]

    def own(self, replica: str) -> tuple[int, ...]:
        """Return this gateway's part of a replica's load.

        It is a tuple of: requests, prefilling, prefill tokens, decoding, context tokens, output tokens.
        """
        load = self._loads.get(replica)
        if load is None:
            return NOTHING
        others = self._others.get(replica, NOTHING)
        return tuple(getattr(load, name) - count for name, count in zip(_COUNTS, others, strict=True))

    def others(self, replica: str, counts: tuple[int, ...], now: float | None = None) -> None:
        """Set the other gateways' part of a replica's load: `counts`, in the order that `own` returns.

        If the count of prefilling requests has fallen, a prefill step is assumed to have ended at `now`.
        """
        load, before = self._loads.get(replica), self._others.get(replica, NOTHING)
        if load is None or counts == before:
            return
        stepped = counts[1] < before[1] or not load.prefilling
        load.requests += counts[0] - before[0]  # field by field: a loop over the names took five times as long
        load.prefilling += counts[1] - before[1]
        load.prefill_tokens += counts[2] - before[2]
        load.decoding += counts[3] - before[3]
        load.context_tokens += counts[4] - before[4]
        load.output_tokens += counts[5] - before[5]
        if stepped or load.since == FAR:
            load.timed(now if stepped and not self._shared else None)
        self._others[replica] = counts
        self._changed(replica, own=False)

    def share(self, shared: bool) -> None:
        """Set whether other gateways' requests are counted too; while they are, a prefill step's start is unknown."""
        if shared != self._shared:
            self._shared = shared
            for replica, load in self._loads.items():
                load.timed(None)
                self._changed(replica, own=False)

    def scraped(self, replica: str, waiting: int | None, kv_usage: float | None) -> None:
        """Set a replica's figures from a scrape of its metrics, as `Load.scraped` does."""
        self._loads[replica].scraped(waiting, kv_usage)
        self._changed(replica, own=False)

    def reserve(
        self,
        replica: str,
        uncached: int,
        tokens: int,
        counted: bool = False,
        now: float | None = None,
        output: int = 0,
        due: float = FAR,
    ) -> Reservation:
        """Count a request in a replica's load, and return its reservation.

        `tokens`: the tokens of its prompt. `uncached`: how many of them must be computed.
        `counted`: whether a ledger shared by several gateways has counted the request already; then `moved` is not
        called.
        `now`: the time in seconds, None without a clock.
        `output`: how many answer tokens are expected. `due`: when the first byte of the answer is expected, or FAR
        (never) if the gateway would not see it.
        """
        load = self._loads[replica]
        at = UNTIMED if now is None else now
        reservation = Reservation(replica, load, _FIGURES(load), uncached, tokens, at, output, due)
        if due != FAR:
            self._unanswered[replica].add(reservation)
        alone = not load.prefilling
        self._weight *= self._growth  # new choices weigh more, so old ones need not fade: only one figure changes
        load.recent += self._weight
        if self._weight > 1e100:
            self._rescale()
        load.requests += 1
        load.prefilling += 1
        load.prefill_tokens += uncached
        load.output_tokens += output
        if alone or load.since == FAR:
            load.timed(now if alone and not self._shared else None)
        if self.changes is not None or self.moved is not None:
            self._changed(replica, not counted)
        return reservation

    def reserve_decode(self, replica: str, tokens: int, output: int = 0) -> Reservation:
        """Count a request that decodes from the start, as another replica computed its prompt; return its reservation.

        `tokens`: its prompt tokens; `output`: expected tokens of its answer. The figures of the replica's current
        prefill step do not change.
        """
        load = self._loads[replica]
        step = load.since, load.begun, load.begun_tokens
        reservation = self.reserve(replica, 0, tokens, output=output)
        self.first_byte(reservation)
        load.since, load.begun, load.begun_tokens = step
        return reservation

    def _regrow(self) -> None:
        """Adapt to the number of replicas how much more each new choice of a replica weighs than the last.

        `Load.recent` sums up the weights of a replica's choices. As new choices weigh more, old ones count ever less.
        """
        self._growth = 1.0 + 1.0 / (_WINDOW * max(1, len(self._loads)))

    def _rescale(self) -> None:
        """Divide the weights of all past choices (`Load.recent`) by that of the latest choice, before they overflow."""
        for replica, load in self._loads.items():
            load.recent = round(load.recent / self._weight, 30)  # 0 before it is too small to divide
            self._changed(replica, own=False)
        self._weight = 1.0

    def compute_more(self, reservation: Reservation, tokens: int) -> None:
        """Add `tokens` to the prompt tokens that a request, which was just reserved, has to compute."""
        load = reservation.load
        if load.begun == load.prefilling:  # this request is in the current step
            load.begun_tokens += tokens
        reservation.uncached += tokens
        load.prefill_tokens += tokens
        if self.changes is not None or self.moved is not None:
            self._changed(reservation.replica)

    def first_byte(self, reservation: Reservation, now: float | None = None) -> None:
        """Move a request from prefill to decode in its replica's load; only the first call counts.

        `now`: when its first byte was seen, None if it was only assumed.
        """
        if reservation.stage != "prefill":
            return
        if now is not None and reservation.unanswered is not None:
            reservation.unanswered.answered(reservation, now)
        reservation.stage = "decode"
        load, uncached, tokens = reservation.load, reservation.uncached, reservation.tokens
        load.prefilling -= 1
        load.prefill_tokens -= uncached
        load.decoding += 1
        load.context_tokens += tokens
        load.timed(None if self._shared else now)
        if self.changes is not None or self.moved is not None:
            self._changed(reservation.replica)

    def came(self, reservation: Reservation, tokens: int) -> None:
        """Add further tokens of a request's answer to its replica's context tokens."""
        if reservation.stage != "decode":
            return
        reservation.tokens += tokens
        reservation.load.context_tokens += tokens
        if self.changes is not None or self.moved is not None:
            self._changed(reservation.replica)

    def answered(self, reservation: Reservation, now: float) -> None:
        """Note at `now` that a request's whole answer came at once, so that its replica does not count as late."""
        if (unanswered := reservation.unanswered) is not None:
            unanswered.answered(reservation, now)
            self._changed(reservation.replica, own=False)

    def held_up(self, now: float) -> None:
        """Note that this gateway was stalled until `now`.

        Replicas may have answered meanwhile, so none counts as late because of the stall.
        """
        for replica, unanswered in self._unanswered.items():
            unanswered.held_up(now)
            self._changed(replica, own=False)

    def expect(self, reservation: Reservation, due: float) -> None:
        """Change the time when the first byte of a request's answer is expected.

        `due`: the new time, or FAR (never) if the gateway would not see that byte.
        """
        unanswered = reservation.unanswered
        if unanswered is not None and reservation.number:
            unanswered.leave(reservation)
            reservation.due = due
            if due != FAR:
                unanswered.add(reservation)
            self._changed(reservation.replica, own=False)

    def release(self, reservation: Reservation, answered_at: float | None = None) -> None:
        """Take a request off its replica's load, whatever the reason; does nothing if that has been done.

        `answered_at`: when the answer came in one piece, if neither `first_byte` nor `answered` was called for it.
        """
        load, stage = reservation.load, reservation.stage
        if stage == "done":
            return
        reservation.stage = "done"
        if (unanswered := reservation.unanswered) is not None:
            if answered_at is not None:
                unanswered.answered(reservation, answered_at)
            elif reservation.number:
                unanswered.leave(reservation)
        load.requests -= 1
        load.output_tokens -= reservation.output
        if stage == "prefill":
            load.prefilling -= 1
            load.prefill_tokens -= reservation.uncached
            if answered_at is not None:
                load.timed(None)
            else:
                load.begun = min(load.begun, load.prefilling)
                load.begun_tokens = min(load.begun_tokens, load.prefill_tokens)
        else:
            load.decoding -= 1
            load.context_tokens -= reservation.tokens
        if self.changes is not None or self.moved is not None:
            self._changed(reservation.replica)

    def outstanding(self) -> dict[str, tuple[int, ...]]:
        """Return this gateway's part of each replica's load, as the tuple that `own` returns.

        It includes replicas that were removed while requests were still on them.
        """
        return {
            replica: self.outstanding_on(replica)
            for replica in (*self._loads, *[replica for replica, _ in self._leaving])
        }

    def outstanding_on(self, replica: str) -> tuple[int, ...]:
        """Return this gateway's part of one replica's load, as the tuple that `own` returns.

        It includes requests that were on the replica when it was removed and have not ended.
        """
        counts = self.own(replica)
        for name, load in self._leaving:
            if name == replica:
                counts = tuple([count + getattr(load, field) for count, field in zip(counts, _COUNTS)])
        return counts

    def total(self) -> Load:
        """Return this gateway's load over all replicas, removed ones included; all zero when idle."""
        return Load(*map(sum, zip(NOTHING, *self.outstanding().values())))
