import asyncio

import pytest

from loadgen.drive import client as room
from loadgen.drive.client import BadURL, Client
from loadgen.drive.records import Record

from ..conftest import DONE, chunked, delta, head

PATH = "/v1/chat/completions"


async def ask(client: Client, body: bytes = b"{}") -> Record:
    record = Record("c", 0, due=0.0)
    await client.ask(PATH, body, record)
    return record


async def test_a_reply_is_timed_and_read(engine, wire):
    first, second = asyncio.Event(), asyncio.Event()

    async def respond(request, writer):
        writer.write(wire.head(200, "text/event-stream", "transfer-encoding: chunked", "x-hitherto-replica: r0"))
        writer.write(wire.chunked(wire.delta("a")))
        await first.wait()
        writer.write(wire.chunked(wire.delta("b") + wire.DONE))
        await second.wait()
        writer.write(wire.chunked(b""))

    async with engine(respond) as server:
        client, record = Client(server.url), Record("c", 0, due=0.0)
        asking = asyncio.create_task(client.ask(PATH, b'{"x":1}', record))
        async with asyncio.timeout(60):
            while record.first is None:
                await asyncio.sleep(0.001)
            assert record.text == "a"  # readable while it streams
            await asyncio.sleep(0.02)
            first.set()
            while not record.gaps:
                await asyncio.sleep(0.001)
            second.set()
            await asking
        assert record.error is None and record.status == 200 and record.replica == "r0"
        assert record.gaps[0] >= 0.02
        assert 0 < record.ttft < record.e2e
        assert record.last == pytest.approx(record.first + record.gaps[0])
        assert server.requests[0].raw == b'{"x":1}'
        client.close()


async def test_connections_are_kept(engine, wire):
    async with engine(wire.answer()) as server:
        client = Client(server.url)
        for _ in range(3):
            assert (await ask(client)).error is None
        assert (server.connections, client.opened) == (1, 1)
        client.close()


async def test_an_idle_connection_is_not_kept_for_long(engine, wire, monkeypatch):
    monkeypatch.setattr(room, "IDLE_SECONDS", 0.0)
    async with engine(wire.answer()) as server:
        client = Client(server.url)
        await ask(client)
        assert (await ask(client)).error is None
        assert server.connections == 2
        client.close()


async def test_a_kept_connection_the_server_closed_is_no_failure(engine, wire):
    async def respond(request, writer):
        if len(server.requests) == 2:
            return False  # takes the second request and closes without a word
        writer.write(wire.answer())

    async with engine(respond) as server:
        client = Client(server.url)
        await ask(client)
        second = await ask(client)
        assert (second.error, second.detail, second.text) == (None, "", "fine")
        assert server.connections == 2
        client.close()


async def test_nobody_listens():
    record = await ask(Client("http://127.0.0.1:1"))
    assert record.error == "connect"
    assert record.last >= record.sent > 0


async def test_a_request_is_given_up(engine):
    async def respond(request, writer):
        await asyncio.Event().wait()

    async with engine(respond) as server:
        client = Client(server.url, timeout=0.05)
        record = await ask(client)
        assert record.error == "timeout"
        assert client.idle == []


async def test_interim_answers_are_passed_over(engine, wire):
    async with engine(b"HTTP/1.1 100 Continue\r\n\r\n" + wire.answer()) as server:
        client = Client(server.url)
        assert (await ask(client)).text == "fine"
        client.close()


async def test_an_error_status_is_a_class_of_its_own(engine, wire):
    async with engine(wire.whole({"error": {"message": "busy"}}, 503)) as server:
        client = Client(server.url)
        record = await ask(client)
        assert record.error == "http_503" and "busy" in record.detail
        assert (await ask(client)).error == "http_503" and server.connections == 1
        client.close()


async def test_get(engine, wire):
    async with engine(wire.whole({"data": [{"id": "m"}]})) as server:
        client = Client(f"{server.url}/v1", {"Authorization": "Bearer k"})
        status, body, problem = await client.get("/v1/models")
        assert (status, problem) == (200, "") and b'"m"' in body
        assert server.requests[0].path == "/v1/models"
        assert server.requests[0].headers["authorization"] == "bearer k"
        client.close()
    status, _, problem = await client.get("/v1/models")
    assert status == 0 and problem.startswith("connect")


@pytest.mark.parametrize(
    "url, host, port, target",
    [
        ("localhost:8000", "localhost", 8000, PATH),
        ("http://h", "h", 80, PATH),
        ("https://api.example.com/v1/", "api.example.com", 443, PATH),
        ("https://example.com/some/base", "example.com", 443, "/some/base" + PATH),
        ("https://example.com/some/v1", "example.com", 443, "/some" + PATH),
        ("http://[::1]:9/v1", "::1", 9, PATH),
    ],
)
def test_urls(url, host, port, target):
    client = Client(url)
    assert (client.host, client.port, client.target(PATH)) == (host, port, target)


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "models/"])
def test_a_url_goes_no_further_than_v1(endpoint):
    with pytest.raises(BadURL, match="end the URL at /v1, as in http://h:1/some/v1$"):
        Client(f"http://h:1/some/v1/{endpoint}")
    assert Client("http://h:1/v1/completions/account").path == "/v1/completions/account"  # somebody's own path


async def test_plain_http_is_not_asked_by_tls():
    async def answers(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        record = await ask(Client(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert record.error == "connect"
    assert record.detail == "it does not speak TLS; if it speaks plain HTTP, write http:// in its URL"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:99999", "http://h:x"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(BadURL):
        Client(url)


@pytest.mark.parametrize(
    "sent, error, text",
    [
        (b"", "closed", ""),
        (head(200, "text/event-stream", "transfer-encoding: chunked") + chunked(delta("a")), "truncated", "a"),
        (head() + delta("a") + DONE, None, "a"),  # the end of the connection is the end of the body
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol", ""),
    ],
)
async def test_a_fresh_connection_that_the_server_closes(engine, sent, error, text):
    async def respond(request, writer):
        writer.write(sent)
        return False

    async with engine(respond) as server:
        record = await ask(Client(server.url))
        assert (record.error, record.text, len(server.requests)) == (error, text, 1)
