"""A worker without a process: it answers its supervisor as a test says."""

import asyncio
from types import SimpleNamespace

import orjson

from gateway.workers.process import Answer

NOTHING = {"urls": {}, "pods": [], "left_out": [], "drained": [], "names": None, "costs": None}  # that a sibling knows


class ScriptedWorker:
    """Has the replicas that it was told of, by id, as a worker's admin side does. It refuses a change with the status
    `refuses`, or is `gone` with the next question; a change waits until `may_answer`."""

    def __init__(self, index: int, *urls: str, **answers):
        self.index, self.process = index, SimpleNamespace(pid=index)
        self.serves, self.missed = True, []
        self.unanswered, self.begun, self.loads = 0, 0.0, {}
        self.replicas = {url.removeprefix("http://"): "ready" for url in urls}
        self.answers = answers  # to questions of the supervisor's own, by the last part of their path
        self.refuses: int | None = None
        self.left = {}  # what the answer to a removal adds about requests that go on
        self.gone = self.killed = False
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def query(self, path: str, seconds: float = 0.0) -> bytes | None:
        name = path.rsplit("/", 1)[1]
        if self.gone or self.killed or not self.serves:
            return None
        known = {**NOTHING, "urls": {id: f"http://{id}" for id in self.replicas}}
        return orjson.dumps({"loads": {}, "known": known, **self.answers}[name])

    async def ask(self, method, path, headers, body, seconds) -> Answer:
        self.asked.set()
        await self.may_answer.wait()
        if self.gone or self.killed:
            raise ConnectionResetError
        if self.refuses:
            return Answer(self.refuses, {"content-type": "application/json"}, b'{"error": {}}')
        _, _, id, *verb = path.split("/") if path != "/replicas" else (0, 0, orjson.loads(body)["url"][7:])
        if method == "POST" and not verb:
            self.replicas[id] = "ready"
        elif id not in self.replicas:
            return Answer(404, {}, b"{}")
        elif verb:
            self.replicas[id] = "drained"
        else:
            del self.replicas[id]
            return Answer(200, {}, orjson.dumps({"id": id, "removed": True, **self.left}))
        return Answer(200, {}, b"{}")

    def tell(self, **message) -> None:
        self.kill()

    async def ended(self) -> int:
        return -9

    async def stop(self, *seconds: float) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed, self.serves = True, False
