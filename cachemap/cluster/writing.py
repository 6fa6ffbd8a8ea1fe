"""Writes to Redis for the replicas whose leases this gateway holds.

Changes are written as deltas; now and then a snapshot of all that a replica holds takes the place of its deltas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from cachemap.cluster.codec import RELOAD, Snapshot, encode_delta, encode_snapshot
from cachemap.cluster.connect import FAILURES, REFUSED, Script, Trouble, Ways, in_words
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.journal import Journal
from cachemap.cluster.keys import KEEP_SECONDS
from cachemap.cluster.replies import strange

HERE = Path(__file__).parent
PUBLISH, COMMIT = Script((HERE / "publish.lua").read_text()), Script((HERE / "commit.lua").read_text())

BATCH_SECONDS = 0.02  # the changes of one or two engine steps are sent together
PAUSE_SECONDS = 0.25  # after a snapshot that could not be written
MOST_SNAPSHOTS = 4  # snapshots written at once: when a Redis comes back empty, all replicas' snapshots are due
WRITES = "deltas and snapshots cannot be written"  # a trouble, as `SharedMap.in_trouble` reports it
MOST_BYTES = 1 << 18  # bytes of deltas in one call, which blocks a server for less than a millisecond


class Writers(Protocol):
    """The part of SharedMap that Writing uses: the replicas' intakes, and the records of failures and troubles."""

    members: list[SharedIntake]
    token: str
    ways: Ways

    def guard(self, member: SharedIntake) -> AbstractContextManager[None]: ...
    def beside(self, work: Coroutine[Any, Any, None]) -> None: ...
    def groups(self, members: list[SharedIntake]) -> list[list[SharedIntake]]: ...
    def lane(self, member: SharedIntake) -> int: ...
    def look_soon(self) -> None: ...
    def in_trouble(self, what: str, lane: int, trouble: Trouble) -> None: ...
    def works(self, what: str, lane: int) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def stumbled(self, member: SharedIntake, error: BaseException) -> None: ...


