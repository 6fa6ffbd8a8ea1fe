"""The part of a gateway that shares its cache map with other gateways through Redis.

For each replica, the gateway that holds the replica's lease (the leader) follows the engine's events and writes the
changes. Three loops, and no request waits for any of them: `_tend` looks at all leases once a second, `Writing` writes
this gateway's changes, and `_follow` (on a Cluster one for each lane) reads what other gateways wrote. Whatever Redis
does, look-ups use this process's own map.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from cachemap.background import Background, Failures
from cachemap.cluster.codec import PIECE, Damaged, Delta, decode_entry
from cachemap.cluster.connect import FAILURES, Place, Script, Trouble, Ways, heed_cancellation, in_words, xread
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.journal import LONGEST_DELTA
from cachemap.cluster.keys import KEEP_SECONDS, RESYNC, REWRITE, Keys
from cachemap.cluster.replies import NONSENSE, strange
from cachemap.cluster.writing import BATCH_SECONDS, WRITES, Writing
from cachemap.map import CacheMap

log = logging.getLogger("hitherto.share")

HERE = Path(__file__).parent
TEND, LEAVE, READ = (Script((HERE / f"{name}.lua").read_text()) for name in ("tend", "leave", "read"))

LEASE_SECONDS = 3.0
LOOK_SECONDS = 1.0
# How long no gateway may lead the newest incarnation that Redis names until that name counts as a mistake; gateways
# notice a restart within 1 to 2 s.
UNLED_SECONDS = 9.0
SETTLE_SECONDS = 0.05  # between claims while leases are free, so that gateways that start together share them
POLL_MILLISECONDS = 250  # a read waits so long for new deltas; the deltas of a new member are read after that time
STREAM_SECONDS = 5e-5  # pause between two reads, for each stream read
PART = "shared map: one replica's part"  # a kind of background work
LEASES, READS = "leases cannot be looked at", "deltas cannot be read"  # tasks that `in_trouble` reports, with WRITES
MOST_LOOKS = 128  # leases in one call, which blocks a server for about a millisecond
# Bytes and members of a list or stream read at once; members longer than gateways write are not read at all.
MOST_READ_BYTES, MOST_READ = 1 << 20, 500


# What tend.lua reports of one replica's lease, in this order: the state of the lease; the number of the last delta;
# whether Redis has deltas and a snapshot; what other gateways ask of the holder; and the newest incarnation of the
# engine, or the reason why Redis refuses the lease.
_Look = tuple[str, int, bool, bytes, str]


def _looks(reply: Any, count: int) -> tuple[float, list[_Look]]:
    """Read a reply of tend.lua to `count` leases: the server's time, and each lease."""
    try:
        time, *states = reply
        looks = [
            (state.decode(), int(head), bool(there), wished, told.decode(errors="replace"))
            for state, head, there, wished, told in states
        ]
        if len(looks) == count and math.isfinite(clock := float(time)):
            return clock, looks
    except NONSENSE as error:
        raise strange("tend.lua", error) from error
    raise strange("tend.lua")


