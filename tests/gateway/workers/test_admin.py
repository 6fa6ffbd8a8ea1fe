"""A change of the replicas is made by all workers or by none. Workers are scripted here; `test_workers` has real
ones."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import orjson
import pytest

from gateway.ops.admin import Admin
from gateway.ops.guard import Guard
from gateway.workers.admin import WorkersAdmin
from gateway.workers.member import Answer
from replicas.kept import KeptReplicas

ENGINE = "10.0.0.7:8000"
URL = f"http://{ENGINE}"


class ScriptedWorker:
    """Knows the replicas that it was told, as a worker's admin side does; `refuses` what is asked of it with that
    status, or is `gone` with the next question."""

    def __init__(self, index: int, urls=()):
        self.index, self.live, self.told, self.silent = index, True, True, 0
        self.replicas = {url.removeprefix("http://"): "ready" for url in urls}
        self.pods: set[str] = set()
        self.refuses: int | None = None
        self.gone = self.killed = False
        self.asked: asyncio.Event = asyncio.Event()
        self.may_answer: asyncio.Event = asyncio.Event()
        self.may_answer.set()

    async def ask(self, method, path, headers, body, seconds) -> Answer:
        self.asked.set()
        try:
            async with asyncio.timeout(seconds):
                await self.may_answer.wait()
        except TimeoutError:
            self.replicas[ENGINE] = "ready"  # the worker goes on with what it was asked
            raise
        if self.gone or self.killed:
            raise ConnectionResetError
        if self.refuses:
            return Answer(self.refuses, {"content-type": "application/json"}, b'{"error": {}}')
        if method == "PUT":
            return self.take_back(path.split("/")[3].replace("%3A", ":"), **orjson.loads(body))
        _, _, id, *verb = (
            path.split("/") if path != "/replicas" else (0, 0, orjson.loads(body)["url"].removeprefix("http://"))
        )
        id = id.replace("%3A", ":")
        if method == "POST" and not verb:
            self.replicas[id] = "ready"
        elif id not in self.replicas:
            return Answer(404, {}, b"{}")
        elif verb:
            self.replicas[id] = "drained"
        else:
            del self.replicas[id]
        return Answer(200, {}, b"{}")

    def take_back(self, id: str, url: str | None, drained: list[str], left_out: bool) -> Answer:
        self.replicas.pop(id, None)
        if url or (id in self.pods and not left_out):
            self.replicas[id] = "drained" if drained else "ready"
        return Answer(200, {}, b"{}")

    def kill(self) -> None:
        self.killed, self.told = True, False


class NothingLaunched:
    replicas: dict = {}
    engines: dict = {}


class WatchedLock(asyncio.Lock):
    def __init__(self):
        super().__init__()
        self.wanted = asyncio.Event()

    async def acquire(self):
        self.wanted.set()
        return await super().acquire()


class ScriptedSupervisor:
    def __init__(self, members, kept=None, urls=()):
        self.members, self.kept, self.fleet = members, kept, NothingLaunched()
        self.urls, self.drained, self.left_out = {url.removeprefix("http://"): url for url in urls}, set(), set()
        self.admin_headers, self.beginning = {}, WatchedLock()

    live = answering = told = property(lambda self: [one for one in self.members if one.told])


@asynccontextmanager
async def admin_of(supervisor, side=None):
    side = side or WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
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
BRING_BACK = {"bring back": lambda client: client.post("/replicas", json={"url": URL})}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("why", ["no worker is there", "all end while they are asked", "one refuses"])
async def test_a_change_that_is_refused_is_made_nowhere(tmp_path, change, why):
    kept = KeptReplicas(tmp_path / "replicas")
    kept.add(URL)
    first, second = members = [ScriptedWorker(index, [URL]) for index in range(2)]
    supervisor = ScriptedSupervisor(members, kept, [URL])
    if why == "one refuses":
        second.refuses = 500
    for one in members:
        one.told, one.gone = why != "no worker is there", why == "all end while they are asked"
    async with admin_of(supervisor) as client:
        answer = await CHANGES[change](client)
    assert answer.status_code == (500 if why == "one refuses" else 503)
    assert (supervisor.urls, supervisor.drained, kept.urls()) == ({ENGINE: URL}, set(), (URL,))
    assert [one.replicas for one in members] == [{ENGINE: "ready"}] * 2


async def test_a_drained_replica_stays_drained_where_it_cannot_be_removed(tmp_path):
    members = [ScriptedWorker(index, [URL]) for index in range(2)]
    supervisor = ScriptedSupervisor(members, None, [URL])
    async with admin_of(supervisor) as client:
        assert (await CHANGES["drain"](client)).status_code == 200
        members[1].refuses = 409
        assert (await CHANGES["remove"](client)).status_code == 409
    assert supervisor.drained == {ENGINE} and members[0].replicas == {ENGINE: "drained"}


async def test_what_was_asked_of_a_pod_is_known_at_once_and_until_it_is_gone():
    """A worker that begins is told of it, though the others have not answered yet; they find pods by themselves."""
    worker = ScriptedWorker(0, [URL])
    supervisor = ScriptedSupervisor([worker])
    side = WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
    async with admin_of(supervisor, side) as client:
        assert (await client.post(f"/replicas/{ENGINE}-dp1/drain", json={})).status_code == 404
        assert (await CHANGES["drain"](client)).status_code == 200
        assert (supervisor.drained, side.pods_asked_of) == ({ENGINE}, {ENGINE})
        worker.asked.clear()
        worker.may_answer.clear()
        removing = asyncio.create_task(CHANGES["remove"](client))
        await worker.asked.wait()
        assert (supervisor.left_out, supervisor.drained, side.pods_asked_of) == ({ENGINE}, set(), {ENGINE})
        worker.may_answer.set()
        assert (await removing).status_code == 200
        assert (await CHANGES["remove"](client)).status_code == 404
    assert supervisor.left_out == {ENGINE}
    supervisor.drained = {f"{ENGINE}-dp1", "10.0.0.8:8000"}
    side.pod_gone(ENGINE)
    assert (supervisor.left_out, supervisor.drained) == (set(), {"10.0.0.8:8000"})


@pytest.mark.parametrize("change", ["drain", "remove", "bring back"])
@pytest.mark.parametrize("goes", [None, "while workers are asked", "while the change waits to be taken back"])
async def test_a_change_of_a_pod_that_one_worker_has_not_found_yet_is_made_nowhere(change, goes):
    """A drain of it, refused by that worker, was undone as a removal in the others. One that goes meanwhile has
    nothing left for the next pod at its address; a change waits while a worker that begins is told the replicas."""
    first, second = members = [ScriptedWorker(0, [URL]), ScriptedWorker(1)]
    first.pods, second.refuses = {ENGINE}, 404
    supervisor = ScriptedSupervisor(members)
    left_out = {ENGINE} if change == "bring back" else set()
    supervisor.left_out = left_out.copy()
    supervisor.drained = {ENGINE} if goes and not left_out else set()
    first.may_answer.clear()
    side = WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
    async with admin_of(supervisor, side) as client:
        changing = asyncio.create_task((CHANGES | BRING_BACK)[change](client))
        await first.asked.wait()
        async with supervisor.beginning:
            if goes == "while the change waits to be taken back":
                supervisor.beginning.wanted.clear()
                first.may_answer.set()
                await supervisor.beginning.wanted.wait()
            if goes:
                first.pods.clear()
                side.pod_gone(ENGINE)
        first.may_answer.set()
        assert (await changing).status_code == 404
    assert first.replicas == ({} if goes or left_out else {ENGINE: "ready"})
    assert (supervisor.left_out, supervisor.drained) == (set() if goes else left_out, set())


@pytest.mark.parametrize("before", ["drain", "remove", "nothing"])
async def test_a_pod_that_is_brought_back_is_no_engine_that_was_given_by_url(tmp_path, before):
    """It is found again by whoever begins, goes with its pod, and stays out once it is removed."""
    kept, worker = KeptReplicas(tmp_path / "replicas"), ScriptedWorker(1, [URL])
    supervisor = ScriptedSupervisor([ScriptedWorker(0, [URL]), worker], kept)
    async with admin_of(supervisor) as client:
        if before == "nothing":
            worker.pods = {ENGINE}
        else:
            assert (await CHANGES[before](client)).status_code == 200
        assert (await client.post("/replicas", json={"url": URL})).status_code in (200, 201)
        assert (supervisor.urls, supervisor.drained, supervisor.left_out, kept.urls()) == ({}, set(), set(), ())
        assert (await CHANGES["remove"](client)).status_code == 200
    assert supervisor.left_out == {ENGINE}


async def test_what_operators_ask_of_an_engine_that_was_given_by_url_does_not_go_with_a_pod():
    supervisor = ScriptedSupervisor([ScriptedWorker(0, [URL])], None, [URL])
    side = WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
    async with admin_of(supervisor, side) as client:
        assert (await CHANGES["drain"](client)).status_code == 200
        assert (supervisor.drained, side.pods_asked_of) == ({ENGINE}, set())
        assert (await CHANGES["remove"](client)).status_code == 200
    assert supervisor.left_out == set()


async def test_a_refused_url_of_a_known_replica_is_not_kept(tmp_path):
    """One that the command line names, with another #events= than it has."""
    kept, worker = KeptReplicas(tmp_path / "replicas"), ScriptedWorker(0, [URL])
    worker.refuses = 409
    async with admin_of(ScriptedSupervisor([worker], kept, [URL])) as client:
        assert (await client.post("/replicas", json={"url": f"{URL}#events=tcp://10.0.0.7:5557"})).status_code == 409
    assert kept.urls() == ()


