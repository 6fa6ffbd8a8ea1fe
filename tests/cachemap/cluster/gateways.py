"""Several gateways' maps on one Redis and replicas that speak as vLLM does, for tests of what they share."""

from __future__ import annotations

import asyncio
import contextlib
from array import array

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.cluster import SharedMap, parse

from ..publisher import BLOCK, Publisher, decode, publishing, stored

MIB = 1 << 20


async def until(true, seconds=15.0, what=""):
    end = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < end, (
            f"did not happen in {seconds} s: {what() if callable(what) else what}"
        )
        await asyncio.sleep(0.01)


def prompt(name: int, blocks: int) -> tuple[list[int], list[int]]:
    """Return tokens and block hashes of a prompt that shares nothing with others."""
    tokens = [name * 10_000 + i for i in range(blocks * BLOCK)]
    return tokens, hash_blocks(array("I", tokens).tobytes(), BLOCK, chain_seed("m", BLOCK))


def event(name: int, start: int, stop: int):
    """Return a BlockStored event for blocks `start` to `stop` of a prompt."""
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

    def told(self, name: str = "r") -> dict:
        """Return how the gateway is with a replica, for the message of a test that fails."""
        one, held = self.intakes[name], len(self.contents(name)["held"])
        return {"held": held} | {
            what: getattr(one, what) for what in ("role", "role_reason", "n", "head", "state", "last_seq")
        }

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


class Gateways(list):
    """Running gateways, all stopped by `gateways`."""

    def start(self, url: str, **options) -> Gateway:
        self.append(Gateway(url, **options))
        self[-1].shared.start()
        return self[-1]


@contextlib.asynccontextmanager
async def gateways(url: str, count: int = 1, **options):
    """Yield a list of gateways, to which `start` adds more; all are stopped."""
    running = Gateways()
    for _ in range(count):
        running.start(url, **options)
    try:
        yield running
    finally:
        for one in running:
            await one.stop()


def writes(gateway, name="r"):
    """Return whether the gateway leads this replica and writes its changes."""
    journal = gateway.intakes[name].journal
    return gateway.role(name) == "leader" and journal is not None and not journal.whole


async def led(gateway, name="r", publisher=None):
    """Wait until the gateway writes.

    With the publisher, its subscription has reached the engine, and the engine's record has come. Batches that are
    published before that are in the record too, for which the leader clears the replica and applies them anew.
    """

    await until(lambda: writes(gateway, name))
    if publisher is not None:
        await publisher.subscribed()
        await until(lambda: not gateway.intakes[name].unreplayed)


async def followed(gateway, name="r"):
    await until(lambda: gateway.role(name) == "follower", what=lambda: gateway.told(name))


async def same(one, other, name="r"):
    await until(lambda: one.contents(name) == other.contents(name), what=lambda: (one.told(name), other.told(name)))


async def hold(number, blocks, *gateways, name="r", seconds=15.0):
    """Wait until all these gateways know that the replica holds so many blocks of a prompt."""
    hashes = prompt(number, blocks)[1]
    await until(
        lambda: all(one.held(name, hashes) == blocks for one in gateways),
        seconds,
        lambda: [one.told(name) for one in gateways],
    )


async def report(publisher, number, *gateways, blocks=6, name="r"):
    """Publish that the engine stored the first blocks of a prompt, and wait until all these gateways know."""
    await publisher.publish(event(number, 0, blocks))
    await hold(number, blocks, *gateways, name=name)


async def share(publisher, one, *others, name="r"):
    """Have the first gateway lead a replica and the others follow."""
    one.follow(name, publisher)
    await led(one, name, publisher)
    for other in others:
        other.follow(name, publisher)
        await followed(other, name)


def is_shared(one, other, name="r"):
    """Return whether one of them leads and the other follows."""
    return {one.role(name), other.role(name)} == {"leader", "follower"}


async def healed(one, other, name="r"):
    """Wait until one of them leads, the other follows it, and both hold the same."""
    await until(lambda: is_shared(one, other, name), what=lambda: (one.told(name), other.told(name)))
    await same(one, other, name)


@contextlib.asynccontextmanager
async def sharing(url, count=2, **engine):
    """Yield a publisher and so many gateways that share its replica "r", the first leading."""
    async with publishing(**engine) as publisher, gateways(url, count) as running:
        await share(publisher, *running)
        yield publisher, *running
