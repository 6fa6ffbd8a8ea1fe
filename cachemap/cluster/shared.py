"""The part of a gateway that shares its cache map with other gateways through Redis.

For each replica, the gateway that holds the replica's lease (the leader) reads the engine's events and writes the
changes to Redis. A gateway runs three loops, and no client's request waits for any of them: `_tend` looks at all leases
once a second, `Writing` writes this gateway's changes, and `_follow` reads the changes that other gateways wrote (on a
Redis Cluster one loop for each lane, a part of the key space).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from cachemap.background import Background
from cachemap.cluster.codec import decode_entry
from cachemap.cluster.connect import (
    FAILURES,
    NONSENSE,
    RedisUrl,
    Trouble,
    heed_cancellation,
    in_words,
    strange,
    xread,
)
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.keys import KEEP_SECONDS, RESYNC, REWRITE, Keys
from cachemap.cluster.link import LEASES, READS, WRITES, Link, script
from cachemap.cluster.writing import BATCH_SECONDS, Writing
from cachemap.map import CacheMap

log = logging.getLogger("hitherto.share")

TEND = script("tend")

SETTLE_SECONDS = 0.05  # pause between claims while leases are free, so that gateways that start together share them
POLL_MILLISECONDS = 250  # a read waits so long for new deltas; those of a newly added replica are only in the next read
STREAM_SECONDS = 5e-5  # pause between two reads, for each stream that is read
MOST_LOOKS = 128  # leases in one call, which blocks a server for about a millisecond


class _Look(NamedTuple):
    """What the script `tend.lua` reports of one replica's lease."""

    state: str  # ours, held, free, newer or refused, as explained in tend.lua
    head: int  # the number of the last delta in Redis
    there: bool  # Redis has deltas and a snapshot
    request: bytes  # what another gateway asks of the leader: RESYNC, REWRITE or nothing
    newest: str  # the newest incarnation of the engine, or the reason why Redis refuses the lease


def _looks(reply: Any, count: int) -> tuple[float, list[_Look]]:
    """Return the server's time (in seconds) and the state of each lease from a reply of tend.lua.

    `count`: how many leases the reply must have. Raises InvalidResponse if the reply is of another kind.
    """
    try:
        time, *states = reply
        looks = [
            _Look(state.decode(), int(head), bool(there), request, newest.decode(errors="replace"))
            for state, head, there, request, newest in states
        ]
        if len(looks) == count and math.isfinite(clock := float(time)):
            return clock, looks
    except NONSENSE as error:
        raise strange("tend.lua", error) from error
    raise strange("tend.lua")


