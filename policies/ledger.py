"""Reserved load per replica: requests sent there that have not ended.

A reservation is made in the same step as the choice, moves once (at the first byte), grows with its answer and ends
once. Each of these steps is idempotent: whichever of retry, cancel, crash and normal end comes first settles it, and
the others change nothing. Not thread safe: one event loop owns a ledger.

An engine computes prompts in steps: all that wait when one ends start with the next, and their first tokens come at its
end. So a first token tells when the prompts that are left began; prompts that come meanwhile have not begun. Callers
that pass the time find that in `Load`. Without it, as with an answer in one piece, nothing is known until the next
first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush
from math import inf

from .changes import Changes

# Unknown times are finite because formulas multiply them: 30,000 years away, on either side of any clock.
FAR = 1e12
UNTIMED = -FAR  # `now` of callers without a clock: queued work then counts as not begun

# Fields of a `Load` that are all 0 where the first of them is: without prompts no tokens, without streams no context.
ZERO_TOGETHER = (("prefilling", "prefill_tokens", "begun", "begun_tokens"), ("decoding", "context_tokens"))


@dataclass(slots=True)
class Load:
    """The present load of one replica.

    The ledger keeps it; scrapes fill `waiting`, `kv_usage` and `capacity_tokens`.
    """

    requests: int = 0  # reserved and not released
    prefilling: int = 0  # requests without a first byte yet
    prefill_tokens: int = 0  # uncached tokens of the prefilling ones
    decoding: int = 0  # requests past the first byte
    context_tokens: int = 0  # of the decoding ones: their prompts, and their answers so far
    output_tokens: int = 0  # expected tokens still to come, of all requests
    waiting: int = 0  # the engine's own waiting queue, last scrape; 0 if not reported
    kv_usage: float = 0.0  # share of its KV blocks in use by running requests, 0..1; 0 if not reported
    capacity_tokens: float = inf  # capacity of its KV cache, in this ledger's tokens; infinite: not known to be short
    since: float = FAR  # when the current prefill step began, by the clock of `Demand.now`; FAR: unknown
    begun: int = 0  # how many of `prefilling` are in that step (unknown: all); later ones wait for the next
    begun_tokens: int = 0  # how many of `prefill_tokens` are in that step
    recent: float = 0.0  # weighted count of recent choices; only its share of all replicas' sum has a meaning
    due: float = FAR  # when it is expected to answer next, by the same clock, see `Unanswered`; FAR: nobody waits

    def copy(self) -> Load:
        """Return a copy; `dataclasses.replace` takes five times as long."""
        return Load(
            self.requests,
            self.prefilling,
            self.prefill_tokens,
            self.decoding,
            self.context_tokens,
            self.output_tokens,
            self.waiting,
            self.kv_usage,
            self.capacity_tokens,
            self.since,
            self.begun,
            self.begun_tokens,
            self.recent,
            self.due,
        )

    def scraped(self, waiting: int | None, kv_usage: float | None) -> None:
        """Take over the figures of a scrape; either may be missing.

        The capacity is the ledger's token count divided by the share of blocks in use, so it allows for prompts that
        share blocks. Below half full the quotient is imprecise, and not needed.
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


