"""Models loaded a moment ago: nobody is told that they do not exist before the engines were asked."""

import asyncio
import json
from unittest.mock import AsyncMock

from gateway.proxy.placement import model_refresh
from gateway.proxy.placement.model_refresh import ModelRefresh

from ..http.talk import eventually
from .replies import answers, post
from .stack import stack

ADAPTER = json.dumps({"model": "sql", "messages": [{"role": "user", "content": "hi " * 100}]}).encode()


class Engines:
    """Asked when it is `open`; `heard` has what was served at each question."""

    def __init__(self):
        self.open, self.heard, self.serves = asyncio.Event(), [], []
        self.fails = False

    async def ask(self):
        self.heard.append(list(self.serves))
        await self.open.wait()
        if self.fails:
            raise RuntimeError("the session is closed")


async def test_those_who_come_during_a_question_share_the_next_one(monkeypatch):
    monkeypatch.setattr(model_refresh, "PAUSE_SECONDS", 0.0)
    engines = Engines()
    asks = ModelRefresh(engines.ask)
    first = asyncio.create_task(asks.refresh())
    await eventually(lambda: engines.heard)
    engines.serves.append("sql")  # loaded after the question: the answer may not know of it
    later = [asyncio.create_task(asks.refresh()) for _ in range(5)]
    later[0].cancel()  # a client that leaves takes nothing from the others
    engines.open.set()
    await asyncio.gather(first, *later[1:])
    assert engines.heard == [[], ["sql"]]


async def test_questions_keep_their_distance(monkeypatch):
    pauses = asyncio.Queue()
    engines = Engines()
    engines.open.set()
    asks = ModelRefresh(engines.ask)
    monkeypatch.setattr(model_refresh.asyncio, "sleep", lambda seconds: _let_go(pauses, seconds))
    await asks.refresh()
    second = asyncio.create_task(asks.refresh())
    seconds, go_on = await pauses.get()
    assert seconds == model_refresh.PAUSE_SECONDS and len(engines.heard) == 1
    go_on.set_result(None)
    await second
    assert len(engines.heard) == 2
    (await pauses.get())[1].set_result(None)


async def _let_go(pauses, seconds):
    pauses.put_nowait((seconds, go_on := asyncio.get_running_loop().create_future()))
    await go_on


async def test_a_question_that_fails_is_an_answer_too(caplog):
    engines = Engines()
    engines.fails = True
    engines.open.set()
    await ModelRefresh(engines.ask).refresh()
    assert "asking the engines for a model failed" in caplog.text


async def test_a_request_for_an_adapter_waits_until_engines_were_asked_and_goes_where_it_is():
    seen = []

    async def loaded():
        backends[1].replica.models = {"m": None, "sql": "m"}
        s.proxy.changed()

    async with stack(answers(), answers(seen=seen), ask_models=loaded) as s:
        backends = list(s.proxy.backends.values())
        status, headers, _ = await s.ask(post(ADAPTER))
        assert (status, headers["x-hitherto-replica"], len(seen)) == (200, backends[1].id, 1)
        await eventually(s.idle)
        hashes = s.proxy.models.pipelines[0].prepare("/v1/chat/completions", ADAPTER, adapters={"sql"}).hashes
        # Not those of a model of that name
        assert s.proxy.router.map.match(hashes, 0.0).held[backends[1].slot] == len(hashes) > 0


async def test_what_nobody_has_after_the_question_is_404():
    asks = AsyncMock()
    async with stack(answers(), ask_models=asks) as s:
        assert (await s.ask(post()))[0] == 200
        assert not asks.called, "nobody is asked for a model that is served"
        status, _, body = await s.ask(post(ADAPTER))
        assert (status, json.loads(body)["error"]["code"], asks.call_count) == (404, "model_not_found", 1)


async def test_a_client_that_leaves_while_engines_are_asked_leaves_nothing():
    engines = Engines()
    async with stack(answers(), ask_models=engines.ask) as s:
        talk = await s.say(post(ADAPTER))
        await eventually(lambda: engines.heard)
        await talk.close()
        await eventually(s.idle)
        engines.open.set()
        await eventually(lambda: not s.proxy.preparation._in_background)
        assert s.idle()
