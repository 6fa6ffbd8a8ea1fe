"""Long prompts, and a client that sends them when they are due: what `bench.large` loads gateways with."""

from __future__ import annotations

import asyncio
import pydoc
import random
import re
from collections.abc import Callable, Iterator
from time import perf_counter

import orjson

from bench.large_parts import MODEL

BODY = 415_000  # bytes: 100,000 tokens of the bundled tokenizer, here
PIECE = 4000
MODULES = (
    "argparse",
    "logging",
    "subprocess",
    "json",
    "asyncio",
    "collections",
    "typing",
    "pathlib",
    "http.client",
    "socket",
)


def prose(seed: int) -> Callable[[int], str]:
    """Pieces of the standard library's own documentation."""
    text = "".join(pydoc.render_doc(name, renderer=pydoc.plaintext) for name in MODULES)
    pick = random.Random(seed)

    def piece(size: int) -> str:
        start = pick.randrange(len(text) - size)
        return text[start : start + size]

    return piece


class Bodies:
    """Bodies of a load, made of pieces that are JSON already: making one must cost the client next to nothing."""

    def __init__(self, seed: int):
        piece = prose(seed)
        self.rng = random.Random(seed)
        self.pieces = [orjson.dumps(piece(PIECE))[1:-1] for _ in range(400)]
        self.common = b"".join(self.pieces[:75])

    def text(self, size: int) -> bytes:
        """A text that begins as no other does and goes on in an order of its own."""
        text = [b"%x " % self.rng.getrandbits(64)]
        while size > 0:
            text.append(self.rng.choice(self.pieces))
            size -= len(text[-1])
        return b"".join(text)

    def new(self, size: int = BODY) -> Iterator[bytes]:
        while True:
            yield body(self.text(1000), self.text(size - 1000))

    def shared(self) -> Iterator[bytes]:
        while True:
            yield body(self.common, self.text(BODY - len(self.common)))

    def conversation(self, talks: int = 25) -> Iterator[bytes]:
        """In turns from conversations that begin with 300 kB and grow to 400: then another takes the place."""
        growing = []
        for number in range(talks):
            growing.append(self._begun(BODY - 2000 * (number + 1)))
        while True:
            for number, talk in enumerate(growing):
                talk.append(self.text(1000))
                yield body(*talk)
                talk.append(self.text(1000))
                if len(talk) > 150:
                    growing[number] = self._begun(BODY - 50_000)

    def _begun(self, size: int) -> list[bytes]:
        talk = [self.text(8000)]
        for _ in range(10):
            talk += [self.text(size // 20), self.text(size // 20)]
        return talk


def body(*contents: bytes) -> bytes:
    """A chat: system prompt, then user and assistant in turns. `contents` are JSON strings without their quotes."""
    roles = (b"system", *((b"user", b"assistant") * (len(contents) // 2 + 1)))
    messages = b",".join(b'{"role":"%b","content":"%b"}' % pair for pair in zip(roles, contents, strict=False))
    return b'{"model":"%b","max_tokens":1,"messages":[%b]}' % (MODEL.encode(), messages)


class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def ask(self, payload: bytes) -> asyncio.Future[bytes]:
        self.answered, self.read = asyncio.get_running_loop().create_future(), b""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.writelines((head % len(payload), payload))
        return self.answered

    def data_received(self, data):
        self.read += data
        end = self.read.find(b"\r\n\r\n")
        if (
            end >= 0
            and (size := re.search(rb"content-length: (\d+)", self.read[:end].lower()))
            and len(self.read) >= end + 4 + int(size[1])
        ):
            self.answered.set_result(self.read)

    def connection_lost(self, error):
        if not self.answered.done():
            self.answered.set_exception(ConnectionError(f"lost: {error}"))


class Client:
    """Connections to one gateway, as many as there are requests under way."""

    def __init__(self, port: int):
        self.port, self.free = port, []

    async def ask(self, payload: bytes) -> bytes:
        connection = (
            self.free.pop()
            if self.free
            else (await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port))[1]
        )
        answer = await asyncio.wait_for(connection.ask(payload), 60)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"answered {answer[:300]!r}")
        self.free.append(connection)
        return answer

    def close(self) -> None:
        for connection in self.free:
            connection.transport.close()

    async def closed_loop(self, bodies: Iterator[bytes], seconds: float, clients: int = 16) -> float:
        """Answers a second, when each client asks again at once."""
        begun, count = perf_counter(), 0

        async def one() -> None:
            nonlocal count
            while perf_counter() - begun < seconds:
                await self.ask(next(bodies))
                count += 1

        await asyncio.gather(*[one() for _ in range(clients)])
        return count / (perf_counter() - begun)

    async def open_loop(self, bodies: Iterator[bytes], rate: float, seconds: float) -> list[float]:
        """Seconds from when each was due to its answer."""
        took: list[float] = []
        begun = perf_counter()

        async def one(payload: bytes, due: float) -> None:
            await self.ask(payload)
            took.append(perf_counter() - due)

        tasks = []
        for number in range(int(rate * seconds)):
            payload, due = next(bodies), begun + number / rate
            await asyncio.sleep(max(due - perf_counter(), 0))
            tasks.append(asyncio.create_task(one(payload, due)))
        await asyncio.gather(*tasks)
        return took
