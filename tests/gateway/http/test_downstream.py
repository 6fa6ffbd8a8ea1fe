"""The life of a client's connection: leaving, faults of ours, draining, closing."""

import asyncio

from gateway.http.downstream import Downstream

from .serving import GET, served
from .talk import Talker, eventually


async def test_a_bug_of_ours_is_a_500_and_is_not_blamed_on_the_client(caplog):
    async with served() as (talk, echo, _):

        def fails(client, request):
            client.exchange = echo
            raise ZeroDivisionError("a bug")

        echo.handle = fails
        assert (await talk.ask(GET))[0] == 500
        assert await talk.rest() == b""
        assert echo.left == 1 and "ZeroDivisionError: a bug" in caplog.text


async def test_drain_finishes_what_runs_and_answers_who_still_asks():
    async with served() as (talk, echo, server):
        idle = await Talker.to(server._listener.sockets[0].getsockname()[1])
        await idle.ask(GET)
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        drained = asyncio.ensure_future(server.drain(5))
        await eventually(lambda: server.clients.draining)
        assert (await idle.ask(GET))[1]["connection"] == "close"
        assert await idle.rest() == b""
        assert not drained.done()
        echo.release()
        assert (await talk.response())[1]["connection"] == "close"
        await drained
        assert await server.end() == 0
        await idle.close()


async def test_a_connection_that_comes_while_closing_is_cut():
    async with served() as (_, _, server):
        await server.close()
        aborted = []
        late = Downstream(server.clients)
        late.connection_made(type("Transport", (), {"abort": lambda self: aborted.append(1), "write": None})())
        assert aborted and not server.connections


async def test_drain_cuts_what_is_still_running_at_the_deadline():
    async with served() as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        await server.drain(0.05)
        assert await server.end() == 1
        assert await talk.rest() == b""
        assert echo.left == 1


async def test_who_is_sending_a_request_when_the_server_ends_is_told_so():
    """And may send on meanwhile, without a reset that would take the answer from it."""
    async with served() as (talk, echo, server):
        await talk.say(b"POST /a HTTP/1.1\r\nHost: x\r\nx-request-id: mine\r\nContent-Length: 900000\r\n\r\nsome")
        await eventually(lambda: server.held)
        await server.drain(0)
        ended = asyncio.ensure_future(server.end())
        status, headers, _ = await talk.response()
        assert (status, headers["connection"], headers["x-request-id"]) == (503, "close", "mine")
        for _ in range(4):
            await talk.say(bytes(100_000))
        assert await talk.rest() == b"" and not ended.done()
        await talk.close()
        assert await ended == 0 and server.held == 0 and not echo.seen


async def test_who_is_refused_and_goes_on_sending_does_not_keep_a_server_from_its_end(monkeypatch):
    monkeypatch.setattr("gateway.http.server.FLUSH_SECONDS", 0.05)
    async with served() as (talk, _, server):
        await talk.say(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\nsome")
        await eventually(lambda: server.held)
        await server.drain(0)
        assert await server.end() == 0
        assert (await talk.response())[0] == 503
