"""No engine sends a question of ours, or the key that goes with it, elsewhere."""

from contextlib import suppress

import pytest
from aiohttp import web

from gateway.ops.chats import EngineTokens, NotAsked
from gateway.proxy.exactness import token_ids
from replicas.access import session_to
from replicas.progress import computes


async def _tokens(session, url):
    await EngineTokens(session, url, "m").of_texts(["a"])


async def _chat(session, url):
    await EngineTokens(session, url, "m").of_chat({"messages": []}, by_chat=False)


async def _ids(session, url):
    await token_ids.poster(session)(f"{url}/tokenize", b"{}")


async def _progress(session, url):
    await computes(session, url, "m", 20)


@pytest.mark.parametrize("ask", [_tokens, _chat, _ids, _progress])
async def test_a_redirect_is_not_followed(ask):
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({}, status=307, headers={"location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        async with session_to("127.0.0.1") as session:
            with suppress(NotAsked, token_ids.Unanswered):
                await ask(session, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    finally:
        await runner.cleanup()
    assert asked and "/elsewhere" not in asked