class Writing:
    """A loop that writes deltas for all replicas whose leases this gateway holds, with snapshots in tasks beside it."""

    def __init__(self, shared: Writers):
        self._shared = shared
        self.snapshots: set[SharedIntake] = set()  # the intakes whose snapshot is being written
        self.written = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(BATCH_SECONDS)
            # An intake in the middle of an event batch is left out: the position written with a delta ends a batch.
            writers = [
                one
                for one in self._shared.members
                if one.journal is not None and one not in self.snapshots and not one.engine.applying
            ]
            for one in writers:
                with self._shared.guard(one):
                    journal = one.journal
                    if journal is not None and one.tells_other_blocks:
                        journal.start_over()
                    if journal is not None and len(self.snapshots) < MOST_SNAPSHOTS and journal.due(one.blocks):
                        self.snapshots.add(one)
                        self._shared.beside(self._write_snapshot(one, journal))
            groups = self._shared.groups(
                [one for one in writers if one not in self.snapshots and one.journal is not None]
            )
            await asyncio.gather(*map(self._publish_group, groups))

    async def _publish_group(self, group: list[SharedIntake]) -> None:
        batch: list[tuple[SharedIntake, Journal, bytes]] = []
        size = 0
        for one in group:
            with self._shared.guard(one):
                journal = one.journal  # None if the lease went while an earlier batch was sent
                if journal is not None and (delta := journal.seal(one.position)) is not None:
                    batch.append((one, journal, delta))
                    size += len(delta)
            if size > MOST_BYTES:
                await self._send(batch)
                batch, size = [], 0
        if batch:
            await self._send(batch)

    async def _send(self, batch: list[tuple[SharedIntake, Journal, bytes]]) -> None:
        keys: list[str] = []
        arguments: list[Any] = [self._shared.token]
        for one, journal, delta in batch:
            keys += [one.keys.lease, one.keys.head, one.keys.deltas]
            arguments += [journal.n + 1, delta]
        try:
            results = await PUBLISH(await self._shared.ways.to(keys[0]), keys, arguments)
            if not isinstance(results, list) or [*map(type, results)] != [bytes] * len(batch):
                raise strange("publish.lua")
        except FAILURES as error:
            self._failed([one for one, *_ in batch], error)
            results = [b"unknown"] * len(batch)  # the deltas may have been written or not
        for (one, journal, delta), result in zip(batch, results, strict=True):
            if result != b"unknown":
                self._answered(one, result)
            if result.startswith(REFUSED):
                self._shared.in_trouble(
                    WRITES, self._shared.lane(one), Trouble(in_words(result.decode(errors="replace")), True)
                )
            if result == b"ok":
                journal.sent(len(delta))
            else:
                journal.start_over()
        if any(result == b"lost" for result in results):
            self._shared.look_soon()

    async def _write_snapshot(self, one: SharedIntake, journal: Journal) -> None:
        """Write a snapshot, which replaces most deltas in Redis.

        It replaces all of them where this gateway cannot add to what Redis has.
        """
        try:
            if one.journal is journal and not one.engine.applying:  # the lease may have gone before this began
                await self._write(one, journal)
            if one.journal is journal and journal.whole:
                self._shared.look_soon()  # to learn the number to start from
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self.snapshots.discard(one)

    async def _write(self, one: SharedIntake, journal: Journal) -> None:
        try:
            result = await (self._write_anew(one, journal) if journal.whole else self._write_on(one, journal))
            self.written += result == b"ok"
            self._answered(one, result)
            if result == b"lost":
                self._shared.look_soon()
            elif result == b"behind":
                journal.start_over()
        except FAILURES as error:
            self._failed([one], error)
            journal.start_over()
        except Exception as error:
            self._shared.stumbled(one, error)

    def _answered(self, one: SharedIntake, result: bytes) -> None:
        one.wrote(result == b"ok")
        if result == b"ok":
            self._shared.works(WRITES, self._shared.lane(one))

    def _failed(self, group: list[SharedIntake], error: BaseException) -> None:
        self._shared.failed(error)
        trouble = Trouble.of(error)
        if trouble.answered:
            self._shared.in_trouble(WRITES, self._shared.lane(group[0]), trouble)
        for one in group:
            one.wrote(False if trouble.answered else None)

    async def _write_on(self, one: SharedIntake, journal: Journal) -> bytes:
        delta = journal.seal(one.position)
        # Taken now, as the replica may have been removed when the answers come.
        snapshot, blocks = one.snapshot(journal), one.blocks
        if delta is not None:
            await self._send([(one, journal, delta)])
            if journal.whole:
                return b"lost"
            snapshot = snapshot._replace(n=journal.n)
        first = journal.first_to_keep(blocks)
        result = await self._commit(one, snapshot, "on", first)
        if result == b"ok":
            journal.trimmed(first)
        return result

    async def _write_anew(self, one: SharedIntake, journal: Journal) -> bytes:
        snapshot = one.snapshot(journal)._replace(n=journal.n + 1)
        journal.whole = False  # changes from here on are deltas after this snapshot, unless too many come meanwhile
        result = await self._commit(one, snapshot, "anew", encode_delta(journal.term, RELOAD, snapshot.position, []))
        if result == b"ok":
            journal.anew(snapshot.n)
        else:
            journal.start_over()
        return result

    async def _commit(self, one: SharedIntake, snapshot: Snapshot, way: str, detail: int | bytes) -> bytes:
        keys = one.keys
        new = f"{keys.snapshot}:{self._shared.token}"
        pieces = await asyncio.to_thread(encode_snapshot, one.identity, snapshot)
        client = await self._shared.ways.to(new)
        await client.delete(new)
        for at in range(0, len(pieces), 32):
            await client.rpush(new, *pieces[at : at + 32])
        await client.expire(new, 60)
        arguments = [self._shared.token, snapshot.n, way, detail, KEEP_SECONDS]
        result = await COMMIT(client, [keys.lease, keys.head, keys.deltas, keys.snapshot, new], arguments)
        if not isinstance(result, bytes):
            raise strange("commit.lua")
        return result
