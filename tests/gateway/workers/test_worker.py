"""A worker's own part, in this very process: what it hands on to one in another one's place."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gateway.settings import load
from gateway.workers.worker import Worker
from policies import Load
from replicas import State
from replicas.pods import Pod

from .scripted import NOTHING

ENGINE, OTHER, POD = "10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.9:8000"


@asynccontextmanager
async def worker(path, known=NOTHING):
    """A worker that has begun with this, and what asks it, as its supervisor does."""
    discover = {"selector": "app=vllm", "namespace": "x", "api": "http://127.0.0.1:1"}
    settings = load({"port": 0, "discover": discover}, {}).settings.to_dict()
    one = Worker({"index": 0, "settings": settings, "secrets": (None, None), "known": known})
    await one.start_at(path)
    await one.begin(0.0)
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as client:

        async def ask(path: str, body=None) -> dict:
            async with client.request("GET" if body is None else "POST", path, json=body) as answer:
                assert answer.status < 300, await answer.text()
                return await answer.json()

        try:
            yield one.gateway, ask
        finally:
            await one.gateway.stop(0)


def pods(*ids: str) -> list[Pod]:
    return [Pod(id.partition(":")[0], id.partition(":")[0], {"app": "vllm"}, id) for id in ids]


async def test_replicas_are_handed_on_as_operators_left_them(tmp_path):
    """And by a worker that was itself told of them, whether it has met them or not."""
    given = {**NOTHING, "urls": {ENGINE: f"http://{ENGINE}#role=prefill", OTHER: f"http://{OTHER}"}}
    async with worker(tmp_path / "first", given) as (gateway, ask):
        gateway.discovery.changed(pods(POD, "10.0.0.10:8000"))
        await ask(f"/replicas/{OTHER}/drain", {})
        await ask(f"/replicas/{POD}/drain", {})
        await gateway.fleet.remove("10.0.0.10:8000")
        handed_on = await ask("/worker/known")
    assert handed_on["urls"] == given["urls"]
    assert handed_on["drained"] == [OTHER, POD]
    assert (handed_on["pods"], handed_on["left_out"]) == (["10.0.0.10:8000", POD], ["10.0.0.10:8000"])
    async with worker(tmp_path / "second", handed_on) as (gateway, ask):
        assert {**await ask("/worker/known"), "names": None} == {**handed_on, "names": None}
        gateway.discovery.changed(pods(POD, "10.0.0.10:8000"))
        for id in (OTHER, POD):
            while gateway.fleet.replicas[id].state is not State.STOPPED:  # once something is known of it
                await asyncio.sleep(0.01)
        assert {*gateway.fleet.engines} == {ENGINE, OTHER, POD}
        assert {**await ask("/worker/known"), "names": None} == {**handed_on, "names": None}
        gateway.discovery.changed([])
        await gateway.fleet.quiet(POD)
        gateway.discovery.changed(pods(POD, "10.0.0.10:8000"))
        assert gateway.fleet.replicas[POD].state is State.STARTING, "another pod at this address"
        assert (await ask("/worker/known"))["drained"] == [OTHER] and "10.0.0.10:8000" in gateway.fleet.engines


@pytest.mark.parametrize("there", [[], [POD]])
async def test_what_was_asked_of_a_pod_holds_for_that_pod_alone(tmp_path, there):
    """One that went while nobody looked takes with it what operators asked of it."""
    told = {**NOTHING, "pods": [POD], "drained": [POD, f"{POD}-dp1"]}
    async with worker(tmp_path / "socket", told) as (gateway, ask):
        gateway.discovery.changed(pods(*there))
        gateway.discovery.changed(pods(POD))
        assert ((await ask("/worker/known"))["drained"] != []) == bool(there)


async def test_a_removal_under_way_is_handed_on(tmp_path):
    async with worker(tmp_path / "socket", {**NOTHING, "urls": {ENGINE: f"http://{ENGINE}"}}) as (gateway, ask):
        gateway.discovery.changed(pods(POD))
        gateway.fleet._inflight = lambda id: 1
        for id in (ENGINE, POD):
            gateway.fleet.remove(id)
        handed_on = await ask("/worker/known")
        assert (handed_on["urls"], handed_on["drained"], handed_on["left_out"]) == ({}, [], [POD])


async def test_a_worker_goes_on_with_the_costs_it_is_given(tmp_path):
    async with worker(tmp_path / "first") as (gateway, ask):
        before = (await ask("/worker/known"))["costs"]
        gateway.costs.add(ENGINE).observe_ttft(3.0, 3000, 0, Load())
        known = await ask("/worker/known")
        assert known["costs"] != before
    async with worker(tmp_path / "second", known) as (gateway, ask):
        gateway.costs.add(ENGINE)
        assert (await ask("/worker/known"))["costs"] == known["costs"]
