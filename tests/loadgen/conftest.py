"""A scripted OpenAI engine for the generator's tests: literal bytes out, parsed requests in."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import pytest


def event(**message) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def delta(text: str | None = None, **choice) -> bytes:
    return event(choices=[{"index": 0, "delta": {} if text is None else {"content": text}, **choice}])


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event(
        choices=[], usage={"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    )


DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b"0\r\n\r\n"


def head(status: int = 200, kind: str = "text/event-stream", *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", f"content-type: {kind}", *lines, "", ""]).encode()


def stream(*events: bytes, headers: tuple[str, ...] = ()) -> bytes:
    return (
        head(200, "text/event-stream", "transfer-encoding: chunked", *headers)
        + b"".join(chunked(part) for part in events)
        + chunked(b"")
    )


def whole(body: object, status: int = 200) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(status, "application/json", f"content-length: {len(data)}") + data


def answer(text: str = "fine", prompt: int = 100, cached: int | None = 64, headers: tuple[str, ...] = ()) -> bytes:
    words = text.split(" ")
    return stream(
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        *(delta(word if number == 0 else f" {word}") for number, word in enumerate(words)),
        delta(finish_reason="stop"),
        usage(prompt, len(words), cached),
        DONE,
        headers=headers,
    )


def openai(reply: bytes | None = None):
    """A server that lists the model `tiny` and answers everything else with `reply`."""

    async def respond(request, writer):
        models = whole({"data": [{"id": "tiny"}]})
        writer.write(models if request.path == "/v1/models" else reply or answer("one two three"))

    return respond


class Request:
    def __init__(self, line: str, headers: dict[str, str], body: bytes):
        self.method, self.path, _ = line.split(" ", 2)
        self.headers, self.raw = headers, body

    @property
    def json(self):
        return json.loads(self.raw)


class Engine:
    """`respond(request, writer)` is a coroutine the test sets; returning False closes the connection."""

    def __init__(self, respond):
        self.respond = respond
        self.requests: list[Request] = []
        self.connections = 0
        self.inflight = self.most_inflight = 0
        self.serving: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.current_task())
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Request(lines[0], headers, body)
                self.requests.append(request)
                self.inflight += 1
                self.most_inflight = max(self.most_inflight, self.inflight)
                try:
                    keep = await self.respond(request, writer)
                finally:
                    self.inflight -= 1
                await writer.drain()
                if keep is False:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            self.serving.discard(asyncio.current_task())
            writer.close()


@pytest.fixture
def engine():
    """`async with engine(respond) as server:`; bytes instead of a coroutine answer everything alike."""

    @asynccontextmanager
    async def make(respond):
        if isinstance(respond, bytes):
            fixed = respond

            async def respond(request, writer):
                writer.write(fixed)

        fake = Engine(respond)
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        try:
            yield fake
        finally:
            server.close()
            tasks = list(fake.serving)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    return make


@pytest.fixture
def wire():
    """The builders of literal replies above."""
    return sys.modules[__name__]
