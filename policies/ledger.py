"""Reserved load per replica: what has been sent there and has not ended.

A reservation is made in the same step as the choice, moves once (first byte seen), grows with its answer and ends once.
Each of these is idempotent, so whichever of retry, cancel, crash and normal end comes first may
settle it and the others do no harm. Not thread safe: one event loop owns a ledger.

An engine computes prompts in steps: all that wait when one ends begin with the next, and their first tokens come at its
end. So a first token tells when those left began, and what comes meanwhile has not begun. Callers that tell the time
get that in `Load`; where it is not told, as with an answer in one piece, nothing is known until the next first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush
from math import inf

from .changes import Changes

# Times that are not known are finite, for they are factors of sums: 30,000 years off, on either side of any clock.
FAR = 1e12
UNTIMED = -FAR  # the time of what is asked without a clock: of what is queued, nothing is done yet

# Fields of a `Load` that are all 0 where the first of them is: no prompts have no tokens, no streams no context.
ZERO_TOGETHER = (("prefilling", "prefill_tokens", "begun", "begun_tokens"), ("decoding", "context_tokens"))


@dataclass(slots=True)
class Load:
    """What one replica has to do right now; the ledger keeps it, a scrape fills the three in the middle."""

    requests: int = 0  # reserved and not released
    prefilling: int = 0  # of these, first byte not seen yet
    prefill_tokens: int = 0  # their uncached tokens
    decoding: int = 0  # of these, past the first byte
    context_tokens: int = 0  # of the decoding ones: their prompts, and what has come of their answers
    output_tokens: int = 0  # expected to come out for all that is reserved
    waiting: int = 0  # the engine's own waiting queue, last scrape; 0 if it was not reported
    kv_usage: float = 0.0  # share of its KV blocks in use by running requests, 0..1; 0 if it was not reported
    capacity_tokens: float = inf  # what its blocks hold, in this ledger's tokens; infinite: not known to be short
    since: float = FAR  # when it began the prompts it computes now, by the clock of `Demand.now`; FAR: not known
    begun: int = 0  # how many of `prefilling` these are (not known: all); those that came later wait for the next step
    begun_tokens: int = 0  # and how many of `prefill_tokens`
    recent: float = 0.0  # choices that fell on it, the later the heavier: what counts is its share of all replicas' sum
    due: float = FAR  # when it is expected to answer next, by the same clock, see `Unanswered`; FAR: nobody waits

    def copy(self) -> Load:
        """As it is now. `dataclasses.replace` takes five times as long."""
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
        """Take over a scrape; either may be missing.

        The capacity follows from what the ledger counts now and the share of blocks that takes, so prompts
        that share blocks are allowed for. Below half full the quotient says little and nobody needs it.
        """
        self.waiting, self.kv_usage = waiting or 0, kv_usage or 0.0
        held = self.context_tokens + self.prefill_tokens
        if self.kv_usage < 0.5 or not held:
            self.capacity_tokens = inf
            return
        capacity = held / self.kv_usage
        self.capacity_tokens = capacity if self.capacity_tokens == inf else (self.capacity_tokens + capacity) / 2

    def timed(self, now: float | None) -> None:
        """The step that computes its prompts began at `now`, with all that wait; None: nobody knows when."""
        self.since = FAR if now is None else now
        self.begun, self.begun_tokens = self.prefilling, self.prefill_tokens


_COUNTS = tuple(f.name for f in fields(Load))[:6]
NOTHING = (0,) * len(_COUNTS)
_VOID = 64  # entries of a heap that are kept however few are waited for
# choices a replica, over which its share of them is taken: fewer are noise, more let what begins at once go to one
# place, and conversations count that are over
_WINDOW = 4


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's share of a replica's load. `met`: the figures of the load that it met, without itself, in their
    order; `at`: when that was. `due`: when the first byte of its answer is expected, FAR if nobody would see it."""

    replica: str
    load: Load
    met: tuple[float, ...]
    uncached: int
    tokens: int
    at: float = UNTIMED
    output: int = 0
    due: float = FAR
    unanswered: Unanswered | None = None  # those on its replica, if it has been one of them
    number: int = 0  # its own among them; 0: it is none of them
    stage: str = "prefill"  # then "decode", then "done"

    @property
    def before(self) -> Load:
        """The load that it met, for whoever asks: most requests end without."""
        return Load(*self.met)  # type: ignore[arg-type]  # the figures are of two types


