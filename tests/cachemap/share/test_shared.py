"""One writes, the others mirror: what is the same in all maps, and when."""

import asyncio

from ..publisher import CLEARED, removed
from .gateways import Gateway, event, gateways, prompt, replica, until


async def led(gateway, name="r"):
    await until(lambda: gateway.role(name) == "writer" and not gateway.intakes[name].journal.whole)


async def same(one, other, name="r"):
    await until(lambda: one.contents(name) == other.contents(name), what=lambda: (one.contents(name), other.contents(name)))


async def test_a_mirror_holds_what_the_writer_holds(redis_server):
    _, hashes = prompt(1, 12)
    async with replica() as publisher, gateways(redis_server.url, 2) as (one, other):
        one.follow("r", publisher)
        await led(one)
        other.follow("r", publisher)
        await until(lambda: other.role("r") == "mirror")
        await publisher.publish(event(1, 0, 8), event(1, 8, 12))
        await until(lambda: other.held("r", hashes) == 12)
        assert one.held("r", hashes) == 12
        await publisher.publish(removed(10_011), removed(10_010))
        await until(lambda: other.held("r", hashes) == 10)
        await publisher.publish(CLEARED, event(2, 0, 3))
        await until(lambda: other.held("r", prompt(2, 3)[1]) == 3)
        await same(one, other)
        assert other.held("r", hashes) == 0 and other.intakes["r"].state == "live"
        assert publisher.asked == [0]  # nobody but the writer reads events
