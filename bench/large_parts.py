"""What `bench.large` has around the gateways, each a process of its own: the engine and the neighbour.

    python -m bench.large_parts engine       prints its URL
    python -m bench.large_parts neighbour    reads lines "PORT SECONDS", answers with a line of JSON each

The engine counts a request's bytes and forgets them. It answers at once, or after GET /hold only when GET /release
comes; both tell how many wait. The neighbour is a client that asks for /health, in which no engine has a part, 200
times a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from time import perf_counter, sleep
from typing import ClassVar

import uvloop

MODEL = "sim"
CONTEXT = 2_000_000
RATE = 200.0
CHAT = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"word"},"finish_reason":"stop"}],"usage":{"total_tokens":1,"completion_tokens":1}}'
)


def reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


FIXED = {
    b"/v1/models": reply(b'{"object":"list","data":[{"id":"sim","object":"model","max_model_len":%d}]}' % CONTEXT),
    b"/version": reply(b'{"version":"0.0.0"}'),
    b"/health": reply(b""),
}


class Engine(asyncio.Protocol):
    holding = False
    waiting: ClassVar[list[asyncio.Transport]] = []  # of all connections

    def connection_made(self, transport):
        self.transport, self.head, self.missing, self.path = transport, b"", 0, b""

    def data_received(self, data):
        while data:
            if not self.missing:
                self.head += data
                end = self.head.find(b"\r\n\r\n")
                if end < 0:
                    return
                head, data, self.head = self.head[:end].lower(), self.head[end + 4 :], b""
                at = head.find(b"content-length: ")
                self.missing = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else 0
                self.path = head.split(b" ", 2)[1]
            took = min(self.missing, len(data))
            self.missing -= took
            data = data[took:]
            if not self.missing:
                self.answer()

    def answer(self):
        if self.path == b"/v1/chat/completions":
            self.waiting.append(self.transport)
            if not Engine.holding:
                self.release()
        elif self.path in (b"/hold", b"/release"):
            Engine.holding = self.path == b"/hold"
            count = len(self.waiting)
            if not Engine.holding:
                self.release()
            self.transport.write(reply(b"%d" % count))
        else:
            self.transport.write(FIXED.get(self.path) or reply(b"{}", b"404 Not Found"))

    def release(self):
        while self.waiting:
            self.waiting.pop().write(reply(CHAT))


async def engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def neighbour(port: int, seconds: float) -> list[float]:
    """Seconds each answer took."""
    took = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = perf_counter()
        for number in range(int(RATE * seconds)):
            due = begun + number / RATE
            if (early := due - perf_counter()) > 0:
                sleep(early)
            sent = perf_counter()
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = connection.recv(65536)
            took.append(perf_counter() - sent)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"answered {answer[:200]!r}")
    return took


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        uvloop.run(engine())
    for line in sys.stdin:
        port, seconds = line.split()
        print(json.dumps(neighbour(int(port), float(seconds))), flush=True)
