"""Several gateways' maps on one Redis and replicas that speak as vLLM does, for tests of what they share."""

from __future__ import annotations

import asyncio
import contextlib
from array import array

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.cluster import SharedMap, parse

from ..publisher import BLOCK, Publisher, decode, stored

MIB = 1 << 20


async def until(true, seconds=15.0, what=""):
    end = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < end, (
            f"did not happen in {seconds} s: {what() if callable(what) else what}"
        )
        await asyncio.sleep(0.01)


def prompt(name: int, blocks: int) -> tuple[list[int], list[int]]:
    """Tokens and hashes of a prompt that shares nothing with others."""
    tokens = [name * 10_000 + i for i in range(blocks * BLOCK)]
    return tokens, hash_blocks(array("I", tokens).tobytes(), BLOCK, chain_seed("m", BLOCK))


def event(name: int, start: int, stop: int):
    """BlockStored for blocks start .. stop of a prompt."""
    tokens = prompt(name, stop)[0][start * BLOCK :]
    keys = [name * 10_000 + i for i in range(start, stop)]
    return stored(keys, tokens, name * 10_000 + start - 1 if start else None)


def contents(table: CacheMap, slot: int = 0) -> dict:
    """Return what a map has of a replica, in a form that compares."""
    told = table.contents(slot)
    held = {
        (tier, tag): h
        for tier, (hashes, tags) in told.held.items()
        for tag, h in zip(tags.tolist(), hashes.tolist(), strict=True)
    }
    return {"observed": told.observed, "held": held, "copies": told.copies, "groups": table.groups(slot)}


class Gateway:
    """What a gateway has of the shared map: a table, and an intake for each replica."""

    def __init__(
        self, url: str, *, budget: int = 8 * MIB, model: str = "m", block_size: int = BLOCK, deployment: str = "test"
    ):
        self.map = CacheMap(budget)
        self.shared = SharedMap(parse(url), deployment, self.map)
        self._model, self._block_size = model, block_size
        self.intakes: dict[str, object] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self.changes: list[tuple[str, str]] = []
        self.slots: dict[str, int] = {}

    def follow(self, name: str, publisher: Publisher, incarnation: str = "100.00", replay: bool = True):
        if name in self._tasks:
            self._tasks.pop(name).cancel()
            self.map.clear(self.slots[name])
        slot = self.slots.setdefault(name, len(self.slots))
        if len(self.intakes) < len(self.slots):
            assert self.map.attach(name, None, True) == slot
        intake = self.intakes[name] = self.shared.intake(
            slot, name, incarnation, endpoint=publisher.endpoint, replay=publisher.replay if replay else None, topic="",
            decode=decode, model=self._model, block_size=self._block_size, on_change=lambda *change: self.changes.append(change),
        )  # fmt: skip
        self._tasks[name] = asyncio.create_task(intake.run())
        return intake

    async def remove(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def held(self, name: str, hashes: list[int]) -> int:
        return self.map.match(hashes, 0.0).confirmed[self.slots[name]]

    def contents(self, name: str) -> dict:
        return contents(self.map, self.slots[name])

    def role(self, name: str) -> str:
        return self.intakes[name].role

    async def stop(self, gracefully: bool = True) -> None:
        for task in self._tasks.values():
            task.cancel()
        if not gracefully:  # as if killed: nothing is given back
            for task in (*self.shared._tasks.values(), *self.shared._aside):
                task.cancel()
            self.shared._tasks.clear()
            for one in self.intakes.values():
                one.journal = None
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.shared.stop()


@contextlib.asynccontextmanager
async def gateways(url: str, count: int = 1, **options):
    """A list to which more may be added; all are stopped."""
    running = [Gateway(url, **options) for _ in range(count)]
    for one in running:
        one.shared.start()
    try:
        yield running
    finally:
        for one in running:
            await one.stop()