class Unanswered:
    """Requests on one replica that have no answer, and by when it is expected to answer one: `Load.due`.

    An answer, whichever it is, says that the replica does not stall: nothing is due before that, nor before the gateway
    went on after it had been held up. And requests that are older than the one that is answered are no longer waited
    for. An engine may have put them last, or lost them.
    """

    __slots__ = ("_load", "_heap", "_waiting", "_number", "_overtaken", "_answered_at")

    def __init__(self, load: Load) -> None:
        self._load = load
        # By when they are due, with the number that each had when it was added: entries that are void (it has ended,
        # was overtaken, or is due at another time now) are dropped when they come to the top, or are too many.
        self._heap: list[tuple[float, int, Reservation]] = []
        self._waiting = self._number = self._overtaken = 0  # how many wait; the latest number; up to which all are void
        self._answered_at = UNTIMED

    def add(self, reservation: Reservation) -> None:
        if len(self._heap) > 2 * self._waiting + _VOID:  # so it is as long as what waits, whatever ends early
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
        """Nobody looked until now: what was due before may have come."""
        self._answered_at = now
        self._look()

    def leave(self, reservation: Reservation) -> None:
        """It has ended, or nobody would see its answer."""
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
    """The load of this gateway's requests, and beside it what is known of other gateways' (`others`); a `Load` has the
    sum. `moved`, if set, hears of each replica on which this gateway's own part changes; `changes` has the names of
    replicas whose `Load` changed in any way, once somebody follows them."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._others: dict[str, tuple[int, ...]] = {}
        self._leaving: list[tuple[str, Load]] = []  # replicas removed while requests were still on them
        self._unanswered: dict[str, Unanswered] = {}
        self._shared = False
        self._weight, self._growth = 1.0, 1.0  # of the latest choice, and how much heavier the next one is
        self.moved: Callable[[str], None] | None = None
        self.changes: Changes[str] | None = None

    def follow(self) -> Changes[str]:
        """The changes from now on. A fleet that nobody keeps arrays of has none to tell, three times a request."""
        if self.changes is None:
            self.changes = Changes()
        return self.changes

    def add(self, replica: str) -> Load:
        """The replica's load; the same object until `remove`."""
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
        """KeyError if it was never added."""
        return self._loads[replica]

    def own(self, replica: str) -> tuple[int, ...]:
        """What this gateway has there: requests, prefilling, prefill tokens, decoding, context and output
        tokens."""
        load = self._loads.get(replica)
        if load is None:
            return NOTHING
        others = self._others.get(replica, NOTHING)
        return tuple(getattr(load, name) - count for name, count in zip(_COUNTS, others, strict=True))

    def others(self, replica: str, counts: tuple[int, ...], now: float | None = None) -> None:
        """What other gateways have there, in the order of `own`. One prompt less without a first token: a step has
        ended, by `now`."""
        load, before = self._loads.get(replica), self._others.get(replica, NOTHING)
        if load is None or counts == before:
            return
        stepped = counts[1] < before[1] or not load.prefilling
        load.requests += counts[0] - before[0]  # at length: with the names as data it took five times as long
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
        """Whether other gateways' requests count from now on: then nobody tells when a replica begins a step."""
        if shared != self._shared:
            self._shared = shared
            for replica, load in self._loads.items():
                load.timed(None)
                if self.changes is not None:
                    self.changes.tell(replica)

    def scraped(self, replica: str, waiting: int | None, kv_usage: float | None) -> None:
        """What the engine says of itself, see `Load.scraped`."""
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
        """Count a request of `tokens` prompt tokens, `uncached` of which must be computed. `counted`: where
        `moved` would tell of it, it is known already. `due`: as the Reservation's."""
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
        self._weight *= self._growth  # heavier choices instead of fading old ones: one figure changes, not all
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
        """Count a request of `tokens` prompt tokens that come computed: it is a stream from the start, and tells
        nothing of the prompts that are computed there."""
        load = self._loads[replica]
        step = load.since, load.begun, load.begun_tokens
        reservation = self.reserve(replica, 0, tokens, output=output)
        self.first_byte(reservation)
        load.since, load.begun, load.begun_tokens = step
        return reservation

    def _regrow(self) -> None:
        """There are more replicas, or fewer, over which choices are weighed."""
        self._growth = 1.0 + 1.0 / (_WINDOW * max(1, len(self._loads)))

    def _rescale(self) -> None:
        """Divide the weights of all choices, before they overflow."""
        for replica, load in self._loads.items():
            load.recent = round(load.recent / self._weight, 30)  # to nothing, before it is too small to divide by
            if self.changes is not None:
                self.changes.tell(replica)
        self._weight = 1.0

    def compute_more(self, reservation: Reservation, tokens: int) -> None:
        """So many prompt tokens more are to be computed, of a request that was reserved just now."""
        load = reservation.load
        if load.begun == load.prefilling:  # it is among those that have begun
            load.begun_tokens += tokens
        reservation.uncached += tokens
        load.prefill_tokens += tokens
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def first_byte(self, reservation: Reservation, now: float | None = None) -> None:
        """Its prefill is done; it decodes from now on. None: that is assumed, and nothing of its answer has come."""
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
        """So many tokens more of its answer have come: each is context of the next."""
        if reservation.stage != "decode":
            return
        reservation.tokens += tokens
        reservation.load.context_tokens += tokens
        if self.changes is not None:
            self.changes.tell(reservation.replica)
        if self.moved is not None:
            self.moved(reservation.replica)

    def answered(self, reservation: Reservation, now: float) -> None:
        """All of its answer came at once."""
        if (unanswered := reservation.unanswered) is not None:
            unanswered.answered(reservation, now)
            if self.changes is not None:
                self.changes.tell(reservation.replica)

    def held_up(self, now: float) -> None:
        """This gateway did not run until now, and takes nobody for late who may have answered meanwhile."""
        for replica, unanswered in self._unanswered.items():
            unanswered.held_up(now)
            if self.changes is not None:
                self.changes.tell(replica)

    def expect(self, reservation: Reservation, due: float) -> None:
        """The first byte of its answer is expected later than was thought; FAR: nobody would see it."""
        unanswered = reservation.unanswered
        if unanswered is not None and reservation.number:
            unanswered.leave(reservation)
            reservation.due = due
            if due != FAR:
                unanswered.add(reservation)
            if self.changes is not None:
                self.changes.tell(reservation.replica)

    def release(self, reservation: Reservation) -> None:
        """It has ended, however it ended."""
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
        """What this gateway has on each replica, in the order of `own`, removed replicas included."""
        return {
            replica: self.outstanding_on(replica)
            for replica in (*self._loads, *[replica for replica, _ in self._leaving])
        }

    def outstanding_on(self, replica: str) -> tuple[int, ...]:
        """The same of one."""
        counts = self.own(replica)
        for name, load in self._leaving:
            if name == replica:
                counts = tuple([count + getattr(load, field) for count, field in zip(counts, _COUNTS)])
        return counts

    def total(self) -> Load:
        """This gateway's sum over all replicas, removed ones with requests left included: zero when idle."""
        return Load(*map(sum, zip(NOTHING, *self.outstanding().values())))