async def test_what_the_body_says_besides_the_url_is_kept_for_workers_and_gateways_to_come(tmp_path):
    kept, worker = KeptReplicas(tmp_path / "replicas"), ScriptedWorker(0)
    supervisor = ScriptedSupervisor([worker], kept)
    async with admin_of(supervisor) as client:
        assert (await client.post("/replicas", json={"url": URL, "role": "prefill"})).status_code == 200
        worker.refuses = 500
        assert (await client.delete(f"/replicas/{ENGINE}")).status_code == 500  # and is taken back
    assert (supervisor.urls, kept.urls()) == ({ENGINE: f"{URL}#role=prefill"}, (f"{URL}#role=prefill",))


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"url": 7}', b'{"url": "ftp://h:1"}', b'{"url": "http://h:1", "roll": "x"}',
                                  b'{"url": "http://h:1", "role": "x"}', b'{"url": "http://h:1#role=decode", "role": ["x"]}'])  # fmt: skip
async def test_what_is_wrong_with_a_body_is_said_as_by_one_gateway(body):
    """However many workers there are, none that could be asked included."""
    alone = Admin(SimpleNamespace(fleet=NothingLaunched(), kept=None), Guard(("127.0.0.1",), None))
    port = await alone.start("127.0.0.1", 0)
    kind = {"content-type": "application/json"}
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as one,
            admin_of(ScriptedSupervisor([])) as many,
        ):
            said, told = [await client.post("/replicas", content=body, headers=kind) for client in (one, many)]
    finally:
        await alone.stop()
    assert (told.status_code, told.json()) == (said.status_code, said.json()) and said.status_code == 400


