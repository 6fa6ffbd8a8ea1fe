"""How long clients may take, and who looks at it."""

import asyncio
import os
import time

import pytest
import uvloop

from gateway.http.downstream import Downstream
from gateway.http.messages import Limits
from gateway.http.server import Server
from gateway.http.upstream import Head

from .serving import GET, Echo, Transport, served
from .talk import Talker, eventually


async def test_a_client_that_waits_for_us_is_not_timed_out():
    async with served(Limits(body_gap_seconds=0.1, head_seconds=0.1)) as (talk, echo, _):
        await talk.say(
            b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nPOST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        await eventually(lambda: echo.held)
        (client,) = echo.held
        await eventually(lambda: client.expects)
        client.check(time.monotonic() + 60)
        echo.release()
        assert (await talk.response())[2] == b"slow"
        assert await talk.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await talk.ask(b"abc"))[2] == b"POST /p abc"


def test_an_idle_connection_is_closed_and_no_other():
    for data, closed in ((b"", True), (GET, True), (GET.replace(b"/a?b=1", b"/slow"), False)):
        client = Downstream(Server(Echo(), Limits(keep_alive_seconds=10.0)).clients)
        client.connection_made(Transport())
        client.data_received(data)
        client.check(client.active_at + 9)
        assert not client.transport.closed
        client.check(client.active_at + 11)
        assert client.transport.closed == closed


async def test_an_answer_nobody_takes_is_cut_in_the_end():
    async with served(Limits(keep_alive_seconds=0.2, flush_seconds=0.2)) as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: echo.held)
        echo.held.pop().reply(200, b"x" * 30_000_000, [])
        await eventually(lambda: not server.connections)


@pytest.mark.parametrize("ends", ["sweep", "server"])
async def test_the_rest_of_an_answer_that_ends_by_close_is_reset_where_nobody_takes_it(ends):
    async with served(Limits(keep_alive_seconds=0.2 if ends == "sweep" else 60)) as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.0\r\n\r\n")
        await eventually(lambda: echo.held)
        client = echo.held.pop()
        client.begin_answer(Head(b"HTTP/1.1 200 OK\r\n\r\n", [], True, True), b"", b"x" * 30_000_000)
        client.finish(keep_alive=False)
        if ends == "server":
            await server.close()
        await eventually(lambda: not server.connections)
        with pytest.raises(ConnectionResetError):
            await talk.reader.read()


async def test_an_answer_that_is_still_being_taken_is_not_cut():
    """Its connection is to be closed, and the client takes longer than a connection may be idle."""
    async with served(Limits(keep_alive_seconds=30)) as (talk, echo, server):
        await talk.say(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await eventually(lambda: echo.held)
        (client,) = server.connections
        server._sweeper.cancel()  # else it may look at the connection between the two lines that do it here
        echo.held.pop().reply(200, b"x" * 30_000_000, [])
        begun, taken = time.monotonic(), 0
        for late in range(1, 4):
            # However much of it the kernel keeps before it takes more from the server.
            while client.transport.get_write_buffer_size() >= client.unsent:
                taken += len(await talk.reader.read(1 << 16))
            assert client.transport.get_write_buffer_size() > 0
            client.check(begun + late * 29)
        assert taken + len(await talk.rest()) > 30_000_000


async def test_a_slow_uploader_still_gets_its_413():
    """It may pause for `linger_seconds` each time it has sent something; the clock is the test's."""
    async with served(Limits(body_bytes=1000, linger_seconds=20)) as (talk, _, server):
        (client,) = server.connections
        server._sweeper.cancel()
        await talk.say(b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        await eventually(lambda: client.closing)
        for _ in range(8):
            due = client.close_at
            await talk.say(b"a" * 1000)
            await eventually(lambda due=due: client.close_at > due)
            client.check(due)
            assert not client.transport.is_closing()
        assert (await talk.response())[0] == 413
        client.check(client.close_at + 1)
        await eventually(lambda: not server.connections)


async def test_of_many_connections_a_sweep_sees_a_part_and_none_is_forgotten():
    async with served(Limits(keep_alive_seconds=0.05)) as (_, echo, server):
        port = server._listener.sockets[0].getsockname()[1]
        ending = []
        echo.sweep = lambda now: ending.append(sum(connection.closing for connection in server.connections))
        talkers = await asyncio.gather(*(Talker.to(port) for _ in range(200)))
        await eventually(lambda: not server.connections, 20)
        assert max(ending) <= 64
        for talker in talkers:
            await talker.close()


async def test_a_failing_sweep_does_not_end_the_sweeping():
    async with served(Limits(head_seconds=0.1)) as (talk, echo, server):
        talk2 = await Talker.to(server._listener.sockets[0].getsockname()[1])
        await eventually(lambda: len(server.connections) == 2)
        for connection in list(server.connections)[:1]:
            connection.read_begun = None  # a bug somewhere
            connection.reading = True
        failed = []

        def fails(now):
            failed.append(now)
            raise ZeroDivisionError

        echo.sweep = fails
        await eventually(lambda: len(failed) > 1)
        echo.sweep = lambda now: None
        await talk.say(b"GET /a HTTP/1.1\r\nHo")
        await talk2.say(b"GET /a HTTP/1.1\r\nHo")
        assert (await talk.response())[0] == (await talk2.response())[0] == 408
        await talk2.close()


def test_a_client_is_not_late_because_the_event_loop_was():
    async def scenario():
        async with served(Limits(head_seconds=0.4)) as (talk, echo, server):
            await talk.say(GET[:10])
            answer = echo.handle

            def hold_up(client, request):
                echo.handle = answer
                os.write(talk.writer.get_extra_info("socket").fileno(), GET[10:])
                time.sleep(1.0)
                answer(client, request)

            echo.handle = hold_up
            other = await Talker.to(talk.writer.get_extra_info("peername")[1])
            await other.say(GET)
            assert (await talk.response())[0] == 200
            await other.close()

    uvloop.run(scenario())  # the gateway's loop, which runs its timers before it reads on