class SharedMap(Link):
    """The part of a gateway that shares its cache map with other gateways through Redis.

    `start` it, make an `intake` for each replica with events, and `stop` it at the end.
    """

    members: list[SharedIntake]

    def __init__(self, place: RedisUrl, deployment: str, cache_map: CacheMap, background: Background | None = None):
        super().__init__(place, deployment, background)
        self._map = cache_map
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._writing = Writing(self)

    def start(self) -> None:
        self._spawn("leases", self._tend)
        self._spawn("publish", self._writing.run, self.abdicate)

    async def stop(self) -> None:
        """Stop all loops and give this gateway's leases back, so that other gateways take over within a second."""
        for task in self._tasks.values():
            task.cancel()
        for group in self.groups([one for one in self.members if one.journal]):
            self.give_back(group)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._aside:
            _, late = await asyncio.wait(self._aside, timeout=1)
            for task in late:
                task.cancel()
        await self.clients.aclose()

    def intake(self, slot: int, replica: str, incarnation: str, **arguments: Any) -> SharedIntake:
        """Return an intake for one replica's blocks, to use in place of an EventIntake.

        `slot`: the replica's index in the map. `replica`: its address. `incarnation`: the id of the present run of its
        engine process. `arguments`: those of EventIntake.
        """
        return SharedIntake(self, self._map, slot, replica, Keys(self.deployment, replica, incarnation), **arguments)

    @property
    def leases(self) -> int:
        return sum(one.journal is not None for one in self.members)

    @property
    def snapshots(self) -> int:
        return self._writing.written

    def abdicate(self) -> None:
        """Give up the leases of all replicas that this gateway leads, as the loop that writes their changes failed."""
        for member in self.members:
            if member.journal is not None:
                member.resign()

    def _spawn(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        kind = f"shared map: {name.partition(' ')[0]}"  # the loops of all lanes count as one kind of work
        self._tasks[name] = self.background.spawn(kind, work, on_failure=on_failure)

    # --- leases

    async def _tend(self) -> None:
        while True:
            for lane in {self.lane(one) for one in self.members}:
                if f"follow {lane}" not in self._tasks:
                    self._spawn(f"follow {lane}", partial(self._follow, lane), partial(self._reload, lane))
            groups = [
                group[at : at + MOST_LOOKS]
                for group in self.groups(self.members)
                for at in range(0, len(group), MOST_LOOKS)
            ]
            # Redis is called even if there is no replica, as only that shows whether it can be reached.
            pauses = await asyncio.gather(*map(self._tend_group, groups or [[]]))
            self._forget_troubles()
            alarm = asyncio.get_running_loop().call_later(min(pauses), self.look_soon)
            await self._look.wait()
            alarm.cancel()
            self._look.clear()

    async def _tend_group(self, group: list[SharedIntake]) -> float:
        """Look at, renew and claim the leases of some replicas, and have each replica take the role that follows.

        The holder of a replica's lease reads the engine's events and writes the changes to Redis. `group`: replicas
        whose keys one Redis command can cover. Returns how soon to look again, in seconds.
        """
        lane = self.lane(group[0]) if group else 0
        # If they are free, the leases that this gateway held so far are claimed, and some of the others.
        others = [one for one in group if one.journal is None and self.now() >= one.claim_at and not one.unreachable]
        claims = set(random.sample(others, min(len(others), max(4, len(others) // 4))))
        keys, arguments = [], [self.token, int(self.lease_seconds * 1000), KEEP_SECONDS]
        for one in group:
            k = one.keys
            keys += [k.lease, k.head, k.request, k.newest, k.deltas, k.snapshot]
            arguments += ["claim" if one in claims or one.journal is not None else "look", k.incarnation, k.replica]
        # The number of the last delta that is known to be in Redis: a lower one in the answer means that data was lost.
        journals = [
            None if one.journal is None or one.journal.whole or one in self._writing.snapshots else one.journal
            for one in group
        ]
        written = [journal.n if journal else 0 for journal in journals]
        read = [one.n for one in group]
        try:
            sent = self.now()
            client = await self.clients.to(keys[0] if keys else self.deployment)
            time, looks = _looks(await TEND(client, keys, arguments), len(group))
        except FAILURES as error:
            self.failed(error)
            self.in_trouble(LEASES, lane, Trouble.of(error))
            for one in group:
                one.wrote(None)
                waited = self.now() - one.led_at > self.lease_seconds
                if one.role == "joining" or (one.role == "follower" and waited):
                    one.want("standalone")
            return self.look_seconds
        self._clock = time - (sent + self.now()) / 2
        self._reached = True
        refused = next((look.newest for look in looks if look.state == "refused"), None)
        if refused is not None:
            self.in_trouble(LEASES, lane, Trouble(in_words(refused), True))
        elif not looks or any(look.state != "free" for look in looks):
            self.works(LEASES, lane)  # a free lease that was not claimed shows nothing about writes
        for one, journal, n, before, look in zip(group, journals, written, read, looks, strict=True):
            if one not in self.members:
                if look.state == "ours":  # claimed while the member was being removed
                    self.give_back([one])
                continue
            with one.guarded():
                if look.state == "ours" and look.request == REWRITE and one.journal is not None:
                    log.warning(
                        "replica %s: another gateway finds what is written damaged: it is written anew", one.replica
                    )
                    one.journal.start_over()
                if journal is not None and journal is one.journal and (look.head < n or not look.there):
                    log.warning("replica %s: redis has lost what was written: it is written anew", one.replica)
                    journal.start_over()
                self._judge(one, look, before)
        return SETTLE_SECONDS if any(look.state == "free" for look in looks) else self.look_seconds

    def _judge(self, one: SharedIntake, look: _Look, before: int) -> None:
        """Have a replica take the role that the state of its lease implies: leader, follower, standalone or outdated.

        `one`: the replica's intake. `look`: the state of its lease. `before`: the number of the last delta that this
        gateway had applied when it looked at the lease.
        """
        one.head = look.head
        now = self.now()
        if look.state in ("ours", "held"):
            one.led_at = now
        if look.state == "ours" and one.journal is None and now < one.claim_at:
            self.give_back([one])
        elif look.state == "ours" and one.stuck_at is not None and now - one.stuck_at > self.lease_seconds:
            log.warning("replica %s: redis takes no more of it: every gateway reads its events itself", one.replica)
            one.resign()
        elif look.state == "ours":
            if one.role != "leader" or one.journal is None:
                one.want("leader")
            elif one.journal.whole:
                one.journal.n = max(one.journal.n, look.head)
            if look.request == RESYNC:
                log.info("replica %s: another gateway found the map wrong: events are read anew", one.replica)
                one.resync()
        elif look.state == "newer" and one.unnamed:
            one.rename(Keys(self.deployment, one.replica, look.newest))
            self.look_soon()
        elif look.state == "newer":
            one.want("outdated")
        elif look.state == "held":
            one.end_journal()
            if now >= one.load_at:
                self._keep_up(one, look.head, before)
        elif now - one.led_at > self.lease_seconds:
            one.end_journal()
            one.want("standalone")

    @staticmethod
    def _keep_up(one: SharedIntake, head: int, before: int) -> None:
        """Have a replica's blocks follow the deltas (changes) that the leading gateway writes to Redis.

        The blocks are loaded again if Redis has fewer deltas than were applied here, or if new deltas in Redis were not
        applied here for several looks at the lease. `head`: the number of the last delta in Redis. `before`: the number
        of the last one applied here before `head` was read.
        """
        one.behind = one.behind + 1 if one.in_step and head > one.n == one.looked_n else 0
        one.looked_n = one.n
        if one.in_step and head < before:
            one.reload("it is shorter than what was read of it")
        elif one.behind > 2:
            one.behind = 0
            one.reload("news of it do not come")
        else:
            one.want("follower")

    def _forget_troubles(self) -> None:
        """Forget failures of those Redis tasks that this gateway has nothing to do for now.

        It would not notice when such a task works again. A refused write is remembered until the replica's lease may be
        claimed again.
        """
        for what, lane in list(self._troubles):
            members = [one for one in self.members if self.lane(one) == lane]
            has_to = {
                WRITES: any(one.journal is not None or self.now() < one.claim_at for one in members),
                READS: any(one.role == "follower" for one in members),
                LEASES: bool(members) or not self.members,
            }
            if not has_to[what]:
                self.works(what, lane)

    # --- reading

    async def _follow(self, lane: int) -> None:
        while True:
            heed_cancellation()
            members = [one for one in self.members if one.in_step and self.lane(one) == lane]
            if not members:
                await asyncio.sleep(5 * BATCH_SECONDS)
                continue
            streams = {one.keys.deltas: one for one in members}
            after = {name: f"{one.n}-0" for name, one in streams.items()}
            try:
                client = await self.clients.to(members[0].keys.deltas)
                found = await xread(client, after, 500, POLL_MILLISECONDS)
            except FAILURES as error:
                self.failed(error)
                self.in_trouble(READS, lane, trouble := Trouble.of(error))
                if trouble.answered:
                    self.look_soon()  # tend.lua removes a key that should be a stream and is not
                await asyncio.sleep(self.look_seconds / 4)
                continue
            self.works(READS, lane)
            for key, entries in found:
                one = streams[key]
                if one in self.members:  # it may have been removed meanwhile
                    with one.guarded():
                        one.take(starmap(decode_entry, entries))
                await asyncio.sleep(0)
            # Most of a read's cost at the server is that of the streams without new deltas: 0.3 us each.
            await asyncio.sleep(max(BATCH_SECONDS / 4, len(streams) * STREAM_SECONDS))

    def _reload(self, lane: int) -> None:
        """Have the followed replicas of one lane (part of the Redis keys) load their blocks again.

        Called when the loop that reads deltas failed, as it may have read some that were not applied.
        """
        for member in self.members:
            if self.lane(member) == lane:
                member.reload("reading the deltas failed")
