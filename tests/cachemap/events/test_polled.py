"""Events that are fetched over HTTP: a real server, and an intake that asks it."""

import asyncio
import json

import pytest
from aiohttp import ClientSession, web

from cachemap.events.intake import EventIntake
from cachemap.events.records import Batch, Cleared, EventError, Removed, Stored
from cachemap.map import CacheMap


class Numbered:
    """Events that are numbers in a row, as an engine's decoder sees them."""

    def __init__(self):
        self._next = 0

    def decode(self, payload: bytes) -> Batch:
        told = json.loads(payload)
        skipped, self._next = told[0] > self._next, told[-1] + 1
        return Batch(0.0, [Cleared()] if skipped else [], [], skipped)


class Engine:
    """Hands out what `told` holds, once. `status`: what it answers."""

    def __init__(self):
        self.told: list[dict] = []
        self.status, self.asked, self.key = 200, 0, ""
        self.port = 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/events", self._events)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error):
        await self._runner.cleanup()

    async def _events(self, request):
        self.asked, self.key = self.asked + 1, request.headers.get("Authorization", "")
        told, self.told = self.told, []
        return web.json_response(told, status=self.status)


def decode(payload: bytes) -> Batch:
    try:
        told = json.loads(payload)
        events = [
            Stored([one["key"]], one["parent"], bytes(16), 4, "gpu", None, None, 0, "full_attention")
            if "parent" in one
            else Removed([one["key"]], "gpu", 0)
            for one in told
        ]
    except (ValueError, KeyError) as error:
        raise EventError(str(error)) from None
    return Batch(0.0, events, [])


@pytest.fixture
async def following():
    tasks = []

    def follow(engine: Engine, decode=decode, on_change=lambda state, reason: None) -> EventIntake:
        cache_map = CacheMap(1 << 20)
        slot = cache_map.attach("one", 1000, True)
        intake = EventIntake(
            cache_map, slot, endpoint=f"http://127.0.0.1:{engine.port}/events", replay=None, decode=decode, model="m",
            block_size=4, on_change=on_change, session=lambda: ClientSession(headers={"Authorization": "Bearer k"}),
        )  # fmt: skip
        tasks.append(asyncio.create_task(intake.run()))
        return intake

    yield follow
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(true, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


async def test_what_is_handed_out_is_applied_and_nothing_is_asked_for_twice(following):
    async with Engine() as engine:
        intake = following(engine)
        engine.told = [{"key": 1, "parent": None}, {"key": 2, "parent": 1}]
        await until(lambda: intake.blocks_stored == 2)
        engine.told = [{"key": 2}]
        await until(lambda: intake.blocks_removed == 1)
        asked = engine.asked
        await until(lambda: engine.asked > asked)
        assert intake.state == "live" and intake.batches == 2 and not intake.gaps and engine.key == "Bearer k"


async def test_an_engine_that_stops_answering_is_unreachable_until_it_answers_again(following, monkeypatch):
    monkeypatch.setattr("cachemap.events.intake.LINK_LOST_SECONDS", 0.2)
    async with Engine() as engine:
        intake = following(engine)
        engine.told = [{"key": 1, "parent": None}]
        await until(lambda: intake.state == "live")
        engine.status = 503
        await until(lambda: intake.unreachable and intake.state == "unobserved")
        engine.status, engine.told = 200, [{"key": 5, "parent": None}]
        await until(lambda: intake.state == "live" and not intake.unreachable)


async def test_where_nobody_listens_the_cache_is_modelled(following):
    async with Engine() as engine:
        pass
    intake = following(engine)
    await until(lambda: intake.state == "unobserved" and intake.unreachable)
    assert "nothing listens there" in intake.reason and "#events=" not in intake.reason


async def test_one_that_answers_otherwise_is_called_what_it_is(following):
    async with Engine() as engine:
        engine.status = 404
        intake = following(engine)
        await until(lambda: intake.state == "unobserved")
        assert "status 404" in intake.reason and "ZMQ" not in intake.reason and "tcp://" not in intake.reason


async def test_an_answer_that_cannot_be_read_is_counted_and_followed_by_others(following):
    async with Engine() as engine:
        intake = following(engine)
        engine.told = [{"no": "key"}]
        await until(lambda: intake.malformed == 1 or intake.batches)
        engine.told = [{"key": 1, "parent": None}]
        await until(lambda: intake.blocks_stored == 1)


async def test_events_that_another_reader_takes_again_and_again_are_a_problem(following):
    said = []
    async with Engine() as engine:
        intake = following(engine, Numbered().decode, lambda state, reason: said.append(reason))
        for turn in range(1, 4):
            assert not intake.problems
            engine.told = [10 * turn, 10 * turn + 1]
            await until(lambda turn=turn: intake.gaps == turn)
        (problem,) = intake.problems
        assert "something else fetches them" in problem and "event_intake" in problem and said.count(problem) == 1
