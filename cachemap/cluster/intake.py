"""One replica's part of the shared map: from its events if this gateway leads, else from the leader.

    joining  nothing known yet
    mirror   another gateway writes; its snapshot and deltas are applied here
    writer   this gateway holds the lease: it follows the engine's events and publishes their changes
    alone    no gateway leads, Redis is away, or its data is of another kind or of a later incarnation: this gateway
             follows the events for itself

The map is usable in every role. A change of role continues after the engine's last batch that is included: every delta
carries that batch's number, and the batches after it are requested from the engine.
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
    """An error: nothing has been written about this replica."""


class Coordinator(Protocol):
    """The part of SharedMap that a SharedIntake uses; it speaks to Redis for all replicas."""

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
    """The intake of one replica in a shared map; `run` it until cancelled.

    `SharedMap.intake` makes it; its arguments are those of EventIntake.
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
        self.unled_at: float | None = None  # since when a newer incarnation is named that no gateway leads
        self.head = 0  # the last delta in Redis, as of the last look
        self.claim_at = 0.0  # when the lease may be claimed again
        # The engine's events cannot be reached: gateways take turns in trying, and only the first time is logged.
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
        """Whether this gateway follows the engine's events and cannot reach them, so that any other may do better."""
        return self._following is not None and self.engine.unreachable

    @property
    def stored_as(self) -> Blocks:
        """The engine's block format: from its events in the writer, from the writer's snapshots in a mirror."""
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
        """Return other attributes from the engine's own intake, as far as events were followed here."""
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def resync(self) -> None:
        """Request everything from the engine again, here or through the writer: the map is wrong about this replica."""
        if self._following:
            self.engine.resync()
        else:
            self._shared.wish(self, RESYNC)

    def forget_adapter(self, name: str) -> None:
        """Forget an adapter's blocks, as EventIntake does.

        A mirror gets what its leader forgets, and only remembers the adapter for when it leads itself.
        """
        self.engine.void_adapter(name, self.position.sequence)
        if self._following:
            self.engine.resync()

    def request_finished(self, prompt_blocks: int) -> None:
        if self._following:
            self.engine.request_finished(prompt_blocks)

    async def run(self) -> None:
        """Follow the replica until cancelled; its slot in the map must stay attached until this has ended."""
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
        """Take a role, as SharedMap asks, which knows who holds the lease."""
        if self._settled and role in (self.role, self._wanted):
            return
        self._wanted, self._settled = role, False
        self._wake.set()

    def reload(self, why: str) -> None:
        """Load the snapshot again, as what was applied here differs from what the others have."""
        if self.mirroring:
            log.info("replica %s: the shared map is loaded anew: %s", self.replica, why)
            self.mirroring = False
            self._shared.reloads += 1
            self._settled, self._wanted = False, "mirror"
            self._wake.set()

    async def _turn(self) -> None:
        """Take the wanted role; what fails is tried again when SharedMap next looks."""
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
        """Lead with the lease, from what the last writer wrote or, without it, from the engine."""
        whole = True
        if self._following is None:  # else this gateway's map follows the engine already, and is written as a whole
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
        """Apply everything that is written; only this gateway may add to it now."""
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
        """Use the keys of the incarnation that another gateway knows; this one could not tell its start time."""
        self._end_journal()
        self.keys, self.head = keys, 0
        self.reload("another gateway knows its incarnation")

    async def _begin_void(self) -> None:
        """Forget everything about this incarnation, as another gateway knows a newer one."""
        if not self._void:
            self._void = True
            self._end_journal()
            await self._stop_following()
            self._map.clear(self._slot)
            self._position, self.term = Position(), None
        self._become("alone", "a newer incarnation of the replica is known to other gateways")
        self._go_alone()

    def lost(self) -> None:
        """Stop writing: another gateway holds the lease, or none does."""
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
        """Report the state of the events.

        That they cannot be reached is reported once, until they come again. What is read while joining is history, not
        a state.
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
        """Stop following the engine's events; on return nothing writes to the map on their behalf."""
        if self._following is not None:
            following, self._following = self._following, None
            following.cancel()
            await asyncio.wait([following])

    # --- reading what others wrote

    async def _load(self) -> None:
        """Load the snapshot and all deltas after it; until then the map keeps what it has."""
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
        """Apply new deltas, in order."""
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
        """Return what the map has of the replica after all changes that `journal` got."""
        self._written = self._blocks
        return Snapshot(journal.n, journal.term, self.position, self._map.contents(self._slot), self.stored_as)

    @property
    def tells_other_blocks(self) -> bool:
        """Whether the engine's block format has changed since the last snapshot. Deltas do not carry the format."""
        return self._blocks != self._written

    @property
    def _blocks(self) -> Blocks:
        return self._or_expected(self.stored_as)

    def _or_expected(self, told: Blocks) -> Blocks:
        """Return a block format; while no event has told one, the one that prompts are hashed in.

        Only for comparison: a gateway that read an expected format as a told one would take the engine's first event,
        which may be the only one for a long time, for a single odd one.
        """
        return told if told.size else told._replace(size=self._identity.block_size)

    def wrote(self, well: bool | None) -> None:
        """Note whether Redis accepted what was written; None if it did not answer."""
        if well is not False:
            self.stuck_at = None
        elif self.stuck_at is None:
            self.stuck_at = self._shared.now()

    @property
    def identity(self) -> Identity:
        return self._identity


def _no_successor(n: int, term: int | None, number: int, delta: Delta) -> str:
    """Return why this delta does not continue what is known up to number `n` of `term`; "" if it does."""
    if number != n + 1:
        return f"deltas {n + 1} to {number - 1} are gone"
    if delta.flags & RELOAD:
        return "its writer wrote it anew"
    if delta.term != term and not delta.flags & FIRST:
        return "it was written by two"
    return ""


def _gap(snapshot: Snapshot, deltas: Iterable[tuple[int, Delta]]) -> str:
    """Return why these deltas cannot be applied to this snapshot one after the other; "" if they can."""
    n, term = snapshot.n, snapshot.term
    for number, delta in deltas:
        if why := _no_successor(n, term, number, delta):
            return why
        n, term = number, delta.term
    return ""
