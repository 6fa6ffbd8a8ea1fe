"""What the parts of one gateway's shared map have in common: Redis clients, a record of failures, and reads from Redis.

No request of a client waits for anything here: look-ups use this process's own map, whatever Redis does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from cachemap.background import Background, Failures
from cachemap.cluster.codec import LONGEST_DELTA, PIECE, Damaged, Delta, decode_entry
from cachemap.cluster.connect import FAILURES, NONSENSE, RedisClients, RedisUrl, Script, Trouble, strange
from cachemap.cluster.keys import Keys

log = logging.getLogger("hitherto.share")

PART = "shared map: one replica's part"  # a kind of background work, under which its failures are counted
# The tasks of a gateway in Redis, each named by the message that it fails (`Link.in_trouble`).
LEASES, READS = "leases cannot be looked at", "deltas cannot be read"
WRITES = "deltas and snapshots cannot be written"
# The bytes and members of a list or stream after which one script stops reading.
MOST_READ_BYTES, MOST_READ = 1 << 20, 500


def script(name: str) -> Script:
    return Script(Path(__file__).with_name(f"{name}.lua").read_text())


LEAVE, READ = script("leave"), script("read")


class Link:
    """One gateway's link to Redis for the cache map that gateways share.

    `place`: the address of Redis. `deployment`: a name that all gateways which share a map have in common.
    `token`: this gateway's random name, which marks the leases that it holds. `members`: the `SharedIntake` of each
    replica. `lease_seconds`: how long a lease (the right to write a replica's data) lasts; `look_seconds`: how often
    leases are looked at and renewed.
    """

    lease_seconds, look_seconds = 3.0, 1.0

    def __init__(self, place: RedisUrl, deployment: str, background: Background | None = None):
        self.background = background or Background()
        self.background.failures.setdefault(PART, Failures())
        self.place, self.deployment = place, deployment
        self.token = secrets.token_hex(8)
        self.clients = RedisClients(place)
        self.members: list[Any] = []
        self._aside: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._clock = 0.0  # the Redis server's time minus this process's time
        self._lags = [0.0, 0.0]  # the longest delays of deltas in the current 5 s and in the 5 s before
        self._lags_until = 0.0
        self._troubles: dict[tuple[str, int], Trouble] = {}  # by task and lane
        self._reached = False
        self.errors = self.takeovers = self.reloads = 0

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def look_soon(self) -> None:
        """Have the loop that looks at the leases run now, instead of after up to `look_seconds`."""
        self._look.set()

    def lane(self, member: Any) -> int:
        return member.keys.lane if self.clients.many else 0

    def groups(self, members: list[Any]) -> list[list[Any]]:
        """Return the members (intakes of replicas) in groups whose Redis keys one command can cover.

        On a Redis Cluster there is a group for each lane (part of the key space), otherwise a single group.
        """
        lanes: dict[int, list[Any]] = {}
        for one in members:
            lanes.setdefault(self.lane(one), []).append(one)
        return list(lanes.values())

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task for which nobody waits; if it fails, the failure is only counted."""

        async def quietly() -> None:
            try:
                await work
            except FAILURES as error:
                self.failed(error)
            except Exception as error:
                self.background.failed("shared map: messages", error)

        task = asyncio.create_task(quietly())
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    def give_back(self, group: list[Any]) -> None:
        """Release this gateway's leases of some replicas, so that other gateways may take them.

        This happens in the background. `group`: a group from `groups`, so that one Redis command covers it.
        """

        async def leave() -> None:
            client = await self.clients.to(group[0].keys.lease)
            await LEAVE(client, [one.keys.lease for one in group], [self.token])

        self.beside(leave())

    def request(self, keys: Keys, what: bytes) -> None:
        """Ask the gateway that leads a replica, through Redis and in the background, to do something.

        `what`: RESYNC (read the engine's events again) or REWRITE (write the replica's data in Redis again).
        """

        async def ask() -> None:
            await (await self.clients.to(keys.request)).set(keys.request, what, px=10_000)

        self.beside(ask())

    # --- what fails

    def failed(self, error: BaseException) -> None:
        """Count and log a failed call to Redis."""
        self.errors += 1
        self.clients.failed()
        log.debug("redis: %s", error)

    def in_trouble(self, what: str, lane: int, trouble: Trouble) -> None:
        """Note that one of this gateway's tasks in Redis fails for one lane (part of the key space).

        `what`: the task: LEASES, READS or WRITES. `trouble`: the reason. It is logged only if no other task is failing
        already.
        """
        self._reached |= trouble.answered
        if not self._troubles:
            log.warning("redis %s: %s%s: every gateway goes on with what it knows: %s",
                        self.place, what, f" of lane {lane}" if self.clients.many else "", trouble.why)  # fmt: skip
        self._troubles[what, lane] = trouble

    def works(self, what: str, lane: int) -> None:
        """Note that one of this gateway's tasks in Redis succeeded for one lane (part of the key space).

        `what`: the task: LEASES, READS or WRITES. If it had failed before, and no task fails any more in any lane, the
        recovery is logged.
        """
        if self._troubles.pop((what, lane), None) is not None and not self._troubles:
            log.info("redis %s is of use again", self.place)

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
        """A message for operators: which tasks Redis does not let this gateway do, and why; "" if all is well."""
        whats: dict[str, dict[str, None]] = {}  # tasks by reason
        for (what, _), one in self._troubles.items():
            whats.setdefault(one.why, {})[what] = None
        told = "; ".join(f"{' and '.join(what)}: {why}" for why, what in whats.items())
        return told or ("" if self._reached else "not connected yet")

    # --- how far behind

    def lag(self, at: float) -> None:
        """Note the delay of a delta that was just applied here.

        `at`: when the delta reached Redis, in seconds by the server's clock.
        """
        self._turn_lags()
        if math.isfinite(at):
            self._lags[0] = max(self._lags[0], self.now() + self._clock - at)

    @property
    def lag_seconds(self) -> float:
        """The longest time between a delta's arrival in Redis and its application here, in the last 5 to 10 s."""
        self._turn_lags()
        return max(self._lags)

    def _turn_lags(self) -> None:
        if self.now() >= self._lags_until:
            self._lags, self._lags_until = [0.0, self._lags[0]], self.now() + 5

    # --- reads

    async def read_snapshot(self, keys: Keys) -> list[bytes]:
        """Return the pieces of a replica's snapshot in Redis, [] if there is none. Raises Damaged for a short piece."""
        pieces: list[bytes] = []
        more = True
        while more:
            more, found = await self._read(keys.snapshot, "list", len(pieces), PIECE)
            pieces += found
            # The last one of these may be the snapshot's last, although the script does not know that nothing follows.
            if more and any(len(piece) < PIECE for piece in pieces[1:-1]):
                raise Damaged("a piece of it is shorter than gateways write")
        return pieces

    async def read_deltas(self, keys: Keys, after: int) -> list[tuple[int, Delta]]:
        """Return a replica's deltas in Redis after number `after`, each with its number.

        Raises Damaged for a malformed delta.
        """
        deltas: list[tuple[int, Delta]] = []
        more, begin = True, f"{after + 1}-0"
        while more:
            more, found = await self._read(keys.deltas, "stream", begin, LONGEST_DELTA)
            deltas += [decode_entry(id, dict(zip(fields[::2], fields[1::2], strict=True))) for id, fields in found]
            begin = f"({found[-1][0].decode()}" if found else begin
        return deltas

    async def _read(self, key: str, kind: str, begin: int | str, longest: int) -> tuple[bool, list[Any]]:
        """Return a part of the list or stream at a key in Redis, and before it whether more follows that part.

        Raises Damaged if a member is longer than gateways write; it is not read.

        `kind`: "list" or "stream". `begin`: the index or entry id to start at. `longest`: the most bytes of a member.
        """
        found = await READ(await self.clients.to(key), [key], [kind, begin, longest, MOST_READ_BYTES, MOST_READ])
        if isinstance(found, int):
            raise Damaged(f"a member of {found} bytes, where gateways write {longest} at most")
        try:
            more, members = found
            if kind == "list":
                sound = all(type(piece) is bytes for piece in members)
            else:
                sound = all({*map(type, (id, *fields))} == {bytes} and len(fields) % 2 == 0 for id, fields in members)
        except NONSENSE as error:
            raise strange("read.lua", error) from error
        if not sound or (more and not members):
            raise strange("read.lua")
        return bool(more), members
