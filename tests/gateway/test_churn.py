"""Replicas are added and removed on several gateways under load: the map of the others stays shared and right."""

import asyncio
import re

from .test_gateways import TEXT, Clients, engines, gateways, joined, known, together, until  # noqa: F401  engines is a fixture

LEASES = "hitherto:1:default:*:lease"


def of(status, id):
    return next((one for one in status["replicas"] if one["id"] == id), None)


async def remove(gateway, id):
    assert (await gateway.admin.delete(f"/replicas/{id}?timeout=0")).status_code < 300
    await gateway.until(lambda status: of(status, id) is None)


async def add(gateway, id):
    assert (await gateway.admin.post("/replicas", json={"url": f"http://{id}"})).status_code < 300


async def shared(fleet, ids):
    """Of each replica one gateway leads and the others follow."""

    async def all_roles():
        told = [{one["id"]: one["map_role"] for one in (await gateway.status())["replicas"]} for gateway in fleet]
        return {id: sorted(str(one.get(id)) for one in told) for id in ids}

    async with asyncio.timeout(15):
        wanted = {id: ["follower"] * (len(fleet) - 1) + ["leader"] for id in ids}
        while await all_roles() != wanted:
            await asyncio.sleep(0.05)


async def find_each_other(fleet, name):
    """What is asked through one gateway the others know, on whichever replica it is."""
    for number in range(4):
        messages = [{"role": "user", "content": f"{name} {number} {TEXT}"}]
        assert (await fleet[number % 2].chat(messages)).status_code == 200
        await known(fleet[1 - number % 2], messages)


async def test_replicas_come_and_go_on_either_gateway_and_the_map_stays_one(redis_server, engines):
    ids = [url.removeprefix("http://") for url in engines]
    with redis_server.client() as client:
        async with gateways(2, redis_server.url, engines) as fleet:
            async with Clients(fleet) as clients:
                await shared(fleet, ids)
                for turn in range(6):
                    id = ids[turn % 2]
                    leads = [of(await gateway.status(), id)["map_role"] == "leader" for gateway in fleet]
                    # the leader, the follower, both
                    here = [fleet[leads.index(turn % 3 == 0)]] if turn % 3 < 2 else fleet
                    for gateway in here:
                        await remove(gateway, id)
                    if len(here) == 2:  # nobody has it: its lease was given back and has not merely run out
                        await until(
                            lambda id=id: (
                                not any(id.encode().rpartition(b":")[2] in key for key in client.keys(LEASES))
                            ),
                            1.5,
                        )
                    for gateway in here:
                        await add(gateway, id)
                    for gateway in here:
                        await gateway.ready(2)
                    if turn == 5:
                        await shared(fleet, ids)
                        await find_each_other(fleet, f"after turn {turn}")
                await clients.more()
            assert not clients.failures
            for gateway in fleet:
                status = await gateway.status()
                assert not status["background_failures"] and not any(one["problems"] for one in status["replicas"])
                assert not re.search(rb"Traceback|ERROR", b"".join(gateway.log))
