"""One replica's part of the cache map that gateways share through Redis.

If this gateway leads, the replica's blocks come from the engine's events, otherwise from the leader's data in Redis.

A gateway has one of these roles for each replica:
    joining     nothing known yet
    follower    another gateway leads; the snapshot and the deltas that it writes to Redis are applied here
    leader      this gateway holds the lease: it reads the engine's events and writes their changes to Redis
    standalone  this gateway reads the events for itself: no gateway leads, Redis cannot be reached, or its data cannot
                be read or is of a later incarnation (run) of the engine

The map is usable in every role. Each delta carries the number of the engine's last event batch that it includes. When
the role changes, the gateway requests the batches after that one from the engine, and continues with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cachemap.changes import Change, Clear, Observe, Store, merged
from cachemap.cluster.codec import (
    FIRST,
    RELOAD,
    Damaged,
    Delta,
    Identity,
    Position,
    Snapshot,
    Unreadable,
    decode_header,
    decode_snapshot,
)
from cachemap.cluster.connect import FAILURES, heed_cancellation
from cachemap.cluster.journal import Journal
from cachemap.cluster.keys import RESYNC, REWRITE, UNNAMED, Keys
from cachemap.cluster.link import PART, Link
from cachemap.events.intake import EventIntake
from cachemap.events.records import Blocks
from cachemap.map import CacheMap

log = logging.getLogger("hitherto.share")

UNREADABLE_SECONDS = 10.0  # pause before data of a gateway with other settings is read again
DAMAGED_SECONDS = 2.0  # pause before damaged data is read again: the leader writes it again within a second
FAULT_SECONDS = 1.0  # pause before a retry after an error in this gateway's own code
TRIES = 5  # attempts to load a snapshot and its deltas: the snapshot may be replaced while the deltas are read


class Absent(Exception):
    """An error: Redis has no data of this replica."""


class SharedIntake:
    """The intake of one replica's blocks into a cache map shared through Redis; `run` it until cancelled.

    It takes the place of an EventIntake, and `SharedMap.intake` makes it. `keys`: the replica's keys in Redis; most
    other arguments are those of EventIntake. Attributes that are not defined here are those of the EventIntake inside,
    which knows only the events that this gateway read itself.
    """

    def __init__(self, link: Link, cache_map: CacheMap, slot: int, replica: str, keys: Keys, *, model: str, block_size: int,
                 on_change: Callable[[str, str], None] = lambda state, reason: None, **source: Any):  # fmt: skip
        self._link, self._map, self._slot, self.keys = link, cache_map, slot, keys
        self.replica, self.unnamed = replica, keys.incarnation == UNNAMED
        ahead = source.get("looks_ahead", 0)
        named = f"{model}, and {ahead} tokens behind a block" if ahead else model
        self.identity = Identity(named, block_size, cache_map.tag_bits)
        self.engine = EventIntake(cache_map, slot, model=model, block_size=block_size, on_change=self._tell,
                                  on_unreachable=self._unreachable, **source)  # fmt: skip
        self._written = self._blocks  # the engine's block format that other gateways know
        self._reading: asyncio.Task[None] | None = None  # reads the engine's events
        self._on_change = on_change
        self._wanted = "joining"  # a role, or "outdated": another gateway knows a newer run of the engine
        self._taken: str | None = "joining"  # the value of `_wanted` when a role was last taken; None: take it again
        self._wake = asyncio.Event()
        self._position = Position()
        self._observed = True
        self._applied = [0, 0]  # the blocks stored and removed by deltas
        self.role = "joining"
        self.role_reason = "nothing heard of Redis yet"
        self.n = 0  # the number of the last delta applied or written
        self.term: int | None = None  # the term (period of leading) of the gateway that wrote the last delta
        self.in_step = False  # this follower's map equals the leader's after delta `n`: the next deltas may be applied
        self.journal: Journal | None = None  # the changes that are still to be written; None unless this gateway leads
        self.led_at = link.now()  # when a gateway was last known to lead
        self.load_at = 0.0  # when data of other gateways may be read again
        self.claim_at = 0.0  # when the lease may be claimed again
        self.head = 0  # the number of the last delta in Redis, when the lease was last looked at
        # Whether the engine's events cannot be reached. Gateways then try in turn, and only the first failure is
        # logged.
        self.away = False
        self.stuck_at: float | None = None  # since when Redis answers but accepts no writes of this replica's data
        self.fault: str | None = None  # the failure of this gateway's own work on this replica, until it succeeds
        # How many times in a row a look at the lease showed newer deltas in Redis although none had been applied here
        # since the look before.
        self.behind = 0
        self.looked_n = -1

    # --- for the gateway, as in EventIntake

    @property
    def state(self) -> str:
        if self.role in ("leader", "standalone"):
            return self.engine.state
        return "connecting" if self.role == "joining" else "live" if self._observed else "unobserved"

    @property
    def reason(self) -> str:
        return self.engine.reason if self.role in ("leader", "standalone") else self.role_reason

    @property
    def unreachable(self) -> bool:
        """Whether this gateway tries to read the engine's events and cannot reach them (another gateway may)."""
        return self._reading is not None and self.engine.unreachable

    @property
    def last_seq(self) -> int | None:
        return self.position.sequence

    @property
    def position(self) -> Position:
        return Position(*self.engine.position) if self._reading else self._position

    @property
    def blocks_stored(self) -> int:
        return self.engine.blocks_stored + self._applied[0]

    @property
    def blocks_removed(self) -> int:
        return self.engine.blocks_removed + self._applied[1]

    @property
    def problems(self) -> list[str]:
        return [*self.engine.problems, *([self.fault] if self.fault else [])]

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def resync(self) -> None:
        """Request all events from the engine again, as the map is wrong about this replica.

        If another gateway leads (reads the events for all), it is asked through Redis to do so.
        """
        if self._reading:
            self.engine.resync()
        else:
            self._link.request(self.keys, RESYNC)

    def forget_adapter(self, name: str) -> None:
        """Forget the replica's blocks, as a LoRA adapter's name now stands for another adapter.

        If another gateway reads the replica's events (leads), this is left to that gateway. The name is remembered for
        the time when this gateway reads them.
        """
        self.engine.void_adapter(name, self.position.sequence)
        if self._reading:
            self.engine.resync()

    def request_finished(self, prompt_blocks: int) -> None:
        if self._reading:
            self.engine.request_finished(prompt_blocks)

    async def run(self) -> None:
        """Keep the map's blocks of the replica up to date until cancelled.

        The replica's slot in the map must stay attached until this task has ended.
        """
        self.role = self._wanted = self._taken = "joining"
        self.in_step, self.led_at = False, self._link.now()
        self._link.members.append(self)
        self._link.look_soon()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                heed_cancellation()
                if self._taken != self._wanted:
                    await self._take_role()
                    heed_cancellation()
        finally:  # after this nothing changes the replica's blocks in the map
            self._link.members.remove(self)
            if self.journal is not None:
                self._link.give_back([self])
            try:
                self.end_journal()
            finally:
                await self._stop_reading()

    # --- roles

    def want(self, role: str) -> None:
        """Have `run` take this role for the replica; SharedMap, which knows who holds the lease, calls this.

        `role`: leader (this gateway reads the engine's events), follower (another one does), or standalone (each reads
        them for itself); or "outdated" if another gateway knows a newer run of the engine.
        """
        if not self._taken == self._wanted == role:
            self._wanted, self._taken = role, None
            self._wake.set()

    def reload(self, why: str) -> None:
        """Have `run` load the replica's blocks from Redis again, as this map may differ from the leading gateway's.

        Only for a follower whose map was up to date. `why`: the reason, for the log.
        """
        if self.in_step:
            log.info("replica %s: the shared map is loaded anew: %s", self.replica, why)
            self.in_step, self._taken, self._wanted = False, None, "follower"
            self._link.reloads += 1
            self._wake.set()

    def resign(self) -> None:
        """Give up the lease to write the replica's data to Redis; from now on read the events for this gateway alone.

        The lease is not claimed again for three times its duration.
        """
        self.claim_at, self.stuck_at = self._link.now() + 3 * self._link.lease_seconds, None
        if self.journal is not None:
            self._link.give_back([self])
            with contextlib.suppress(KeyError):  # its slot in the map may be gone
                self.end_journal()
        self.want("standalone")

    def stumble(self, error: BaseException) -> None:
        """Handle an exception in this gateway's own code for this replica; other replicas are not affected.

        The fault is recorded, and the lease is given up, because another gateway may not have the fault. Later this
        gateway tries again to share the map.
        """
        self._link.background.failed(PART, error, self.replica)
        self.fault = f"this gateway's part of the shared map failed: {type(error).__name__}: {error}"
        self.resign()
        self.load_at = self.claim_at

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Return a context manager that passes an exception in its body to `stumble` and ends there.

        Used in loops over many replicas, so that one that fails does not affect the others.
        """
        try:
            yield
        except Exception as error:
            self.stumble(error)

    def _unreachable(self) -> None:
        """Give up the lease to write the replica's data, as this gateway cannot reach the engine's events.

        Another gateway may reach them. The lease is given up before the map drops the replica's blocks, so that no
        delta makes other gateways drop them as well. It is not claimed again while the events cannot be reached.
        """
        if self.journal is not None:
            if not self.away:
                log.warning(
                    "replica %s: its events cannot be reached from here: gateways take turns in trying", self.replica
                )
            self.resign()

    async def _take_role(self) -> None:
        """Take the role in `_wanted`; after a failure this is tried again when SharedMap next looks at the leases."""
        wanted = self._wanted
        try:
            if wanted == "leader":
                await self._lead()
            elif wanted == "follower":
                await self._load()
                self.in_step = True
                self._become("follower", "another gateway reads its events")
            elif wanted == "outdated":
                await self._forget_all()
            else:
                self._stand_alone()
            self._taken = wanted
        except Absent:
            self.role_reason = "another gateway leads and has not written yet"
        except Unreadable as error:
            damaged = isinstance(error, Damaged)
            self.load_at = self._link.now() + (DAMAGED_SECONDS if damaged else UNREADABLE_SECONDS)
            if damaged:
                self._link.request(self.keys, REWRITE)
            self._stand_alone(f"what other gateways wrote cannot be used here: {error}")
        except FAILURES as error:
            self._link.failed(error)
        except Exception as error:
            self.stumble(error)
            await asyncio.sleep(FAULT_SECONDS)

    async def _lead(self) -> None:
        """Become the replica's leader: the gateway that reads the engine's events and writes the changes to Redis.

        If this gateway does not read the events already, it continues from the data that the last leader wrote. Without
        such data, it starts from all events that the engine still has.
        """
        whole = True
        if self._reading is None:  # otherwise the map follows the engine already, and a new snapshot is written from it
            with contextlib.suppress(Absent, Unreadable):
                if self.in_step:  # read what the last leader still wrote: now only this gateway may write
                    self.take(await self._link.read_deltas(self.keys, self.n))
                if not self.in_step or self.n != self.head:
                    await self._load()
                whole = False
                self._link.takeovers += 1
        self._wanted = "leader"  # `take` may have asked for a reload, which has been done
        self.in_step = False
        self.journal = Journal(max(self.n, self.head) if whole else self.n, whole)
        self.stuck_at = None
        self._map.record(self._slot, self.journal.add)
        self._read_events()
        self._become("leader", "this gateway reads its events for all")

    def _stand_alone(self, why: str = "") -> None:
        self.in_step = False
        self.end_journal()
        link = self._link
        if why or self.role != "standalone":
            refused = "Redis refuses what gateways do there" if link.reachable else "Redis is away"
            self._become("standalone", why or ("no gateway leads" if link.usable else refused))
        self._read_events()

    async def _forget_all(self) -> None:
        """Forget all blocks of this run of the engine's process, as another gateway knows a newer run of it."""
        self.end_journal()
        await self._stop_reading()
        self._map.clear(self._slot)
        self._position, self.term = Position(), None
        self._stand_alone("a newer incarnation of the replica is known to other gateways")

    def rename(self, keys: Keys) -> None:
        """Switch to the Redis keys of an incarnation (run of the engine process), and load its data.

        Another gateway has named the incarnation. This gateway could not name it, because it did not learn the start
        time of the engine's process.
        """
        self.end_journal()
        self.keys, self.head = keys, 0
        self.reload("another gateway knows its incarnation")

    def end_journal(self) -> None:
        """Stop writing this replica's changes to Redis, as this gateway does not hold the lease any more."""
        if self.journal is not None:
            self.n, self.term, self.journal = self.journal.n, self.journal.term, None
            self._taken = None
            self._map.record(self._slot, None)

    def _become(self, role: str, reason: str) -> None:
        if (role, reason) != (self.role, self.role_reason) and not self.away:
            log.info("replica %s: %s: %s", self.replica, role, reason)
        self.role, self.role_reason = role, reason
        if role != "standalone":
            self.fault = None

    def _tell(self, state: str, reason: str) -> None:
        """Report the state of the engine's events to `on_change`.

        If the events cannot be reached, this is reported once, and not again before events have come. Nothing is
        reported in the role "joining", as the changes that are read then are old.
        """
        if state == "live" and self.away:
            self.away = False
            log.info("replica %s: %s: %s", self.replica, self.role, self.role_reason)
        if not self.away and self.role != "joining":
            self._on_change(state, reason)
        if state == "unobserved" and self.engine.unreachable:
            self.away = True

    def _read_events(self) -> None:
        """Start a task that reads the engine's events; after a failure it requests all of them again."""

        async def read() -> None:
            while True:
                try:
                    await self.engine.run()
                except Exception as error:
                    self.stumble(error)
                    await asyncio.sleep(FAULT_SECONDS)
                    with self.guarded():
                        self.engine.resync()

        if self._reading is None:
            self.engine.resume(*self._position, self._observed)
            self._reading = asyncio.create_task(read(), name=f"events {self.replica}")

    async def _stop_reading(self) -> None:
        """Stop the task that reads the engine's events; after this the EventIntake no longer changes the map."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            reading.cancel()
            await asyncio.wait([reading])

    # --- reading what others wrote

    async def _load(self) -> None:
        """Load the replica's blocks from Redis into the map: the snapshot, and all deltas (changes) after it.

        Until both have been read, the map stays as it is. Raises Absent if Redis has no data of this replica,
        Unreadable or Damaged if the data cannot be used.
        """
        for _ in range(TRIES):
            pieces = await self._link.read_snapshot(self.keys)
            if not pieces:
                raise Absent
            header = decode_header(pieces[0])
            told = Blocks(*header.blocks)
            if told.size:
                self.engine.believe(told)
            self._written = self._or_expected(told)
            snapshot = decode_snapshot(self.identity, header, pieces[1:])
            deltas = await self._link.read_deltas(self.keys, snapshot.n)
            n, term, why = snapshot.n, snapshot.term, ""
            for number, delta in deltas:
                why = why or _no_successor(n, term, number, delta)
                n, term = number, delta.term
            if not why and snapshot.n + len(deltas) >= self.head:
                break
        else:
            raise Damaged(f"its snapshot and deltas do not end at {self.head}" + (why and f": {why}"))
        self.end_journal()
        await self._stop_reading()
        self.in_step = False
        for _ in self._map.become(self._slot, snapshot.contents):
            await asyncio.sleep(0)
        self._observed = snapshot.contents.observed
        for change in merged(change for _, delta in deltas for change in delta.changes):
            await asyncio.sleep(0)
            self._change(change)
        self.n, self.term, self._position = n, term, deltas[-1][1].position if deltas else snapshot.position

    def take(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """Apply new deltas (changes written by the leading gateway) to the map, each given with its number, in order.

        If a delta does not continue the last one or cannot be read, the snapshot is loaded again (`reload`).
        """
        try:
            for n, delta in deltas:
                if not self.in_step:
                    return
                if n <= self.n:
                    continue
                if why := _no_successor(self.n, self.term, n, delta):
                    self.reload(why)
                    return
                for change in delta.changes:
                    self._change(change)
                self.n, self.term, self._position = n, delta.term, delta.position
                self._link.lag(delta.at)
        except Damaged as error:
            self._link.request(self.keys, REWRITE)
            self.reload(str(error))

    def _change(self, change: Change) -> None:
        removed = self._map.change(self._slot, change)
        self._applied[0] += len(change.hashes) if isinstance(change, Store) else 0
        self._applied[1] += removed
        if isinstance(change, Observe):
            self._observed = change.observed
            self._tell(self.state, "reported by the gateway that reads its events")
        elif isinstance(change, Clear):
            self._tell(self.state, "cleared by the gateway that reads its events")

    # --- writing

    @property
    def blocks(self) -> int:
        return self._map.held(self._slot)

    def snapshot(self, journal: Journal) -> Snapshot:
        """Return all blocks that the map has of the replica; these include all changes that `journal` was given."""
        self._written = self._blocks
        contents = self._map.contents(self._slot)
        return Snapshot(journal.n, journal.term, self.position, contents, self.engine.stored_as)

    @property
    def tells_other_blocks(self) -> bool:
        """Whether the engine's block format differs from the one in the last snapshot.

        If it does, a new snapshot must be written, because deltas do not carry the format.
        """
        return self._blocks != self._written

    @property
    def _blocks(self) -> Blocks:
        return self._or_expected(self.engine.stored_as)

    def _or_expected(self, told: Blocks) -> Blocks:
        """Return the block format `told` for comparisons, with the expected block size if no event has shown one yet.

        `told`: the format as events have shown it so far. The expected size is the one in which prompts are hashed. It
        must not be used as a size that events have shown: an engine's first event, which may be the only one for a long
        time, could then be ignored because its size differs.
        """
        return told if told.size else told._replace(size=self.identity.block_size)

    def wrote(self, well: bool | None) -> None:
        """Note whether Redis accepted a write of this replica's data; `well` is None if Redis did not answer."""
        if well is not False:
            self.stuck_at = None
        elif self.stuck_at is None:
            self.stuck_at = self._link.now()


def _no_successor(n: int, term: int | None, number: int, delta: Delta) -> str:
    """Return why the delta (set of changes) `number` does not continue delta `n`, for the log; "" if it does.

    `term`: the term of delta `n`, a random number for the period in which one gateway leads.
    """
    if number != n + 1:
        return f"deltas {n + 1} to {number - 1} are gone"
    if delta.flags & RELOAD:
        return "its leader wrote it anew"
    return "it was written by two" if delta.term != term and not delta.flags & FIRST else ""