async def test_a_worker_that_does_not_say_whether_it_made_a_change_is_replaced_by_one_that_knows():
    first, second = members = [ScriptedWorker(0), ScriptedWorker(1)]
    second.gone = True
    supervisor = ScriptedSupervisor(members)
    async with admin_of(supervisor) as client:
        assert (await client.post("/replicas", json={"url": URL})).status_code == 200
    assert (supervisor.urls, first.replicas, first.killed, second.killed) == (
        {ENGINE: URL},
        {ENGINE: "ready"},
        False,
        True,
    )


async def test_a_change_waits_for_a_worker_that_waits_for_a_drain(monkeypatch):
    """However long that takes: the worker would make it all the same."""
    monkeypatch.setattr("gateway.workers.admin.ANSWER_SECONDS", 0.0)
    worker = ScriptedWorker(0)
    supervisor = ScriptedSupervisor([worker])
    worker.may_answer.clear()
    async with admin_of(supervisor) as client:
        adding = asyncio.create_task(client.post("/replicas", json={"url": URL}))
        await worker.asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        worker.may_answer.set()
        assert (await adding).status_code == 200
    assert supervisor.urls == {ENGINE: URL} and worker.replicas == {ENGINE: "ready"}


async def test_a_worker_that_begins_while_a_change_fails_does_not_keep_it():
    first, second = ScriptedWorker(0, [URL]), ScriptedWorker(1)
    supervisor = ScriptedSupervisor([first], None, [URL])
    first.may_answer.clear()
    first.gone = True
    async with admin_of(supervisor) as client:
        removing = asyncio.create_task(client.delete(f"/replicas/{ENGINE}"))
        await first.asked.wait()
        async with supervisor.beginning:  # as the supervisor does
            second.replicas = dict.fromkeys(supervisor.urls, "ready")
            supervisor.members.append(second)
        first.may_answer.set()
        assert (await removing).status_code == 503
    assert supervisor.urls == {ENGINE: URL} and second.replicas == {ENGINE: "ready"}


