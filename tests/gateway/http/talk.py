"""Literal bytes over real sockets: a client that says exactly what it is told, and replicas that do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from ...redis_server import free_port as free_port  # where nobody listens


class Talker:
    """One raw connection to a server under test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Talker:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, mark: bytes, seconds: float = 5) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), seconds)

    async def response(self, seconds: float = 5) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case, the values of one name joined as HTTP does) and body of one response."""
        head = (await self.until(b"\r\n\r\n", seconds)).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        headers: dict[str, str] = {}
        for name, _, value in (header.partition(":") for header in rest):
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(await self.until(b"\r\n", seconds), 16):
                parts.append((await asyncio.wait_for(self.reader.readexactly(size + 2), seconds))[:-2])
            await self.until(b"\r\n", seconds)
            body = b"".join(parts)
        else:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers.get("content-length", 0))), seconds)
        return int(line.split()[1]), headers, body

    async def ask(self, request: bytes, seconds: float = 5) -> tuple[int, dict[str, str], bytes]:
        await self.say(request)
        return await self.response(seconds)

    async def rest(self, seconds: float = 5) -> bytes:
        """Everything up to the end of the connection, b'' if it was reset."""
        try:
            return await asyncio.wait_for(self.reader.read(), seconds)
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script, listening: socket.socket | None = None):
    """A server that runs `script` for each connection, `listening` if given; yields its port."""
    tasks: set[asyncio.Task] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(run, sock=listening or socket.create_server(("127.0.0.1", 0), backlog=100))
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one request with a content-length (or none)."""
    head = await reader.readuntil(b"\r\n\r\n")
    low = head.lower()
    at = low.find(b"content-length:")
    length = int(low[at + 15 : low.index(b"\r\n", at)]) if at >= 0 else 0
    return head, await reader.readexactly(length)


async def eventually(true: Callable[[], bool], seconds: float = 5) -> None:
    """Wait until a condition holds; AssertionError if it does not in time."""
    end = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < end, "did not become true in time"
        await asyncio.sleep(0.005)
