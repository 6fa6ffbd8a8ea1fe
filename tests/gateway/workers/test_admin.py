"""Changes of the replicas are made by all workers. Workers are scripted here; `test_workers` has real ones."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from cachemap.background import Background
from gateway.ops.admin import Admin
from gateway.ops.guard import Guard
from gateway.workers.admin import WorkersAdmin
from gateway.workers.process import Places
from replicas.kept import KeptReplicas

from .scripted import NOTHING, ScriptedWorker

ENGINE = "10.0.0.7:8000"
URL = f"http://{ENGINE}"
NOTHING_LAUNCHED = SimpleNamespace(replicas={}, engines={})
GUARD = Guard(("127.0.0.1",), None)


def side_of(*workers, kept=None) -> WorkersAdmin:
    places = Places(len(workers))
    places.workers = dict(enumerate(workers))
    return WorkersAdmin(places, NOTHING_LAUNCHED, kept, Background(), (), GUARD)


@asynccontextmanager
async def asking(side):
    port = await side.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await side.stop()


CHANGES = {
    "add": lambda client: client.post("/replicas", json={"url": "http://10.0.0.8:8000"}),
    "drain": lambda client: client.post(f"/replicas/{ENGINE}/drain", json={}),
    "remove": lambda client: client.delete(f"/replicas/{ENGINE}"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_made_by_every_worker(tmp_path, change):
    workers = [ScriptedWorker(index, URL) for index in range(2)]
    kept = KeptReplicas(tmp_path / "replicas")
    kept.add(URL)
    async with asking(side_of(*workers, kept=kept)) as client:
        assert (await CHANGES[change](client)).status_code == 200
    known = {"add": {ENGINE: "ready", "10.0.0.8:8000": "ready"}, "drain": {ENGINE: "drained"}, "remove": {}}[change]
    assert [one.replicas for one in workers] == [known, known]
    assert kept.urls() == tuple(f"http://{id}" for id in known)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("why", ["no worker is there", "all end while they are asked", "one refuses"])
async def test_a_refused_change_leaves_the_file_of_replicas_as_it_was(tmp_path, change, why):
    kept = KeptReplicas(tmp_path / "replicas")
    kept.add(URL)
    first, second = workers = [ScriptedWorker(index, URL) for index in range(2)]
    second.refuses = 500 if why == "one refuses" else None
    for one in workers:
        one.serves = why != "no worker is there"
        one.gone = why == "all end while they are asked"
    async with asking(side_of(*workers, kept=kept)) as client:
        answer = await CHANGES[change](client)
    assert answer.status_code == (500 if why == "one refuses" else 503)
    assert kept.urls() == (URL,) and second.replicas == {ENGINE: "ready"}


async def test_a_removal_names_the_requests_that_any_worker_has_left():
    workers = [ScriptedWorker(index, URL) for index in range(3)]
    _, second, third = workers
    second.left = {"left": 2, "requests": ["my2", "my4"]}
    third.left = {"left": 300, "requests": [f"its{number}" for number in range(100)]}
    async with asking(side_of(*workers)) as client:
        told = (await CHANGES["remove"](client)).json()
    assert (told["id"], told["removed"], told["left"]) == (ENGINE, True, 302)
    assert told["requests"] == ["my2", "my4", *(f"its{number}" for number in range(98))]


async def test_a_replica_that_the_settings_or_a_pod_give_is_not_kept_once_more(tmp_path):
    known = {**NOTHING, "urls": {ENGINE: URL}, "pods": ["10.0.0.8:8000"]}
    kept, worker = KeptReplicas(tmp_path / "replicas"), ScriptedWorker(0, URL, known=known)
    async with asking(side_of(worker, kept=kept)) as client:
        assert (await client.post("/replicas", json={"url": URL})).status_code == 200
        assert (await CHANGES["add"](client)).status_code == 200
        worker.refuses = 409
        assert (await client.post("/replicas", json={"url": f"{URL}#events=tcp://10.0.0.7:5557"})).status_code == 409
    assert kept.urls() == ()


async def test_what_the_body_says_besides_the_url_is_kept(tmp_path):
    kept, worker = KeptReplicas(tmp_path / "replicas"), ScriptedWorker(0)
    async with asking(side_of(worker, kept=kept)) as client:
        assert (await client.post("/replicas", json={"url": URL, "role": "prefill"})).status_code == 200
        worker.refuses = 500
        assert (await client.delete(f"/replicas/{ENGINE}")).status_code == 500
    assert kept.urls() == (f"{URL}#role=prefill",)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"url": 7}', b'{"url": "ftp://h:1"}', b'{"url": "http://h:1", "roll": "x"}',
                                  b'{"url": "http://h:1", "role": "x"}', b'{"url": "http://h:1#role=decode", "role": ["x"]}'])  # fmt: skip
async def test_what_is_wrong_with_a_body_is_said_as_by_one_gateway(body):
    """However many workers there are, none that could be asked included."""
    alone = Admin(SimpleNamespace(fleet=NOTHING_LAUNCHED, kept=None), GUARD)
    kind = {"content-type": "application/json"}
    async with asking(alone) as one, asking(side_of()) as many:
        said, told = [await client.post("/replicas", content=body, headers=kind) for client in (one, many)]
    assert (told.status_code, told.json()) == (said.status_code, said.json()) and said.status_code == 400


async def test_a_worker_that_does_not_say_whether_it_made_a_change_is_ended():
    """The one in its place begins with what a sibling has."""
    first, second = ScriptedWorker(0), ScriptedWorker(1)
    second.gone = True
    side = side_of(first, second)
    async with asking(side) as client:
        assert (await client.post("/replicas", json={"url": URL})).status_code == 200
    assert (first.replicas, first.killed, second.killed) == ({ENGINE: "ready"}, False, True)
    assert (await side.known())["urls"] == {ENGINE: URL}


@pytest.mark.parametrize("gone", [False, True])
async def test_a_worker_that_starts_during_a_change_makes_it_when_it_serves(gone):
    """It may have taken over the replicas of a sibling as they were before. What no sibling made it does not make
    either; what a client is answered is what the others said."""
    first, second = ScriptedWorker(0, URL), ScriptedWorker(1, URL)
    first.gone, second.serves = gone, False
    async with asking(side_of(first, second)) as client:
        assert (await CHANGES["remove"](client)).status_code == (503 if gone else 200)
    assert [change[:2] for change in second.missed] == ([] if gone else [("DELETE", f"/replicas/{ENGINE}")])


async def test_where_no_worker_is_left_to_ask_the_replicas_are_those_after_the_last_change():
    worker = ScriptedWorker(0)
    side = side_of(worker)
    side.given({"10.0.0.9:8000": "http://10.0.0.9:8000"})
    worker.serves = False
    assert list((await side.known())["urls"]) == ["10.0.0.9:8000"], "those of the settings, before any worker is"
    worker.serves = True
    async with asking(side) as client:
        assert (await client.post("/replicas", json={"url": URL})).status_code == 200
    worker.kill()
    assert (await side.known())["urls"] == {ENGINE: URL}


async def test_a_change_waits_for_a_worker_that_waits_for_a_drain_and_goes_on_without_its_client(monkeypatch):
    """However long that takes: the worker would make it all the same."""
    monkeypatch.setattr("gateway.workers.admin.ANSWER_SECONDS", 0.0)
    worker = ScriptedWorker(0)
    worker.may_answer.clear()
    side = side_of(worker)
    async with asking(side) as client:
        adding = asyncio.create_task(client.post("/replicas", json={"url": URL}))
        await worker.asked.wait()
        adding.cancel()
        next_one = asyncio.create_task(CHANGES["remove"](client))  # waits for the first
        while not any(lock._waiters for lock in side._changing.values()):
            await asyncio.sleep(0)
        worker.may_answer.set()
        assert (await next_one).status_code == 200
    assert worker.replicas == {}
    assert len(side._changing) == 0, "what was changed once is not remembered"