async def test_what_was_changed_once_is_not_remembered():
    worker = ScriptedWorker(0)
    side = WorkersAdmin(ScriptedSupervisor([worker]), Guard(("127.0.0.1",), None))
    port = await side.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for number in range(20):
            assert (await client.post(f"/replicas/nobody:{number + 1}/drain", json={})).status_code == 404
    await side.stop()
    assert len(side._changing) == len(side._before) == 0 and side.workers.drained == set()


async def test_pods_that_go_are_not_remembered():
    """Neither those that nobody changes, nor those that go while they are removed."""
    supervisor = ScriptedSupervisor([])
    side = WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
    async with admin_of(supervisor, side) as client:
        for number in range(3):
            engine = f"10.0.1.{number}:8000"
            worker = ScriptedWorker(0, [f"http://{engine}"])
            supervisor.members, worker.pods = [worker], {engine}
            worker.may_answer.clear()
            removing = asyncio.create_task(client.delete(f"/replicas/{engine}"))
            await worker.asked.wait()
            side.pod_gone(engine)
            worker.may_answer.set()
            assert (await removing).status_code == 200
            side.pod_gone(engine)
    assert side._before == {} and (supervisor.drained, supervisor.left_out) == (set(), set())


async def test_a_pod_that_went_before_a_change_takes_nothing_from_the_next_one_at_its_address():
    """The next pod is drained, and stays so where its removal is refused, though the pod before it went during another
    change for which these two waited."""
    worker = ScriptedWorker(0, [URL])
    supervisor = ScriptedSupervisor([worker])
    side = WorkersAdmin(supervisor, Guard(("127.0.0.1",), None))
    worker.pods = {ENGINE}
    worker.may_answer.clear()
    async with admin_of(supervisor, side) as client:
        first = asyncio.create_task(CHANGES["drain"](client))
        await worker.asked.wait()
        side.pod_gone(ENGINE)
        assert supervisor.drained == set()
        lock = side._changing[ENGINE]
        second = asyncio.create_task(CHANGES["drain"](client))
        while not lock._waiters:
            await asyncio.sleep(0)
        worker.may_answer.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        worker.refuses = 409
        assert (await CHANGES["remove"](client)).status_code == 409
    assert supervisor.drained == {ENGINE} and side._before == {}
