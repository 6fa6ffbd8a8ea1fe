"""Clients that speak TLS: what holds for plain connections holds for theirs."""

import asyncio
import functools
import ssl
from contextlib import asynccontextmanager

import pytest
import uvloop

from gateway.http import room
from gateway.http.messages import Limits
from gateway.tls import Certificate
from tests.replicas.certificates import authority, issue

from ..proxy.replies import ANSWER, BODY, EVENT, SSE_HEAD, answers, chunk, post, silent
from ..proxy.stack import stack
from .talk import Talker, eventually, read_request


def on_uvloop(test):
    """As in a gateway: TLS is the event loop's own there, and no part of asyncio's is used."""

    @functools.wraps(test)
    def run(*args, **options):
        uvloop.run(test(*args, **options))

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("certificates")
    authority(found)
    issue(found, "server", "IP:127.0.0.1")
    return found


class Secure:
    def __init__(self, s, folder):
        self.stack = s
        self.believes = ssl.create_default_context(cafile=folder / "ca.pem")

    async def talk(self, **options) -> Talker:
        talker = Talker(*await asyncio.open_connection("127.0.0.1", self.stack.port, ssl=self.believes, **options))
        self.stack.talkers.append(talker)
        return talker


@asynccontextmanager
async def secure(folder, *scripts, **options):
    tls = Certificate(folder / "server.pem", folder / "server.key").context
    async with stack(*scripts, tls=tls, **options) as s:
        yield Secure(s, folder)


@on_uvloop
async def test_requests_on_a_kept_connection_and_large_bodies(folder):
    seen = []
    async with secure(folder, answers(seen=seen)) as s:
        talk = await s.talk()
        large = BODY[:-1] + b',"user":"' + b"x" * 3_000_000 + b'"}'
        for body in (BODY, large, BODY):
            status, _, answer = await talk.ask(post(body))
            assert (status, answer) == (200, ANSWER)
        assert [body for _, body in seen] == [BODY, large, BODY]
        await talk.say(post() + post())  # pipelined
        assert [(await talk.response())[0] for _ in range(2)] == [200, 200]


@on_uvloop
async def test_plain_http_and_half_handshakes_are_none_of_anybodys_business(folder, caplog):
    async with secure(folder, answers(), limits=Limits(head_seconds=0.5)) as s:
        plain = await s.stack.talk()
        await plain.say(post())
        assert b"HTTP/1.1" not in await plain.rest()
        mute = await s.stack.talk()
        assert await mute.rest() == b""  # after the time that a head may take
        talk = await s.talk()
        assert (await talk.ask(post()))[0] == 200
        assert not [one for one in caplog.records if one.levelname in ("ERROR", "WARNING")]


@on_uvloop
async def test_handshakes_that_do_not_end_are_counted_and_bounded_and_hold_nobody_up(folder, monkeypatch):
    monkeypatch.setattr(room, "MOST_HANDSHAKES", 8)
    async with secure(folder, answers(), limits=Limits(head_seconds=60)) as s:
        first = await s.stack.talk()
        await eventually(lambda: s.stack.server.open == 1)
        mute = [await s.stack.talk() for _ in range(20)]
        await eventually(lambda: s.stack.server.open == 8)
        assert await first.rest() == b""  # the oldest gave way
        kept = await s.talk()
        for _ in range(2):
            assert (await kept.ask(post()))[0] == 200
        assert len(s.stack.server.connections) == 1 and s.stack.server.open == 8
        for one in mute:
            await one.close()
        await eventually(lambda: s.stack.server.open == 1)


@on_uvloop
async def test_handshakes_take_an_eighth_of_the_files_that_the_process_may_open_at_most(folder, monkeypatch):
    monkeypatch.setattr(room.resource, "getrlimit", lambda _: (40, 40))
    async with secure(folder, answers(), limits=Limits(head_seconds=60)) as s:
        mute = [await s.stack.talk() for _ in range(6)]
        assert await mute[0].rest() == b"" and s.stack.server.open == 5
        await s.stack.server.close()  # which ends handshakes
        assert s.stack.server.open == 0 and await mute[1].rest() == b""


@on_uvloop
async def test_a_slow_reader_holds_its_replica_back_and_gets_all_in_the_end(folder):
    """What the gateway keeps for it is bounded, and closing waits for it."""
    piece, count, sent = chunk(b"data: " + b"x" * 65_000 + b"\n\n"), 600, []

    async def script(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD + chunk(EVENT))
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
            sent.append(1)
        writer.write(b"0\r\n\r\n")

    async with secure(folder, script) as s:
        talk = await s.talk(limit=1 << 16)
        await talk.say(post(BODY.replace(b"{", b'{"stream": true,', 1), extra=b"Connection: close\r\n"))
        head = await talk.until(b"\r\n\r\n")
        assert head.split()[1] == b"200"
        # Nobody reads: the replica is stopped long before it has sent 39 MB
        await eventually(lambda: any(connection.writing_paused for connection in s.stack.server.connections))
        stopped = -1
        while stopped != len(sent):
            stopped = len(sent)
            await asyncio.sleep(0.1)
        assert stopped < count / 2
        rest = await talk.rest(30)
        assert rest.count(b"x" * 65_000) == count and rest.endswith(b"0\r\n\r\n")
        await eventually(lambda: not s.stack.server.connections)


@on_uvloop
async def test_a_drain_sends_what_is_under_way(folder):
    """The last bytes of an answer are in the kernel before its connection is closed."""
    large = ANSWER[:-1] + b',"x":"' + b"y" * 5_000_000 + b'"}'
    async with secure(folder, answers(large)) as s:
        talk = await s.talk(limit=1 << 12)
        await talk.say(post())
        await talk.until(b"\r\n\r\n")
        (connection,) = s.stack.server.connections
        await eventually(lambda: connection.busy)
        body = b""
        while connection.busy:  # what has left the gateway's own buffer may wait in its transport's
            body += await talk.reader.read(1 << 12)
        draining = asyncio.create_task(s.stack.server.drain(20))
        for _ in range(5):
            await asyncio.sleep(0)
        body += await asyncio.wait_for(talk.reader.readexactly(len(large) - len(body)), 20)
        assert body == large
        await draining
        assert await s.stack.server.end() == 0


@on_uvloop
async def test_a_shutdown_does_not_wait_for_those_that_say_nothing(folder):
    async with secure(folder, silent) as s:
        await s.stack.talk()  # connected, and no handshake
        idle, busy = await s.talk(), await s.talk()
        await busy.say(post())
        await eventually(lambda: len(s.stack.proxy.exchanges) == 1)
        begun = asyncio.get_running_loop().time()
        await s.stack.server.drain(0.2)
        assert await s.stack.server.end() == 1
        assert asyncio.get_running_loop().time() - begun < 3
        assert await idle.rest() == b""


@on_uvloop
async def test_an_upload_that_the_server_ends_before_is_answered(folder):
    async with secure(folder) as s:
        talk = await s.talk()
        await talk.say(post()[:-5])
        await eventually(lambda: s.stack.server.held)
        s.stack.proxy.drain()
        await s.stack.server.drain(0)
        ended = asyncio.ensure_future(s.stack.server.end())
        status, _, body = await talk.response()
        assert status == 503 and b"shutting_down" in body
        await talk.say(bytes(50_000))
        assert not ended.done()
        await talk.close()
        assert await ended == 0
