"""A sketch to measure by: what asyncio on uvloop with httptools costs when it passes bytes and does nothing else.

    python -m bench.passthrough PORT ENGINE_PORT...

Requests are collected whole and sent on as they came, responses leave as they come; engines in turn, connections kept.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import httptools
import uvloop


class Engine(asyncio.Protocol):
    def __init__(self, pool: list[Engine]):
        self.pool, self.client = pool, None
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        if self in self.pool:
            self.pool.remove(self)
        if self.client is not None:
            self.client.transport.abort()

    def on_message_complete(self):
        self.complete = True

    def data_received(self, data):
        self.parser.feed_data(data)
        client = self.client
        if self.complete:
            self.complete, self.client, client.engine = False, None, None
            self.pool.append(self)
        client.transport.write(data)


class Client(asyncio.Protocol):
    def __init__(self, engines):
        self.engines, self.engine, self.parts = engines, None, []
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        if self.engine is not None:
            self.engine.client = None
            self.engine.transport.abort()

    def pause_writing(self):
        if self.engine is not None:
            self.engine.transport.pause_reading()

    def resume_writing(self):
        if self.engine is not None:
            self.engine.transport.resume_reading()

    def data_received(self, data):
        self.parts.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self):
        port, pool = next(self.engines)
        whole, self.parts = b"".join(self.parts), []
        if pool:
            self.sent(pool.pop(), whole)
        else:
            asyncio.get_running_loop().create_task(self.connect(port, pool, whole))

    async def connect(self, port, pool, whole):
        _, engine = await asyncio.get_running_loop().create_connection(lambda: Engine(pool), "127.0.0.1", port)
        self.sent(engine, whole)

    def sent(self, engine, whole):
        self.engine, engine.client = engine, self
        engine.transport.write(whole)


async def main() -> None:
    engines = itertools.cycle([(int(port), []) for port in sys.argv[2:]])
    server = await asyncio.get_running_loop().create_server(lambda: Client(engines), "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
