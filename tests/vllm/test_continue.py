"""Streams whose vLLM is killed in the middle: another one goes on, and the client's answer is the uninterrupted one.

`make test-vllm ARGS="-m continue"`. Engines compute in 32 bits here: in 16, two tokens of a model with random weights
are often equally likely, and which is taken depends on what else is in the batch, whether an engine dies or not.
"""

import asyncio

import httpx
import pytest

from ..gateway.test_continue import PATHS, as_a_whole, body, difference, events
from .engines import gateway
from .pd import alone

pytestmark = [getattr(pytest.mark, "continue"), pytest.mark.timeout(900)]
AT_ONCE, TOKENS, INTERRUPTED = 64, 128, 100


class Stream:
    """A request through the gateway."""

    def __init__(self, number: int):
        self.path, self.text, self.replica, self.reads, self.complete = PATHS[number % 4], "", "", 0, False
        limit = "max_output_tokens" if self.path.endswith("/responses") else "max_tokens"
        self.body = body(self.path, number, model="tiny", ignore_eos=True, **{limit: TOKENS})
        if self.path.endswith("/messages"):
            del self.body["ignore_eos"]  # it has no such field

    async def run(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", self.path, json=self.body) as response:
            assert response.status_code == 200
            self.replica = response.headers.get("x-hitherto-replica", "")
            async for piece in response.aiter_text():
                self.text, self.reads = self.text + piece, self.reads + 1
        self.complete = True


async def begun(streams: list[Stream], tasks: list[asyncio.Task]) -> None:
    """Until all have some of their text."""
    while any(one.reads < 6 and not one.complete for one in streams):
        assert not any(task.done() and task.exception() for task in tasks)
        await asyncio.sleep(0.01)


async def test_killed_engines_leave_no_trace_in_greedy_answers(start_engine):
    started = [start_engine("--dtype", "float32", blocks=2048) for _ in range(2)]
    engines = [engine.wait() for engine in started]
    round_ = continued = 0
    async with gateway(*engines, continue_streams="exact") as g, httpx.AsyncClient(timeout=120) as client:
        client.base_url = g.url
        while continued < INTERRUPTED:
            victim, other = engines[round_ % 2], engines[(round_ + 1) % 2]
            streams = [Stream(1000 * round_ + number) for number in range(AT_ONCE)]
            tasks = [asyncio.create_task(one.run(client)) for one in streams]
            await begun(streams, tasks)
            cut = [one for one in streams if one.replica == victim.id and not one.complete]
            victim.kill()
            await asyncio.gather(*tasks)
            for one in streams:
                whole = (await alone(other, one.path, one.body)).text
                found = difference(as_a_whole(events(one.text))[::2], as_a_whole(events(whole))[::2])
                assert not found, f"{one.path}: {found}"
            before, continued = continued, int(await g.counted("hitherto_continued_streams_total"))
            # Of some that were not complete the end was on its way already: they were not continued.
            assert continued - before <= len(cut)
            round_ += 1
            victim.start().wait()
            await g.ready(2)
        assert await g.counted("hitherto_streams_not_continued_total") == 0
        assert await g.counted("hitherto_reservations") == 0