_COUNTS = tuple(f.name for f in fields(Load))[:6]
NOTHING = (0,) * len(_COUNTS)
_VOID = 64  # entries of a heap that may be void however few requests wait
# Choices per replica over which `recent` is weighted: fewer are noise; more send simultaneous conversations to one
# replica, and count those that are over
_WINDOW = 4


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's share of a replica's load.

    `met`: the figures of the load that it met, without itself, in the order of `Load`; `at`: when that was. `due`: when
    the first byte of its answer is expected, FAR if that would not be seen.
    """

    replica: str
    load: Load
    met: tuple[float, ...]
    uncached: int
    tokens: int
    at: float = UNTIMED
    output: int = 0
    due: float = FAR
    unanswered: Unanswered | None = None  # its replica's unanswered requests, if it has been one of them
    number: int = 0  # its number among them; 0: it is not one of them
    stage: str = "prefill"  # then "decode", then "done"

    @property
    def before(self) -> Load:
        """The load that it met, as a `Load`; built on demand, since most requests end without it."""
        return Load(*self.met)  # type: ignore[arg-type]  # the figures are of two types


class Unanswered:
    """The requests on one replica without an answer, which determine when it is expected to answer next: `Load.due`.

    Any answer shows that the replica is not stalled: nothing is due before that, nor before the gateway itself resumed
    after a stall. Requests older than the answered one are no longer expected: an engine may have put them last, or
    lost them.
    """

    __slots__ = ("_load", "_heap", "_waiting", "_number", "_overtaken", "_answered_at")

    def __init__(self, load: Load) -> None:
        self._load = load
        # (due, number when added, reservation). Void entries (ended, overtaken, or due at another time by now) are
        # dropped when they come to the top, or when there are too many.
        self._heap: list[tuple[float, int, Reservation]] = []
        self._waiting = self._number = self._overtaken = 0  # how many wait; the latest number; the last void one
        self._answered_at = UNTIMED

    def add(self, reservation: Reservation) -> None:
        if len(self._heap) > 2 * self._waiting + _VOID:  # keeps the heap bounded by what waits
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapify(self._heap)
        self._number = number = self._number + 1
        self._waiting += 1
        reservation.unanswered, reservation.number = self, number
        heappush(self._heap, (reservation.due, number, reservation))
        self._look()

    def answered(self, reservation: Reservation, now: float) -> None:
        self._answered_at = now
        if reservation.number:
            self._overtaken = max(self._overtaken, reservation.number)
            self._forget(reservation)
        self._look()

    def held_up(self, now: float) -> None:
        """Note that the gateway was stalled until `now`: earlier answers may have come unseen."""
        self._answered_at = now
        self._look()

    def leave(self, reservation: Reservation) -> None:
        """Remove a request that has ended, or whose answer would not be seen."""
        if reservation.number:
            self._forget(reservation)
            self._look()

    def _forget(self, reservation: Reservation) -> None:
        reservation.number = 0
        self._waiting -= 1

    def _counts(self, entry: tuple[float, int, Reservation]) -> bool:
        _, number, reservation = entry
        return reservation.number == number > self._overtaken

    def _look(self) -> None:
        heap = self._heap
        while heap and not self._counts(heap[0]):
            heappop(heap)
        self._load.due = max(heap[0][0], self._answered_at) if heap else FAR


class Ledger:
    """The load of this gateway's requests and, separately, of other gateways' (`others`); a `Load` holds the sum.

    `moved`, if set, is called with each replica on which this gateway's own part changes. `changes` logs the replicas
    whose `Load` changed in any way, once `follow` was called.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._others: dict[str, tuple[int, ...]] = {}
        self._leaving: list[tuple[str, Load]] = []  # replicas removed while requests were still on them
        self._unanswered: dict[str, Unanswered] = {}
        self._shared = False
        self._weight, self._growth = 1.0, 1.0  # weight of the latest choice, and the factor to the next one's
        self.moved: Callable[[str], None] | None = None
        self.changes: Changes[str] | None = None

    def follow(self) -> Changes[str]:
        """Return the log of changed replicas, which begins at the first call.

        It costs three entries per request, so it is kept only for fleets large enough for arrays.
        """
        if self.changes is None:
            self.changes = Changes()
        return self.changes

    def add(self, replica: str) -> Load:
        """Return the replica's load, the same object until `remove`."""
        load = self._loads.get(replica)
        if load is None:
            load = self._loads[replica] = Load()
            self._unanswered[replica] = Unanswered(load)
        self._regrow()
        return load

    def remove(self, replica: str) -> None:
        """Forget a replica. Requests still on it settle against its old load."""
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

        In this order: requests, prefilling, prefill tokens, decoding, context tokens, output tokens.
        """
        load = self._loads.get(replica)
        if load is None:
            return NOTHING
        others = self._others.get(replica, NOTHING)
        return tuple(getattr(load, name) - count for name, count in zip(_COUNTS, others, strict=True))

    def others(self, replica: str, counts: tuple[int, ...], now: float | None = None) -> None:
        """Set the other gateways' part of a replica's load, in the order of `own`.

        A lower count of prefilling requests means that a prefill step has ended by `now`.
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
        if self.changes is not None:
            self.changes.tell(replica)

    def share(self, shared: bool) -> None:
        """Set whether other gateways' requests are counted; then the start of a prefill step is unknown."""
        if shared != self._shared:
            self._shared = shared
            for replica, load in self._loads.items():
                load.timed(None)
                if self.changes is not None:
                    self.changes.tell(replica)

    def scraped(self, replica: str, waiting: int | None, kv_usage: float | None) -> None:
        """Take over the engine's own figures, see `Load.scraped`."""
        self._loads[replica].scraped(waiting, kv_usage)
        if self.changes is not None:
            self.changes.tell(replica)

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
        """Count a request on a replica and return its reservation.

        `uncached`: how many of its prompt `tokens` must be computed; `counted`: the shared ledger counts it already, so
        `moved` is not called; `now`: None without a clock; `output`: tokens still expected of its answer; `due`: as in
        `Reservation`.
        """
        load = self._loads[replica]
        met = (
            load.requests,
            load.prefilling,
            load.prefill_tokens,
            load.decoding,
            load.context_tokens,
            load.output_tokens,
            load.waiting,
            load.kv_usage,
            load.capacity_tokens,
            load.since,
            load.begun,
            load.begun_tokens,
            load.recent,
            load.due,
        )
        reservation = Reservation(replica, load, met, uncached, tokens, UNTIMED if now is None else now, output, due)
        if due != FAR:
            self._unanswered[replica].add(reservation)
        alone = not load.prefilling
        self._weight *= self._growth  # new choices weigh more instead of old ones fading: one figure changes, not all
        load.recent += self._weight
        if self._weight > 1e100:
            self._rescale()
        load.requests += 1
        load.prefilling += 1
        load.prefill_tokens += uncached
        load.output_tokens += output
        if alone or load.since == FAR:
            load.timed(now if alone and not self._shared else None)
        if self.changes is not None:
            self.changes.tell(replica)
        if self.moved is not None and not counted:
            self.moved(replica)
        return reservation

    def reserve_decode(self, replica: str, tokens: int, output: int = 0) -> Reservation:
        """Count a request whose prompt of `tokens` arrives computed: it decodes from the start.

        It tells nothing about the prefills of that replica.
        """
        load = self._loads[replica]
        step = load.since, load.begun, load.begun_tokens
        reservation = self.reserve(replica, 0, tokens, output=output)
        self.first_byte(reservation)
        load.since, load.begun, load.begun_tokens = step
        return reservation

    def _regrow(self) -> None:
        """Adapt the weight growth of choices to the number of replicas."""
        self._growth = 1.0 + 1.0 / (_WINDOW * max(1, len(self._loads)))

    def _rescale(self) -> None:
        """Divide the weights of all choices before they overflow."""
        for replica, load in self._loads.items():
            load.recent = round(load.recent / self._weight, 30)  # 0 before it is too small to divide
            if self.changes is not None:
                self.changes.tell(replica)
        self._weight = 1.0

    def compute_more(self, reservation: Reservation, tokens: int) -> None:
        """Add prompt tokens to be computed to a request that was just reserved."""
        load = reservation.load
        if load.begun == load.prefilling:  # this request is in the current step
            load.begun_tokens += tokens
        reservation.uncached += tokens
        load.prefill_tokens += tokens
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def first_byte(self, reservation: Reservation, now: float | None = None) -> None:
        """Move a request from prefill to decode; `now` None: its first byte was not seen, only assumed."""
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
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def came(self, reservation: Reservation, tokens: int) -> None:
        """Count further tokens of its answer, which are context for the next ones."""
        if reservation.stage != "decode":
            return
        reservation.tokens += tokens
        reservation.load.context_tokens += tokens
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def answered(self, reservation: Reservation, now: float) -> None:
        """Note an answer that came in one piece."""
        if (unanswered := reservation.unanswered) is not None:
            unanswered.answered(reservation, now)
            if self.changes is not None:
                self.changes.tell(reservation.replica)

    def held_up(self, now: float) -> None:
        """Note that this gateway was stalled until `now`.

        Replicas may have answered meanwhile, so none counts as late for that.
        """
        for replica, unanswered in self._unanswered.items():
            unanswered.held_up(now)
            if self.changes is not None:
                self.changes.tell(replica)

    def expect(self, reservation: Reservation, due: float) -> None:
        """Change when the first byte of its answer is due; FAR: it would not be seen."""
        unanswered = reservation.unanswered
        if unanswered is not None and reservation.number:
            unanswered.leave(reservation)
            reservation.due = due
            if due != FAR:
                unanswered.add(reservation)
            if self.changes is not None:
                self.changes.tell(reservation.replica)

    def release(self, reservation: Reservation) -> None:
        """End a reservation, for whatever reason."""
        load, stage = reservation.load, reservation.stage
        if stage == "done":
            return
        reservation.stage = "done"
        if reservation.unanswered is not None:
            reservation.unanswered.leave(reservation)
        load.requests -= 1
        load.output_tokens -= reservation.output
        if stage == "prefill":
            load.prefilling -= 1
            load.prefill_tokens -= reservation.uncached
            load.begun, load.begun_tokens = (
                min(load.begun, load.prefilling),
                min(load.begun_tokens, load.prefill_tokens),
            )
        else:
            load.decoding -= 1
            load.context_tokens -= reservation.tokens
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def outstanding(self) -> dict[str, tuple[int, ...]]:
        """Return this gateway's part of each replica's load, in the order of `own`, removed replicas included."""
        return {
            replica: self.outstanding_on(replica)
            for replica in (*self._loads, *[replica for replica, _ in self._leaving])
        }

    def outstanding_on(self, replica: str) -> tuple[int, ...]:
        """Return this gateway's part of one replica's load, including what is left from before it was removed."""
        counts = self.own(replica)
        for name, load in self._leaving:
            if name == replica:
                counts = tuple([count + getattr(load, field) for count, field in zip(counts, _COUNTS)])
        return counts

    def total(self) -> Load:
        """Return this gateway's load over all replicas, removed ones included; all zero when idle."""
        return Load(*map(sum, zip(NOTHING, *self.outstanding().values())))
