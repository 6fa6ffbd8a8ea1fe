"""A simulated engine on a real socket, in this process."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from replicas.simulated.engine import Engine
from replicas.simulated.metrics import Metrics
from replicas.simulated.model import sim_model_dir
from replicas.simulated.profile import Profile, StepTime
from replicas.simulated.publisher import Publisher
from replicas.simulated.replies import Replies
from replicas.simulated.runner import Runner
from replicas.simulated.server import Server
from replicas.simulated.tokens import Tokens


@pytest.fixture(scope="session")
def model_dir():
    return sim_model_dir()


@pytest.fixture(scope="session")
def tokens(model_dir):
    return Tokens(model_dir)


@pytest.fixture(scope="session")
def replies(tokens):
    return Replies(tokens)


@dataclass
class Stack:
    url: str
    session: aiohttp.ClientSession
    server: Server
    engine: Engine
    publisher: Publisher | None
    first: int = 0  # number of the first event batch a test looks at

    async def post(self, path: str, **body) -> dict:
        async with self.session.post(self.url + path, json=body) as response:
            data = await response.json()
            assert response.status == 200, data
            return data

    async def get(self, path: str):
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return await response.json()

    async def refused(self, path: str, data, method: str = "POST") -> tuple[int, dict]:
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        async with self.session.request(method, self.url + path, data=data) as response:
            return response.status, (await response.json())["error"]

    async def stream(self, path: str, **body) -> list:
        """Events of a stream: (name or None, data) with data parsed, "[DONE]" as text."""
        async with self.session.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())

    async def idle(self) -> None:
        await eventually(lambda: self.engine.running == self.engine.waiting == 0)


def cached_tokens(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def parse_events(raw: bytes) -> list:
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


async def eventually(condition, seconds: float = 10.0) -> None:
    """Until the condition holds; fails if it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    tokens, replies, *, events=True, lora=(), show_cached=True, seed=0, step=StepTime(prefill=1.0, decode=0.5), **limits
):
    limits = {"num_blocks": 2048, "max_num_batched_tokens": 2048, "max_model_len": 8192, **limits}
    engine = Engine(Profile("test", step, **limits), every_token=True)
    publisher = Publisher("127.0.0.1", 0, 0, engine.profile) if events else None
    runner = Runner(engine, Metrics(engine, "sim"), publisher, seed)
    server = Server(runner, tokens, replies, "sim", "sim", list(lora), show_cached)
    http = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await http.setup()
    site = web.TCPSite(http, "127.0.0.1", 0)
    await site.start()
    tasks = [asyncio.ensure_future(runner.run())]
    if publisher is not None:
        tasks.append(asyncio.ensure_future(publisher.serve_replay()))
    url = "http://127.0.0.1:%d" % site._server.sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession() as session:
            yield Stack(url, session, server, engine, publisher)
        failed = [task for task in tasks if task.done()]
        assert not failed, failed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await http.cleanup()
        if publisher is not None:
            publisher.close()


@pytest.fixture
async def stack(tokens, replies):
    async with running(tokens, replies, lora=["tuned"]) as stack:
        yield stack


@pytest.fixture
def run_stack(tokens, replies):
    """`async with run_stack(...)` for an engine with other settings."""
    return lambda **settings: running(tokens, replies, **settings)