class SharedMap:
    """The shared map of one gateway: `start` it, make an `intake` for each replica with events, `stop` it at the end.

    `place`: the Redis. `deployment`: a name that the gateways that share a map have in common.
    `members`: the intakes of all replicas. `token`: this gateway's random name, which its leases carry.
    """

    def __init__(self, place: Place, deployment: str, cache_map: CacheMap, background: Background | None = None):
        self.background = background or Background()
        self.background.failures.setdefault(PART, Failures())
        self.place, self.deployment, self._map = place, deployment, cache_map
        self.token = secrets.token_hex(8)
        self.ways = Ways(place)
        self.members: list[SharedIntake] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._aside: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._writing = Writing(self)
        self._clock = 0.0  # the server's time minus this process's
        self._lags = [0.0, 0.0]  # the worst lags of the current and the last 5 s
        self._lags_until = 0.0
        self._troubles: dict[tuple[str, int], Trouble] = {}  # by task and lane
        self._reached = False
        self.errors = 0
        self.takeovers = 0
        self.reloads = 0

    # --- for the gateway

    def start(self) -> None:
        self._spawn("leases", self._tend)
        self._spawn("publish", self._writing.run, self.abdicate)

    async def stop(self) -> None:
        """Stop all loops and give the leases back, so that other gateways take over when they next look at them."""
        for task in self._tasks.values():
            task.cancel()
        for group in self.groups([one for one in self.members if one.journal]):
            self.beside(self._give_back(group))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._aside:
            _, late = await asyncio.wait(self._aside, timeout=1)
            for task in late:
                task.cancel()
        await self.ways.aclose()

    def intake(self, slot: int, replica: str, incarnation: str, **arguments: Any) -> SharedIntake:
        """Return an intake for one replica, to use in place of an EventIntake.

        `replica`: the replica's address. `incarnation`: the id of the engine's present run. `arguments`: as for
        EventIntake.
        """
        return SharedIntake(self, self._map, slot, replica, Keys(self.deployment, replica, incarnation), **arguments)

    @property
    def reachable(self) -> bool:
        """Whether Redis answers, even with a refusal."""
        return self._reached and all(one.answered for one in self._troubles.values())

    @property
    def usable(self) -> bool:
        """Whether Redis answers and lets this gateway do all its tasks."""
        return self._reached and not self._troubles

    @property
    def trouble(self) -> str:
        """A message: which tasks Redis does not let this gateway do, and why; "" if all is well."""
        whats: dict[str, dict[str, None]] = {}  # tasks by reason
        for (what, _), one in self._troubles.items():
            whats.setdefault(one.why, {})[what] = None
        told = "; ".join(f"{' and '.join(what)}: {why}" for why, what in whats.items())
        return told or ("" if self._reached else "not connected yet")

    @property
    def leases(self) -> int:
        return sum(one.journal is not None for one in self.members)

    @property
    def snapshots(self) -> int:
        return self._writing.written

    @property
    def lag_seconds(self) -> float:
        """The longest time between a delta's arrival in Redis and its application here, in the last 5 to 10 s."""
        self._turn_lags()
        return max(self._lags)

    # --- for its intakes

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def join(self, member: SharedIntake) -> None:
        member.led_at = self.now()
        self.members.append(member)
        lane = self.lane(member)
        if f"follow {lane}" not in self._tasks:
            self._spawn(f"follow {lane}", partial(self._follow, lane), partial(self._follow_failed, lane))
        self.look_soon()

    def leave(self, member: SharedIntake) -> None:
        """Remove a replica's intake; after this nothing here changes the replica's blocks in the map."""
        self.members.remove(member)
        if member.journal is not None and self._tasks:
            self.beside(self._give_back([member]))

    def stumbled(self, member: SharedIntake, error: BaseException) -> None:
        """Handle a failure of this gateway's own work on one replica; the other replicas are not affected.

        This gateway gives up the replica's lease, as another gateway may not fail. It follows the events for itself and
        tries to share the map again later.
        """
        self.background.failed(PART, error, member.replica)
        member.fault = f"this gateway's part of the shared map failed: {type(error).__name__}: {error}"
        member.claim_at = member.mirror_at = self.now() + 3 * LEASE_SECONDS
        self._resign(member)

    def unreachable(self, member: SharedIntake) -> None:
        """Give up a replica's lease, as this gateway cannot reach the engine's events and another gateway may.

        This happens before the map drops the replica's blocks, so that no delta tells other gateways to do so. The
        lease is not claimed again while the events cannot be reached.
        """
        if member.journal is not None:
            if not member.away:
                log.warning(
                    "replica %s: its events cannot be reached from here: gateways take turns in trying", member.replica
                )
            member.claim_at = self.now() + 3 * LEASE_SECONDS
            self._resign(member)

    def abdicate(self) -> None:
        """Give up all leases, as the loop that writes for all of them failed."""
        for member in self.members:
            if member.journal is not None:
                member.claim_at = self.now() + 3 * LEASE_SECONDS
                self._resign(member)

    def _resign(self, member: SharedIntake) -> None:
        if member.journal is not None:
            self.beside(self._give_back([member]))
            with self.guard(member, quietly=True):
                member.lost()
        member.want("alone")

    def _follow_failed(self, lane: int) -> None:
        """Reload all mirrored replicas of a lane, as deltas that were read may not have been applied."""
        for member in self.members:
            if self.lane(member) == lane:
                member.reload("reading the deltas failed")

    @contextlib.contextmanager
    def guard(self, member: SharedIntake, *, quietly: bool = False) -> Iterator[None]:
        """Catch a failure of work on one replica, in a loop over many, and handle it.

        `quietly`: only record the failure; otherwise the replica's lease is given up too (`stumbled`).
        """
        try:
            yield
        except Exception as error:
            if quietly:
                self.background.failed(PART, error, member.replica)
            else:
                self.stumbled(member, error)

    async def _give_back(self, group: list[SharedIntake]) -> None:
        client = await self.ways.to(group[0].keys.lease)
        await LEAVE(client, [one.keys.lease for one in group], [self.token])

    def look_soon(self) -> None:
        self._look.set()

    def wish(self, member: SharedIntake, what: bytes) -> None:
        """Ask the replica's leader for something: RESYNC (read its events anew) or REWRITE (write its data anew)."""
        self.beside(self._wish(member.keys, what))

    async def _wish(self, keys: Keys, what: bytes) -> None:
        await (await self.ways.to(keys.wish)).set(keys.wish, what, px=10_000)

    def failed(self, error: BaseException) -> None:
        """Count a failed call to Redis."""
        self.errors += 1
        self.ways.failed()
        log.debug("redis: %s", error)

    def lag(self, at: float) -> None:
        """Note how long ago a delta, applied here now, reached Redis; `at`: when, in seconds by the server's clock."""
        self._turn_lags()
        if math.isfinite(at):
            self._lags[0] = max(self._lags[0], self.now() + self._clock - at)

    def _turn_lags(self) -> None:
        if self.now() >= self._lags_until:
            self._lags, self._lags_until = [0.0, self._lags[0]], self.now() + 5

    async def read_snapshot(self, keys: Keys) -> list[bytes]:
        """Return the pieces of a replica's snapshot, [] if there is none. Raises Damaged for a malformed piece."""
        pieces: list[bytes] = []
        more = True
        while more:
            more, found = await self._read(keys.snapshot, "list", len(pieces), PIECE)
            pieces += found
            if more and any(len(piece) < PIECE for piece in pieces[1:]):
                raise Damaged("a piece of it is shorter than gateways write")
        return pieces

    async def read_deltas(self, keys: Keys, after: int) -> list[tuple[int, Delta]]:
        """Return a replica's deltas after number `after`, with their numbers. Raises Damaged for a malformed delta."""
        deltas: list[tuple[int, Delta]] = []
        more, begin = True, f"{after + 1}-0"
        while more:
            more, found = await self._read(keys.deltas, "stream", begin, LONGEST_DELTA)
            deltas += [decode_entry(id, dict(zip(fields[::2], fields[1::2], strict=True))) for id, fields in found]
            begin = f"({found[-1][0].decode()}" if found else begin
        return deltas

    async def _read(self, key: str, kind: str, begin: int | str, longest: int) -> tuple[bool, list[Any]]:
        """Return a part of the list or stream at a key, and before it whether there is more after that part.

        `kind`: "list" or "stream". `begin`: the index or entry id to start at. `longest`: the most bytes of a member.
        """
        found = await READ(await self.ways.to(key), [key], [kind, begin, longest, MOST_READ_BYTES, MOST_READ])
        if isinstance(found, int):
            raise Damaged(f"a member of {found} bytes, where gateways write {longest} at most")
        try:
            more, members = found
            if kind == "list":
                sound = all(type(piece) is bytes for piece in members)
            else:
                sound = all({*map(type, (id, *fields))} == {bytes} for id, fields in members)
        except NONSENSE as error:
            raise strange("read.lua", error) from error
        if not sound or (more and not members):
            raise strange("read.lua")
        return bool(more), members

    # --- leases

    async def _tend(self) -> None:
        while True:
            groups = [
                group[at : at + MOST_LOOKS]
                for group in self.groups(self.members)
                for at in range(0, len(group), MOST_LOOKS)
            ]
            pauses = await asyncio.gather(*map(self._tend_group, groups or [[]]))
            self._forget_troubles()
            alarm = asyncio.get_running_loop().call_later(min(pauses), self.look_soon)
            await self._look.wait()
            alarm.cancel()
            self._look.clear()

    async def _tend_group(self, group: list[SharedIntake]) -> float:
        """Look at, renew and claim the leases of some replicas; return how soon to look again, in seconds.

        Redis is called even if there is no replica, as only that shows whether it can be reached.
        """
        claims = self._to_claim(group)
        keys, arguments = [], [self.token, int(LEASE_SECONDS * 1000), KEEP_SECONDS]
        for one in group:
            k = one.keys
            keys += [k.lease, k.head, k.wish, k.life, k.deltas, k.snapshot]
            arguments += [self._asks(one, claims), k.incarnation, k.replica]
        # Deltas known to be in Redis before this call must be counted in its answer.
        journals = [
            None if one.journal is None or one.journal.whole or one in self._writing.snapshots else one.journal
            for one in group
        ]
        written = [journal.n if journal else 0 for journal in journals]
        read = [one.n for one in group]
        try:
            sent = self.now()
            time, states = _looks(
                await TEND(await self.ways.to(keys[0] if keys else self.deployment), keys, arguments), len(group)
            )
        except FAILURES as error:
            self.failed(error)
            self._unreachable(group, error)
            return LOOK_SECONDS
        self._clock = time - (sent + self.now()) / 2
        self._heard(group, states)
        for one, journal, n, before, (state, head, there, wished, life) in zip(
            group, journals, written, read, states, strict=True
        ):
            if one not in self.members:
                if state == "ours":  # claimed while the member was being removed
                    self.beside(self._give_back([one]))
                continue
            with self.guard(one):
                if state == "ours" and wished == REWRITE and one.journal is not None:
                    log.warning(
                        "replica %s: another gateway finds what is written damaged: it is written anew",
                        one.replica,
                    )
                    one.journal.start_over()
                if journal is not None and journal is one.journal and (head < n or not there):
                    log.warning("replica %s: redis has lost what was written: it is written anew", one.replica)
                    journal.start_over()
                self._judge(one, state, head, before, wished == RESYNC, life)
        return SETTLE_SECONDS if any(state == "free" for state, *_ in states) else LOOK_SECONDS

    def _asks(self, one: SharedIntake, claims: set[SharedIntake]) -> str:
        """Return what `tend.lua` shall do about this replica's lease: look, claim it if free, or insist.

        Insist means to claim it although Redis names a newer incarnation. If no gateway leads that incarnation, its
        name is a mistake, or the engine's clock was set back when it restarted.
        """
        if one.unled_at is not None and self.now() - one.unled_at > UNLED_SECONDS:
            return "insist"
        return "claim" if one in claims else "look"

    def _to_claim(self, group: list[SharedIntake]) -> set[SharedIntake]:
        """Return the replicas whose leases to claim if free: those that this gateway leads, and some of the others."""
        others = [one for one in group if one.journal is None and self.now() >= one.claim_at and not one.unreachable]
        some = random.sample(others, min(len(others), max(4, len(others) // 4)))
        return {one for one in group if one.journal is not None} | set(some)

    def _judge(self, one: SharedIntake, state: str, head: int, before: int, wished: bool, life: str) -> None:
        """Take the role that the state of a replica's lease implies.

        `state`, `head`, `wished`, `life`: the answer of `tend.lua`: the lease's state, the number of the last delta,
        whether a gateway wants the events read anew, the newest incarnation. `before`: the number of the last delta
        that this gateway had applied before the call.
        """
        one.head = head
        one.unled_at = (one.unled_at or self.now()) if state == "unled" else None
        if state in ("ours", "held"):
            one.led_at = self.now()
        if state == "ours" and one.journal is None and self.now() < one.claim_at:
            self.beside(self._give_back([one]))
        elif state == "ours" and one.stuck_at is not None and self.now() - one.stuck_at > LEASE_SECONDS:
            self._give_up(one)
        elif state == "ours":
            if one.role != "writer" or one.journal is None:
                one.want("writer")
            elif one.journal.whole:
                one.journal.n = max(one.journal.n, head)
            if wished:
                log.info("replica %s: another gateway found the map wrong: events are read anew", one.replica)
                one.resync()
        elif state in ("newer", "unled"):
            if one.unnamed:
                one.rename(Keys(self.deployment, one.replica, life))
                self.look_soon()
            else:
                one.want("void")
        elif state == "held":
            one.lost()
            self._mirror(one, head, before)
        elif self.now() - one.led_at > LEASE_SECONDS:
            one.lost()
            one.want("alone")

    def _give_up(self, one: SharedIntake) -> None:
        """Give up the lease of a replica whose deltas Redis refuses; every gateway then follows its events itself."""
        log.warning("replica %s: redis takes no more of it: every gateway follows its events itself", one.replica)
        one.claim_at, one.stuck_at = self.now() + 3 * LEASE_SECONDS, None
        self.beside(self._give_back([one]))
        one.lost()
        one.want("alone")

    def _mirror(self, one: SharedIntake, head: int, before: int) -> None:
        if self.now() < one.mirror_at:
            return
        one.behind = one.behind + 1 if one.mirroring and head > one.n == one.looked_n else 0
        one.looked_n = one.n
        if one.mirroring and head < before:
            one.reload("it is shorter than what was read of it")
        elif one.behind > 2:
            one.behind = 0
            one.reload("news of it do not come")
        else:
            one.want("mirror")

    def _heard(self, group: list[SharedIntake], states: list[_Look]) -> None:
        lane = self._lane_of(group)
        self._reached = True
        refused = next((told for state, *_, told in states if state == "refused"), None)
        if refused is not None:
            self.in_trouble(LEASES, lane, Trouble(in_words(refused), True))
        elif not states or any(
            state != "free" for state, *_ in states
        ):  # a free lease that was not claimed shows nothing about writes
            self.works(LEASES, lane)

    def _unreachable(self, group: list[SharedIntake], error: BaseException) -> None:
        self.in_trouble(LEASES, self._lane_of(group), Trouble.of(error))
        for one in group:
            one.wrote(None)
            waited = self.now() - one.led_at > LEASE_SECONDS
            if one.role == "joining" or (one.role == "mirror" and waited):
                one.want("alone")

    def in_trouble(self, what: str, lane: int, trouble: Trouble) -> None:
        """Note that a task (LEASES, READS or WRITES) fails in a lane of Redis keys; the first trouble is logged."""
        self._reached |= trouble.answered
        if not self._troubles:
            log.warning("redis %s: %s%s: every gateway goes on with what it knows: %s",
                        self.place, what, f" of lane {lane}" if self.ways.many else "", trouble.why)  # fmt: skip
        self._troubles[what, lane] = trouble

    def works(self, what: str, lane: int) -> None:
        """Note that a task (LEASES, READS or WRITES) works in a lane of Redis keys."""
        if self._troubles.pop((what, lane), None) is not None and not self._troubles:
            log.info("redis %s is of use again", self.place)

    def _forget_troubles(self) -> None:
        """Forget troubles with tasks that this gateway no longer has, as it would never notice that they work again.

        After a refused write, the lease is not claimed for a while; until then the trouble is kept.
        """
        for what, lane in list(self._troubles):
            members = [one for one in self.members if self.lane(one) == lane]
            if what == WRITES:
                has_to = any(one.journal is not None or self.now() < one.claim_at for one in members)
            elif what == READS:
                has_to = any(one.role == "mirror" for one in members)
            else:
                has_to = bool(members) or not self.members
            if not has_to:
                self.works(what, lane)

    # --- reading

    async def _follow(self, lane: int) -> None:
        while True:
            heed_cancellation()
            members = [one for one in self.members if one.mirroring and self.lane(one) == lane]
            if not members:
                await asyncio.sleep(5 * BATCH_SECONDS)
                continue
            streams = {one.keys.deltas: one for one in members}
            try:
                client = await self.ways.to(next(iter(streams)))
                found, no_streams = await xread(
                    client, {name: f"{one.n}-0" for name, one in streams.items()}, 500, POLL_MILLISECONDS
                )
            except FAILURES as error:
                self.failed(error)
                self.in_trouble(READS, lane, Trouble.of(error))
                await asyncio.sleep(LOOK_SECONDS / 4)
                continue
            self.works(READS, lane)
            for one in map(streams.__getitem__, no_streams):
                if one in self.members:
                    one.reload("something else than a stream lies where its deltas were")
            for name, entries in found:
                one = streams[name.decode()]
                if one in self.members:  # it may have been removed meanwhile
                    with self.guard(one):
                        one.take(starmap(decode_entry, entries))
                await asyncio.sleep(0)
            # The server's cost of a read is mostly that of streams without news: 0.3 us each.
            await asyncio.sleep(max(BATCH_SECONDS / 4, len(streams) * STREAM_SECONDS))

    # --- the rest

    def groups(self, members: list[SharedIntake]) -> list[list[SharedIntake]]:
        """Return the members in groups that one command can cover: on a Cluster one group for each lane."""
        if not self.ways.many:
            return [list(members)] if members else []
        lanes: dict[int, list[SharedIntake]] = {}
        for one in members:
            lanes.setdefault(self.lane(one), []).append(one)
        return list(lanes.values())

    def lane(self, member: SharedIntake) -> int:
        return member.keys.lane if self.ways.many else 0

    def _lane_of(self, group: list[SharedIntake]) -> int:
        return self.lane(group[0]) if group else 0

    def _spawn(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        kind = f"shared map: {name.partition(' ')[0]}"  # all lanes share one kind
        self._tasks[name] = self.background.spawn(kind, work, on_failure=on_failure)

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; nobody waits for it, and failures are only counted."""
        task = asyncio.create_task(self._quietly(work))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FAILURES as error:
            self.failed(error)
        except Exception as error:
            self.background.failed("shared map: messages", error)
