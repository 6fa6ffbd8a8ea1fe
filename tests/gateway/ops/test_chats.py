"""Chats of which an engine tells the ids, compared with the gateway's when it is adopted."""

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.ops.chats import CHATS, EngineTokens, NotAsked, chats_differ, made_here
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.tokens.agreement import Differences
from replicas.engines.vllm import VLLM
from replicas.simulated.model import sim_model_dir
from replicas.simulated.tokens import RequestError, Tokens

from ..prompt.families import FAMILIES
from ..prompt.reference import model_dir


@pytest.fixture(scope="module")
def tokens():
    return Tokens(sim_model_dir())


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "sim", 16)


class Engine:
    """`made`: from a body to ids. `tokenizes`: /tokenize takes messages; else it is known by what usage counts."""

    def __init__(self, made, tokenizes=True):
        self.made, self.tokenizes, self.asked = made, tokenizes, []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(request.path)
        try:
            ids = self.made(body)
        except RequestError as error:
            return web.json_response({"object": "error", "message": str(error)}, status=400)
        except Busy as error:
            return web.json_response({"object": "error"}, status=error.args[0])
        if request.path == "/tokenize":
            if not self.tokenizes:
                return web.json_response({"object": "error", "message": "prompt: field required"}, status=400)
            return web.json_response({"tokens": ids, "count": len(ids)})
        assert body["max_tokens"] == 1
        return web.json_response({"choices": [{}], "usage": {"prompt_tokens": len(ids)}})

    async def differs(self, pipeline) -> str:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                engine = EngineTokens(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "sim")
                return await chats_differ(engine, made_here(pipeline))
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_an_engine_that_fills_its_template_alike(tokens, pipeline, tokenizes):
    engine = Engine(tokens.chat, tokenizes)
    assert await engine.differs(pipeline) == ""
    assert engine.asked.count("/tokenize") >= 4
    assert ("/v1/chat/completions" in engine.asked) is not tokenizes


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_one_that_leaves_the_tools_out(tokens, pipeline, tokenizes):
    def without_tools(body):
        return tokens.chat({name: value for name, value in body.items() if name != "tools"})

    assert '"tools"' in await Engine(without_tools, tokenizes).differs(pipeline)


async def test_one_that_strips_texts_and_keeps_their_number_of_tokens(tokens, pipeline):
    def other(body):
        return [*tokens.chat(body)[:-1], 7]

    assert "other tokens" in await Engine(other).differs(pipeline)


async def test_chats_that_the_engine_refuses_count_for_nothing(tokens, pipeline):
    def only_plain(body):
        if body.keys() - {"model", "messages", "max_tokens"}:
            raise RequestError("no tools here")
        return tokens.chat(body)

    assert await Engine(only_plain).differs(pipeline) == ""


async def test_one_that_refuses_all_of_them_is_not_trusted(pipeline):
    def nothing(body):
        raise RequestError("no chats here")

    assert "nothing shows" in await Engine(nothing).differs(pipeline)


class Busy(Exception):
    """The engine answers with this status."""


@pytest.mark.parametrize("status", [401, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("tokenizes", [True, False])
async def test_one_that_cannot_look_at_them_now_has_shown_nothing(pipeline, status, tokenizes):
    def busy(body):
        raise Busy(status)

    with pytest.raises(NotAsked, match="--engine-api-key" if status == 401 else str(status)):
        await Engine(busy, tokenizes).differs(pipeline)


async def test_a_chat_that_breaks_the_engine_counts_for_nothing_beside_others(tokens, pipeline):
    def no_tools(body):
        if "tools" in body:
            raise Busy(500)
        return tokens.chat(body)

    assert await Engine(no_tools).differs(pipeline) == ""


@pytest.mark.parametrize("unread", ["reasoning", "reasoning_content"])
async def test_one_that_reads_what_an_assistant_thought_by_one_name_alone(unread):
    """vLLM's /tokenize knows the newer name only, though its chats know both; SGLang the older one only."""
    pipeline = Pipeline(model_dir("qwen3"), "sim", 16)
    pipeline.differ(Differences(shown=True))

    def read(body):
        kept = [{key: value for key, value in one.items() if key != unread} for one in body["messages"]]
        return pipeline.made("/v1/chat/completions", json.dumps({**body, "messages": kept}).encode())

    assert await Engine(read).differs(pipeline) == ""


@pytest.mark.parametrize("version, path", [("0.32.0", "/v1/chat/completions"), ("0.33.0", "/tokenize")])
async def test_chats_of_gpt_oss_are_asked_for_where_the_engine_writes_them_as_it_computes_them(tmp_path, version, path):
    """Until 0.32 its /tokenize fills the template, which it does not compute."""
    pipeline = Pipeline(FAMILIES["gpt-oss"](tmp_path / "model"), "sim", 16)
    pipeline.follow(VLLM.version_quirks(version))
    engine = Engine(lambda body: pipeline.made("/v1/chat/completions", json.dumps(body).encode()))
    assert await engine.differs(pipeline) == "" and set(engine.asked) == {path}


def test_chats_are_of_all_kinds():
    assert any("tools" in one for one in CHATS) and any(len(one["messages"]) > 2 for one in CHATS)


@pytest.mark.parametrize("body, final", [("<html>starting</html>", False), ('{"tokens": "none"}', True)])
async def test_a_page_of_something_before_the_engine_is_no_last_word(body, final):
    async def tokenize(request):
        return web.Response(text=body)

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with pytest.raises(NotAsked) as asked:
            await EngineTokens(session, str(server.make_url("")).rstrip("/"), None).of_texts(["hi"])
    assert asked.value.final is final
