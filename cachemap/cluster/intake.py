"""One replica's part of the shared map: from its events if this gateway leads, else from the leading gateway.

A gateway has one of these roles for each replica:
    joining  nothing known yet
    mirror   another gateway leads; the snapshot and the deltas that it writes to Redis are applied here
    writer   this gateway leads (holds the lease): it follows the engine's events and writes their changes to Redis
    alone    no gateway leads, Redis is away, or its data cannot be read or is of a later incarnation of the engine:
             this gateway follows the events for itself

The map is usable in every role. Each delta carries the number of the engine's last event batch that it includes. When
the role changes, the gateway requests the batches after that one from the engine, and continues with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

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
    decode_snapshot,
    told_blocks,
)
from cachemap.cluster.connect import FAILURES, heed_cancellation
from cachemap.cluster.journal import Journal
from cachemap.cluster.keys import RESYNC, REWRITE, UNNAMED, Keys
from cachemap.events.intake import EventIntake
from cachemap.events.records import Blocks
from cachemap.map import CacheMap

log = logging.getLogger("hitherto.share")

UNREADABLE_SECONDS = 10.0  # before data of a gateway with other settings is read again
DAMAGED_SECONDS = 2.0  # before damaged data is read again: the leader writes it again at its next look
FAULT_SECONDS = 1.0  # before a retry after a fault of this gateway's own
TRIES = 5  # attempts to load: a snapshot may be replaced while its deltas are read


class Absent(Exception):
    """An error: Redis has no data of this replica."""


class Coordinator(Protocol):
    """The part of SharedMap, which talks to Redis for all replicas, that a SharedIntake uses."""

    reloads: int
    takeovers: int

    @property
    def reachable(self) -> bool: ...
    @property
    def usable(self) -> bool: ...
    def now(self) -> float: ...
    def join(self, member: SharedIntake) -> None: ...
    def leave(self, member: SharedIntake) -> None: ...
    def unreachable(self, member: SharedIntake) -> None: ...
    def stumbled(self, member: SharedIntake, error: BaseException) -> None: ...
    def wish(self, member: SharedIntake, what: bytes) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def lag(self, at: float) -> None: ...
    async def read_snapshot(self, keys: Keys) -> list[bytes]: ...
    async def read_deltas(self, keys: Keys, after: int) -> list[tuple[int, Delta]]: ...


class SharedIntake:
    """The intake of one replica in a shared map, in place of an EventIntake; `run` it until cancelled.

    `SharedMap.intake` makes it. Most arguments are those of EventIntake; `keys`: the replica's keys in Redis.
    """

    def __init__(self, shared: Coordinator, cache_map: CacheMap, slot: int, replica: str, keys: Keys, *, model: str, block_size: int,
                 on_change: Callable[[str, str], None] = lambda state, reason: None, **source: Any):  # fmt: skip
        self._shared, self._map, self._slot, self.keys = shared, cache_map, slot, keys
        self.replica, self.unnamed = replica, keys.incarnation == UNNAMED
        ahead = source.get("looks_ahead", 0)
        named = f"{model}, and {ahead} tokens behind a block" if ahead else model
        self._identity = Identity(named, block_size, cache_map.tag_bits)
        self.engine = EventIntake(cache_map, slot, model=model, block_size=block_size, on_change=self._tell,
                                  on_unreachable=lambda: shared.unreachable(self), **source)  # fmt: skip
        self._written = self._blocks  # the block format that other gateways know
        self._following: asyncio.Task[None] | None = None  # follows the engine's events
        self._on_change = on_change
        self._wanted = "joining"
        self._wake = asyncio.Event()
        self._settled = True
        self._position = Position()
        self._observed = True
        self._mirrored = [0, 0]  # the blocks stored and removed by deltas
        self.role = "joining"
        self.role_reason = "nothing heard of Redis yet"
        self.n = 0  # the last delta applied or written
        self.term: int | None = None
        self.mirroring = False  # deltas may be applied
        self.journal: Journal | None = None
        self.led_at = shared.now()  # when a gateway was last known to lead
        self.mirror_at = 0.0  # when data of other gateways may be read again
        self.unled_at: float | None = None  # since when Redis has named a newer incarnation that no gateway leads
        self.head = 0  # the last delta in Redis, as of the last look
        self.claim_at = 0.0  # when the lease may be claimed again
        # The engine's events cannot be reached: gateways try in turn, and only the first failure is logged.
        self.away = False
        self.stuck_at: float | None = None  # since when Redis answers but accepts no writes
        self._void = False
        # The failure of this gateway's own work on this replica, until it succeeds again.
        self.fault: str | None = None
        # Consecutive looks at which Redis had newer deltas and this gateway had made no progress since the last look.
        self.behind = 0
        self.looked_n = -1

    # --- for the gateway, as in EventIntake

    @property
    def state(self) -> str:
        if self.role in ("writer", "alone"):
            return self.engine.state
        return "connecting" if self.role == "joining" else "live" if self._observed else "unobserved"

    @property
    def reason(self) -> str:
        return self.engine.reason if self.role in ("writer", "alone") else self.role_reason

    @property
    def unreachable(self) -> bool:
        """Whether this gateway tries to follow the engine's events and cannot reach them, though another one may."""
        return self._following is not None and self.engine.unreachable

    @property
    def stored_as(self) -> Blocks:
        """The engine's block format, as shown by its events (role writer) or by the leader's snapshots (mirror)."""
        return self.engine.stored_as

    def held_up(self) -> None:
        self.engine.held_up()

    @property
    def last_seq(self) -> int | None:
        return self.position.sequence

    @property
    def position(self) -> Position:
        return Position(*self.engine.position) if self._following else self._position

    @property
    def blocks_stored(self) -> int:
        return self.engine.blocks_stored + self._mirrored[0]

    @property
    def blocks_removed(self) -> int:
        return self.engine.blocks_removed + self._mirrored[1]

    @property
    def problems(self) -> list[str]:
        return [*self.engine.problems, *([self.fault] if self.fault else [])]

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the EventIntake, which knows only the events that were followed here."""
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def resync(self) -> None:
        """Request everything from the engine again, here or through the leader: the map is wrong about this replica."""
        if self._following:
            self.engine.resync()
        else:
            self._shared.wish(self, RESYNC)

    def forget_adapter(self, name: str) -> None:
        """Forget the replica's blocks, as the adapter's name now stands for another adapter.

        A mirror waits for the leader to do this, and remembers the adapter for the time when it leads itself.
        """
        self.engine.void_adapter(name, self.position.sequence)
        if self._following:
            self.engine.resync()

    def request_finished(self, prompt_blocks: int) -> None:
        if self._following:
            self.engine.request_finished(prompt_blocks)

    async def run(self) -> None:
        """Follow the replica until cancelled; its slot in the map must stay attached until this task has ended."""
        self.role, self._wanted, self._settled, self.mirroring = "joining", "joining", True, False
        self._shared.join(self)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                heed_cancellation()
                if not self._settled:
                    await self._turn()
                    heed_cancellation()
        finally:
            self._shared.leave(self)
            try:
                self._end_journal()
            finally:
                await self._stop_following()

    # --- roles

    def want(self, role: str) -> None:
        """Take a role; SharedMap, which knows who holds the lease, calls this."""
        if self._settled and role in (self.role, self._wanted):
            return
        self._wanted, self._settled = role, False
        self._wake.set()

    def reload(self, why: str) -> None:
        """Load the snapshot again, as this mirror may differ from the leader's map; `why`: the reason, for the log."""
        if self.mirroring:
            log.info("replica %s: the shared map is loaded anew: %s", self.replica, why)
            self.mirroring = False
            self._shared.reloads += 1
            self._settled, self._wanted = False, "mirror"
            self._wake.set()

    async def _turn(self) -> None:
        """Take the wanted role; after a failure this is tried again when SharedMap next looks at the leases."""
        wanted = self._wanted
        try:
            if wanted == "writer":
                await self._lead()
            elif wanted == "mirror":
                await self._mirror()
            elif wanted == "alone":
                self._go_alone()
            else:
                await self._begin_void()
            self._settled = self._wanted == wanted
        except Absent:
            self.role_reason = "another gateway leads and has not written yet"
        except Unreadable as error:
            damaged = isinstance(error, Damaged)
            self.mirror_at = self._shared.now() + (DAMAGED_SECONDS if damaged else UNREADABLE_SECONDS)
            if damaged:
                self._shared.wish(self, REWRITE)
            self._become("alone", f"what other gateways wrote cannot be used here: {error}")
            self._go_alone()
        except FAILURES as error:
            self._shared.failed(error)
        except Exception as error:
            self._shared.stumbled(self, error)
            await asyncio.sleep(FAULT_SECONDS)

    async def _lead(self) -> None:
        """Lead: start from the data that the last leader wrote or, without such data, from the engine."""
        whole = True
        if self._following is None:  # else the map here follows the engine already, and its contents are written anew
            with contextlib.suppress(Absent, Unreadable):
                await self._catch_up()
                whole = False
                self._shared.takeovers += 1
        self._wanted = "writer"  # a reload requested on the way has been done by `_catch_up`
        self.mirroring = False
        self.journal = Journal(max(self.n, self.head) if whole else self.n, whole)
        self.stuck_at = None
        self._map.record(self._slot, self.journal.add)
        self._follow_events()
        self._become("writer", "this gateway follows its events for all")

    async def _catch_up(self) -> None:
        """Apply everything that the last leader wrote; by its lease only this gateway may write now."""
        if self.mirroring:
            self.take(await self._shared.read_deltas(self.keys, self.n))
        if not self.mirroring or self.n != self.head:
            await self._load()

    async def _mirror(self) -> None:
        await self._load()
        self.mirroring = True
        self._become("mirror", "another gateway follows its events")

    def _go_alone(self) -> None:
        self.mirroring = False
        self._end_journal()
        if self.role != "alone":
            self._become(
                "alone",
                "no gateway leads"
                if self._shared.usable
                else "Redis refuses what gateways do there"
                if self._shared.reachable
                else "Redis is away",
            )
        self._follow_events()

    def rename(self, keys: Keys) -> None:
        """Use the keys of the incarnation that another gateway named, as this one did not learn its start time."""
        self._end_journal()
        self.keys, self.head = keys, 0
        self.reload("another gateway knows its incarnation")

    async def _begin_void(self) -> None:
        """Forget everything about this incarnation of the replica, as another gateway knows a newer one."""
        if not self._void:
            self._void = True
            self._end_journal()
            await self._stop_following()
            self._map.clear(self._slot)
            self._position, self.term = Position(), None
        self._become("alone", "a newer incarnation of the replica is known to other gateways")
        self._go_alone()

    def lost(self) -> None:
        """Stop writing to Redis, as another gateway holds the lease, or none does."""
        self._end_journal()

    def _end_journal(self) -> None:
        if self.journal is not None:
            self.n, self.term, self.journal = self.journal.n, self.journal.term, None
            self._map.record(self._slot, None)

    def _become(self, role: str, reason: str) -> None:
        if (role, reason) != (self.role, self.role_reason) and not self.away:
            log.info("replica %s: %s: %s", self.replica, role, reason)
        self.role, self.role_reason = role, reason
        if role != "alone":
            self.fault, self._void = None, False

    def _tell(self, state: str, reason: str) -> None:
        """Report the state of the events to `on_change`.

        Unreachable events are reported once, and again only after they have come. Nothing is reported while joining, as
        the changes that are read then are old.
        """
        if state == "live" and self.away:
            self.away = False
            log.info("replica %s: %s: %s", self.replica, self.role, self.role_reason)
        if not self.away and self.role != "joining":
            self._on_change(state, reason)
        if state == "unobserved" and self.engine.unreachable:
            self.away = True

    def _follow_events(self) -> None:
        if self._following is None:
            self.engine.resume(*self._position, self._observed)
            self._following = asyncio.create_task(self._run_engine(), name=f"events {self.replica}")

    async def _run_engine(self) -> None:
        """Follow the engine's events; after a failure, request all of them again."""
        failed = False
        while True:
            try:
                if failed:
                    self.engine.resync()
                await self.engine.run()
            except Exception as error:
                failed = True
                self._shared.stumbled(self, error)
                await asyncio.sleep(FAULT_SECONDS)

    async def _stop_following(self) -> None:
        """Stop following the engine's events; when this returns, the EventIntake no longer changes the map."""
        if self._following is not None:
            following, self._following = self._following, None
            following.cancel()
            await asyncio.wait([following])

    # --- reading what others wrote

    async def _load(self) -> None:
        """Load the snapshot and all deltas after it from Redis; until both are read, the map stays as it is."""
        for _ in range(TRIES):
            pieces = await self._shared.read_snapshot(self.keys)
            if not pieces:
                raise Absent
            told = told_blocks(pieces)
            if told.size:
                self.engine.believe(told)
            self._written = self._or_expected(told)
            snapshot = decode_snapshot(self._identity, pieces)
            deltas = await self._shared.read_deltas(self.keys, snapshot.n)
            why = _gap(snapshot, deltas)
            if not why and snapshot.n + len(deltas) >= self.head:
                break
        else:
            raise Damaged(f"its snapshot and deltas do not end at {self.head}" + (why and f": {why}"))
        await self._adopt(snapshot)
        for change in merged(change for _, delta in deltas for change in delta.changes):
            await asyncio.sleep(0)
            self._change(change)
        if deltas:
            self._applied(*deltas[-1])

    async def _adopt(self, snapshot: Snapshot) -> None:
        self._end_journal()
        await self._stop_following()
        self.mirroring = False
        for _ in self._map.become(self._slot, snapshot.contents):
            await asyncio.sleep(0)
        self.n, self.term, self._position = snapshot.n, snapshot.term, snapshot.position
        self._observed = snapshot.contents.observed

    def take(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """Apply new deltas, each given with its number, in order."""
        try:
            for n, delta in deltas:
                if not self.mirroring:
                    return
                if n > self.n:
                    self._take(n, delta)
        except Damaged as error:
            self._shared.wish(self, REWRITE)
            self.reload(str(error))

    def _take(self, n: int, delta: Delta) -> None:
        if why := _no_successor(self.n, self.term, n, delta):
            self.reload(why)
        else:
            self._apply(n, delta)
            self._shared.lag(delta.at)

    def _apply(self, n: int, delta: Delta) -> None:
        for change in delta.changes:
            self._change(change)
        self._applied(n, delta)

    def _applied(self, n: int, delta: Delta) -> None:
        self.n, self.term, self._position = n, delta.term, delta.position

    def _change(self, change: Change) -> None:
        removed = self._map.change(self._slot, change)
        self._mirrored[0] += len(change.hashes) if isinstance(change, Store) else 0
        self._mirrored[1] += removed
        if isinstance(change, Observe):
            self._observed = change.observed
            self._tell(self.state, "reported by the gateway that follows its events")
        elif isinstance(change, Clear):
            self._tell(self.state, "cleared by the gateway that follows its events")

    # --- writing

    @property
    def blocks(self) -> int:
        return self._map.held(self._slot)

    def snapshot(self, journal: Journal) -> Snapshot:
        """Return all that the map has of the replica, which includes all changes that `journal` got."""
        self._written = self._blocks
        return Snapshot(journal.n, journal.term, self.position, self._map.contents(self._slot), self.stored_as)

    @property
    def tells_other_blocks(self) -> bool:
        """Whether the engine's block format differs from that in the last snapshot; deltas do not have the format."""
        return self._blocks != self._written

    @property
    def _blocks(self) -> Blocks:
        return self._or_expected(self.stored_as)

    def _or_expected(self, told: Blocks) -> Blocks:
        """Return a block format, with the block size that prompts are hashed in if no event has shown one yet.

        The result is only for comparing formats. A gateway that took an expected block size for one that events showed
        would ignore the engine's first event, which may be the only one for a long time, as a single odd one.
        """
        return told if told.size else told._replace(size=self._identity.block_size)

    def wrote(self, well: bool | None) -> None:
        """Note whether Redis accepted a write of this replica's data; None if Redis did not answer."""
        if well is not False:
            self.stuck_at = None
        elif self.stuck_at is None:
            self.stuck_at = self._shared.now()

    @property
    def identity(self) -> Identity:
        return self._identity


def _no_successor(n: int, term: int | None, number: int, delta: Delta) -> str:
    """Return why delta `number` does not continue delta `n` of `term`; "" if it does."""
    if number != n + 1:
        return f"deltas {n + 1} to {number - 1} are gone"
    if delta.flags & RELOAD:
        return "its writer wrote it anew"
    if delta.term != term and not delta.flags & FIRST:
        return "it was written by two"
    return ""


def _gap(snapshot: Snapshot, deltas: Iterable[tuple[int, Delta]]) -> str:
    """Return why these numbered deltas cannot be applied to this snapshot one after the other; "" if they can."""
    n, term = snapshot.n, snapshot.term
    for number, delta in deltas:
        if why := _no_successor(n, term, number, delta):
            return why
        n, term = number, delta.term
    return ""
