"""Writes to Redis for the replicas that this gateway leads.

Changes are written as deltas; now and then a snapshot of all that a replica holds takes the place of its deltas.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cachemap.cluster.codec import RELOAD, Snapshot, encode_delta, encode_snapshot
from cachemap.cluster.connect import FAILURES, REFUSED, Trouble, in_words, strange
from cachemap.cluster.intake import SharedIntake
from cachemap.cluster.journal import Journal
from cachemap.cluster.keys import KEEP_SECONDS
from cachemap.cluster.link import WRITES, Link, script

PUBLISH, COMMIT = script("publish"), script("commit")

BATCH_SECONDS = 0.02  # the changes of one or two engine steps are sent together
PAUSE_SECONDS = 0.25  # the pause after a snapshot that could not be written
MOST_SNAPSHOTS = 4  # snapshots written at once: when a Redis comes back empty, all replicas' snapshots are due
MOST_BYTES = 1 << 18  # bytes of deltas in one call, which blocks a server for less than a millisecond

_Batch = list[tuple[SharedIntake, Journal, bytes]]


class Writing:
    """A loop that writes the changes of all replicas that this gateway leads to Redis, as deltas.

    Snapshots, which take longer, are written in tasks of their own.
    """

    def __init__(self, link: Link):
        self._link = link
        self.snapshots: set[SharedIntake] = set()  # the intakes whose snapshot is being written
        self.written = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(BATCH_SECONDS)
            ready: list[SharedIntake] = []
            for one in self._link.members:
                # A replica whose event batch is only partly applied is left out: a delta's position is a whole batch.
                if one.journal is None or one in self.snapshots or one.engine.applying:
                    continue
                with one.guarded():
                    if one.tells_other_blocks:
                        one.journal.start_over()
                    if len(self.snapshots) < MOST_SNAPSHOTS and one.journal.due(one.blocks):
                        self.snapshots.add(one)
                        self._link.beside(self._write_snapshot(one, one.journal))
                    else:
                        ready.append(one)
            await asyncio.gather(*map(self._publish, self._link.groups(ready)))

    async def _publish(self, group: list[SharedIntake]) -> None:
        batch: _Batch = []
        size = 0
        for one in group:
            with one.guarded():
                journal = one.journal  # None if the lease was lost while an earlier batch was sent
                if journal is not None and (delta := journal.seal(one.position)) is not None:
                    batch.append((one, journal, delta))
                    size += len(delta)
            if size > MOST_BYTES:
                await self._send(batch)
                batch, size = [], 0
        if batch:
            await self._send(batch)

    async def _send(self, batch: _Batch) -> None:
        keys: list[str] = []
        arguments: list[Any] = [self._link.token]
        for one, journal, delta in batch:
            keys += [one.keys.lease, one.keys.head, one.keys.deltas]
            arguments += [journal.n + 1, delta]
        try:
            results = await PUBLISH(await self._link.clients.to(keys[0]), keys, arguments)
            if not isinstance(results, list) or [*map(type, results)] != [bytes] * len(batch):
                raise strange("publish.lua")
        except FAILURES as error:  # the deltas may have been written or not
            self._failed([one for one, *_ in batch], error)
            for _, journal, _ in batch:
                journal.start_over()
            return
        for (one, journal, delta), result in zip(batch, results, strict=True):
            self._answered(one, result)
            if result.startswith(REFUSED):
                trouble = Trouble(in_words(result.decode(errors="replace")), True)
                self._link.in_trouble(WRITES, self._link.lane(one), trouble)
            if result == b"ok":
                journal.sent(len(delta))
            else:
                journal.start_over()

    async def _write_snapshot(self, one: SharedIntake, journal: Journal) -> None:
        """Write a snapshot of one replica's blocks to Redis, and remove the deltas there that it contains.

        If this gateway's changes cannot continue the deltas in Redis (`journal.whole`), the snapshot replaces all of
        them.
        """
        try:
            if one.journal is journal and not one.engine.applying:  # the lease may have been lost before this began
                with one.guarded():
                    try:
                        await (self._write_anew(one, journal) if journal.whole else self._write_on(one, journal))
                    except FAILURES as error:
                        self._failed([one], error)
                        journal.start_over()
            if one.journal is journal and journal.whole:
                self._link.look_soon()  # to learn the number of the last delta, from which to go on
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self.snapshots.discard(one)

    async def _write_on(self, one: SharedIntake, journal: Journal) -> None:
        delta = journal.seal(one.position)
        # The snapshot is taken now, as the replica may have been removed when Redis's answers come.
        snapshot, blocks = one.snapshot(journal), one.blocks
        if delta is not None:
            await self._send([(one, journal, delta)])
            if journal.whole:
                return
        first = journal.first_to_keep(blocks)
        result = await self._commit(one, snapshot._replace(n=journal.n), "on", first)
        if result == b"ok":
            journal.trimmed(first)
        elif result == b"behind":
            journal.start_over()

    async def _write_anew(self, one: SharedIntake, journal: Journal) -> None:
        snapshot = one.snapshot(journal)._replace(n=journal.n + 1)
        journal.whole = False  # changes from now on become deltas after this snapshot, unless too many come meanwhile
        reload = encode_delta(journal.term, RELOAD, snapshot.position, [])
        if await self._commit(one, snapshot, "anew", reload) == b"ok":
            journal.anew(snapshot.n)
        else:
            journal.start_over()

    async def _commit(self, one: SharedIntake, snapshot: Snapshot, how: str, detail: int | bytes) -> bytes:
        """Replace a replica's snapshot in Redis, if this gateway still holds the lease; return commit.lua's answer.

        `one`: the replica's intake. `snapshot`: the new snapshot, which has the number of the last delta that it
        contains.
        `how` "on": the deltas in Redis continue. `detail` is the number (int) of the oldest delta to keep.
        `how` "anew": all deltas are removed. `detail` is the one delta (bytes) to write in their place, which tells the
            other gateways to load the snapshot.

        The answer is b"ok", or b"lost" if this gateway no longer holds the lease. It is b"behind" if the number of the
        last delta in Redis does not fit: below the snapshot's number with "on", or not below it with "anew".
        """
        keys = one.keys
        new = f"{keys.snapshot}:{self._link.token}"
        pieces = await asyncio.to_thread(encode_snapshot, one.identity, snapshot)
        client = await self._link.clients.to(new)
        await client.delete(new)
        for at in range(0, len(pieces), 32):
            await client.rpush(new, *pieces[at : at + 32])
        await client.expire(new, 60)
        arguments = [self._link.token, snapshot.n, how, detail, KEEP_SECONDS]
        result = await COMMIT(client, [keys.lease, keys.head, keys.deltas, keys.snapshot, new], arguments)
        if not isinstance(result, bytes):
            raise strange("commit.lua")
        self.written += result == b"ok"
        self._answered(one, result)
        return result

    def _answered(self, one: SharedIntake, result: bytes) -> None:
        one.wrote(result == b"ok")
        if result == b"ok":
            self._link.works(WRITES, self._link.lane(one))
        elif result == b"lost":
            self._link.look_soon()

    def _failed(self, group: list[SharedIntake], error: BaseException) -> None:
        self._link.failed(error)
        trouble = Trouble.of(error)
        if trouble.answered:
            self._link.in_trouble(WRITES, self._link.lane(group[0]), trouble)
        for one in group:
            one.wrote(False if trouble.answered else None)
